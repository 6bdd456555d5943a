"""The KDA layer: projections, short convolutions, the gated delta rule, output norm and gate."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from trivium.config import TILE, K3Config
from trivium.model import trace
from trivium.model.heads import Blocks
from trivium.model.layers import Linear, RMSNorm
from trivium.model.state import KdaState, Pending
from trivium.ops.conv import short_conv
from trivium.ops.kda import kda, kda_gate
from trivium.ops.linear import linear
from trivium.ops.norm import gated_rms_norm
from trivium.ops.precision import work_dtype
from trivium.ops.rows import Rows, Tile
from trivium.ops.sigmoid import sigmoid


class ShortConv(nn.Module):
    """The weight of a causal depthwise convolution; tap 3 multiplies the current token. float32 always."""

    def __init__(self, width: int, num_taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1, num_taps, dtype=torch.float32))


class KimiDeltaAttention(nn.Module):
    """x_TD and the layer's state to its output [T, D] and new state (docs/model.md, 19-41; arXiv 2510.26692)."""

    def __init__(self, config: K3Config, name: str) -> None:
        super().__init__()
        self.name = name
        self.num_heads, self.head_dim = config.kda.num_heads, config.kda.head_dim
        self.lower_bound = config.kda.gate_lower_bound
        D, width = config.hidden_size, config.kda.width
        self.q_proj = Linear(D, width)
        self.k_proj = Linear(D, width)
        self.v_proj = Linear(D, width)
        self.q_conv1d = ShortConv(width, config.kda.short_conv_kernel_size)
        self.k_conv1d = ShortConv(width, config.kda.short_conv_kernel_size)
        self.v_conv1d = ShortConv(width, config.kda.short_conv_kernel_size)
        self.f_a_proj = Linear(D, self.head_dim)
        self.f_b_proj = Linear(self.head_dim, width)
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(width, dtype=torch.float32))
        self.b_proj = Linear(D, self.num_heads)
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=torch.float32)
        self.g_proj = Linear(D, width)
        self.o_proj = Linear(width, D)

    def forward(self, x_TD: Tensor, rows: Rows, state: KdaState | None) -> tuple[Tensor, KdaState | None]:
        qkv_TX = linear(x_TD, *(proj.weight.to(x_TD.dtype) for proj in (self.q_proj, self.k_proj, self.v_proj)))
        decay_in_THK = self._heads(self.f_b_proj(self.f_a_proj(x_TD)))
        beta_in_TH = self.b_proj(x_TD)
        if isinstance(rows, Tile):
            qkv_TX, decay_in_THK, beta_in_TH = _join_pending(state, (qkv_TX, decay_in_THK, beta_in_TH), rows)
        dt_bias_HK = self.dt_bias.view(self.num_heads, self.head_dim)
        trace.record(
            f"{self.name}.decay", lambda: kda_gate(decay_in_THK, self.A_log, dt_bias_HK, self.lower_bound).exp()
        )
        trace.record(f"{self.name}.beta", lambda: sigmoid(beta_in_TH.to(work_dtype(beta_in_TH))))

        conv_weight_X14 = torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])
        mixed_TX, window_S3X = short_conv(qkv_TX, conv_weight_X14, rows, state and state.window_S3X)
        q_THK, k_THK, v_THV = (self._heads(x) for x in mixed_TX.chunk(3, dim=-1))
        o_THV, state_SHKV = kda(
            q_THK,
            k_THK,
            v_THV,
            decay_in_THK,
            beta_in_TH,
            self.A_log,
            dt_bias_HK,
            rows,
            state and state.state_SHKV,
            lower_bound=self.lower_bound,
        )
        if isinstance(rows, Tile):
            inputs = (qkv_TX, decay_in_THK, beta_in_TH)
            state = _after_tile(state, KdaState(state_SHKV=state_SHKV, window_S3X=window_S3X), inputs, rows)
        elif state is not None:
            state = KdaState(state_SHKV=state_SHKV, window_S3X=window_S3X)

        o_THV = gated_rms_norm(o_THV, self._heads(self.g_proj(x_TD)), self.o_norm.weight, self.o_norm.eps)
        return self.o_proj(o_THV.flatten(1)), state

    def head_blocks(self) -> dict[str, Blocks]:
        """A head has head_dim rows of each matrix that writes channels, and those columns of o_proj.

        b_proj has one row a head and f_a_proj none of its own: both stay whole.
        """
        heads = (self.head_dim,) * self.num_heads
        by_rows = ("q_proj", "k_proj", "v_proj", "f_b_proj", "g_proj")
        return {f"{name}.weight": Blocks(rows=heads) for name in by_rows} | {"o_proj.weight": Blocks(columns=heads)}

    def _heads(self, x_TX: Tensor) -> Tensor:
        return x_TX.unflatten(-1, (self.num_heads, self.head_dim))


def _join_pending(state: KdaState, new: tuple[Tensor, ...], rows: Tile) -> tuple[Tensor, ...]:
    """The whole tile's projected inputs: those kept from earlier calls, this call's, and zeros where no token is."""
    pending = state.pending
    assert pending.counts == (rows.first,), "a tile goes on where the state stopped"
    kept = (pending.qkv_SCX, pending.decay_in_SCHK, pending.beta_in_SCH)
    return tuple(
        torch.cat([old_SC[0, : rows.first], new_C[rows.first : rows.last], torch.zeros_like(new_C[rows.last :])])
        for old_SC, new_C in zip(kept, new, strict=True)
    )


def _after_tile(before: KdaState, after: KdaState, inputs: tuple[Tensor, ...], rows: Tile) -> KdaState:
    """A full tile moves the state to the next grid point; a part of one leaves it and keeps the inputs."""
    if rows.last < TILE:
        qkv_CX, decay_in_CHK, beta_in_CH = (x[None] for x in inputs)
        counts = (rows.last,)
        pending = Pending(qkv_SCX=qkv_CX, decay_in_SCHK=decay_in_CHK, beta_in_SCH=beta_in_CH, counts=counts)
        return replace(before, pending=pending)
    qkv_CX, decay_in_CHK, beta_in_CH = (torch.zeros_like(x[None]) for x in inputs)
    pending = Pending(qkv_SCX=qkv_CX, decay_in_SCHK=decay_in_CHK, beta_in_SCH=beta_in_CH, counts=(0,))
    return replace(after, pending=pending)
