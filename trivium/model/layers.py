"""The layers everything else is built from. None initialises itself: parameters start as raw memory.

What comes in decides the dtype: a weight is cast to it where it meets it, so that float32 masters serve bfloat16 rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trivium.config import K3Config
from trivium.ops.linear import linear
from trivium.ops.norm import rms_norm
from trivium.ops.situ import situ


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) over the last dim in float32, cast back, then times the weight."""

    def __init__(self, dim: int, eps: float, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


class Linear(nn.Module):
    """x @ weight^T, weight [out, in], no bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype))


class Mlp(nn.Module):
    """down(SiTU(gate(x), up(x))): the dense feed-forward, and the shared experts."""

    def __init__(self, config: K3Config, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, intermediate_size)
        self.up_proj = Linear(config.hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, config.hidden_size)
        self.bounds = {"bound": config.activation_situ_beta, "up_bound": config.activation_situ_linear_beta}

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(situ(self.gate_proj(x_TD), self.up_proj(x_TD), **self.bounds))
