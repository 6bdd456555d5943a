"""Cross-entropy by its definition, all logits at once."""

from __future__ import annotations

from torch import Tensor

from trivium.ops.precision import work_dtype


def cross_entropy_reference(hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor) -> Tensor:
    logit_TW = hidden_TD @ weight_WD.T
    logit_TW = logit_TW.to(work_dtype(logit_TW))
    return logit_TW.logsumexp(-1) - logit_TW.gather(1, targets_T[:, None]).squeeze(1)


def cross_entropy_sum_reference(hidden_TD: Tensor, weight_WD: Tensor, targets_T: Tensor, scale_T: Tensor) -> Tensor:
    nll_T = cross_entropy_reference(hidden_TD, weight_WD, targets_T)
    return (scale_T.detach().to(nll_T.dtype) * nll_T).sum()
