"""MXFP4: weights of four bits that share a power of two in groups of 32, as the released experts are stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.backend import choose
from trivium.ops.mxfp4.native import pack_native, unpack_native
from trivium.ops.mxfp4.reference import GROUP_SIZE, pack_reference, unpack_reference
from trivium.ops.mxfp4.tables import pack_by_tables, unpack_by_tables

__all__ = ["GROUP_SIZE", "PackedWeight", "pack", "unpack"]


def unpack(packed_U8: Tensor, scale_U8: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [.., in] of `packed_U8` [.., in/2] and `scale_U8` [.., in/32], both uint8.

    W = ± magnitude(code) · 2^(scale − 127). Byte j of a row holds column 2j in its low nibble and 2j + 1 in its high
    one; a nibble is a sign bit (8) and a code of 0, 0.5, 1, 1.5, 2, 3, 4, 6; a scale byte serves 32 columns. Exact in
    float32, float64 and bfloat16, except that a value beyond the dtype's range (from 2^128 on, scales 253 and 254)
    becomes infinite. Scale byte 0 is 2^-127 and 255 is nan (OCP Microscaling Formats 1.0). Raises ValueError for
    other dtypes or shapes that do not belong together.
    """
    _check_pair(packed_U8, scale_U8)
    on_cpu = dtype == torch.float32 and packed_U8.device.type == scale_U8.device.type == "cpu"
    native = unpack_native if on_cpu and cpu.serves() else None
    run = choose("mxfp4 unpack", reference=unpack_reference, torch=unpack_by_tables, native=native)
    return run(packed_U8, scale_U8, dtype)


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(packed [.., in/2], scale [.., in/32]), both uint8, of a floating weight [.., in]: the inverse of `unpack`.

    The scale of a group is 2^e with e = floor(log2(largest magnitude)) − 2, which puts the largest in [4, 8), and one
    more where it would be 7 or above: 7 to 8 lies nearer to 8 = 4·2 than to 6. No other power of two keeps the largest
    better: it is off by at most 1/5 of itself (at 5, between the codes 4 and 6) and above 6 by at most 1/7 (at 7),
    where e alone would lose 1/4, and rounding log2(largest/6) to the nearest power 29%. Magnitudes then round
    to the nearest code, ties to the even one; the sign stays, also of zero. A group of zeros gets scale byte 0. What
    `unpack` gave packs again to the same values. Raises ValueError for a width that is no multiple of 32, for NaN or
    infinity, and for magnitudes from 7·2^127 on (float64 only).
    """
    if not weight.is_floating_point():
        raise ValueError(f"mxfp4: a weight to pack is floating point, got {weight.dtype}")
    if weight.ndim == 0 or weight.shape[-1] % GROUP_SIZE:
        raise ValueError(f"mxfp4: the last dimension is a multiple of {GROUP_SIZE}, got shape {tuple(weight.shape)}")
    weight = weight.detach()
    num_bad = weight.numel() - int(weight.isfinite().sum())
    if num_bad:
        raise ValueError(f"mxfp4: {num_bad} of {weight.numel()} weights are NaN or infinite, only finite ones pack")
    if weight.dtype == torch.float64 and weight.numel() and weight.abs().max() >= 7 * 2.0**127:
        raise ValueError(f"mxfp4: magnitude {weight.abs().max().item():.4g} is beyond the largest, 6 * 2^127")
    native = pack_native if cpu.serves(weight) else None
    return choose("mxfp4 pack", reference=pack_reference, torch=pack_by_tables, native=native)(weight)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeight:
    """The weights of E experts kept packed: packed [E, out, in/2] and scale [E, out, in/32], unpacked to `dtype`."""

    packed: Tensor
    scale: Tensor
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.packed.ndim != 3:
            raise ValueError(f"mxfp4: packed experts are [E, out, in/2], got {tuple(self.packed.shape)}")
        _check_pair(self.packed, self.scale)
        if self.packed.device != self.scale.device:
            raise ValueError(f"mxfp4: packed lies on {self.packed.device}, scale on {self.scale.device}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, out, in)."""
        num_experts, num_out, num_bytes = self.packed.shape
        return num_experts, num_out, 2 * num_bytes

    def expert(self, expert_id: int) -> Tensor:
        """The dense weight [out, in] of one expert."""
        return unpack(self.packed[expert_id], self.scale[expert_id], self.dtype)


def _check_pair(packed: Tensor, scale: Tensor) -> None:
    for name, tensor in (("packed", packed), ("scale", scale)):
        if tensor.dtype != torch.uint8:
            raise ValueError(f"mxfp4: {name} is uint8, got {tensor.dtype}")
    same_rows = packed.ndim > 0 and packed.shape[:-1] == scale.shape[:-1]
    if not same_rows or packed.shape[-1] * 2 != scale.shape[-1] * GROUP_SIZE:
        raise ValueError(
            f"mxfp4: packed [.., in/2] and scale [.., in/{GROUP_SIZE}] do not belong together, "
            f"got {tuple(packed.shape)} and {tuple(scale.shape)}"
        )
