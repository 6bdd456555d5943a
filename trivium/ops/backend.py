"""Which of an operation's implementations runs: `reference`, `torch` or `native`.

The default is `native` where an operation names one, else `torch`. `use_backend` asks for one by name; an operation
that lacks it raises. Nothing falls back: a kernel that fails, fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trivium.ops import cpu

NAMES = ("reference", "torch", "native")

# A module global and no ContextVar: Dynamo cannot trace a ContextVar.
_asked: str | None = None


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Run every operation inside the block on the named backend; None is the default choice.

    The choice is the process's: threads that run at the same time must ask for the same one.
    """
    global _asked
    if name is not None and name not in NAMES:
        raise ValueError(f"backend: wanted one of {', '.join(NAMES)}, got {name!r}")
    before, _asked = _asked, name
    try:
        yield
    finally:
        _asked = before


def choose(op: str, **implementations: Callable[..., Any] | None) -> Callable[..., Any]:
    """The implementation of `op` to run now; one that is None does not serve these tensors.

    Raises ValueError when a backend was asked for that this operation does not have, or not for these tensors.
    """
    name = _asked or ("native" if implementations.get("native") else "torch")
    chosen = implementations.get(name)
    if chosen is None:
        has = ", ".join(name for name, implementation in implementations.items() if implementation)
        why = f": {cpu.missing}" if name == "native" and cpu.missing else ""
        raise ValueError(f"{op}: has no {name!r} backend for these tensors, only {has}{why}")
    return chosen


def default_backend(device: str) -> str:
    """What runs on this device unless another backend is asked for: `native` where it is built, else `torch`."""
    usable = {line.backend for line in availability() if line.device == device and line.usable}
    return "native" if "native" in usable else "torch"


@dataclass(frozen=True, kw_only=True)
class Availability:
    """One device and backend, and whether it can run here; `reason` says why not, or what it is."""

    device: str
    backend: str
    usable: bool
    reason: str


def availability() -> list[Availability]:
    """Every device and backend that this build knows, usable or not, for `trivium doctor`."""
    found = []
    for device, present, reason in (
        ("cpu", True, f"{torch.get_num_threads()} threads"),
        ("cuda", torch.cuda.is_available(), _cuda_reason()),
    ):
        for backend, what in (("reference", "the definition, slow"), ("torch", "chunked, differentiable")):
            found.append(
                Availability(
                    device=device, backend=backend, usable=present, reason=f"{what}; {reason}" if present else reason
                )
            )
        found.append(_native(device))
    return found


def _native(device: str) -> Availability:
    if device == "cpu":
        reason = cpu.missing or f"compiled for {cpu.isa}, float32; {torch.get_num_threads()} threads"
        return Availability(device=device, backend="native", usable=cpu.missing is None, reason=reason)
    reason = "no compiled kernel for this device is part of this version"
    return Availability(device=device, backend="native", usable=False, reason=reason)


def _cuda_reason() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "torch sees no CUDA device"
