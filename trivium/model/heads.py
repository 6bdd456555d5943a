"""Which rows and columns of a matrix belong to one head: declared by the module that has the heads.

A head is a map of its own: nothing but the order in memory joins its rows to its neighbour's. What treats a matrix as a
map, Muon above all, has to know where one ends and the next begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import nn


class Rectangle(NamedTuple):
    """Rows [top, bottom) and columns [left, right) of a matrix."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def height(self) -> int:
        return self.bottom - self.top

    @property
    def width(self) -> int:
        return self.right - self.left


@dataclass(frozen=True)
class Blocks:
    """How a matrix [out, in] is cut: the lengths of its row spans and of its column spans, one behind the other.

    Each row span by each column span is a matrix of its own; () is one span over the whole side.
    """

    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, spans in (("rows", self.rows), ("columns", self.columns)):
            if any(span < 1 for span in spans):
                raise ValueError(f"blocks: wanted {name} of at least 1, got {spans}")

    def rectangles(self, num_out: int, num_in: int) -> list[Rectangle]:
        """The blocks of a matrix of this shape, row span by row span. ValueError where the spans are of another one."""
        rows, columns = _bounds("rows", self.rows, num_out), _bounds("columns", self.columns, num_in)
        return [Rectangle(*across, *along) for across in pairwise(rows) for along in pairwise(columns)]


WHOLE = Blocks()


def head_blocks(model: nn.Module) -> dict[str, Blocks]:
    """What the model's modules declare, by full parameter name; a matrix that is not named is one block.

    A module declares with a method `head_blocks() -> dict[str, Blocks]` over names as seen from itself. Raises
    ValueError for a parameter that is not there, or whose sides are not the sum of the spans.
    """
    found = {}
    for path, module in model.named_modules():
        if callable(declare := getattr(module, "head_blocks", None)):
            for name, blocks in declare().items():
                full = f"{path}.{name}" if path else name
                try:
                    blocks.rectangles(*module.get_parameter(name).shape[-2:])
                except (AttributeError, ValueError) as error:
                    raise ValueError(f"{full}: declared as {blocks}: {error}") from error
                found[full] = blocks
    return found


def _bounds(side: str, spans: Sequence[int], length: int) -> list[int]:
    bounds = list(accumulate(spans or (length,), initial=0))
    if bounds[-1] != length:
        raise ValueError(f"blocks: wanted {side} that add up to {length}, got {bounds[-1]} from {len(spans)} spans")
    return bounds
