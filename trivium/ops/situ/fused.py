"""SiTU with its backward by hand: it saves gate and up, and nothing in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trivium.ops.once import once_differentiable
from trivium.ops.precision import work_dtype
from trivium.ops.sigmoid import sigmoid


def situ_fused(gate_TF: Tensor, up_TF: Tensor, bound: float, up_bound: float) -> Tensor:
    return _Situ.apply(gate_TF, up_TF, bound, up_bound)


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_TF: Tensor, up_TF: Tensor, bound: float, up_bound: float) -> Tensor:
        ctx.save_for_backward(gate_TF, up_TF)
        ctx.bounds = bound, up_bound
        return situ_forward(gate_TF, up_TF, bound, up_bound)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *situ_backward(grad_TF, *ctx.saved_tensors, *ctx.bounds), None, None


def situ_forward(gate_TF: Tensor, up_TF: Tensor, bound: float, up_bound: float) -> Tensor:
    """The value alone, for callers that write their own backward."""
    work = work_dtype(gate_TF)
    g_TF, u_TF = gate_TF.to(work), up_TF.to(work)
    y_TF = torch.div(g_TF, bound).tanh_().mul_(sigmoid(g_TF))
    y_TF.mul_(torch.div(u_TF, up_bound).tanh_()).mul_(bound * up_bound)
    return y_TF.to(gate_TF.dtype)


def situ_backward(
    grad_TF: Tensor, gate_TF: Tensor, up_TF: Tensor, bound: float, up_bound: float
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up.

    With a = tanh(gate/bound), s = sigmoid(gate), c = tanh(up/up_bound):
    d gate = grad · up_bound·c·s·(1 − a² + bound·a·(1 − s)) and d up = grad · bound·a·s·(1 − c²).
    """
    work = work_dtype(gate_TF)
    g_TF, u_TF = gate_TF.to(work), up_TF.to(work)
    s_TF = sigmoid(g_TF)
    a_TF = torch.div(g_TF, bound).tanh_()
    c_TF = torch.div(u_TF, up_bound).tanh_()
    grad_s_TF = grad_TF.to(work) * s_TF
    d_up_TF = torch.mul(c_TF, c_TF).neg_().add_(1).mul_(a_TF).mul_(grad_s_TF).mul_(bound)
    d_gate_TF = s_TF.neg_().add_(1).mul_(a_TF).mul_(bound).add_(1).addcmul_(a_TF, a_TF, value=-1)
    d_gate_TF.mul_(grad_s_TF).mul_(c_TF).mul_(up_bound)
    return d_gate_TF.to(gate_TF.dtype), d_up_TF.to(up_TF.dtype)
