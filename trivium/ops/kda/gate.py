"""KDA's raw inputs, and what is done to them token by token, whichever implementation runs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trivium.config import LOWEST_DECAY_BOUND
from trivium.ops.precision import work_dtype
from trivium.ops.sigmoid import sigmoid

L2_EPS = 1e-6  # inside the root, on the sum of squares


class KdaInputs(NamedTuple):
    """Raw projections of T tokens, and the gate's two parameters: what `kda` takes and every implementation is given."""

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    decay_in_THK: Tensor
    beta_in_TH: Tensor
    A_log_H: Tensor
    dt_bias_HK: Tensor


def check_lower_bound(lower_bound: float) -> None:
    if not LOWEST_DECAY_BOUND <= lower_bound < 0:
        raise ValueError(f"kda: lower_bound {lower_bound} is outside [{LOWEST_DECAY_BOUND}, 0)")


def l2_norm(x_THK: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dim, in float32."""
    x_THK = x_THK.to(work_dtype(x_THK))
    return x_THK * torch.rsqrt(x_THK.square().sum(-1, keepdim=True) + L2_EPS)


def kda_gate(decay_in_THK: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor, lower_bound: float = -5.0) -> Tensor:
    """Log decay g in (lower_bound, 0): lower_bound * sigmoid(exp(A_log) * (decay_in + dt_bias)), in float32."""
    work = work_dtype(decay_in_THK)
    z_THK = decay_in_THK.to(work) + dt_bias_HK.to(work)
    return lower_bound * sigmoid(A_log_H.to(work).exp()[:, None] * z_THK)
