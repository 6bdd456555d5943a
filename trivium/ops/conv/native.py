"""The short convolution on the CPU's compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.cpu.op import cpu_op
from trivium.ops.rows import Rows


def short_conv_native(x_TX: Tensor, weight_X14: Tensor, rows: Rows, window_S3X: Tensor) -> tuple[Tensor, Tensor]:
    """`short_conv` in one pass. Backward saves the inputs and computes the sums again."""
    return _forward(x_TX, weight_X14, window_S3X, rows.starts)


@cpu_op("short_conv")
def _forward(x_TX: Tensor, weight_X14: Tensor, window_S3X: Tensor, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    y_TX, after_S3X = x_TX.new_empty(x_TX.shape), window_S3X.new_empty(window_S3X.shape)
    inputs = (x.contiguous() for x in (x_TX, weight_X14, window_S3X))
    cpu.call("short_conv", *inputs, _bounds(starts), y_TX, after_S3X, len(starts) - 1, x_TX.shape[1])
    return y_TX, after_S3X


def _bounds(starts: Sequence[int]) -> Tensor:
    return cpu.numbers(starts)


@_forward.register_fake
def _(x_TX: Tensor, weight_X14: Tensor, window_S3X: Tensor, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    return x_TX.new_empty(x_TX.shape), window_S3X.new_empty(window_S3X.shape)


@cpu_op("short_conv_backward")
def _gradients(
    d_y_TX: Tensor, d_after_S3X: Tensor, x_TX: Tensor, weight_X14: Tensor, window_S3X: Tensor, starts: Sequence[int]
) -> list[Tensor]:
    """Of x, weight and window."""
    inputs = [x.contiguous() for x in (x_TX, weight_X14, window_S3X)]
    gradients = [torch.empty_like(x) for x in inputs]
    given = (x.contiguous() for x in (d_y_TX, d_after_S3X))
    sizes = (len(starts) - 1, x_TX.shape[1])
    cpu.call("short_conv_backward", *inputs, _bounds(starts), *given, *gradients, *sizes)
    return gradients


@_gradients.register_fake
def _(d_y_TX, d_after_S3X, x_TX, weight_X14, window_S3X, starts):
    return [x.new_empty(x.shape) for x in (x_TX, weight_X14, window_S3X)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.starts = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, needs: Sequence[Any], d_y_TX: Tensor, d_after_S3X: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(d_y_TX, d_after_S3X, *ctx.saved_tensors, ctx.starts), None


_forward.register_autograd(_backward, setup_context=_keep)
