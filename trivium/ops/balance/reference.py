"""Selection and quantile balancing as plain loops over tokens and experts."""

from __future__ import annotations

import torch
from torch import Tensor


def select_experts_reference(score_TE: Tensor, bias_E: Tensor, num_active: int) -> Tensor:
    experts = []
    for choice_E in (score_TE + bias_E).tolist():
        ranked = sorted((-choice, expert_id) for expert_id, choice in enumerate(choice_E))
        experts.append(sorted(expert_id for _, expert_id in ranked[:num_active]))
    return torch.tensor(experts, dtype=torch.int64, device=score_TE.device).view(-1, num_active)


def quantile_balance_reference_(bias_E: Tensor, score_NE: Tensor, num_active: int) -> None:
    num_tokens, num_experts = score_NE.shape
    fair_share = num_tokens * num_active // num_experts
    threshold = [sorted(s_E + bias_E, reverse=True)[num_active] for s_E in score_NE]
    for e in range(num_experts):
        excess = [score_NE[i, e] - threshold[i] for i in range(num_tokens)]
        bias_E[e] = -sorted(excess, reverse=True)[fair_share]
    bias_E -= bias_E.mean()
