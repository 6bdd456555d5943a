"""MXFP4 by lookup: a byte is one row of two values, and a scale byte one power of two."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.ops.mxfp4.reference import GROUP_SIZE, MAGNITUDES
from trivium.ops.precision import work_dtype


def unpack_by_tables(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # Every value, scale and product is exact in bfloat16 already; float16 has no 2^-127 and needs the detour.
    work = torch.float32 if dtype == torch.float16 else dtype
    pair = F.embedding(packed.int(), _pairs(work, packed.device))  # [.., in/2, 2]
    group = pair.flatten(-2).unflatten(-1, (-1, GROUP_SIZE))
    return (group * _factors(work, packed.device)[scale.int()][..., None]).flatten(-2).to(dtype)


def pack_by_tables(weight: Tensor) -> tuple[Tensor, Tensor]:
    work = work_dtype(weight)
    group = weight.to(work).unflatten(-1, (-1, GROUP_SIZE))
    magnitude = group.abs()
    # largest = mantissa · 2^exponent with the mantissa in [0.5, 1): over 2^(exponent - 3) it lies in [4, 8).
    mantissa, exponent = torch.frexp(magnitude.amax(-1))
    power = exponent - 3 + (mantissa >= 7 / 8)
    scale = torch.where(mantissa == 0, 0, power.clamp(-127, 127) + 127)
    magnitude /= _factors(work, weight.device)[scale][..., None]
    code = torch.bucketize(magnitude, _borders(work, weight.device), out_int32=True).to(torch.uint8)
    nibble = (code | group.signbit().to(torch.uint8) << 3).flatten(-2)
    return nibble[..., 0::2] | nibble[..., 1::2] << 4, scale.to(torch.uint8)


@lru_cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 2]: the values of a byte's low and high nibble."""
    value = [*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)]
    pairs = [(value[byte & 15], value[byte >> 4]) for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.float64, device="cpu").to(dtype).to(device)


@lru_cache
def _factors(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256]: 2^(byte − 127), and nan for byte 255."""
    factors = [*(2.0 ** (byte - 127) for byte in range(255)), torch.nan]
    return torch.tensor(factors, dtype=torch.float64, device="cpu").to(dtype).to(device)


@lru_cache
def _borders(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[7]: a magnitude above border i has a code above i.

    The borders are the midpoints. A tie belongs to the even code: where that is the upper one (code 2, 4, 6), the border
    is the last float below the midpoint.
    """
    middle = [(low + high) / 2 for low, high in pairwise(MAGNITUDES)]
    border = torch.tensor(middle, dtype=dtype, device="cpu")
    border[1::2] = border[1::2].nextafter(torch.zeros((), dtype=dtype, device="cpu"))
    return border.to(device)
