"""Rows: how sequences are packed into one row of tokens. There is no padding and no attention mask anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
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
    def of(
        cls, lengths: Sequence[int], device: torch.device | str = "cpu", past: Sequence[int] = ()
    ) -> Rows:
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

    @property
    def last_S(self) -> Tensor:
        """Index of every sequence's last token, int64. Raises ValueError if a sequence is empty: it has none."""
        if 0 in self.lengths:
            raise ValueError(f"rows: sequence {self.lengths.index(0)} is empty and has no last token")
        return torch.tensor(self.starts[1:], dtype=torch.int64, device=self.starts_S1.device) - 1
