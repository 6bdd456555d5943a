"""Ids: what a tokenizer's ids stand for, and a fingerprint of all that they depend on."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from trivium.chat.pieces import MAX_CHARS, MAX_RUN_CHARS, PATTERN
from trivium.chat.tokenizer import Tokenizer


def num_bytes_of_ids(tokenizer: Tokenizer) -> Tensor:
    """Bytes of text that each id stands for, int64 [W]; 0 for a control id."""
    ranks = tokenizer.vocabulary.ranks
    return torch.tensor([len(token) for token in ranks] + [0] * (tokenizer.vocab_size - len(ranks)))


def fingerprint_of_tokenizer(tokenizer: Tokenizer) -> str:
    """SHA-256 over all that the ids of a text depend on: the pieces it is cut into, the ranks, and [BOS]."""
    seen = hashlib.sha256()
    for part in (
        PATTERN.encode(),
        b"%d %d %d" % (MAX_CHARS, MAX_RUN_CHARS, tokenizer.bos_id),
        *tokenizer.vocabulary.ranks,
    ):
        seen.update(len(part).to_bytes(8, "big"))
        seen.update(part)
    return seen.hexdigest()
