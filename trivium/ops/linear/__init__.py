"""The product with a weight: the contract that every projection of the model goes through."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.backend import choose
from trivium.ops.linear.native import linear_native


def linear(x_TD: Tensor, *weights: Tensor) -> Tensor:
    """x weight^T, [..., N], of x [..., D] and a weight [N, D], in their dtype; several weights' outputs side by side.

    The `native` backend sums every element in one order (blocks of 512 of D, each in rising order by fused
    multiply-adds): a row has the same bits alone, in any batch and on any number of threads. The `torch` backend
    promises that for no shape. Raises ValueError for shapes or dtypes that do not fit.
    """
    if not weights:
        raise ValueError("linear: wanted at least one weight")
    for weight in weights:
        if weight.dim() != 2 or x_TD.dim() == 0 or x_TD.shape[-1] != weight.shape[1]:
            wanted = weight.shape[-1] if weight.dim() else "?"
            raise ValueError(f"linear: weight {tuple(weight.shape)} wants x [.., {wanted}], got {tuple(x_TD.shape)}")
        if x_TD.dtype != weight.dtype:
            raise ValueError(f"linear: x and weight want one dtype, got {x_TD.dtype} and {weight.dtype}")
    native = linear_native if cpu.serves(x_TD, *weights) else None
    return choose("linear", reference=_linear, torch=_linear, native=native)(x_TD, *weights)


def _linear(x_TD: Tensor, *weights: Tensor) -> Tensor:
    if len(weights) == 1:
        return F.linear(x_TD, weights[0])
    return torch.cat([F.linear(x_TD, weight) for weight in weights], dim=-1)
