"""The routed experts: every token through the few SiTU MLPs it chose, and the weighted sum of what they say."""

from __future__ import annotations

import torch
from torch import Tensor

from trivium.ops.backend import choose
from trivium.ops.experts.grouped import experts_grouped
from trivium.ops.experts.native import experts_native, serves
from trivium.ops.experts.reference import ExpertInputs, experts_reference
from trivium.ops.experts.tile import experts_by_tile
from trivium.ops.mxfp4 import PackedWeight
from trivium.ops.precision import work_dtype


def experts(
    latent_TL: Tensor,
    experts_TA: Tensor,
    weights_TA: Tensor,
    w1: Tensor | PackedWeight,
    w3: Tensor | PackedWeight,
    w2: Tensor | PackedWeight,
    *,
    bound: float = 4.0,
    up_bound: float = 25.0,
) -> Tensor:
    """y_TL = sum over a of weights[:, a] · expert(latent), expert(z) = w2 · situ(w1 · z, w3 · z) of experts[:, a].

    `experts_TA` int64, `weights_TA` float32; w1 (gate) and w3 (up) are [E, F, L], w2 (down) [E, L, F], in the latent's
    dtype. Each expert's output has the latent's dtype, the sum is float32 in the order of `experts_TA`, y has the
    latent's dtype. An expert without tokens has gradients of exactly zero. A `PackedWeight` serves inference: gradients
    pass through it to the latent and the weights. Released modelling code. Raises ValueError for shapes or dtypes that
    do not fit and for ids outside 0 .. E − 1.
    """
    inputs = ExpertInputs(latent_TL, experts_TA, weights_TA, w1, w3, w2, bound, up_bound)
    _check("experts", inputs, lowest_id=0)
    native = experts_native if serves(inputs) else None
    return choose("experts", reference=experts_reference, torch=experts_grouped, native=native)(inputs)


def experts_tile(
    latent_TL: Tensor,
    experts_TA: Tensor,
    weights_TA: Tensor,
    w1: Tensor | PackedWeight,
    w3: Tensor | PackedWeight,
    w2: Tensor | PackedWeight,
    *,
    bound: float = 4.0,
    up_bound: float = 25.0,
) -> Tensor:
    """`experts` for a tile of a fixed number of rows, where a row's bits do not depend on the other rows.

    Every chosen expert is run over all T rows and each row takes what is its own, so that every matrix product has one
    shape whoever else is in the tile. A row of experts −1 is unused: it chooses nothing and gets zeros. For inference.
    """
    inputs = ExpertInputs(latent_TL, experts_TA, weights_TA, w1, w3, w2, bound, up_bound)
    _check("experts_tile", inputs, lowest_id=-1)
    native = experts_native if serves(inputs) else None
    return choose("experts_tile", reference=experts_reference, torch=experts_by_tile, native=native)(inputs)


def _check(op: str, inputs: ExpertInputs, lowest_id: int) -> None:
    latent_TL, experts_TA, weights_TA, w1, w3, w2, *_ = inputs
    num_tokens, L = latent_TL.shape
    num_experts, F, _ = w1.shape
    if min(num_experts, F, L, experts_TA.shape[-1]) < 1:
        raise ValueError(
            f"{op}: wanted at least one expert of each token, got {tuple(experts_TA.shape)} of {tuple(w1.shape)}"
        )
    dense = [weight for weight in (w1, w3, w2) if isinstance(weight, Tensor)]
    if len(dense) in (1, 2) and torch.is_grad_enabled() and any(weight.requires_grad for weight in dense):
        raise ValueError(f"{op}: a matrix beside packed ones has no gradient, got one that requires it")
    for name, weight, wanted in (("w1", w1, (F, L)), ("w3", w3, (F, L)), ("w2", w2, (L, F))):
        if tuple(weight.shape) != (num_experts, *wanted):
            raise ValueError(f"{op}: {name} is {(num_experts, *wanted)}, got {tuple(weight.shape)}")
        if weight.dtype != latent_TL.dtype:
            raise ValueError(f"{op}: {name} has the latent's dtype {latent_TL.dtype}, got {weight.dtype}")
    if experts_TA.ndim != 2 or len(experts_TA) != num_tokens or experts_TA.shape != weights_TA.shape:
        raise ValueError(
            f"{op}: experts and weights are ({num_tokens}, A), got {tuple(experts_TA.shape)} and {tuple(weights_TA.shape)}"
        )
    if experts_TA.dtype != torch.int64:
        raise ValueError(f"{op}: expert ids are int64, got {experts_TA.dtype}")
    if weights_TA.dtype != work_dtype(latent_TL):
        raise ValueError(f"{op}: the weights are {work_dtype(latent_TL)}, got {weights_TA.dtype}")
    if experts_TA.numel():
        low, high = (int(x) for x in experts_TA.aminmax())
        if low < lowest_id or high >= num_experts:
            wrong = low if low < lowest_id else high
            raise ValueError(f"{op}: expert ids are {lowest_id} to {num_experts - 1}, got {wrong}")
