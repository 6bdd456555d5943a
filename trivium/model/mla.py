"""Gated multi-head latent attention without positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.config import K3Config
from trivium.model.heads import Blocks
from trivium.model.layers import Linear, RMSNorm
from trivium.model.recompute import is_recomputing
from trivium.model.state import MlaState
from trivium.ops.attention import latent_attention, max_logit
from trivium.ops.norm import sigmoid_gate
from trivium.ops.rows import Rows, Tile

# Of the two latents' norms: the released code leaves its default here, and not rms_norm_eps.
LATENT_NORM_EPS = 1e-6


class GatedMla(nn.Module):
    """x_TD and the layer's latents to its output [T, D] and grown latents (docs/model.md, 42-52; arXiv 2405.04434).

    With `watch_logits` set, forwards in training keep every head's largest logit for `take_max_logit`.
    """

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        mla, D = config.mla, config.hidden_size
        self.config = mla
        self.q_a_proj = Linear(D, mla.q_lora_rank)
        self.q_a_layernorm = RMSNorm(mla.q_lora_rank, LATENT_NORM_EPS)
        self.q_b_proj = Linear(mla.q_lora_rank, mla.num_heads * mla.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(D, mla.kv_lora_rank + mla.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(mla.kv_lora_rank, mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim))
        self.g_proj = Linear(D, mla.num_heads * mla.v_head_dim)
        self.o_proj = Linear(mla.num_heads * mla.v_head_dim, D)
        self.watch_logits = False
        self._max_logit_H: Tensor | None = None

    def forward(self, x_TD: Tensor, rows: Rows, state: MlaState | None) -> tuple[Tensor, MlaState | None]:
        mla = self.config
        q_THX = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD))).unflatten(-1, (mla.num_heads, -1))
        q_nope_THK, q_rest_THJ = q_THX.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
        latent_TR, shared_key_TJ = self.kv_a_proj_with_mqa(x_TD).split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
        latent_UR, shared_key_UJ = self.kv_a_layernorm(latent_TR), shared_key_TJ
        if state is not None:
            state = state.append(latent_UR, shared_key_UJ, rows)
            latent_UR, shared_key_UJ = state.latent, state.shared_key
        if isinstance(rows, Tile):  # as many keys as a full tile has, so that shapes do not tell where it was cut
            missing = rows.num_tokens - rows.last
            latent_UR, shared_key_UJ = (F.pad(x, (0, 0, 0, missing)) for x in (latent_UR, shared_key_UJ))
        kv_b_HXR = self.kv_b_proj.weight.unflatten(0, (mla.num_heads, -1)).to(x_TD.dtype)
        o_THV = latent_attention(q_nope_THK, q_rest_THJ, latent_UR, shared_key_UJ, kv_b_HXR, rows)
        if self.watch_logits and self.training and torch.is_grad_enabled() and not is_recomputing():
            max_H = max_logit(q_nope_THK, q_rest_THJ, latent_UR, shared_key_UJ, kv_b_HXR, rows)
            self._max_logit_H = max_H if self._max_logit_H is None else torch.maximum(self._max_logit_H, max_H)
        return self.o_proj(sigmoid_gate(o_THV.flatten(1), self.g_proj(x_TD))), state

    def take_max_logit(self) -> Tensor | None:
        """Every head's largest logit [H] in the watched forwards since the last call, handed over; None without any."""
        taken, self._max_logit_H = self._max_logit_H, None
        return taken

    def head_blocks(self) -> dict[str, Blocks]:
        """kv_b_proj is two matrices a head, keys out of the latent and then values; kv_a_proj_with_mqa holds the latent
        and, behind it, the key that all heads share. q_a_proj's latent is of all heads and stays whole.
        """
        mla = self.config
        values = (mla.v_head_dim,) * mla.num_heads
        return {
            "q_b_proj.weight": Blocks(rows=(mla.qk_head_dim,) * mla.num_heads),
            "kv_a_proj_with_mqa.weight": Blocks(rows=(mla.kv_lora_rank, mla.qk_rope_head_dim)),
            "kv_b_proj.weight": Blocks(rows=(mla.qk_nope_head_dim, mla.v_head_dim) * mla.num_heads),
            "g_proj.weight": Blocks(rows=values),
            "o_proj.weight": Blocks(columns=values),
        }
