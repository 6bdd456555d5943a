"""Norms and gates on the CPU's compiled kernels. Each saves its inputs, and makes the rest again in its backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trivium.ops import cpu
from trivium.ops.cpu.op import cpu_op


@cpu_op("rms_norm")
def rms_norm_native(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    x_TD, y_TD = x_TD.contiguous(), cpu.empty(x_TD.shape)
    cpu.call("rms_norm", x_TD, weight_D.contiguous(), y_TD, *_rows(x_TD), eps)
    return y_TD


@cpu_op("rms_norm_backward")
def rms_norm_backward(dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dx_TD, dweight_D = cpu.empty(x_TD.shape), cpu.empty(weight_D.shape)
    args = (x.contiguous() for x in (dy_TD, x_TD, weight_D))
    cpu.call("rms_norm_backward", *args, dx_TD, dweight_D, *_rows(x_TD), eps)
    return dx_TD, dweight_D


@cpu_op("gated_rms_norm")
def gated_rms_norm_native(o_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    y_THV = cpu.empty(o_THV.shape)
    cpu.call("gated_rms_norm", *(x.contiguous() for x in (o_THV, gate_THV, weight_V)), y_THV, *_rows(o_THV), eps)
    return y_THV


@cpu_op("gated_rms_norm_backward")
def gated_rms_norm_backward(
    dy_THV: Tensor, o_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    do_THV, dgate_THV, dweight_V = cpu.empty(o_THV.shape), cpu.empty(o_THV.shape), cpu.empty(weight_V.shape)
    args = (x.contiguous() for x in (dy_THV, o_THV, gate_THV, weight_V))
    cpu.call("gated_rms_norm_backward", *args, do_THV, dgate_THV, dweight_V, *_rows(o_THV), eps)
    return do_THV, dgate_THV, dweight_V


@cpu_op("sigmoid_gate")
def sigmoid_gate_native(x: Tensor, gate: Tensor) -> Tensor:
    y = cpu.empty(x.shape)
    cpu.call("sigmoid_gate", x.contiguous(), gate.contiguous(), y, x.numel())
    return y


@cpu_op("sigmoid_gate_backward")
def sigmoid_gate_backward(dy: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    dx, dgate = cpu.empty(x.shape), cpu.empty(x.shape)
    cpu.call("sigmoid_gate_backward", *(t.contiguous() for t in (dy, x, gate)), dx, dgate, x.numel())
    return dx, dgate


rms_norm_native.register_fake(lambda x, weight, eps: x.new_empty(x.shape))
rms_norm_backward.register_fake(lambda dy, x, weight, eps: (x.new_empty(x.shape), weight.new_empty(weight.shape)))
gated_rms_norm_native.register_fake(lambda o, gate, weight, eps: o.new_empty(o.shape))
gated_rms_norm_backward.register_fake(
    lambda dy, o, gate, weight, eps: (o.new_empty(o.shape), o.new_empty(o.shape), weight.new_empty(weight.shape))
)
sigmoid_gate_native.register_fake(lambda x, gate: x.new_empty(x.shape))
sigmoid_gate_backward.register_fake(lambda dy, x, gate: (x.new_empty(x.shape), x.new_empty(x.shape)))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


rms_norm_native.register_autograd(
    lambda ctx, needs, dy: (*rms_norm_backward(dy, *ctx.saved_tensors, ctx.eps), None), setup_context=_keep
)
gated_rms_norm_native.register_autograd(
    lambda ctx, needs, dy: (*gated_rms_norm_backward(dy, *ctx.saved_tensors, ctx.eps), None), setup_context=_keep
)
sigmoid_gate_native.register_autograd(
    lambda ctx, needs, dy: sigmoid_gate_backward(dy, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _rows(x: Tensor) -> tuple[int, int]:
    """Rows along the last dim, and their width."""
    return (x.numel() // x.shape[-1] if x.shape[-1] else 0), x.shape[-1]
