"""Which parameter is trained by Muon and which by AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor, nn

from trivium.train.muon import Muon

# Matrices by shape, but none by meaning: the rows of these are ids or experts, seen with unequal counts.
_ROWS_ARE_IDS = ("embed_tokens.weight", "lm_head.weight", "pos_emb.weight")
_ROUTER = "block_sparse_moe.gate.weight"
_PATCHES = "patch_embed.proj.weight"  # its last two dims are pixels, not outputs and inputs


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters under one optimiser and one rate. `rule` is what the rate is multiplied by, matrix by matrix.

    `averages`: Muon's momentum, or AdamW's two betas.
    """

    name: str
    optimiser: str
    rule: str
    lr: float
    averages: tuple[float, ...]
    weight_decay: float
    parameters: tuple[tuple[str, Tensor], ...]

    @property
    def numel(self) -> int:
        """Numbers in all of its parameters."""
        return sum(parameter.numel() for _, parameter in self.parameters)


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]],
    *,
    muon_lr: float,
    adamw_lr: float,
    muon_momentum: float = 0.95,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
) -> list[Group]:
    """Every trained parameter in exactly one group.

    Muon has the matrices [..., out, in] with both sides above 1. AdamW has embedding and lm_head, the router's gate,
    and all vectors: norms, convolutions, A_log, dt_bias and the queries [1, D]. `weight_decay` holds for the matrices,
    the embedding and lm_head: nothing else is decayed.
    """
    muon, ids, rest = [], [], []
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        if name.endswith(_ROWS_ARE_IDS):
            ids.append((name, parameter))
        elif parameter.ndim < 2 or 1 in parameter.shape[-2:] or name.endswith((_ROUTER, _PATCHES)):
            rest.append((name, parameter))
        else:
            muon.append((name, parameter))
    rule = "× s"
    groups = (
        Group(
            name="matrices",
            optimiser="Muon",
            rule=rule,
            lr=muon_lr,
            averages=(muon_momentum,),
            weight_decay=weight_decay,
            parameters=tuple(muon),
        ),
        Group(
            name="embedding and lm_head",
            optimiser="AdamW",
            rule="",
            lr=adamw_lr,
            averages=adamw_betas,
            weight_decay=weight_decay,
            parameters=tuple(ids),
        ),
        Group(
            name="router and all vectors",
            optimiser="AdamW",
            rule="",
            lr=adamw_lr,
            averages=adamw_betas,
            weight_decay=0.0,
            parameters=tuple(rest),
        ),
    )
    return [group for group in groups if group.parameters]


def build_optimisers(groups: Iterable[Group]) -> list[torch.optim.Optimizer]:
    """One optimiser a group. Each param group also keeps its full rate as `full_lr`, for the schedule."""
    optimisers: list[torch.optim.Optimizer] = []
    for group in groups:
        parameters = [parameter for _, parameter in group.parameters]
        if group.optimiser == "Muon":
            (momentum,) = group.averages
            optimiser: torch.optim.Optimizer = Muon(
                parameters, group.lr, momentum=momentum, weight_decay=group.weight_decay
            )
        else:
            optimiser = torch.optim.AdamW(
                parameters, group.lr, betas=group.averages, weight_decay=group.weight_decay, fused=True
            )
        for param_group in optimiser.param_groups:
            param_group["full_lr"] = group.lr
        optimisers.append(optimiser)
    return optimisers


def groups_table(groups: Iterable[Group]) -> Table:
    """Who got what, to be printed once."""
    table = Table(
        title="parameters by optimiser",
        title_justify="left",
        caption="s = sqrt(max(1, out/in)) of each matrix",
        caption_justify="left",
    )
    for column, justify in (
        ("optimiser", "left"),
        ("what", "left"),
        ("tensors", "right"),
        ("numbers", "right"),
        ("rate", "right"),
        ("decay", "right"),
    ):
        table.add_column(column, justify=justify, no_wrap=True)
    for group in groups:
        table.add_row(
            group.optimiser,
            group.name,
            str(len(group.parameters)),
            f"{group.numel:,}",
            f"{group.lr:g} {group.rule}".rstrip(),
            f"{group.weight_decay:g}",
        )
    return table
