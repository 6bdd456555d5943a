"""Routing and quantile balancing on the CPU's compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.cpu.op import cpu_op


@cpu_op("select_experts")
def select_experts_native(score_TE: Tensor, bias_E: Tensor, num_active: int) -> Tensor:
    experts_TA = score_TE.new_empty(len(score_TE), num_active, dtype=torch.int64)
    cpu.call("select_experts", score_TE.contiguous(), bias_E.contiguous(), experts_TA, *score_TE.shape, num_active)
    return experts_TA


@select_experts_native.register_fake
def _(score_TE: Tensor, bias_E: Tensor, num_active: int) -> Tensor:
    return score_TE.new_empty(len(score_TE), num_active, dtype=torch.int64)


@cpu_op("route")
def route_native(logit_TE: Tensor, bias_E: Tensor, num_active: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of the chosen experts, the scores of all, and who the chosen are."""
    weights_TA, score_TE, experts_TA = outputs = _route(logit_TE, num_active)
    sizes = *logit_TE.shape, num_active
    cpu.call("route", logit_TE.contiguous(), bias_E.contiguous(), experts_TA, weights_TA, score_TE, *sizes, scale)
    return outputs


@route_native.register_fake
def _(logit_TE: Tensor, bias_E: Tensor, num_active: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return _route(logit_TE, num_active)


def _route(logit_TE: Tensor, num_active: int) -> tuple[Tensor, Tensor, Tensor]:
    experts_TA = logit_TE.new_empty(len(logit_TE), num_active, dtype=torch.int64)
    return logit_TE.new_empty(experts_TA.shape), logit_TE.new_empty(logit_TE.shape), experts_TA


@cpu_op("route_backward")
def route_backward(
    d_weights_TA: Tensor | None, d_score_TE: Tensor | None, logit_TE: Tensor, experts_TA: Tensor, scale: float
) -> Tensor:
    d_logit_TE = logit_TE.new_empty(logit_TE.shape)
    given = [None if x is None else x.contiguous() for x in (d_weights_TA, d_score_TE)]
    sizes = *logit_TE.shape, experts_TA.shape[1]
    cpu.call("route_backward", *given, logit_TE.contiguous(), experts_TA, d_logit_TE, *sizes, scale)
    return d_logit_TE


@route_backward.register_fake
def _(
    d_weights_TA: Tensor | None, d_score_TE: Tensor | None, logit_TE: Tensor, experts_TA: Tensor, scale: float
) -> Tensor:
    return logit_TE.new_empty(logit_TE.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int, float], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logit_TE, _, _, ctx.scale = inputs
    ctx.save_for_backward(logit_TE, output[2])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, needs: Sequence[Any], d_weights_TA: Tensor | None, d_score_TE: Tensor | None, d_experts: None
) -> tuple[Tensor | None, None, None, None]:
    return route_backward(d_weights_TA, d_score_TE, *ctx.saved_tensors, ctx.scale), None, None, None


route_native.register_autograd(_backward, setup_context=_keep)


def quantile_balance_native_(bias_E: Tensor, score_NE: Tensor, num_active: int) -> None:
    N, E = score_NE.shape
    moved_E = bias_E.clone(memory_format=torch.contiguous_format)
    scratch = (score_NE.new_empty(N), score_NE.new_empty(E, N))
    cpu.call("quantile_balance", score_NE.contiguous(), moved_E, *scratch, N, E, num_active, N * num_active // E)
    bias_E.copy_(moved_E)
    bias_E -= bias_E.mean()  # as the other backends sum it, bit for bit
