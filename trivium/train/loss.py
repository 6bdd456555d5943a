"""Cross-entropy that never holds the logits of more than one block of tokens, and bits per byte."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Logits of one block are 512 * W numbers: 8 MB at W = 4,096 in float32, 335 MB at K3's 163,840.
BLOCK = 512


def cross_entropy(hidden_TD: Tensor, head_WD: Tensor, targets_T: Tensor, weight_T: Tensor) -> Tensor:
    """Σ_t weight_t · nll_t in nats, float32, with nll_t = log Σ_w exp(h_t · head_w) − h_t · head_target.

    The gradients of `hidden_TD` and `head_WD` are made in the forward, block by block, where the logits still exist:
    d logits = weight · (softmax − onehot). Logits are in the head's dtype, everything after them in float32. The
    weights are constants. Raises ValueError when the shapes do not fit one another.
    """
    _check(hidden_TD, head_WD, targets_T)
    if weight_T.shape != targets_T.shape:
        raise ValueError(f"loss: {tuple(weight_T.shape)} weights for {tuple(targets_T.shape)} targets")
    return _CrossEntropy.apply(hidden_TD, head_WD, targets_T, weight_T)


@torch.no_grad()
def token_nll(hidden_TD: Tensor, head_WD: Tensor, targets_T: Tensor) -> Tensor:
    """nll_T in nats, float32: −log p(target) of every token; no gradients."""
    _check(hidden_TD, head_WD, targets_T)
    blocks = zip(hidden_TD.split(BLOCK), targets_T.split(BLOCK), strict=True)
    return torch.cat(
        [F.cross_entropy((h_CD @ head_WD.T).float(), targets_C, reduction="none") for h_CD, targets_C in blocks]
    )


def bits_per_byte(nll: float, num_bytes: int) -> float:
    """Nats over all tokens of a text → bits for each byte of it: nll / (ln 2 · bytes)."""
    if num_bytes < 1:
        raise ValueError(f"bits per byte: wanted a text of at least one byte, got {num_bytes}")
    return nll / (math.log(2) * num_bytes)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, head_WD: Tensor, targets_T: Tensor, weight_T: Tensor) -> Tensor:
        total = hidden_TD.new_zeros((), dtype=torch.float32)
        want_hidden, want_head = ctx.needs_input_grad[:2]
        d_hidden_TD = torch.empty_like(hidden_TD) if want_hidden else None
        d_head_WD = torch.zeros_like(head_WD, dtype=torch.float32) if want_head else None
        for start in range(0, len(targets_T), BLOCK):
            block = slice(start, start + BLOCK)
            h_CD, weight_C = hidden_TD[block], weight_T[block]
            # A target without weight may be any number, such as -100.
            targets_C1 = targets_T[block].masked_fill(weight_C == 0, 0)[:, None]
            log_p_CW = (h_CD @ head_WD.T).float().log_softmax(dim=-1)
            total -= weight_C @ log_p_CW.gather(1, targets_C1).squeeze(1)
            d_CW = log_p_CW.exp_().mul_(weight_C[:, None])
            d_CW.scatter_add_(1, targets_C1, -weight_C[:, None])
            d_CW = d_CW.to(head_WD.dtype)
            if d_hidden_TD is not None:
                d_hidden_TD[block] = d_CW @ head_WD
            if d_head_WD is not None:
                d_head_WD += d_CW.T @ h_CD
        ctx.save_for_backward(d_hidden_TD, None if d_head_WD is None else d_head_WD.to(head_WD.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        d_hidden_TD, d_head_WD = (None if d is None else d * d_total.to(d.dtype) for d in ctx.saved_tensors)
        return d_hidden_TD, d_head_WD, None, None


def _check(hidden_TD: Tensor, head_WD: Tensor, targets_T: Tensor) -> None:
    if hidden_TD.shape != (*targets_T.shape, head_WD.shape[-1]) or targets_T.ndim != 1:
        raise ValueError(
            f"loss: wanted hidden [T, D], head [W, D] and targets [T], got {tuple(hidden_TD.shape)}, "
            f"{tuple(head_WD.shape)} and {tuple(targets_T.shape)}"
        )
