"""The routed experts over a tile: every product has the tile's shape."""

from __future__ import annotations

from torch import Tensor

from trivium.ops.experts.reference import ExpertInputs, expert_weight
from trivium.ops.precision import work_dtype
from trivium.ops.situ.fused import situ_fused


def experts_by_tile(inputs: ExpertInputs) -> Tensor:
    latent_TL, experts_TA, weights_TA, w1, w3, w2, bound, up_bound = inputs
    num_tokens, num_active = experts_TA.shape
    work = work_dtype(latent_TL)
    part_TAL = latent_TL.new_zeros(num_tokens, num_active, latent_TL.shape[1])
    for expert_id in sorted(set(experts_TA.flatten().tolist()) - {-1}):
        w1_FL, w3_FL, w2_LF = (expert_weight(w, expert_id) for w in (w1, w3, w2))
        hidden_TF = situ_fused(latent_TL @ w1_FL.T, latent_TL @ w3_FL.T, bound, up_bound)
        out_TL = hidden_TF @ w2_LF.T
        row_M, slot_M = (experts_TA == expert_id).nonzero(as_tuple=True)
        part_TAL[row_M, slot_M] = out_TL[row_M]
    # An unused row's weight may be anything, NaN too: select, do not multiply by zero.
    weights_TA = weights_TA.masked_fill(experts_TA < 0, 0)
    y_TL = part_TAL.new_zeros(latent_TL.shape, dtype=work)
    for slot in range(num_active):
        y_TL = y_TL + weights_TA[:, slot, None] * part_TAL[:, slot].to(work)
    return y_TL.to(latent_TL.dtype)
