"""QK-Clip: an MLA head whose attention logits grow past a limit has its query and key weights scaled down.

MuonClip of Kimi K2, arXiv 2507.20534, section 2.1 and algorithm 1: Muon's updates have full rank, so that logits can
grow without bound where AdamW's would not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trivium.model.kimi_k3 import KimiK3
from trivium.model.mla import GatedMla
from trivium.parallel.fsdp import share_of
from trivium.parallel.world import ALONE, World


def watch_logits_(model: KimiK3, limit: float | None) -> None:
    """Before a step: its forwards keep what `clip_logits_` needs, and what earlier ones kept is dropped.

    Without a limit (None or inf) nothing is watched, and nothing is paid. Raises ValueError for a limit not above 0, and for
    frozen weights, which cannot be clipped.
    """
    watch = limit is not None and _checked(limit) < math.inf
    for layer in model.mla_layers():
        if watch and not (layer.q_b_proj.weight.requires_grad and layer.kv_b_proj.weight.requires_grad):
            raise ValueError(
                "logit limit: an MLA layer's q_b_proj or kv_b_proj is frozen; train both, or give no limit"
            )
        layer.watch_logits = watch
        layer.take_max_logit()


@torch.no_grad()
def clip_logits_(model: KimiK3, limit: float, world: World = ALONE) -> int:
    """Behind the optimisers: scale every MLA head whose largest logit of the step was above `limit`; how many there were.

    With S the largest logit over all micro-batches of all processes and gamma = limit / S: the head's query rows for
    latent keys and its rows of latent keys times sqrt(gamma), its query rows for the shared key times gamma; the shared
    key belongs to all heads and stays. All of the head's logits are then gamma times what they were. No bit of any
    other row changes. Weights may be sharded, with a head across two processes.

    Collective. Raises ValueError for a limit not above 0, and where no forward was watched.
    """
    layers = model.mla_layers()
    if _checked(limit) == math.inf or not layers:
        return 0
    max_MH = world.max_(torch.stack([_taken(layer) for layer in layers]))
    if (max_MH == -math.inf).any():
        raise ValueError("clip_logits_: no forward of this step was watched, wanted watch_logits_ in front of it")
    num_over = int((max_MH > limit).sum())
    if num_over == 0:
        return 0
    gamma_MH = torch.where(max_MH > limit, limit / max_MH, 1.0)
    for layer, gamma_H in zip(layers, gamma_MH, strict=True):
        K, J, V = layer.config.qk_nope_head_dim, layer.config.qk_rope_head_dim, layer.config.v_head_dim
        root_HK, gamma_HJ = gamma_H.sqrt()[:, None].expand(-1, K), gamma_H[:, None].expand(-1, J)
        one_HV = torch.ones_like(gamma_H)[:, None].expand(-1, V)
        _scale_rows_(layer.q_b_proj.weight, torch.cat([root_HK, gamma_HJ], dim=1).flatten())
        _scale_rows_(layer.kv_b_proj.weight, torch.cat([root_HK, one_HV], dim=1).flatten())
    return num_over


def _checked(limit: float) -> float:
    if not limit > 0:
        raise ValueError(f"logit limit: wanted a number above 0, got {limit}")
    return limit


def _taken(layer: GatedMla) -> Tensor:
    """max_H of this process, float64; -inf where it ran no forward."""
    max_H = layer.take_max_logit()
    if max_H is None:
        max_H = torch.full((layer.config.num_heads,), -math.inf, device=layer.q_b_proj.weight.device)
    return max_H.double()


def _scale_rows_(weight: Tensor, factor_X: Tensor) -> None:
    """Multiply the rows whose factor is not 1, each process those that it holds."""
    factor_X = share_of(factor_X, weight)
    if isinstance(weight, DTensor):
        weight, factor_X = weight.to_local(), factor_X.to_local()
    at = (factor_X != 1).nonzero().squeeze(1)
    weight[at] = (weight[at].double() * factor_X[at, None]).to(weight.dtype)
