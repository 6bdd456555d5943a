"""A run's whole state as tensors by name, and back: nothing in it depends on the order or layout of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trivium.checkpoint.resume import ResumePoint
from trivium.data.loader import Loader
from trivium.model.kimi_k3 import KimiK3
from trivium.train.groups import Group
from trivium.train.loop import Progress

# What an optimiser keeps of a parameter that has had a gradient; anything else is of another optimiser.
_KEPT = {"Muon": ("momentum_buffer",), "AdamW": ("exp_avg", "exp_avg_sq", "step")}


def take_point(
    model: KimiK3,
    groups: Sequence[Group],
    optimisers: Sequence[torch.optim.Optimizer],
    loader: Loader,
    progress: Progress,
) -> ResumePoint:
    """Parameters, balancers, the optimisers' moments, the place in the data, and the generators of random numbers."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for group, optimiser in zip(groups, optimisers, strict=True):
        for name, parameter in group.parameters:
            for key, value in optimiser.state[parameter].items():
                tensors[f"optimiser.{key}.{name}"] = value
    tensors["random.cpu"] = torch.get_rng_state()
    if model.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(model.device)
    about = {"tokens": progress.tokens, "time_s": progress.time_s, "loader": loader.state()}
    return ResumePoint(step=progress.step, tensors=tensors, about=about)


@torch.no_grad()
def restore_(
    point: ResumePoint,
    model: KimiK3,
    groups: Sequence[Group],
    optimisers: Sequence[torch.optim.Optimizer],
    loader: Loader,
    num_steps: int | None,
) -> Progress:
    """Put everything back in its place. Raises ValueError where the point is not of this model, optimiser or data."""
    left = dict(point.tensors)
    for name, target in model.state_dict().items():
        target.copy_(_taken(left, f"model.{name}", target))
    num_updates = torch.zeros(())  # AdamW counts in float32
    for group, optimiser in zip(groups, optimisers, strict=True):
        for name, parameter in group.parameters:
            stored = {key: f"optimiser.{key}.{name}" for key in _KEPT[group.optimiser]}
            if left.keys().isdisjoint(stored.values()):
                continue  # it never had a gradient
            optimiser.state[parameter] = {
                key: _taken(left, of, num_updates if key == "step" else parameter).to(parameter.device, copy=True)
                for key, of in stored.items()
            }
    torch.set_rng_state(_taken(left, "random.cpu", torch.get_rng_state()))
    if (cuda := left.pop("random.cuda", None)) is not None and model.device.type == "cuda":
        torch.cuda.set_rng_state(cuda, model.device)
    if left:
        raise ValueError(f"resume: {min(left)} belongs to nothing of this run")
    loader.restore(point.about["loader"])
    return Progress(step=point.step, tokens=point.about["tokens"], time_s=point.about["time_s"], num_steps=num_steps)


def _taken(left: dict[str, Tensor], name: str, target: Tensor) -> Tensor:
    if name not in left:
        raise ValueError(f"resume: {name} is missing")
    value = left.pop(name)
    if value.shape != target.shape or value.dtype != target.dtype:
        raise ValueError(
            f"resume: {name}: wanted {target.dtype} {list(target.shape)}, got {value.dtype} {list(value.shape)}"
        )
    return value
