"""Cross-entropy over blocks of tokens, with gradients by hand: the differentiable torch path."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trivium.ops.once import once_differentiable
from trivium.ops.precision import work_dtype

# Logits of one block are 512 * W numbers: 8 MB at W = 4,096 in float32, 335 MB at K3's 163,840.
BLOCK = 512


def cross_entropy_blocks(hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor) -> Tensor:
    return _CrossEntropy.apply(hidden_TD, weight_WD, targets_T)


def cross_entropy_sum_blocks(hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor, scale_T: Tensor) -> Tensor:
    return _CrossEntropySum.apply(hidden_TD, weight_WD, targets_T, scale_T)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TD, weight_WD, targets_T)
        return _by_blocks(hidden_TD, weight_WD, targets_T, None, False, False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dnll_T: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        return *_by_blocks(*ctx.saved_tensors, dnll_T, *ctx.needs_input_grad[:2])[1:], None


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor, scale_T: Tensor) -> Tensor:
        nll_T, *gradients = _by_blocks(hidden_TD, weight_WD, targets_T, scale_T, *ctx.needs_input_grad[:2])
        ctx.save_for_backward(*gradients)
        return scale_T.to(nll_T.dtype) @ nll_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        d_hidden_TD, d_weight_WD = (None if d is None else d * d_total.to(d.dtype) for d in ctx.saved_tensors)
        return d_hidden_TD, d_weight_WD, None, None


def _by_blocks(
    hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor, scale_T: Tensor | None, for_hidden: bool, for_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """nll_T, and the gradients of scale · nll that are asked for: d logits = scale · (softmax − onehot)."""
    work = work_dtype(weight_WD)
    nll_T = hidden_TD.new_empty(len(targets_T), dtype=work)
    d_hidden_TD = torch.empty_like(hidden_TD) if for_hidden else None
    d_weight_WD = torch.zeros_like(weight_WD, dtype=work) if for_weight else None
    for start in range(0, len(targets_T), BLOCK):
        block = slice(start, start + BLOCK)
        h_CD, targets_C1 = hidden_TD[block], targets_T[block, None]
        log_p_CW = (h_CD @ weight_WD.T).to(work).log_softmax(dim=-1)
        nll_T[block] = -log_p_CW.gather(1, targets_C1).squeeze(1)
        if scale_T is None:
            continue
        scale_C1 = scale_T[block, None].to(work)
        d_CW = log_p_CW.exp_().mul_(scale_C1).scatter_add_(1, targets_C1, -scale_C1).to(weight_WD.dtype)
        if d_hidden_TD is not None:
            d_hidden_TD[block] = d_CW @ weight_WD
        if d_weight_WD is not None:
            d_weight_WD += d_CW.T @ h_CD
    return nll_T, d_hidden_TD, None if d_weight_WD is None else d_weight_WD.to(weight_WD.dtype)
