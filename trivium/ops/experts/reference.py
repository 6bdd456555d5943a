"""The routed experts token by token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trivium.ops.mxfp4 import PackedWeight
from trivium.ops.precision import work_dtype
from trivium.ops.situ.reference import situ_reference


class ExpertInputs(NamedTuple):
    """What `experts` takes, checked, and every implementation is given."""

    latent_TL: Tensor
    experts_TA: Tensor
    weights_TA: Tensor
    w1: Tensor | PackedWeight
    w3: Tensor | PackedWeight
    w2: Tensor | PackedWeight
    bound: float
    up_bound: float


def experts_reference(inputs: ExpertInputs) -> Tensor:
    latent_TL, experts_TA, weights_TA, w1, w3, w2, bound, up_bound = inputs
    work = work_dtype(latent_TL)
    y = []
    for latent_L, experts_A, weights_A in zip(latent_TL, experts_TA.tolist(), weights_TA, strict=True):
        y_L = torch.zeros_like(latent_L, dtype=work)
        for expert_id, weight in zip(experts_A, weights_A, strict=True):
            if expert_id >= 0:  # a row of a tile may be unused
                w1_FL, w3_FL, w2_LF = (expert_weight(w, expert_id) for w in (w1, w3, w2))
                hidden_F = situ_reference(w1_FL @ latent_L, w3_FL @ latent_L, bound, up_bound)
                y_L = y_L + weight * (w2_LF @ hidden_F).to(work)
        y.append(y_L.to(latent_TL.dtype))
    return torch.stack(y) if y else latent_TL


def expert_weight(weight: Tensor | PackedWeight, expert_id: int) -> Tensor:
    """The dense matrix [out, in] of one expert."""
    return weight.expert(expert_id) if isinstance(weight, PackedWeight) else weight[expert_id]
