"""The product with a weight: the contract that every projection of the model goes through."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.backend import choose
from trivium.ops.linear.native import linear_native


def linear(x_TD: Tensor, weight: Tensor) -> Tensor:
    """x weight^T, [..., N], of x [..., D] and weight [N, D], in their dtype.

    The `native` backend sums every element in one order (blocks of 256 of D, each in rising order by fused
    multiply-adds): a row has the same bits alone, in any batch and on any number of threads. The `torch` backend
    promises that for no shape. Raises ValueError for shapes or dtypes that do not fit.
    """
    if weight.dim() != 2 or x_TD.dim() == 0 or x_TD.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: weight {tuple(weight.shape)} wants x [.., {weight.shape[-1]}], got {tuple(x_TD.shape)}"
        )
    if x_TD.dtype != weight.dtype:
        raise ValueError(f"linear: x and weight want one dtype, got {x_TD.dtype} and {weight.dtype}")
    native = linear_native if cpu.serves(x_TD, weight) else None
    return choose("linear", reference=F.linear, torch=F.linear, native=native)(x_TD, weight)
