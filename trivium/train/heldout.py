"""The loss on text that was held out, in nats a token and in bits per byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from trivium.data.batch import Batch
from trivium.model.kimi_k3 import KimiK3
from trivium.train.loss import bits_per_byte, token_nll


@dataclass(frozen=True, kw_only=True)
class Heldout:
    """`loss` is nats a token, `bpb` bits a byte of the text; both over the same tokens."""

    loss: float
    bpb: float
    num_tokens: int
    num_bytes: int


@torch.no_grad()
def score(model: KimiK3, batches: Iterable[Batch]) -> Heldout:
    """Every weighted target of the batches once; each sequence starts from an empty state."""
    was_training = model.training
    model.eval()
    nll, num_tokens, num_bytes = 0.0, 0, 0
    for batch in batches:
        hidden_TD, _ = model(batch.ids_T, batch.rows, pixels=batch.pixels)
        counts_T = batch.weight_T > 0
        # In float64: a float32 sum over 100,000 tokens would lose the digits that two runs differ in.
        nll += float(
            token_nll(hidden_TD, model.language_model.lm_head.weight, batch.targets_T)[counts_T].double().sum()
        )
        num_tokens += int(counts_T.sum())
        num_bytes += batch.num_bytes
    model.train(was_training)
    if not num_tokens:
        raise ValueError("held out: no token to score")
    return Heldout(loss=nll / num_tokens, bpb=bits_per_byte(nll, num_bytes), num_tokens=num_tokens, num_bytes=num_bytes)
