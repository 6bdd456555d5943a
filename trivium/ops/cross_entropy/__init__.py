"""Cross-entropy of a head's logits without ever holding those of more than one block of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.backend import choose
from trivium.ops.cross_entropy.blocks import cross_entropy_blocks, cross_entropy_sum_blocks
from trivium.ops.cross_entropy.native import cross_entropy_native, cross_entropy_sum_native
from trivium.ops.cross_entropy.reference import cross_entropy_reference, cross_entropy_sum_reference


def cross_entropy(hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor) -> Tensor:
    """nll_T in nats, float32 (float64 for float64): log Σ_w exp(h_t · weight_w) − h_t · weight_target.

    Logits are in the weight's dtype, everything after them in float32. The backward makes them again: four products
    in all. Raises ValueError for shapes that do not fit, and for a target that is no row of the weight.
    """
    _check(hidden_TD, weight_WD, targets_T)
    native = cross_entropy_native if cpu.serves(hidden_TD, weight_WD) else None
    run = choose("cross_entropy", reference=cross_entropy_reference, torch=cross_entropy_blocks, native=native)
    return run(hidden_TD, weight_WD, targets_T)


def cross_entropy_sum(hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor, scale_T: Tensor) -> Tensor:
    """Σ_t scale_t · nll_t, with the gradients made while the logits are there: three products in all.

    The scale is a constant. Raises ValueError for shapes that do not fit; a target of scale 0 may be any number.
    """
    targets_T = targets_T.masked_fill(scale_T == 0, 0) if scale_T.shape == targets_T.shape else targets_T
    _check(hidden_TD, weight_WD, targets_T)
    if scale_T.shape != targets_T.shape:
        raise ValueError(f"loss: {tuple(scale_T.shape)} weights for {tuple(targets_T.shape)} targets")
    native = cross_entropy_sum_native if cpu.serves(hidden_TD, weight_WD, scale_T) else None
    run = choose("cross_entropy", reference=cross_entropy_sum_reference, torch=cross_entropy_sum_blocks, native=native)
    return run(hidden_TD, weight_WD, targets_T, scale_T)


def _check(hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor) -> None:
    if hidden_TD.shape != (*targets_T.shape, weight_WD.shape[-1]) or targets_T.ndim != 1 or weight_WD.ndim != 2:
        raise ValueError(
            f"loss: wanted hidden [T, D], head [W, D] and targets [T], got {tuple(hidden_TD.shape)}, "
            f"{tuple(weight_WD.shape)} and {tuple(targets_T.shape)}"
        )
    if targets_T.dtype != torch.int64:
        raise ValueError(f"loss: targets want dtype torch.int64, got {targets_T.dtype}")
    if targets_T.is_cpu and len(targets_T):
        low, high = (int(bound) for bound in targets_T.aminmax())
        if low < 0 or high >= len(weight_WD):
            raise ValueError(f"loss: targets want ids from 0 to {len(weight_WD) - 1}, got {low} to {high}")
