"""Norms and gates behind a layer: RMSNorm, RMSNorm with an output gate, a gate alone."""

from __future__ import annotations

from torch import Tensor

from trivium.ops import cpu
from trivium.ops.backend import choose
from trivium.ops.norm.fused import gated_rms_norm_fused, rms_norm_fused, sigmoid_gate_fused
from trivium.ops.norm.native import gated_rms_norm_native, rms_norm_native, sigmoid_gate_native
from trivium.ops.norm.reference import gated_rms_norm_reference, rms_norm_reference, sigmoid_gate_reference


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dim in float32, cast back to x's dtype, then times the weight.

    Any leading shape. Cast before the weight multiplies, as released: in bfloat16 the other order rounds differently.
    Raises ValueError for a weight of another width.
    """
    _check_width("rms_norm", x_TD, weight_D)
    native = rms_norm_native if cpu.serves(x_TD, weight_D) else None
    run = choose("rms_norm", reference=rms_norm_reference, torch=rms_norm_fused, native=native)
    return run(x_TD, weight_D, eps)


def gated_rms_norm(o_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """o / sqrt(mean(o^2) + eps) · weight · sigmoid(gate) over the last dim, all in float32, in gate's dtype.

    KDA's output norm and gate (arXiv 2510.26692, eq. 10). Raises ValueError for shapes that do not fit.
    """
    if o_THV.shape != gate_THV.shape:
        raise ValueError(f"gated_rms_norm: gate wants shape {tuple(o_THV.shape)}, got {tuple(gate_THV.shape)}")
    _check_width("gated_rms_norm", o_THV, weight_V)
    native = gated_rms_norm_native if cpu.serves(o_THV, gate_THV, weight_V) else None
    run = choose("gated_rms_norm", reference=gated_rms_norm_reference, torch=gated_rms_norm_fused, native=native)
    return run(o_THV, gate_THV, weight_V, eps)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x · sigmoid(gate), the sigmoid in float32 and cast to gate's dtype: MLA's output gate.

    Any shape, the same for both; raises ValueError otherwise.
    """
    if x.shape != gate.shape:
        raise ValueError(f"sigmoid_gate: gate wants shape {tuple(x.shape)}, got {tuple(gate.shape)}")
    native = sigmoid_gate_native if cpu.serves(x, gate) else None
    run = choose("sigmoid_gate", reference=sigmoid_gate_reference, torch=sigmoid_gate_fused, native=native)
    return run(x, gate)


def _check_width(op: str, x: Tensor, weight: Tensor) -> None:
    if x.dim() == 0 or weight.dim() != 1 or x.shape[-1] != len(weight):
        raise ValueError(f"{op}: weight wants shape {tuple(x.shape[-1:])}, got {tuple(weight.shape)}")
