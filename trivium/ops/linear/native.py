"""The linear layer on the CPU's compiled kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.cpu.op import cpu_op


def linear_native(x_TD: Tensor, *weights: Tensor) -> Tensor:
    return _linear(x_TD, weights)


@cpu_op("linear")
def _linear(x_TD: Tensor, weights: Sequence[Tensor]) -> Tensor:
    x_TD = x_TD.contiguous()
    M, K, ldy = _sizes(x_TD, weights)
    y_TN = x_TD.new_empty(*x_TD.shape[:-1], ldy)
    for offset, weight in _beside(weights):
        cpu.call("linear", x_TD, weight.contiguous(), y_TN, offset, ldy, M, len(weight), K)
    return y_TN


@_linear.register_fake
def _(x_TD: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return x_TD.new_empty(*x_TD.shape[:-1], sum(len(weight) for weight in weights))


@cpu_op("linear_backward")
def _linear_backward(
    dy_TN: Tensor, x_TD: Tensor, weights: Sequence[Tensor], for_x: bool, for_weights: bool
) -> list[Tensor]:
    """dx and every weight's gradient, each only where it is asked for, else empty."""
    dy_TN, x_TD = dy_TN.contiguous(), x_TD.contiguous()
    weights = [weight.contiguous() for weight in weights]
    dx_TD, *d_weights = _like_gradients(x_TD, weights, for_x, for_weights)
    M, K, ldy = _sizes(x_TD, weights)
    for (offset, weight), d_weight in zip(_beside(weights), d_weights, strict=True):
        sizes = (offset, ldy, M, len(weight), K)
        if for_x:
            cpu.call("linear_input_grad", dy_TN, weight, dx_TD, *sizes, int(offset > 0))
        if for_weights:
            cpu.call("linear_weight_grad", dy_TN, x_TD, d_weight, *sizes)
    return [dx_TD, *d_weights]


@_linear_backward.register_fake
def _(dy_TN: Tensor, x_TD: Tensor, weights: Sequence[Tensor], for_x: bool, for_weights: bool) -> list[Tensor]:
    return _like_gradients(x_TD, weights, for_x, for_weights)


def _sizes(x_TD: Tensor, weights: Sequence[Tensor]) -> tuple[int, int, int]:
    return math.prod(x_TD.shape[:-1]), x_TD.shape[-1], sum(len(weight) for weight in weights)


def _beside(weights: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Every weight and the column where its outputs begin."""
    offset = 0
    for weight in weights:
        yield offset, weight
        offset += len(weight)


def _like_gradients(x_TD: Tensor, weights: Sequence[Tensor], for_x: bool, for_weights: bool) -> list[Tensor]:
    like = {"memory_format": torch.contiguous_format}
    dx_TD = torch.empty_like(x_TD, **like) if for_x else x_TD.new_empty(0)
    return [dx_TD, *(torch.empty_like(w, **like) if for_weights else w.new_empty(0) for w in weights)]


def _keep(ctx: Any, inputs: tuple[Tensor, list[Tensor]], output: Tensor) -> None:
    x_TD, weights = inputs
    ctx.save_for_backward(x_TD, *weights)


def _backward(ctx: Any, needs: Sequence[Any], dy_TN: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
    x_TD, *weights = ctx.saved_tensors
    for_x, for_weights = needs[0], any(needs[1])
    dx_TD, *d_weights = _linear_backward(dy_TN, x_TD, weights, for_x, for_weights)
    return dx_TD if for_x else None, d_weights if for_weights else [None] * len(weights)


_linear.register_autograd(_backward, setup_context=_keep)
