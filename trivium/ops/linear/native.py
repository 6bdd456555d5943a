"""The linear layer on the CPU's compiled kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trivium.ops import cpu


@torch.library.custom_op("trivium::linear", mutates_args=(), device_types="cpu")
def linear_native(x_TD: Tensor, weight: Tensor) -> Tensor:
    x_TD = x_TD.contiguous()
    y_TN = x_TD.new_empty(*x_TD.shape[:-1], len(weight))
    M, (N, K) = math.prod(x_TD.shape[:-1]), weight.shape
    cpu.call("linear", x_TD, weight.contiguous(), y_TN, M, N, K)
    return y_TN


@linear_native.register_fake
def _(x_TD: Tensor, weight: Tensor) -> Tensor:
    return x_TD.new_empty(*x_TD.shape[:-1], len(weight))


@torch.library.custom_op("trivium::linear_backward", mutates_args=(), device_types="cpu")
def linear_backward(dy_TN: Tensor, x_TD: Tensor, weight: Tensor, for_x: bool, for_weight: bool) -> list[Tensor]:
    """dx and dweight, each only where it is asked for, else empty."""
    dy_TN, x_TD, weight = dy_TN.contiguous(), x_TD.contiguous(), weight.contiguous()
    dx_TD, d_weight = (torch.empty_like(x if asked else x[:0]) for x, asked in ((x_TD, for_x), (weight, for_weight)))
    M, (N, K) = math.prod(dy_TN.shape[:-1]), weight.shape
    if for_x:
        cpu.call("linear_input_grad", dy_TN, weight, dx_TD, M, N, K)
    if for_weight:
        cpu.call("linear_weight_grad", dy_TN, x_TD, d_weight, M, N, K)
    return [dx_TD, d_weight]


@linear_backward.register_fake
def _(dy_TN: Tensor, x_TD: Tensor, weight: Tensor, for_x: bool, for_weight: bool) -> list[Tensor]:
    return [torch.empty_like(x if asked else x[:0]) for x, asked in ((x_TD, for_x), (weight, for_weight))]


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, Tensor | None]:
    for_x, for_weight = ctx.needs_input_grad
    dx_TD, d_weight = linear_backward(dy_TN, *ctx.saved_tensors, for_x, for_weight)
    return dx_TD if for_x else None, d_weight if for_weight else None


linear_native.register_autograd(_backward, setup_context=_keep)
