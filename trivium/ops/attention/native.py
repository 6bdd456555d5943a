"""Latent attention on the CPU's compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.cpu.op import cpu_op
from trivium.ops.rows import Rows


def latent_native(
    q_nope_THK: Tensor,
    q_rest_THJ: Tensor,
    latent_UR: Tensor,
    shared_key_UJ: Tensor,
    kv_b_HXR: Tensor,
    rows: Rows,
    *,
    absorb: bool,
) -> Tensor:
    o_THV, _ = latent_attention_native(
        q_nope_THK, q_rest_THJ, latent_UR, shared_key_UJ, kv_b_HXR, rows.starts, rows.past, absorb
    )
    return o_THV


@cpu_op("latent_attention")
def latent_attention_native(
    q_nope_THK: Tensor,
    q_rest_THJ: Tensor,
    latent_UR: Tensor,
    shared_key_UJ: Tensor,
    kv_b_HXR: Tensor,
    starts: Sequence[int],
    past: Sequence[int],
    absorb: bool,
) -> tuple[Tensor, Tensor]:
    """o_THV, and for the backward the log-sum-exp lse_TH of the scores, to base 2."""
    inputs = [x.contiguous() for x in (q_nope_THK, q_rest_THJ, latent_UR, shared_key_UJ, kv_b_HXR)]
    sizes = _sizes(*inputs)
    o_THV, lse_TH = _outputs(q_nope_THK, kv_b_HXR)
    name = "latent_absorbed" if absorb else "latent_expanded"
    cpu.call(name, *inputs, cpu.numbers(starts), cpu.numbers(past), o_THV, lse_TH, len(past), *sizes)
    return o_THV, lse_TH


@latent_attention_native.register_fake
def _(q_nope_THK, q_rest, latent, shared_key, kv_b_HXR, starts, past, absorb):
    return _outputs(q_nope_THK, kv_b_HXR)


@cpu_op("latent_attention_backward")
def latent_attention_backward(
    do_THV: Tensor,
    q_nope_THK: Tensor,
    q_rest_THJ: Tensor,
    latent_UR: Tensor,
    shared_key_UJ: Tensor,
    kv_b_HXR: Tensor,
    o_THV: Tensor,
    lse_TH: Tensor,
    starts: Sequence[int],
    past: Sequence[int],
) -> list[Tensor]:
    """Gradients of the five inputs, whichever form ran."""
    inputs = [x.contiguous() for x in (q_nope_THK, q_rest_THJ, latent_UR, shared_key_UJ, kv_b_HXR)]
    gradients = [torch.empty_like(x) for x in inputs]
    kept = [x.contiguous() for x in (o_THV, lse_TH, do_THV)]
    bounds = [cpu.numbers(starts), cpu.numbers(past)]
    cpu.call("latent_backward", *inputs, *bounds, *kept, *gradients, len(past), *_sizes(*inputs))
    return gradients


@latent_attention_backward.register_fake
def _(do_THV, q_nope_THK, q_rest_THJ, latent_UR, shared_key_UJ, kv_b_HXR, o_THV, lse_TH, starts, past):
    return [x.new_empty(x.shape) for x in (q_nope_THK, q_rest_THJ, latent_UR, shared_key_UJ, kv_b_HXR)]


def _outputs(q_nope_THK: Tensor, kv_b_HXR: Tensor) -> tuple[Tensor, Tensor]:
    T, H, K = q_nope_THK.shape
    return q_nope_THK.new_empty(T, H, kv_b_HXR.shape[1] - K), q_nope_THK.new_empty(T, H)


def _sizes(q_nope: Tensor, q_rest: Tensor, latent: Tensor, shared_key: Tensor, kv_b: Tensor) -> tuple[int, ...]:
    """H, K, J, V, R"""
    _, H, K = q_nope.shape
    return H, K, q_rest.shape[-1], kv_b.shape[1] - K, latent.shape[-1]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.starts, ctx.past, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, needs: Sequence[Any], do_THV: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = latent_attention_backward(do_THV, *ctx.saved_tensors, ctx.starts, ctx.past)
    return *gradients, None, None, None


latent_attention_native.register_autograd(_backward, setup_context=_keep)
