"""Rows: how sequences are packed into one row of tokens. There is no padding and no attention mask anywhere."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from trivium.config import TILE

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The bounds of S packed sequences over T tokens.

    `starts` are the S + 1 bounds on the host, from 0 to T; a sequence may be empty. `starts_S1` are the same on the
    device (int32), never read back. `past_S` is how many tokens each sequence already has in the state, () for none.
    `slots_S` (int64) says which state slot is whose, None for slot s = sequence s.
    """

    starts: tuple[int, ...]
    starts_S1: Tensor
    past_S: tuple[int, ...] = ()
    slots_S: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.starts) < 1 or self.starts[0] != 0:
            raise ValueError(f"rows: bounds start at 0, got {self.starts}")
        if any(end < start for start, end in pairwise(self.starts)):
            raise ValueError(f"rows: bounds never fall, got {self.starts}")
        if self.past_S and len(self.past_S) != self.num_sequences:
            raise ValueError(f"rows: {len(self.past_S)} past lengths for {self.num_sequences} sequences")
        if any(past < 0 for past in self.past_S):
            raise ValueError(f"rows: a past length is never negative, got {self.past_S}")

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu", past: Sequence[int] = ()) -> Rows:
        """Sequences of these lengths, one behind the other."""
        if any(length < 0 for length in lengths):
            raise ValueError(f"rows: a length is never negative, got {tuple(lengths)}")
        starts = tuple(accumulate(lengths, initial=0))
        return cls(
            starts=starts,
            starts_S1=torch.tensor(starts, dtype=torch.int32, device=device),
            past_S=tuple(past),
        )

    @classmethod
    def one(cls, num_tokens: int, device: torch.device | str = "cpu", past: int = 0) -> Rows:
        """One sequence."""
        return cls.of([num_tokens], device, past=(past,) if past else ())

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]

    @property
    def num_sequences(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in pairwise(self.starts))

    @cached_property
    def past(self) -> tuple[int, ...]:
        """Tokens each sequence already has in the state, written out."""
        return self.past_S or (0,) * self.num_sequences

    @property
    def max_len(self) -> int:
        return max(self.lengths, default=0)

    @cached_property
    def sequence_of_T(self) -> Tensor:
        """The sequence each token belongs to, int64 on the rows' device."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        return torch.repeat_interleave(torch.arange(self.num_sequences), lengths).to(self.starts_S1.device)

    def table(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made once for this Rows and this key: for the index tables of kernels."""
        tables = self.__dict__.setdefault("_tables", {})
        if key not in tables:
            with torch.inference_mode(False):  # a table made in inference mode could not be used in training
                tables[key] = make()
        return tables[key]

    def chunks(self, size: int) -> Chunks:
        """The table of chunks of `size` tokens."""
        return self.table(("chunks", size), lambda: _chunk_table(self, size))

    @property
    def last_S(self) -> Tensor:
        """Index of every sequence's last token, int64. Raises ValueError if a sequence is empty: it has none."""
        if 0 in self.lengths:
            raise ValueError(f"rows: sequence {self.lengths.index(0)} is empty and has no last token")
        return torch.tensor(self.starts[1:], dtype=torch.int64, device=self.starts_S1.device) - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Tile(Rows):
    """16 rows that are one tile of the absolute grid of one sequence; rows first to last - 1 hold the new tokens.

    The deterministic mode runs the whole model on one such tile at a time: every product then has one shape, and a
    token one place in it, whatever the batch and wherever the sequence was cut. Rows before `first` belong to tokens
    that were already fed, rows from `last` on are empty; layers neither keep nor count what comes out of either.
    `past_S` is the position of row 0, a multiple of 16.
    """

    first: int
    last: int

    @classmethod
    def at(cls, start: int, first: int, last: int, device: torch.device | str = "cpu") -> Tile:
        """The tile whose row 0 is position `start`."""
        starts_S1 = torch.tensor([0, TILE], dtype=torch.int32, device=device)
        return cls(starts=(0, TILE), starts_S1=starts_S1, past_S=(start,), first=first, last=last)


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunks:
    """Every sequence cut into chunks of one size, N in all, ordered by step: first chunks first, longest sequence first.

    Step n is then one slice of the chunks, and its sequences are the first `count` of the sorted ones.
    """

    index_NC: Tensor  # int64, the token at each place; T at a pad
    place_T: Tensor  # int64, where in the flattened chunks each token went
    pad_NC: Tensor | None  # bool, None when no place is a pad
    steps: tuple[tuple[slice, int], ...]  # (slice of the chunks, number of sequences) per step
    places: tuple[tuple[int, int], ...]  # of each chunk: its sequence, and its number in it
    order_S: Tensor  # int64, sequences by falling length
    place_S: Tensor  # int64, where each sequence went in that order

    def gather(self, x_T: Tensor) -> Tensor:
        """[T, ...] to [N, C, ...], zeros at pads."""
        if self.pad_NC is not None:
            x_T = torch.cat([x_T, x_T.new_zeros(1, *x_T.shape[1:])])
        return x_T[self.index_NC]

    def scatter(self, x_NC: Tensor) -> Tensor:
        """[N, C, ...] back to [T, ...]."""
        return x_NC.flatten(0, 1)[self.place_T]


def _chunk_table(rows: Rows, size: int) -> Chunks:
    order = sorted(range(rows.num_sequences), key=lambda s: (-rows.lengths[s], s))
    index, steps, places = [], [], []
    for step in range(-(-rows.max_len // size)):
        active = [s for s in order if rows.lengths[s] > step * size]
        steps.append((slice(len(index), len(index) + len(active)), len(active)))
        for s in active:
            places.append((s, step))
            first = rows.starts[s] + step * size
            count = min(size, rows.starts[s + 1] - first)
            index.append(list(range(first, first + count)) + [rows.num_tokens] * (size - count))
    index_NC = torch.tensor(index, dtype=torch.int64).reshape(len(index), size)
    pad_NC = index_NC == rows.num_tokens
    place_T = index_NC.flatten().argsort(stable=True)[: rows.num_tokens]
    order_S = torch.tensor(order, dtype=torch.int64)
    device = rows.starts_S1.device
    return Chunks(
        index_NC=index_NC.to(device),
        place_T=place_T.to(device),
        pad_NC=pad_NC.to(device) if bool(pad_NC.any()) else None,
        steps=tuple(steps),
        places=tuple(places),
        order_S=order_S.to(device),
        place_S=order_S.argsort().to(device),
    )
