"""Mask: which ids a grammar allows next, so that an answer is sampled from those that keep to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trivium.chat.pieces import PATTERN

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from trivium.chat.tokenizer import Tokenizer  # which needs tiktoken, and training does without


class Grammars:
    """Grammars over the ids of one tokenizer. Made once: of 163,840 ids it takes a second."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise ImportError("a grammar is held by llguidance: pip install 'trivium[serve]'") from error
        special_ids = tokenizer.special_ids
        self._tokenizer = LLTokenizer.from_tiktoken(
            encoder={token: rank for rank, token in enumerate(tokenizer.vocabulary.ranks)},
            special_tokens=special_ids,
            pattern=PATTERN,
            # llguidance adds this id wherever a grammar may be over. <|end_of_msg|> is in ours, as the last id.
            eos_token=special_ids["[EOS]"],
            n_vocab=tokenizer.vocab_size,
            slices=None,
        )

    def compile(self, grammar: str) -> Constraint:
        """The constraint of one answer, at its beginning. Raises ValueError that says what is wrong with the grammar."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"grammar: {matcher.get_error()}")
        return Constraint(matcher, self._tokenizer.vocab_size)


class Constraint:
    """What may come next in one answer, which it shares with no other: `mask` the logits, sample, `accept` the id."""

    def __init__(self, matcher: LLMatcher, num_ids: int) -> None:
        self._matcher = matcher
        self._num_ids = num_ids

    @property
    def is_finished(self) -> bool:
        """Whether the answer is whole, and nothing may come behind it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self, logits_W: Tensor) -> Tensor:
        """The logits with -inf for each id that may not come next.

        Raises ValueError where no id may: the answer is whole, or has been refused, or is too much for the grammar's
        limits. It ends the one answer.
        """
        if logits_W.shape != (self._num_ids,):
            raise ValueError(f"mask: wanted logits [{self._num_ids}], got {list(logits_W.shape)}")
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed_W = np.unpackbits(bits, count=self._num_ids, bitorder="little")
        if self._matcher.is_stopped() or not allowed_W.any():  # asked now: a limit may be met while a mask is made
            raise ValueError(f"mask: nothing may come next ({self._matcher.stop_reason()})")
        return logits_W.masked_fill(torch.from_numpy(allowed_W == 0).to(logits_W.device), -torch.inf)

    def accept(self, token_id: int) -> None:
        """Go on by an id that was sampled, or that the prompt has. Raises ValueError for one that may not come next,
        and the answer is not gone on with."""
        if not (0 <= token_id < self._num_ids and self._matcher.consume_token(token_id)):
            raise ValueError(f"accept: id {token_id} may not come next ({self._matcher.stop_reason()})")
