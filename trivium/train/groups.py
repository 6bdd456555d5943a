"""Which parameter is trained by Muon and which by AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

from trivium.model.heads import WHOLE, Blocks, head_blocks
from trivium.train.muon import Muon

# Matrices by shape, but none by meaning: the rows of the first are ids, places or experts, seen with unequal counts, and
# the last two dims of the patches' are pixels, not outputs and inputs.
_NO_MAPS = (
    "embed_tokens.weight",
    "lm_head.weight",
    "pos_emb.weight",
    "block_sparse_moe.gate.weight",
    "patch_embed.proj.weight",
)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters under one optimiser and one rate.

    `averages`: Muon's momentum, or AdamW's two betas. `blocks`: how Muon's matrices are cut, of those that are.
    """

    name: str
    optimiser: str
    lr: float
    averages: tuple[float, ...]
    weight_decay: float
    parameters: tuple[tuple[str, Tensor], ...]
    blocks: Mapping[str, Blocks] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Numbers in all of its parameters."""
        return sum(parameter.numel() for _, parameter in self.parameters)

    @property
    def num_blocks(self) -> int:
        """Matrices that Newton-Schulz makes orthogonal; of AdamW's none."""
        if self.optimiser != "Muon":
            return 0
        return sum(
            math.prod(parameter.shape[:-2]) * len(self.blocks.get(name, WHOLE).rectangles(*parameter.shape[-2:]))
            for name, parameter in self.parameters
        )


def parameter_groups(
    model: nn.Module,
    *,
    muon_lr: float,
    adamw_lr: float,
    muon_momentum: float = 0.95,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.1,
    per_head: bool = True,
) -> list[Group]:
    """Every trained parameter in exactly one group.

    Muon has the matrices [..., out, in] with both sides above 1, cut as the model declares unless `per_head` is off, and
    `weight_decay` is theirs alone. AdamW has the rest and decays nothing: embedding, lm_head, the router's gate, what
    vision has for places and patches, and all vectors: norms, convolutions, A_log, dt_bias, the queries [1, D].
    """
    muon, rest = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_vector = parameter.ndim < 2 or 1 in parameter.shape[-2:]
            (rest if is_vector or name.endswith(_NO_MAPS) else muon).append((name, parameter))
    names = {name for name, _ in muon}
    blocks = {name: cut for name, cut in head_blocks(model).items() if name in names} if per_head else {}
    groups = (
        Group(
            name="matrices",
            optimiser="Muon",
            lr=muon_lr,
            averages=(muon_momentum,),
            weight_decay=weight_decay,
            parameters=tuple(muon),
            blocks=blocks,
        ),
        Group(
            name="the rest",
            optimiser="AdamW",
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
        if group.optimiser == "Muon":
            (momentum,) = group.averages
            optimiser: torch.optim.Optimizer = Muon(
                group.parameters, group.lr, blocks=group.blocks, momentum=momentum, weight_decay=group.weight_decay
            )
        else:
            parameters = [parameter for _, parameter in group.parameters]
            optimiser = torch.optim.AdamW(
                parameters, group.lr, betas=group.averages, weight_decay=group.weight_decay, fused=True
            )
        for param_group in optimiser.param_groups:
            param_group["full_lr"] = group.lr
        optimisers.append(optimiser)
    return optimisers


def groups_table(groups: Iterable[Group]) -> Table:
    """Who got what, to be printed once; below it the names of all that is no matrix, without the layer."""
    groups = list(groups)
    rest = [_kind(name) for group in groups if group.optimiser == "AdamW" for name, _ in group.parameters]
    table = Table(
        title="parameters by optimiser",
        title_justify="left",
        caption="s = sqrt(max(1, out/in)) of the whole matrix; blocks: made orthogonal each by itself, at the whole's RMS\n"
        f"AdamW: {', '.join(dict.fromkeys(rest)) or 'nothing'}",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for column, justify in (
        ("optimiser", "left"),
        ("tensors", "right"),
        ("blocks", "right"),
        ("numbers", "right"),
        ("rate", "right"),
        ("averages", "right"),
        ("decay", "right"),
    ):
        table.add_column(column, justify=justify, no_wrap=True)
    for group in groups:
        is_muon = group.optimiser == "Muon"
        table.add_row(
            f"{group.optimiser}: {group.name}",
            str(len(group.parameters)),
            f"{group.num_blocks:,}" if is_muon else "",
            f"{group.numel:,}",
            f"{group.lr:g} × s" if is_muon else f"{group.lr:g}",
            ", ".join(f"{average:g}" for average in group.averages),
            f"{group.weight_decay:g}",
        )
    return table


def _kind(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]
