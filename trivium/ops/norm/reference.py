"""Norms and gates by their definition."""

from __future__ import annotations

import torch
from torch import Tensor

from trivium.ops.precision import work_dtype


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    x = x_TD.to(work_dtype(x_TD))
    rms = (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return (x / rms).to(x_TD.dtype) * weight_D


def gated_rms_norm_reference(o_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    work = work_dtype(gate_THV)
    normed_THV = rms_norm_reference(o_THV.to(work), weight_V.to(work), eps)
    return (normed_THV * torch.sigmoid(gate_THV.to(work))).to(gate_THV.dtype)


def sigmoid_gate_reference(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate.to(work_dtype(gate))).to(gate.dtype)
