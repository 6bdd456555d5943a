"""A run's whole state out and back into fresh objects, and what is refused on the way."""

from dataclasses import replace

import pytest
import torch

from tests.tiny import tiny_config
from trivium.data.loader import Loader
from trivium.data.pack import TokenStream
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.train.groups import build_optimisers, parameter_groups
from trivium.train.loop import Progress
from trivium.train.point import restore_, take_point
from trivium.train.step import train_step

CONFIG = tiny_config(44)  # 300 ids
STREAM = TokenStream(
    ids_T=torch.randint(0, 44, (150,), generator=torch.Generator().manual_seed(0), dtype=torch.int32),
    starts=(0, 40, 150),
    num_bytes_W=torch.ones(300, dtype=torch.int64),
)
GATE = "language_model.model.layers.1.block_sparse_moe.gate"
MATRIX = "language_model.model.layers.0.mlp.gate_proj.weight"


class Trained:
    """Model, optimisers and loader of a run, after some steps."""

    def __init__(self, seed, num_steps=0):
        self.model = KimiK3(CONFIG)
        initialise_(self.model, seed)
        self.groups = parameter_groups(self.model.named_parameters(), muon_lr=0.02, adamw_lr=0.003)
        self.optimisers = build_optimisers(self.groups)
        self.loader = Loader(STREAM, max_len=16, num_tokens=20, seed=seed, source="test")
        self.steps(num_steps)

    def steps(self, count):
        return [train_step(self.model, [next(self.loader)], self.optimisers) for _ in range(count)]

    def point(self, progress):
        return take_point(self.model, self.groups, self.optimisers, self.loader, progress)

    def restore(self, point):
        return restore_(point, self.model, self.groups, self.optimisers, self.loader, 9)


@pytest.fixture
def point():
    """Of a run of two steps, apart from it: `take_point` gives the tensors themselves."""
    taken = Trained(0, 2).point(Progress(step=2, tokens=40, time_s=1.5))
    return replace(taken, tensors={name: tensor.clone() for name, tensor in taken.tensors.items()})


def test_what_was_taken_comes_back_into_fresh_objects_and_goes_on_alike():
    first, second = Trained(0, 2), Trained(0)
    initialise_(second.model, 5)
    progress = Progress(step=2, tokens=40, time_s=1.5, num_steps=9)
    assert second.restore(first.point(progress)) == progress
    torch.rand(3)
    assert first.steps(3) == second.steps(3)
    for (name, got), want in zip(second.model.state_dict().items(), first.model.state_dict().values(), strict=True):
        assert torch.equal(got, want), name
    assert first.model.get_submodule(GATE).e_score_correction_bias.abs().max() > 0


def test_a_point_holds_model_balancers_moments_generators_and_the_place_in_the_data(point):
    run = Trained(0)
    state = run.model.state_dict()
    kinds = {name.split(".", 2)[1] for name in point.tensors if name.startswith("optimiser.")}
    assert kinds == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    matrices, others = (
        sum(len(group.parameters) for group in run.groups if group.optimiser == name) for name in ("Muon", "AdamW")
    )
    assert len(point.tensors) == len(state) + matrices + 3 * others + 1
    assert f"model.{GATE}.e_score_correction_bias" in point.tensors
    assert torch.equal(point.tensors["random.cpu"], torch.get_rng_state())
    run.steps(2)
    assert point.about == {"tokens": 40, "time_s": 1.5, "loader": run.loader.state()} and point.step == 2


def test_restoring_sets_the_random_numbers_back(point):
    torch.rand(1)
    want = torch.rand(3, generator=torch.Generator().set_state(point.tensors["random.cpu"]))
    Trained(1).restore(point)
    assert torch.equal(torch.rand(3), want)


def test_nothing_of_a_point_is_shared_with_the_run_that_goes_on(point):
    before = {name: tensor.clone() for name, tensor in point.tensors.items()}
    run = Trained(1)
    run.restore(point)
    run.steps(1)
    for name, tensor in point.tensors.items():
        assert torch.equal(tensor, before[name]), name


def test_before_the_first_step_an_optimiser_has_nothing_to_take():
    point = Trained(0).point(Progress())
    assert not [name for name in point.tensors if name.startswith("optimiser.")]
    assert Trained(1).restore(point).step == 0


def longer(tensor):
    return torch.cat([tensor.reshape(-1), tensor.new_zeros(1)])


@pytest.mark.parametrize(
    "name",
    [
        f"model.{MATRIX}",
        f"model.{GATE}.e_score_correction_bias",
        f"optimiser.exp_avg.{GATE}.weight",
        f"optimiser.exp_avg_sq.{GATE}.weight",
        f"optimiser.step.{GATE}.weight",
        "random.cpu",
    ],
)
def test_what_is_missing_or_of_another_kind_is_refused_by_name(point, name):
    tensor = point.tensors.pop(name)
    with pytest.raises(ValueError, match=f"^resume: {name} is missing$"):
        Trained(0).restore(point)
    for other in (longer(tensor), tensor.to(torch.float64)):
        with pytest.raises(ValueError) as raised:
            Trained(0).restore(replace(point, tensors={**point.tensors, name: other}))
        assert str(raised.value) == (
            f"resume: {name}: wanted {tensor.dtype} {list(tensor.shape)}, got {other.dtype} {list(other.shape)}"
        )


def test_a_moment_of_another_shape_is_refused_by_name(point):
    name = f"optimiser.momentum_buffer.{MATRIX}"
    for other in (point.tensors[name].T.contiguous(), torch.zeros(())):
        with pytest.raises(ValueError, match=f"^resume: {name}: wanted torch.float32 "):
            Trained(0).restore(replace(point, tensors={**point.tensors, name: other}))


@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.model.layers.9.norm.weight",
        f"optimiser.exp_avg.{MATRIX}",  # a moment of AdamW for what Muon has
        f"optimiser.momentum_buffer.{GATE}.weight",
        "optimiser.step",
        "random.tpu",
        "elsewhere",
    ],
)
def test_what_is_left_over_is_refused_by_name(point, name):
    point.tensors[name] = torch.zeros(2)
    with pytest.raises(ValueError, match=f"^resume: {name} belongs to nothing of this run$"):
        Trained(0).restore(point)


def test_a_place_that_the_data_does_not_have_is_refused(point):
    about = {**point.about, "loader": {"epoch": 0, "piece": 999, "offset": 0}}
    with pytest.raises(ValueError, match="^loader: .* does not fit a stream of 10 pieces$"):
        Trained(0).restore(replace(point, about=about))
