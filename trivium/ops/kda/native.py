"""KDA on the CPU's compiled kernels: the recurrence, token by token, with the state in cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.cpu.op import cpu_op
from trivium.ops.kda.gate import KdaInputs
from trivium.ops.rows import Rows

SEGMENT = 32  # tokens between two states that are kept for backward, as in cpu.cpp


def kda_native(inputs: KdaInputs, rows: Rows, state_SHKV: Tensor, lower_bound: float) -> tuple[Tensor, Tensor]:
    """`kda` as its definition runs. Backward saves q, k, the gates' inputs, each token's miss, a state a segment."""
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (*inputs, state_SHKV))
    o_THV, state_SHKV, _, _ = _forward(*inputs, state_SHKV, rows.starts, lower_bound, keep)
    return o_THV, state_SHKV


@cpu_op("kda")
def _forward(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    decay_in_THK: Tensor,
    beta_in_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    state_SHKV: Tensor,
    starts: Sequence[int],
    lower_bound: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o_THV, the states behind every sequence, and with `keep` the misses v - S^T k and each segment's entering state."""
    tokens = [_rows_apart(x) for x in (q_THK, k_THK, v_THV, decay_in_THK, beta_in_TH)]
    outputs = _empty_outputs(v_THV, state_SHKV, starts, keep)
    cpu.call(
        "kda",
        *(x.data_ptr() for x in tokens),
        A_log_H.contiguous(),
        dt_bias_HK.contiguous(),
        state_SHKV.contiguous(),
        cpu.numbers(starts),
        *outputs[:2],
        *(x if keep else None for x in outputs[2:]),
        *(x.stride(0) for x in tokens),
        *state_SHKV.shape,
        lower_bound,
    )
    return outputs


def _rows_apart(x_TX: Tensor) -> Tensor:
    """As it is where only its rows lie apart, as those of a part of joined projections do; else a copy."""
    return x_TX if x_TX[:1].is_contiguous() else x_TX.contiguous()


def _empty_outputs(
    v_THV: Tensor, state_SHKV: Tensor, starts: Sequence[int], keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_segments = sum(-(-(end - start) // SEGMENT) for start, end in pairwise(starts))
    return (
        v_THV.new_empty(v_THV.shape),
        v_THV.new_empty(state_SHKV.shape),
        v_THV.new_empty(v_THV.shape if keep else 0),
        v_THV.new_empty((num_segments, *state_SHKV.shape[1:]) if keep else 0),
    )


@_forward.register_fake
def _(q, k, v_THV, decay_in, beta_in, A_log, dt_bias, state_SHKV, starts, lower_bound, keep):
    return _empty_outputs(v_THV, state_SHKV, starts, keep)


@cpu_op("kda_backward")
def _gradients(
    d_o_THV: Tensor,
    d_state_SHKV: Tensor | None,
    q_THK: Tensor,
    k_THK: Tensor,
    decay_in_THK: Tensor,
    beta_in_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    miss_THV: Tensor,
    entering_NHKV: Tensor,
    starts: Sequence[int],
    lower_bound: float,
) -> list[Tensor]:
    """Of the seven inputs and of the entering states."""
    tokens = [_rows_apart(x) for x in (q_THK, k_THK, decay_in_THK, beta_in_TH)]
    gradients = _empty_gradients(q_THK, miss_THV, entering_NHKV, len(starts) - 1)
    cpu.call(
        "kda_backward",
        *(x.data_ptr() for x in tokens),
        A_log_H.contiguous(),
        dt_bias_HK.contiguous(),
        cpu.numbers(starts),
        miss_THV,
        entering_NHKV,
        d_o_THV.contiguous(),
        None if d_state_SHKV is None else d_state_SHKV.contiguous(),
        *gradients,
        *(x.stride(0) for x in tokens),
        *gradients[-1].shape,
        lower_bound,
    )
    return gradients


def _empty_gradients(q_THK: Tensor, miss_THV: Tensor, entering_NHKV: Tensor, num_sequences: int) -> list[Tensor]:
    (T, H, K), V = q_THK.shape, miss_THV.shape[-1]
    shapes = ((T, H, K), (T, H, K), (T, H, V), (T, H, K), (T, H), (H,), (H, K), (num_sequences, H, K, V))
    return [q_THK.new_empty(shape) for shape in shapes]


@_gradients.register_fake
def _(d_o, d_state, q_THK, k, decay_in, beta_in, A_log, dt_bias, miss_THV, entering_NHKV, starts, lower_bound):
    return _empty_gradients(q_THK, miss_THV, entering_NHKV, len(starts) - 1)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, _, decay_in, beta_in, A_log, dt_bias, _, ctx.starts, ctx.lower_bound, _ = inputs
    ctx.save_for_backward(q, k, decay_in, beta_in, A_log, dt_bias, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, needs: Sequence[Any], d_o_THV: Tensor | None, d_state_SHKV: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if d_o_THV is None:
        d_o_THV = torch.zeros_like(saved[-2])  # as wide as the misses
    return *_gradients(d_o_THV, d_state_SHKV, *saved, ctx.starts, ctx.lower_bound), None, None, None


_forward.register_autograd(_backward, setup_context=_keep)
