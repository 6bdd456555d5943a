"""Attention of MLA: queries against latent keys, causal, over packed sequences.

DeepSeek-V2, arXiv 2405.04434, section 2.1 (absorbed form: appendix C), without rotary positions: the `rest` channels
are one raw key shared by all heads.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from trivium.ops import backend, cpu
from trivium.ops.attention.blocks import latent_absorbed, latent_expanded
from trivium.ops.attention.max_logit import max_logit_blocks, max_logit_reference
from trivium.ops.attention.native import latent_native
from trivium.ops.attention.reference import latent_reference
from trivium.ops.rows import Rows, Tile

__all__ = ["latent_absorbed", "latent_attention", "latent_expanded", "latent_native", "max_logit"]


def latent_attention(
    q_nope_THK: Tensor, q_rest_THJ: Tensor, latent_UR: Tensor, shared_key_UJ: Tensor, kv_b_HXR: Tensor, rows: Rows
) -> Tensor:
    """Values o_THV in q's dtype. X = K + V: a head's K key rows of kv_b, then its V value rows.

    U counts every sequence's past tokens (`rows.past`) and its new ones, packed sequence by sequence. With c the
    latent and r the shared key: score_ij = (q_nope_i . W_k c_j + q_rest_i . r_j) (K + J)^-1/2 over j up to i, softmax
    in float32, o_i = sum_j a_ij W_v c_j. Keys are expanded from the latents, or W_k and W_v absorbed into q and o,
    whichever is less work; inside a `Tile` always absorbed.

    Raises ValueError for shapes that do not fit.
    """
    _check("latent_attention", q_nope_THK, q_rest_THJ, latent_UR, shared_key_UJ, kv_b_HXR, rows)
    T, H, K = q_nope_THK.shape
    R = latent_UR.shape[-1]
    if T == 0:
        return q_nope_THK.new_zeros(0, H, kv_b_HXR.shape[1] - K)
    absorb = isinstance(rows, Tile) or _absorbing_is_less_work(rows, K, kv_b_HXR.shape[1] - K, R)
    run = backend.choose(
        "latent_attention",
        reference=latent_reference,
        torch=latent_absorbed if absorb else latent_expanded,
        native=partial(latent_native, absorb=absorb)
        if cpu.serves(q_nope_THK, q_rest_THJ, latent_UR, shared_key_UJ, kv_b_HXR)
        else None,
    )
    return run(q_nope_THK, q_rest_THJ, latent_UR, shared_key_UJ, kv_b_HXR, rows)


@torch.no_grad()
def max_logit(
    q_nope_THK: Tensor, q_rest_THJ: Tensor, latent_UR: Tensor, shared_key_UJ: Tensor, kv_b_HXR: Tensor, rows: Rows
) -> Tensor:
    """max_H: every head's largest score_ij of `latent_attention`, over all queries i and keys j up to i; no gradient.

    float32 (float64 for float64); -inf where there is no query. What QK-Clip watches: MuonClip's S_max of Kimi K2,
    arXiv 2507.20534, section 2.1. Costs the product of queries and keys once more, in memory linear in T. Raises
    ValueError for shapes that do not fit.
    """
    _check("max_logit", q_nope_THK, q_rest_THJ, latent_UR, shared_key_UJ, kv_b_HXR, rows)
    run = backend.choose("max_logit", reference=max_logit_reference, torch=max_logit_blocks)
    return run(q_nope_THK, q_rest_THJ, latent_UR, shared_key_UJ, kv_b_HXR, rows)


def _check(
    op: str,
    q_nope_THK: Tensor,
    q_rest_THJ: Tensor,
    latent_UR: Tensor,
    shared_key_UJ: Tensor,
    kv_b_HXR: Tensor,
    rows: Rows,
) -> None:
    T, H, K = q_nope_THK.shape
    J, R = q_rest_THJ.shape[-1], latent_UR.shape[-1]
    U = rows.num_tokens + sum(rows.past)
    for name, tensor, shape in (
        ("q_rest", q_rest_THJ, (T, H, J)),
        ("latent", latent_UR, (U, R)),
        ("shared_key", shared_key_UJ, (U, J)),
        ("kv_b", kv_b_HXR, (H, kv_b_HXR.shape[1], R)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{op}: {name} wants shape {shape}, got {tuple(tensor.shape)}")
    if rows.num_tokens != T:
        raise ValueError(f"{op}: rows hold {rows.num_tokens} tokens, q holds {T}")
    if kv_b_HXR.shape[1] <= K:
        raise ValueError(f"{op}: kv_b wants more than {K} rows a head, got {kv_b_HXR.shape[1]}")


def _absorbing_is_less_work(rows: Rows, K: int, V: int, R: int) -> bool:
    """Expanding a key costs R (K + V) products a head; not doing so costs 2 R - K - V more for each query it meets."""
    return any(rows.past) and rows.max_len * (2 * R - K - V) < R * (K + V)
