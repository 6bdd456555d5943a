"""Selection by topk and quantile balancing by kthvalue: exact, like the loops they stand for."""

from __future__ import annotations

import torch
from torch import Tensor


def select_topk(score_TE: Tensor, bias_E: Tensor, num_active: int) -> Tensor:
    num_tokens, num_experts = score_TE.shape
    if num_active == num_experts:
        return torch.arange(num_experts, device=score_TE.device).repeat(num_tokens, 1)
    choice_TE = score_TE + bias_E
    # topk says nothing about ties. They matter where the last one taken equals the first one left: there a stable sort
    # decides. Written so that a NaN counts as a tie: such a row still gets valid ids, and no other row is touched.
    value, experts = choice_TE.topk(num_active + 1)
    experts_TA = experts[:, :num_active]
    tied_T = ~(value[:, num_active - 1] > value[:, num_active])
    if tied_T.any():
        ranked = choice_TE[tied_T].sort(dim=1, descending=True, stable=True).indices
        experts_TA[tied_T] = ranked[:, :num_active]
    return experts_TA.sort(dim=1).values


def quantile_balance_kth_(bias_E: Tensor, score_NE: Tensor, num_active: int) -> None:
    num_tokens, num_experts = score_NE.shape
    fair_share = num_tokens * num_active // num_experts
    # The (j+1)-th largest of n is the (n−j)-th smallest.
    threshold_N = (score_NE + bias_E).kthvalue(num_experts - num_active, dim=1).values
    excess_EN = (score_NE - threshold_N[:, None]).T.contiguous()
    bias_E.copy_(excess_EN.kthvalue(num_tokens - fair_share, dim=1).values.neg_())
    bias_E -= bias_E.mean()
