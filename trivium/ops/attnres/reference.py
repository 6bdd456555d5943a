"""Attention Residuals by their definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.ops.precision import work_dtype


def attnres_weights(source_NTD: Tensor, query_D: Tensor, eps: float = 1e-5) -> Tensor:
    """weight_NT, float32 (float64 for float64): each token's softmax over its N sources."""
    work = work_dtype(source_NTD)
    key_NTD = F.rms_norm(source_NTD.to(work), query_D.shape, eps=eps)
    return (key_NTD * query_D.to(work)).sum(-1).softmax(dim=0)


def attnres_reference(blocks: Sequence[Tensor], sum_TD: Tensor, query_D: Tensor, eps: float) -> Tensor:
    source_NTD = torch.stack([*blocks, sum_TD])
    weight_NT = attnres_weights(source_NTD, query_D, eps)
    return (weight_NT[..., None] * source_NTD.to(weight_NT.dtype)).sum(0).to(sum_TD.dtype)


def attnres_full(outputs: Sequence[Tensor], query_D: Tensor, eps: float = 1e-5) -> Tensor:
    """The full form: every earlier sublayer's output, and the embedding, is a source of its own (eq. 2-4)."""
    source_NTD = torch.stack(list(outputs))
    weight_NT = attnres_weights(source_NTD, query_D, eps)
    return torch.einsum("nt,ntd->td", weight_NT, source_NTD.to(weight_NT.dtype)).to(source_NTD.dtype)
