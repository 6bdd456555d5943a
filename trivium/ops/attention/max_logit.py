"""The largest score of each head: by definition, and in the blocks that attention itself walks."""

from __future__ import annotations

import torch
from torch import Tensor

from trivium.ops.attention.blocks import BLOCK, block_scores, block_table
from trivium.ops.precision import work_dtype
from trivium.ops.rows import Rows


def max_logit_reference(
    q_nope_THK: Tensor, q_rest_THJ: Tensor, latent_UR: Tensor, shared_key_UJ: Tensor, kv_b_HXR: Tensor, rows: Rows
) -> Tensor:
    work = work_dtype(q_nope_THK)
    _, H, K = q_nope_THK.shape
    scale = (K + q_rest_THJ.shape[-1]) ** -0.5
    k_UHK = torch.einsum("ur,hkr->uhk", latent_UR.to(work), kv_b_HXR[:, :K].to(work))
    max_H, key_start = k_UHK.new_full((H,), -torch.inf), 0
    for s, (length, past) in enumerate(zip(rows.lengths, rows.past, strict=True)):
        new = slice(rows.starts[s], rows.starts[s + 1])
        keys = slice(key_start, key_start + past + length)
        score_HTU = torch.einsum("thk,uhk->htu", q_nope_THK[new].to(work), k_UHK[keys])
        score_HTU = score_HTU + torch.einsum("thj,uj->htu", q_rest_THJ[new].to(work), shared_key_UJ[keys].to(work))
        future_TU = torch.ones(length, past + length, dtype=torch.bool, device=score_HTU.device).triu(past + 1)
        if length:
            max_H = torch.maximum(max_H, (score_HTU * scale).masked_fill(future_TU, -torch.inf).amax((1, 2)))
        key_start = keys.stop
    return max_H


def max_logit_blocks(
    q_nope_THK: Tensor, q_rest_THJ: Tensor, latent_UR: Tensor, shared_key_UJ: Tensor, kv_b_HXR: Tensor, rows: Rows
) -> Tensor:
    work = work_dtype(q_nope_THK)
    T, H, K = q_nope_THK.shape
    scale = (K + q_rest_THJ.shape[-1]) ** -0.5
    max_H = q_nope_THK.new_full((H,), -torch.inf, dtype=work)
    if T == 0:
        return max_H
    table = block_table(rows, BLOCK)
    q_NHCX = table.queries.gather(torch.cat([q_nope_THK, q_rest_THJ], dim=-1)).transpose(1, 2).to(work)
    key_MCHK = (table.keys.gather(latent_UR) @ kv_b_HXR[:, :K].flatten(0, 1).T).unflatten(-1, (H, K))
    shared_MCHJ = table.keys.gather(shared_key_UJ)[:, :, None].expand(-1, -1, H, -1)
    k_MHCX = torch.cat([key_MCHK, shared_MCHJ], dim=-1).transpose(1, 2).to(work)
    pad_NC = table.queries.pad_NC  # rows of zeros, whose scores of 0 are nobody's
    for step in table.steps:
        at = step.query_at
        if len(at) == 0:  # keys of sequences that have no new token
            continue
        score_NHCJ = block_scores(q_NHCX[at], k_MHCX[step.key_at], step, table, scale)
        if pad_NC is not None:
            score_NHCJ.masked_fill_(pad_NC[at][:, None, :, None], -torch.inf)
        max_H = torch.maximum(max_H, score_NHCJ.amax((0, 2, 3)))
    return max_H
