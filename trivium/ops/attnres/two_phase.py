"""The read in two phases: all sublayers of a block read its closed blocks at once, each merges the running sum later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.ops.precision import work_dtype
from trivium.ops.sigmoid import sigmoid


def read_blocks(blocks: Sequence[Tensor], query_QD: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Phase one, for Q queries: the mix of the closed blocks alone, mix_QTD, and the log of its weights' sum, log_QT.

    Both float32 (float64 for float64). N is at least 1.
    """
    if len(blocks) == 0:
        raise ValueError("read_blocks: wanted at least one closed block, got none")
    blocks_NTD = torch.stack(tuple(blocks))
    work = work_dtype(blocks_NTD)
    key_NTD = F.rms_norm(blocks_NTD.to(work), blocks_NTD.shape[-1:], eps=eps)
    score_QNT = torch.einsum("ntd,qd->qnt", key_NTD, query_QD.to(work))
    log_QT = score_QNT.logsumexp(dim=1)
    weight_QNT = (score_QNT - log_QT[:, None]).exp()
    return torch.einsum("qnt,ntd->qtd", weight_QNT, blocks_NTD.to(work)), log_QT


def merge_sum(mix_TD: Tensor, log_T: Tensor, sum_TD: Tensor, query_D: Tensor, eps: float = 1e-5) -> Tensor:
    """Phase two, for one query: the running sum joins the softmax. Equals `attnres` over blocks and sum."""
    work = work_dtype(sum_TD)
    score_T = (F.rms_norm(sum_TD.to(work), sum_TD.shape[-1:], eps=eps) * query_D.to(work)).sum(-1)
    weight_T = sigmoid(score_T - log_T)
    return torch.lerp(mix_TD, sum_TD.to(work), weight_T[:, None]).to(sum_TD.dtype)
