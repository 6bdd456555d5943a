"""Attention Residuals: every sublayer reads a softmax-weighted sum of earlier outputs instead of their plain sum.

Attention Residuals, arXiv 2603.15031: full form eq. 2-4, block form eq. 5-6, two phases section 4. The norm's weight
multiplies the key alone, so it arrives inside the query; values are mixed raw.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trivium.ops import backend, cpu
from trivium.ops.attnres.fused import attnres_fused
from trivium.ops.attnres.native import attnres_native
from trivium.ops.attnres.reference import attnres_full, attnres_reference, attnres_weights
from trivium.ops.attnres.two_phase import merge_sum, read_blocks

__all__ = ["attnres", "attnres_full", "attnres_weights", "merge_sum", "read_blocks"]


def attnres(blocks: Sequence[Tensor], sum_TD: Tensor, query_D: Tensor, eps: float = 1e-5) -> Tensor:
    """What a sublayer reads, [T, D] in sum's dtype: N closed blocks of [T, D] and the running sum, weighted per token.

    weight_n = softmax over n of query . v_n / sqrt(mean(v_n^2) + eps) in float32; result sum_n weight_n v_n. N may be
    0: a softmax over one source is the identity. Raises ValueError for shapes that do not fit.
    """
    T, D = sum_TD.shape
    blocks = tuple(blocks)
    for block_TD in blocks:
        if block_TD.shape != sum_TD.shape:
            raise ValueError(f"attnres: blocks want shape ({T}, {D}), got {tuple(block_TD.shape)}")
    if tuple(query_D.shape) != (D,):
        raise ValueError(f"attnres: query wants shape ({D},), got {tuple(query_D.shape)}")
    native = attnres_native if cpu.serves(*blocks, sum_TD, query_D) else None
    run = backend.choose("attnres", reference=attnres_reference, torch=attnres_fused, native=native)
    return run(blocks, sum_TD, query_D, eps)
