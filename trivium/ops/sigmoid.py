"""sigmoid(x) whose bits depend on x alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trivium.ops.once import once_differentiable


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in x's dtype, once differentiable.

    torch.sigmoid on a CPU rounds the elements that do not fill a vector register differently from the rest (3% of
    them, one bit, torch 2.13): a token's value then depends on how many tokens stand beside it. exp, the sum and the
    quotient round each element alike. torch's silu, softplus and gelu have the same flaw; its exp and tanh do not.
    """
    return _Sigmoid.apply(x)


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.neg(x).exp_().add_(1).reciprocal_()  # exp is inf below -88, and the quotient 0: right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # y(1 - y) is 0 in float32 from x = 17 on; e / (1 + e)² with e = exp(-|x|) <= 1 keeps every digit.
        (x,) = ctx.saved_tensors
        e = x.abs().neg_().exp_()
        return (e + 1).square_().reciprocal_().mul_(e).mul_(grad)
