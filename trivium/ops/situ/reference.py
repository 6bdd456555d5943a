"""SiTU as the report writes it."""

from __future__ import annotations

import torch
from torch import Tensor

from trivium.ops.precision import work_dtype


def situ_reference(gate_TF: Tensor, up_TF: Tensor, bound: float, up_bound: float) -> Tensor:
    work = work_dtype(gate_TF)
    g_TF, u_TF = gate_TF.to(work), up_TF.to(work)
    gate_part_TF = bound * torch.tanh(g_TF / bound) * torch.sigmoid(g_TF)
    up_part_TF = up_bound * torch.tanh(u_TF / up_bound)
    return (gate_part_TF * up_part_TF).to(gate_TF.dtype)
