"""Causal attention in blocks of 64 queries by 64 keys with a running softmax: linear memory, one fixed set of shapes.

A query meets its sequence's key blocks in rising order from block 0, each product has the same shape however long the
sequences are, and a masked key adds an exact zero: so a later token changes no earlier bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trivium.config import TILE
from trivium.ops.once import once_differentiable
from trivium.ops.precision import work_dtype
from trivium.ops.rows import Chunks, Rows

BLOCK = 64


def latent_expanded(
    q_nope_THK: Tensor, q_rest_THJ: Tensor, latent_UR: Tensor, shared_key_UJ: Tensor, kv_b_HXR: Tensor, rows: Rows
) -> Tensor:
    """`latent_attention` with keys and values written out per head: for training, and prompts."""
    _, H, K = q_nope_THK.shape
    scale = (K + q_rest_THJ.shape[-1]) ** -0.5
    table = block_table(rows, BLOCK)
    q_THX = torch.cat([q_nope_THK, q_rest_THJ], dim=-1)
    # Blocks first, then the product: it never has fewer than 64 rows, whose bits would differ from those of many.
    kv_MJHX = (table.keys.gather(latent_UR) @ kv_b_HXR.flatten(0, 1).T).unflatten(-1, (H, -1))
    shared_MJHX = table.keys.gather(shared_key_UJ)[:, :, None].expand(-1, -1, H, -1)
    o_NHCV = _Attend.apply(
        table.queries.gather(q_THX).transpose(1, 2),
        torch.cat([kv_MJHX[..., :K], shared_MJHX], dim=-1).transpose(1, 2),
        kv_MJHX[..., K:].transpose(1, 2),
        table,
        scale,
    )
    return table.queries.scatter(o_NHCV.transpose(1, 2)).to(q_nope_THK.dtype)


def latent_absorbed(
    q_nope_THK: Tensor, q_rest_THJ: Tensor, latent_UR: Tensor, shared_key_UJ: Tensor, kv_b_HXR: Tensor, rows: Rows
) -> Tensor:
    """`latent_attention` in the latent: one key and one value for all heads, W_k moved to q and W_v behind the sum."""
    _, H, K = q_nope_THK.shape
    scale = (K + q_rest_THJ.shape[-1]) ** -0.5
    W_k_HKR, W_v_HVR = kv_b_HXR[:, :K], kv_b_HXR[:, K:]
    q_latent_THR = (q_nope_THK.transpose(0, 1) @ W_k_HKR).transpose(0, 1)
    q_THX = torch.cat([q_latent_THR, q_rest_THJ], dim=-1)
    k_UX = torch.cat([latent_UR, shared_key_UJ], dim=-1)
    table = block_table(rows, next(size for size in (1, TILE, BLOCK) if rows.max_len <= size or size == BLOCK))
    N, C = table.queries.index_NC.shape
    key_N1CX = table.keys.gather(k_UX)[:, None]
    context_N1XR = _Attend.apply(
        table.queries.gather(q_THX).transpose(1, 2).reshape(N, 1, H * C, -1),  # heads are more rows of one product
        key_N1CX,
        key_N1CX[..., : latent_UR.shape[-1]],
        table,
        scale,
    )
    context_THR = table.queries.scatter(context_N1XR.reshape(N, H, C, -1).transpose(1, 2)).to(q_nope_THK.dtype)
    return (context_THR.transpose(0, 1) @ W_v_HVR.transpose(1, 2)).transpose(0, 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    """One meeting of query blocks with key blocks: key block number b of every sequence that has one."""

    query_at: Tensor  # int64, query blocks that take part
    key_at: Tensor  # int64, the key block each of them meets
    edge_at: Tensor  # int64, which of these meetings hold a key that is later than a query
    edge_gap: Tensor  # int64, of those: first query position minus first key position


@dataclass(frozen=True, kw_only=True, eq=False)
class _Blocks:
    queries: Chunks  # of the new tokens
    keys: Chunks  # of all tokens
    query_size: int
    steps: tuple[_Step, ...]


def block_table(rows: Rows, query_size: int) -> _Blocks:
    """The meetings of all blocks, worked out on the host once per Rows and query size."""
    return rows.table(("attention", query_size), lambda: _make_blocks(rows, query_size))


def _make_blocks(rows: Rows, query_size: int) -> _Blocks:
    device = rows.starts_S1.device
    all_rows = Rows.of([past + length for past, length in zip(rows.past, rows.lengths, strict=True)], device)
    queries, keys = rows.chunks(query_size), all_rows.chunks(BLOCK)
    sequence_N, block_N = torch.tensor(queries.places).T
    past_S, end_S = torch.tensor(rows.past), torch.tensor(all_rows.lengths)
    first_N = past_S[sequence_N] + block_N * query_size
    last_N = torch.minimum(first_N + query_size, end_S[sequence_N]) - 1
    place_of_S = all_rows.chunks(BLOCK).place_S.cpu()  # key block b of sequence s is the place_of_S[s]-th of step b
    steps = []
    for b, (blocks, _) in enumerate(keys.steps):
        query_at = (last_N >= b * BLOCK).nonzero().squeeze(1)
        gap = first_N[query_at] - b * BLOCK
        edge_at = (gap < BLOCK - 1).nonzero().squeeze(1)
        steps.append(
            _Step(
                query_at=query_at.to(device),
                key_at=(blocks.start + place_of_S[sequence_N[query_at]]).to(device),
                edge_at=edge_at.to(device),
                edge_gap=gap[edge_at].to(device),
            )
        )
    return _Blocks(queries=queries, keys=keys, query_size=query_size, steps=tuple(steps))


def block_scores(q_NGIX: Tensor, k_NGJX: Tensor, step: _Step, table: _Blocks, scale: float) -> Tensor:
    """Scaled scores of one step, -inf at later keys. Rows I are query_size tokens, or heads times that."""
    score_NGIJ = (q_NGIX @ k_NGJX.transpose(-1, -2)) * scale
    if len(step.edge_at):
        query_C1 = torch.arange(table.query_size, device=score_NGIJ.device)[:, None]
        key_J = torch.arange(BLOCK, device=score_NGIJ.device)
        future_NCJ = step.edge_gap[:, None, None] + query_C1 < key_J
        edge = score_NGIJ[step.edge_at].unflatten(2, (-1, table.query_size))
        score_NGIJ[step.edge_at] = edge.masked_fill_(future_NCJ[:, None, None], -torch.inf).flatten(2, 3)
    return score_NGIJ


class _Attend(torch.autograd.Function):
    """Forward keeps one log-sum-exp a query row; backward forms the weights again, block by block."""

    @staticmethod
    def forward(ctx, q_NGIX: Tensor, k_MGJX: Tensor, v_MGJV: Tensor, table: _Blocks, scale: float) -> Tensor:
        work = work_dtype(q_NGIX)
        q, k, v = q_NGIX.to(work), k_MGJX.to(work), v_MGJV.to(work)
        o_NGIV = q.new_zeros(*q.shape[:3], v.shape[-1])
        total_NGI1 = q.new_zeros(*q.shape[:3], 1)
        peak_NGI1 = q.new_full((*q.shape[:3], 1), -torch.inf)
        for step in table.steps:
            at = step.query_at
            score_NGIJ = block_scores(q[at], k[step.key_at], step, table, scale)
            old_peak = peak_NGI1[at]
            # Key 0 is no query's future, so after the first block every peak is finite.
            peak = torch.maximum(old_peak, score_NGIJ.amax(-1, keepdim=True))
            weight_NGIJ = (score_NGIJ - peak).exp()
            fade = (old_peak - peak).exp()
            total_NGI1[at] = total_NGI1[at] * fade + weight_NGIJ.sum(-1, keepdim=True)
            o_NGIV[at] = o_NGIV[at] * fade + weight_NGIJ @ v[step.key_at]
            peak_NGI1[at] = peak
        o_NGIV = o_NGIV / total_NGI1
        ctx.save_for_backward(q_NGIX, k_MGJX, v_MGJV, o_NGIV, peak_NGI1 + total_NGI1.log())
        ctx.table, ctx.scale = table, scale
        return o_NGIV

    @staticmethod
    @once_differentiable
    def backward(ctx, do_NGIV: Tensor):
        q_in, k_in, v_in, o_NGIV, log_NGI1 = ctx.saved_tensors
        work = o_NGIV.dtype
        q, k, v = q_in.to(work), k_in.to(work), v_in.to(work)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        along_NGI1 = (do_NGIV * o_NGIV).sum(-1, keepdim=True)
        for step in ctx.table.steps:
            at, key_at = step.query_at, step.key_at
            weight_NGIJ = (block_scores(q[at], k[key_at], step, ctx.table, ctx.scale) - log_NGI1[at]).exp()
            do = do_NGIV[at]
            dv.index_add_(0, key_at, weight_NGIJ.transpose(-1, -2) @ do)
            dweight_NGIJ = do @ v[key_at].transpose(-1, -2)
            dscore_NGIJ = weight_NGIJ * (dweight_NGIJ - along_NGI1[at]) * ctx.scale
            dq[at] += dscore_NGIJ @ k[key_at]
            dk.index_add_(0, key_at, dscore_NGIJ.transpose(-1, -2) @ q[at])
        return dq.to(q_in.dtype), dk.to(k_in.dtype), dv.to(v_in.dtype), None, None
