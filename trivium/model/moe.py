"""Stable LatentMoE: routed experts in a latent, one norm behind their sum, shared experts on the full width."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trivium.config import K3Config
from trivium.model import trace
from trivium.model.layers import Linear, Mlp, RMSNorm
from trivium.model.recompute import is_recomputing
from trivium.ops.balance import Route, route
from trivium.ops.experts import experts, experts_tile
from trivium.ops.linear import linear
from trivium.ops.mxfp4 import PackedWeight
from trivium.ops.precision import work_dtype
from trivium.ops.rows import Rows, Tile


class Router(nn.Module):
    """Scores every expert for every token. The bias selects and nothing else; balancing moves it, not the gradient."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        moe = config.moe
        self.num_active, self.scale = moe.num_experts_per_token, moe.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.empty(moe.num_experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor) -> Route:
        work = work_dtype(x_TD)
        logit_TE = linear(x_TD.to(work), self.weight.to(work))
        return route(logit_TE, self.e_score_correction_bias, self.num_active, self.scale)


class DenseStack(nn.Module):
    """One matrix of every expert, [E, out, in]."""

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))

    def value(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)


class PackedStack(nn.Module):
    """The same as MXFP4 bytes: two columns a byte, one scale a group of 32 columns. Inference only."""

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        shape = (num_experts, out_features)
        self.register_buffer("weight_packed", torch.empty(*shape, in_features // 2, dtype=torch.uint8))
        self.register_buffer("weight_scale", torch.empty(*shape, in_features // 32, dtype=torch.uint8))

    def value(self, dtype: torch.dtype) -> PackedWeight:
        return PackedWeight(packed=self.weight_packed, scale=self.weight_scale, dtype=dtype)


class Experts(nn.Module):
    """The routed experts: SiTU MLPs in the latent, w1 the gate, w3 up, w2 down."""

    def __init__(self, config: K3Config, packed: bool) -> None:
        super().__init__()
        E, L, width = (
            config.moe.num_experts,
            config.moe.routed_expert_hidden_size,
            config.moe.moe_intermediate_size,
        )
        stack = PackedStack if packed else DenseStack
        self.w1 = stack(E, L, width)
        self.w3 = stack(E, L, width)
        self.w2 = stack(E, width, L)
        self.bounds = {"bound": config.activation_situ_beta, "up_bound": config.activation_situ_linear_beta}

    def forward(self, latent_TL: Tensor, chosen: Route, rows: Rows) -> Tensor:
        """sum over a token's experts of weight * expert(latent), summed in float32, in the latent's dtype."""
        weights = [stack.value(latent_TL.dtype) for stack in (self.w1, self.w3, self.w2)]
        if isinstance(rows, Tile):
            index_T = torch.arange(rows.num_tokens, device=latent_TL.device)
            empty_T = (index_T < rows.first) | (index_T >= rows.last)
            experts_TA = chosen.experts_TA.masked_fill(empty_T[:, None], -1)
            return experts_tile(latent_TL, experts_TA, chosen.weights_TA, *weights, **self.bounds)
        return experts(latent_TL, chosen.experts_TA, chosen.weights_TA, *weights, **self.bounds)


class LatentMoe(nn.Module):
    """x_TD to the output of its routed and shared experts [T, D] (docs/model.md, 53-62)."""

    def __init__(self, config: K3Config, name: str, packed: bool) -> None:
        super().__init__()
        self.name = name
        D, L = config.hidden_size, config.moe.routed_expert_hidden_size
        self.gate = Router(config)
        self.experts = Experts(config, packed)
        self.routed_expert_down_proj = Linear(D, L)
        self.routed_expert_norm = RMSNorm(L, config.rms_norm_eps)
        self.routed_expert_up_proj = Linear(L, D)
        self.shared_experts = Mlp(config, config.moe.shared_intermediate_size)
        self.keep_graph = False  # of the scores: an auxiliary loss wants it
        self._scores: list[Tensor] = []

    def forward(self, x_TD: Tensor, rows: Rows) -> Tensor:
        chosen = self.gate(x_TD)
        if self.training and torch.is_grad_enabled() and not is_recomputing():
            self._scores = [chosen.scores_TE if self.keep_graph else chosen.scores_TE.detach()]
        trace.record(f"{self.name}.experts", lambda: chosen.experts_TA)
        trace.record(f"{self.name}.weights", lambda: chosen.weights_TA)
        y_TL = self.experts(self.routed_expert_down_proj(x_TD), chosen, rows)
        return self.routed_expert_up_proj(self.routed_expert_norm(y_TL)) + self.shared_experts(x_TD)

    def take_scores(self) -> list[Tensor]:
        """Router scores [T, E] of the last training forward, handed over; none where there was none since.

        A forward that is run again for its gradients (activation checkpointing) does not count.
        """
        taken, self._scores = self._scores, []
        return taken
