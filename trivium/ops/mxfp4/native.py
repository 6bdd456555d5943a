"""MXFP4 to and from float32 on the CPU's compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.cpu.op import cpu_op
from trivium.ops.mxfp4.reference import GROUP_SIZE


def unpack_native(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    assert dtype == torch.float32, dtype
    return _unpack(packed, scale)


@cpu_op("mxfp4_unpack")
def _unpack(packed: Tensor, scale: Tensor) -> Tensor:
    weight = _weight(packed)
    cpu.call("mxfp4_unpack", packed.contiguous(), scale.contiguous(), weight, scale.numel())
    return weight


@_unpack.register_fake
def _(packed: Tensor, scale: Tensor) -> Tensor:
    return _weight(packed)


def _weight(packed: Tensor) -> Tensor:
    return packed.new_empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=torch.float32)


@cpu_op("mxfp4_pack")
def pack_native(weight: Tensor) -> tuple[Tensor, Tensor]:
    packed, scale = _packed(weight)
    cpu.call("mxfp4_pack", weight.contiguous(), packed, scale, scale.numel())
    return packed, scale


@pack_native.register_fake
def _(weight: Tensor) -> tuple[Tensor, Tensor]:
    return _packed(weight)


def _packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    packed, scale = (
        weight.new_empty(*weight.shape[:-1], weight.shape[-1] // n, dtype=torch.uint8) for n in (2, GROUP_SIZE)
    )
    return packed, scale
