"""Norms through torch's own rms_norm, gates through a sigmoid whose bits depend on the element alone."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from trivium.ops.precision import work_dtype
from trivium.ops.sigmoid import sigmoid


def rms_norm_fused(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x_TD.to(work_dtype(x_TD)), weight_D.shape, eps=eps).to(x_TD.dtype) * weight_D


def gated_rms_norm_fused(o_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    work = work_dtype(gate_THV)
    normed_THV = F.rms_norm(o_THV.to(work), weight_V.shape, weight_V.to(work), eps)
    return (normed_THV * sigmoid(gate_THV.to(work))).to(gate_THV.dtype)


def sigmoid_gate_fused(x: Tensor, gate: Tensor) -> Tensor:
    return x * sigmoid(gate.to(work_dtype(gate))).to(gate.dtype)
