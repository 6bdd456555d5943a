"""A run's whole state as tensors by name, and back: nothing in it depends on the order or layout of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from trivium.checkpoint.resume import ResumePoint, RunState
from trivium.data.loader import Loader
from trivium.model.kimi_k3 import KimiK3
from trivium.parallel.world import World
from trivium.train.groups import Group
from trivium.train.guard import SpikeGuard
from trivium.train.loop import Progress

# What an optimiser keeps of a parameter that has had a gradient; anything else is of another optimiser.
_KEPT = {"Muon": ("momentum_buffer",), "AdamW": ("exp_avg", "exp_avg_sq", "step")}


@dataclass(frozen=True, kw_only=True, eq=False)
class Learner:
    """All that a step moves. `optimisers` are those of `groups`, one each."""

    model: KimiK3
    groups: Sequence[Group]
    optimisers: Sequence[torch.optim.Optimizer]
    loader: Loader
    guard: SpikeGuard


def not_finite(model: KimiK3, world: World) -> str | None:
    """The name of a parameter that holds nan or inf, on whatever process, None where there is none. Collective."""
    named = list(model.named_parameters())
    parts = [parameter.to_local() if isinstance(parameter, DTensor) else parameter for _, parameter in named]
    own = next((idx for idx, part in enumerate(parts) if not part.isfinite().all()), len(named))
    first = -int(world.max_(torch.tensor(-own)))
    return named[first][0] if first < len(named) else None


def take_point(learner: Learner, progress: Progress) -> RunState:
    """Parameters, balancers, the optimisers' moments, the place in the data, and the generators of random numbers.

    The tensors are those that train, not copies. Of a parameter without a gradient so far there are no moments.
    """
    tensors = {f"model.{name}": value for name, value in learner.model.state_dict().items()}
    for group, optimiser in zip(learner.groups, learner.optimisers, strict=True):
        for name, parameter in group.parameters:
            for key, value in optimiser.state.get(parameter, {}).items():
                tensors[f"optimiser.{key}.{name}"] = value
    tensors["random.cpu"] = torch.get_rng_state()
    if learner.model.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(learner.model.device)
    about = {"progress": asdict(progress), "loader": learner.loader.state(), "guard": learner.guard.state()}
    return RunState(step=progress.step, tensors=tensors, about=about)


@torch.no_grad()
def restore_(point: ResumePoint, learner: Learner, num_steps: int | None) -> Progress:
    """Put everything back in its place, cut as the place is cut. Collective.

    Raises ValueError where the point is not of this model, optimiser or data; of tensors, before any is written.
    """
    tensors = {f"model.{name}": value for name, value in learner.model.state_dict().items()}
    states = []
    for group, optimiser in zip(learner.groups, learner.optimisers, strict=True):
        for name, parameter in group.parameters:
            stored = {key: f"optimiser.{key}.{name}" for key in _KEPT[group.optimiser]}
            if point.names.keys().isdisjoint(stored.values()):
                continue  # it never had a gradient
            # AdamW counts in float32.
            count = torch.zeros((), device=parameter.device)
            state = {key: count if key == "step" else torch.zeros_like(parameter) for key in stored}
            states.append((optimiser, parameter, state))
            tensors |= {stored[key]: value for key, value in state.items()}
    on_cpu, on_cuda = torch.get_rng_state(), torch.empty(0)
    tensors["random.cpu"] = on_cpu
    cuda = learner.model.device.type == "cuda" and "random.cuda" in point.names
    if cuda:
        tensors["random.cuda"] = on_cuda = torch.cuda.get_rng_state(learner.model.device)
    if left := point.names.keys() - tensors.keys() - {"random.cuda"}:
        raise ValueError(f"resume: {min(left)} belongs to nothing of this run")
    point.read_(tensors)
    for optimiser, parameter, state in states:
        optimiser.state[parameter] = state
    torch.set_rng_state(on_cpu)
    if cuda:
        torch.cuda.set_rng_state(on_cuda, learner.model.device)
    learner.loader.restore(point.about["loader"])
    learner.guard.restore(point.about["guard"])
    return replace(Progress(**point.about["progress"]), num_steps=num_steps)
