"""MXFP4 as the format defines it, nibble by nibble."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_SIZE = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; the sign is bit 3 of the nibble


def unpack_reference(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    nibble = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)  # low nibble first: column 2j
    magnitude = torch.tensor(MAGNITUDES, dtype=torch.float64, device=packed.device)[(nibble & 7).long()]
    value = torch.where(nibble >= 8, -magnitude, magnitude)
    factor = torch.exp2(scale.double() - 127)
    factor = torch.where(scale == 255, torch.nan, factor)
    return (value * factor.repeat_interleave(GROUP_SIZE, dim=-1)).to(dtype)


def pack_reference(weight: Tensor) -> tuple[Tensor, Tensor]:
    group = weight.double().unflatten(-1, (-1, GROUP_SIZE))
    largest = group.abs().amax(-1)
    # Subnormal floats of the source are normal numbers in float64, so log2 sees them as they are.
    power = torch.floor(torch.log2(largest)) - 2
    power = torch.where(largest / torch.exp2(power) >= 7, power + 1, power)
    power = torch.where(largest == 0, -127.0, power).clamp(-127, 127)
    scaled = group / torch.exp2(power)[..., None]

    # The even codes stand first, and argmin takes the first of equals: ties go to the even code.
    code = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7], device=weight.device)
    magnitude = torch.tensor(MAGNITUDES, dtype=torch.float64, device=weight.device)[code]
    nearest = code[(scaled.abs()[..., None] - magnitude).abs().argmin(-1)]
    nibble = (nearest + 8 * group.signbit()).flatten(-2).to(torch.uint8)
    return nibble[..., 0::2] | nibble[..., 1::2] << 4, (power + 127).to(torch.uint8)
