"""The routed experts on the CPU's compiled kernels, dense or straight from MXFP4 bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.cpu.op import cpu_op
from trivium.ops.experts.reference import ExpertInputs
from trivium.ops.mxfp4 import PackedWeight


def serves(inputs: ExpertInputs) -> bool:
    data, scales = zip(*(_parts(w) for w in inputs[3:6]), strict=True)
    dense = [x for x, scale in zip(data, scales, strict=True) if scale is None]
    on_cpu = all(x.device.type == "cpu" for x in (*data, inputs.experts_TA))
    return on_cpu and cpu.serves(inputs.latent_TL, inputs.weights_TA, *dense)


def experts_native(inputs: ExpertInputs) -> Tensor:
    latent_TL, experts_TA, weights_TA, *weights, bound, up_bound = inputs
    data, scales = zip(*(_parts(w) for w in weights), strict=True)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (latent_TL, weights_TA, *data))
    y_TL, _, _ = _experts(latent_TL, weights_TA, *data, experts_TA, *scales, bound, up_bound, keep)
    return y_TL


def _parts(weight: Tensor | PackedWeight) -> tuple[Tensor, Tensor | None]:
    return (weight.packed, weight.scale) if isinstance(weight, PackedWeight) else (weight, None)


@cpu_op("experts")
def _experts(
    latent_TL: Tensor,
    weights_TA: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    experts_TA: Tensor,
    scale1: Tensor | None,
    scale3: Tensor | None,
    scale2: Tensor | None,
    bound: float,
    up_bound: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y_TL, and gate and up of every pair, sorted by expert, for the gradients; empty unless `keep`.

    Of T · A rows of gate and up those of pairs without an expert stand last and hold nothing.
    """
    inputs = _contiguous(latent_TL, experts_TA, weights_TA, w1, scale1, w3, scale3, w2, scale2)
    y_TL, gate_MF, up_MF = _outputs(latent_TL, weights_TA, w1, keep)
    kept = (gate_MF, up_MF) if keep else (None, None)
    cpu.call("experts", *inputs, y_TL, *kept, *_sizes(latent_TL, weights_TA, w1), bound, up_bound)
    return y_TL, gate_MF, up_MF


@_experts.register_fake
def _(latent_TL, weights_TA, w1, w3, w2, experts_TA, scale1, scale3, scale2, bound, up_bound, keep):
    return _outputs(latent_TL, weights_TA, w1, keep)


@cpu_op("experts_backward")
def _experts_backward(
    dy_TL: Tensor,
    latent_TL: Tensor,
    weights_TA: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    experts_TA: Tensor,
    scale1: Tensor | None,
    scale3: Tensor | None,
    scale2: Tensor | None,
    gate_MF: Tensor,
    up_MF: Tensor,
    bound: float,
    up_bound: float,
    for_latent: bool,
    for_matrices: bool,
) -> list[Tensor]:
    """The gradients of latent, weights, w1, w3 and w2, empty where they are not asked for."""
    dy_TL, *inputs = _contiguous(dy_TL, latent_TL, experts_TA, weights_TA, w1, scale1, w3, scale3, w2, scale2)
    outputs = _gradients(latent_TL, weights_TA, (w1, w3, w2), for_latent, for_matrices)
    asked = (for_latent, True, *[for_matrices] * 3)
    kept = (gate_MF, up_MF) if gate_MF.numel() else (None, None)
    pointers = (x if wanted else None for x, wanted in zip(outputs, asked, strict=True))
    sizes = _sizes(latent_TL, weights_TA, w1)
    cpu.call("experts_backward", dy_TL, *inputs, *kept, *pointers, *sizes, bound, up_bound)
    return outputs


@_experts_backward.register_fake
def _(dy, latent_TL, weights_TA, w1, w3, w2, ids, s1, s3, s2, gate, up, bound, up_bound, for_latent, for_matrices):
    return _gradients(latent_TL, weights_TA, (w1, w3, w2), for_latent, for_matrices)


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _sizes(latent_TL: Tensor, weights_TA: Tensor, w1: Tensor) -> tuple[int, int, int, int, int]:
    T, L = latent_TL.shape
    return T, weights_TA.shape[1], w1.shape[0], L, w1.shape[1]


def _outputs(latent_TL: Tensor, weights_TA: Tensor, w1: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    T, A, _, L, F = _sizes(latent_TL, weights_TA, w1)
    gate_MF, up_MF = (latent_TL.new_empty(T * A if keep else 0, F) for _ in range(2))
    return latent_TL.new_empty(T, L), gate_MF, up_MF


def _gradients(
    latent_TL: Tensor, weights_TA: Tensor, matrices: tuple[Tensor, ...], for_latent: bool, for_matrices: bool
) -> list[Tensor]:
    asked = (for_latent, True, *[for_matrices] * 3)
    tensors = (latent_TL, weights_TA, *matrices)
    return [x.new_empty(x.shape if wanted else 0) for x, wanted in zip(tensors, asked, strict=True)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, bound, up_bound, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.bounds = bound, up_bound
    ctx.dense = all(scale is None for scale in tensors[6:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, needs: Sequence[Any], dy_TL: Tensor, d_gate: None, d_up: None) -> tuple[Tensor | None, ...]:
    for_latent, for_matrices = needs[0], ctx.dense and any(needs[2:5])
    gradients = _experts_backward(dy_TL, *ctx.saved_tensors, *ctx.bounds, for_latent, for_matrices)
    asked = (for_latent, True, *[for_matrices] * 3)
    return *(x if wanted else None for x, wanted in zip(gradients, asked, strict=True)), *[None] * 7


_experts.register_autograd(_backward, setup_context=_keep)
