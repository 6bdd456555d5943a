"""Cross-entropy that never holds the logits of more than one block of tokens, and bits per byte."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trivium.ops import cross_entropy as ops


def cross_entropy(hidden_TD: Tensor, head_WD: Tensor, targets_T: Tensor, weight_T: Tensor) -> Tensor:
    """Σ_t weight_t · nll_t in nats, float32, with nll_t = log Σ_w exp(h_t · head_w) − h_t · head_target.

    The logits are in the dtype of `hidden_TD`, to which a wider head is cast. The gradients of both are made in the
    forward, block by block, where the logits still exist. The weights are constants. Raises ValueError when the shapes
    do not fit one another.
    """
    return ops.cross_entropy_sum(hidden_TD, head_WD.to(hidden_TD.dtype), targets_T, weight_T)


@torch.no_grad()
def token_nll(hidden_TD: Tensor, head_WD: Tensor, targets_T: Tensor) -> Tensor:
    """nll_T in nats, float32: −log p(target) of every token; no gradients."""
    return ops.cross_entropy(hidden_TD, head_WD.to(hidden_TD.dtype), targets_T)


def bits_per_byte(nll: float, num_bytes: int) -> float:
    """Nats over all tokens of a text → bits for each byte of it: nll / (ln 2 · bytes)."""
    if num_bytes < 1:
        raise ValueError(f"bits per byte: wanted a text of at least one byte, got {num_bytes}")
    return nll / (math.log(2) * num_bytes)
