"""Rectangles of matrices whose rows are spread over processes: each one whole at an owner, and back where it came from.

What a matrix is made into as a whole (Muon's orthogonal update) is not what its shards would be made into one by one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from trivium.model.heads import Rectangle


class Place(NamedTuple):
    """A rectangle of one matrix, and of which."""

    matrix_idx: int
    rectangle: Rectangle


class Piece(NamedTuple):
    """The rows [top, bottom) of a place's matrix, inside its rectangle, that process `holder` has."""

    place_idx: int
    holder: int
    top: int
    bottom: int


class Exchange:
    """Who gathers which rectangle, and what this process sends and gets for that.

    `bounds[matrix_idx]`: R + 1 rows, process r has the rows [bounds[r], bounds[r + 1]), perhaps none. A rectangle that
    lies wholly in one process's rows stays there: nothing is sent. Any other is gathered by one of those that hold a
    part of it, the one with least to do; what a rectangle costs is short² · long, as Newton-Schulz does. Every process
    finds the same owners from the same table, so all must call with the same places and bounds.
    """

    def __init__(self, places: Sequence[Place], bounds: Sequence[Sequence[int]], rank: int, size: int) -> None:
        self.places, self.rank, self.size = places, rank, size
        pieces = [_pieces(place_idx, place, bounds[place.matrix_idx]) for place_idx, place in enumerate(places)]
        owners = _owners(places, pieces, size)
        self.anything_sent = any(len(parts) > 1 for parts in pieces)  # the same answer everywhere
        self.whole: list[int] = []
        self.gathered: list[int] = []
        self._held: list[list[Piece]] = [[] for _ in range(size)]  # by owner
        self._got: list[list[Piece]] = [[] for _ in range(size)]  # by holder
        for place_idx, (owner, parts) in enumerate(zip(owners, pieces, strict=True)):
            if owner == rank:
                (self.whole if len(parts) == 1 else self.gathered).append(place_idx)
            for part in parts if len(parts) > 1 else ():
                if part.holder == rank:
                    self._held[owner].append(part)
                if owner == rank:
                    self._got[part.holder].append(part)

    def to_owners(
        self, fill: Callable[[Piece, Tensor], None], like: Tensor, group: dist.ProcessGroup
    ) -> list[tuple[Piece, Tensor]]:
        """`fill(piece, into)` writes every piece held here; the pieces of the rectangles gathered here come back.

        One all-to-all, in the dtype and on the device of `like`.
        """
        return self._send(self._held, self._got, fill, like, group)

    def to_holders(
        self, fill: Callable[[Piece, Tensor], None], like: Tensor, group: dist.ProcessGroup
    ) -> list[tuple[Piece, Tensor]]:
        """The way back: `fill` writes every piece of the rectangles gathered here, those held here come back."""
        return self._send(self._got, self._held, fill, like, group)

    def _send(
        self,
        outgoing: Sequence[Sequence[Piece]],
        incoming: Sequence[Sequence[Piece]],
        fill: Callable[[Piece, Tensor], None],
        like: Tensor,
        group: dist.ProcessGroup,
    ) -> list[tuple[Piece, Tensor]]:
        sent, num_sent, views = self._buffer(outgoing, like)
        for piece, view in views:
            fill(piece, view)
        received, num_received, views = self._buffer(incoming, like)
        dist.all_to_all_single(received, sent, num_received, num_sent, group=group)
        return views

    def _buffer(
        self, by_peer: Sequence[Sequence[Piece]], like: Tensor
    ) -> tuple[Tensor, list[int], list[tuple[Piece, Tensor]]]:
        """Room for the pieces, peer by peer; how much of it is each peer's; and every piece's part of it."""
        counts = [sum(math.prod(self._shape(piece)) for piece in pieces) for pieces in by_peer]
        buffer = like.new_empty(sum(counts))
        pieces = [piece for pieces in by_peer for piece in pieces]
        parts = buffer.split([math.prod(self._shape(piece)) for piece in pieces])
        return buffer, counts, [(p, part.view(self._shape(p))) for p, part in zip(pieces, parts, strict=True)]

    def _shape(self, piece: Piece) -> tuple[int, int]:
        return piece.bottom - piece.top, self.places[piece.place_idx].rectangle.width


def shard_bounds(num_rows: int, size: int, rows_each: int = 1) -> list[int]:
    """Where the shards of torch's Shard(0) begin and end: equal lengths rounded up, and what is left for the last.

    `num_rows` counts entries of dim 0, each of which is `rows_each` rows of the matrix.
    """
    each = -(-num_rows // size)
    return [rows_each * min(rank * each, num_rows) for rank in range(size + 1)]


def _pieces(place_idx: int, place: Place, bounds: Sequence[int]) -> list[Piece]:
    top, bottom = place.rectangle.top, place.rectangle.bottom
    first, last = bisect_right(bounds, top) - 1, bisect_left(bounds, bottom) - 1
    return [
        Piece(place_idx, rank, max(top, bounds[rank]), min(bottom, bounds[rank + 1]))
        for rank in range(first, last + 1)
        if bounds[rank] < bounds[rank + 1]
    ]


def _owners(places: Sequence[Place], pieces: Sequence[Sequence[Piece]], size: int) -> list[int]:
    """The dearest first, each to the least loaded of its holders."""
    costs = [_cost(place.rectangle) for place in places]
    load, owners = [0] * size, [parts[0].holder for parts in pieces]
    for place_idx, parts in enumerate(pieces):
        if len(parts) == 1:
            load[owners[place_idx]] += costs[place_idx]
    split = [place_idx for place_idx, parts in enumerate(pieces) if len(parts) > 1]
    for place_idx in sorted(split, key=lambda place_idx: -costs[place_idx]):
        owners[place_idx] = min((part.holder for part in pieces[place_idx]), key=lambda rank: (load[rank], rank))
        load[owners[place_idx]] += costs[place_idx]
    return owners


def _cost(rectangle: Rectangle) -> int:
    short, long = sorted((rectangle.height, rectangle.width))
    return short * short * long
