"""Cross-entropy on the CPU's compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.cpu.op import cpu_op

# Logits of one block of tokens, 32 MB. A block is 64 tokens at least, or dweight's own traffic costs more than its sums.
BLOCK_NUMEL, MIN_TOKENS, MAX_TOKENS = 2**23, 64, 512


@cpu_op("cross_entropy")
def cross_entropy_native(hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor) -> Tensor:
    nll_T = cpu.empty(len(targets_T))
    _run(hidden_TD, weight_WD, targets_T, None, nll_T, None, None, None)
    return nll_T


@cpu_op("cross_entropy_backward")
def _cross_entropy_backward(
    dnll_T: Tensor, hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor, for_hidden: bool, for_weight: bool
) -> tuple[Tensor, Tensor]:
    """The gradients, each only where it is asked for, else empty."""
    d_hidden_TD, d_weight_WD = _room(hidden_TD, for_hidden), _room(weight_WD, for_weight)
    gradients = (d_hidden_TD if for_hidden else None, d_weight_WD if for_weight else None)
    _run(hidden_TD, weight_WD, targets_T, dnll_T, cpu.empty(len(targets_T)), None, *gradients)
    return d_hidden_TD, d_weight_WD


@cpu_op("cross_entropy_sum")
def _cross_entropy_sum(
    hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor, scale_T: Tensor, for_hidden: bool, for_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ scale · nll and its gradients, each only where it is asked for, else empty."""
    total, d_hidden_TD, d_weight_WD = cpu.empty(()), _room(hidden_TD, for_hidden), _room(weight_WD, for_weight)
    gradients = (d_hidden_TD if for_hidden else None, d_weight_WD if for_weight else None)
    _run(hidden_TD, weight_WD, targets_T, scale_T, cpu.empty(len(targets_T)), total, *gradients)
    return total, d_hidden_TD, d_weight_WD


@cpu_op("cross_entropy_scaled")
def _scaled_gradients(
    d_total: Tensor, hidden_TD: Tensor, weight_WD: Tensor, d_hidden_TD: Tensor, d_weight_WD: Tensor
) -> tuple[Tensor, Tensor]:
    """Both times d_total. They depend on hidden and weight, in a way that has no formula: a second derivative raises."""
    return d_hidden_TD * d_total, d_weight_WD * d_total


def cross_entropy_sum_native(hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor, scale_T: Tensor) -> Tensor:
    grad = torch.is_grad_enabled()
    asked = (grad and hidden_TD.requires_grad, grad and weight_WD.requires_grad)
    return _cross_entropy_sum(hidden_TD, weight_WD, targets_T, scale_T.detach(), *asked)[0]


def _run(
    hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor, scale_T: Tensor | None, *results: Tensor | None
) -> None:
    """The kernel; `scale_T` None is the forward alone."""
    (T, D), num_words = hidden_TD.shape, len(weight_WD)
    height = min(max(BLOCK_NUMEL // max(num_words, 1), MIN_TOKENS), MAX_TOKENS)
    room = min(height, T)
    scaled = cpu.empty(height * D + room) if scale_T is not None else None
    inputs = (hidden_TD.contiguous(), weight_WD.contiguous(), targets_T.contiguous())
    scale_T = None if scale_T is None else scale_T.contiguous()
    scratch = (cpu.empty(room * num_words), scaled)
    cpu.call("cross_entropy", *inputs, scale_T, *results, *scratch, T, num_words, D, height)


def _room(x: Tensor, asked: bool) -> Tensor:
    return cpu.empty(x.shape if asked else (0,))


@cross_entropy_native.register_fake
def _(hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor) -> Tensor:
    return hidden_TD.new_empty(len(targets_T))


@_cross_entropy_backward.register_fake
def _(
    dnll_T: Tensor, hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor, for_hidden: bool, for_weight: bool
) -> tuple[Tensor, Tensor]:
    return _fake_room(hidden_TD, for_hidden), _fake_room(weight_WD, for_weight)


@_cross_entropy_sum.register_fake
def _(
    hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor, scale_T: Tensor, for_hidden: bool, for_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return hidden_TD.new_empty(()), _fake_room(hidden_TD, for_hidden), _fake_room(weight_WD, for_weight)


@_scaled_gradients.register_fake
def _(
    d_total: Tensor, hidden_TD: Tensor, weight_WD: Tensor, d_hidden_TD: Tensor, d_weight_WD: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(d_hidden_TD), torch.empty_like(d_weight_WD)


def _fake_room(x: Tensor, asked: bool) -> Tensor:
    return x.new_empty(x.shape if asked else (0,))


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, needs: Sequence[Any], dnll_T: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    for_hidden, for_weight = needs[:2]
    d_hidden_TD, d_weight_WD = _cross_entropy_backward(dnll_T, *ctx.saved_tensors, for_hidden, for_weight)
    return d_hidden_TD if for_hidden else None, d_weight_WD if for_weight else None, None


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.asked = inputs[-2:]
    ctx.save_for_backward(*inputs[:2], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward_of_sum(ctx: Any, needs: Sequence[Any], d_total: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    gradients = _scaled_gradients(d_total, *ctx.saved_tensors)
    return *(d if asked else None for d, asked in zip(gradients, ctx.asked, strict=True)), None, None, None, None


cross_entropy_native.register_autograd(_backward, setup_context=_keep)
_cross_entropy_sum.register_autograd(_backward_of_sum, setup_context=_keep_gradients)
