"""Whether a forward is the first of its kind or runs once more, inside a backward, for the tensors it did not keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


@contextmanager
def recomputing() -> Iterator[None]:
    """Around a forward that has run before: what a forward counts or keeps besides its output is not counted twice."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def is_recomputing() -> bool:
    """True inside `recomputing`."""
    return _depth > 0
