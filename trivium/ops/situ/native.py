"""SiTU on the CPU's compiled kernels: it saves gate and up, and nothing in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.cpu.op import cpu_op


@cpu_op("situ")
def situ_native(gate_TF: Tensor, up_TF: Tensor, bound: float, up_bound: float) -> Tensor:
    gate_TF, up_TF = gate_TF.contiguous(), up_TF.contiguous()
    y_TF = torch.empty_like(gate_TF)
    cpu.call("situ", gate_TF, up_TF, y_TF, gate_TF.numel(), bound, up_bound)
    return y_TF


@situ_native.register_fake
def _(gate_TF: Tensor, up_TF: Tensor, bound: float, up_bound: float) -> Tensor:
    return torch.empty_like(gate_TF, memory_format=torch.contiguous_format)


@cpu_op("situ_backward")
def situ_backward(
    dy_TF: Tensor, gate_TF: Tensor, up_TF: Tensor, bound: float, up_bound: float
) -> tuple[Tensor, Tensor]:
    dy_TF, gate_TF, up_TF = dy_TF.contiguous(), gate_TF.contiguous(), up_TF.contiguous()
    d_gate_TF, d_up_TF = torch.empty_like(gate_TF), torch.empty_like(up_TF)
    cpu.call("situ_backward", dy_TF, gate_TF, up_TF, d_gate_TF, d_up_TF, gate_TF.numel(), bound, up_bound)
    return d_gate_TF, d_up_TF


@situ_backward.register_fake
def _(dy_TF: Tensor, gate_TF: Tensor, up_TF: Tensor, bound: float, up_bound: float) -> tuple[Tensor, Tensor]:
    d_gate_TF, d_up_TF = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate_TF, up_TF))
    return d_gate_TF, d_up_TF


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float, float], output: Tensor) -> None:
    gate_TF, up_TF, *ctx.bounds = inputs
    ctx.save_for_backward(gate_TF, up_TF)


def _backward(ctx: Any, needs: Sequence[Any], dy_TF: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return *situ_backward(dy_TF, *ctx.saved_tensors, *ctx.bounds), None, None


situ_native.register_autograd(_backward, setup_context=_keep)
