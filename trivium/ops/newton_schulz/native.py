"""Newton-Schulz on the CPU's compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.cpu.op import cpu_op
from trivium.ops.newton_schulz.reference import COEFFICIENTS, EPS

_COEFFICIENTS_S3 = torch.tensor(COEFFICIENTS, dtype=torch.float32, device="cpu")


@cpu_op("newton_schulz")
def newton_schulz_native(stack_NOI: Tensor) -> Tensor:
    x_NOI = torch.empty_like(stack_NOI, memory_format=torch.contiguous_format)
    cpu.call("newton_schulz", stack_NOI.contiguous(), x_NOI, *x_NOI.shape, _COEFFICIENTS_S3, len(COEFFICIENTS), EPS)
    return x_NOI


@newton_schulz_native.register_fake
def _(stack_NOI: Tensor) -> Tensor:
    return torch.empty_like(stack_NOI, memory_format=torch.contiguous_format)
