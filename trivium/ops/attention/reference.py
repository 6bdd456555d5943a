"""Latent attention by its definition: every sequence on its own, all scores at once."""

from __future__ import annotations

import torch
from torch import Tensor

from trivium.ops.precision import work_dtype
from trivium.ops.rows import Rows


def latent_reference(
    q_nope_THK: Tensor, q_rest_THJ: Tensor, latent_UR: Tensor, shared_key_UJ: Tensor, kv_b_HXR: Tensor, rows: Rows
) -> Tensor:
    work = work_dtype(q_nope_THK)
    K = q_nope_THK.shape[-1]
    scale = (K + q_rest_THJ.shape[-1]) ** -0.5
    kv_UHX = torch.einsum("ur,hxr->uhx", latent_UR.to(work), kv_b_HXR.to(work))
    k_UHK, v_UHV = kv_UHX[..., :K], kv_UHX[..., K:]
    output, key_start = [v_UHV[:0]], 0
    for s, (length, past) in enumerate(zip(rows.lengths, rows.past, strict=True)):
        new = slice(rows.starts[s], rows.starts[s + 1])
        keys = slice(key_start, key_start + past + length)
        score_HTU = torch.einsum("thk,uhk->htu", q_nope_THK[new].to(work), k_UHK[keys])
        score_HTU = score_HTU + torch.einsum("thj,uj->htu", q_rest_THJ[new].to(work), shared_key_UJ[keys].to(work))
        future_TU = torch.ones(length, past + length, dtype=torch.bool, device=score_HTU.device).triu(past + 1)
        weight_HTU = (score_HTU * scale).masked_fill(future_TU, -torch.inf).softmax(-1)
        output.append(torch.einsum("htu,uhv->thv", weight_HTU, v_UHV[keys]))
        key_start = keys.stop
    return torch.cat(output).to(q_nope_THK.dtype)
