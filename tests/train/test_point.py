"""A run's whole state out, through the disk and back into fresh objects, and what is refused on the way."""

from dataclasses import asdict, replace

import pytest
import torch

from tests.tiny import tiny_config
from trivium.checkpoint.resume import ResumeWriter, load_resume_point
from trivium.data.loader import Loader
from trivium.data.pack import TokenStream
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.train.balance import QuantileBalancer
from trivium.train.groups import build_optimisers, parameter_groups
from trivium.train.guard import SpikeGuard
from trivium.train.loop import Progress
from trivium.train.point import Learner, restore_, take_point
from trivium.train.step import train_step

CONFIG = tiny_config(44)  # 300 ids
STREAM = TokenStream(
    ids_T=torch.randint(0, 44, (150,), generator=torch.Generator().manual_seed(0), dtype=torch.int32),
    starts=(0, 40, 150),
    num_bytes_W=torch.ones(300, dtype=torch.int64),
)
GATE = "language_model.model.layers.1.block_sparse_moe.gate"
MATRIX = "language_model.model.layers.0.mlp.gate_proj.weight"
PROGRESS = Progress(step=2, tokens=40, time_s=1.5, skipped=1, num_steps=9)


class Trained:
    """A run after some steps."""

    def __init__(self, seed, num_steps=0):
        model = KimiK3(CONFIG)
        initialise_(model, seed)
        groups = parameter_groups(model, muon_lr=0.02, adamw_lr=0.003)
        self.learner = Learner(
            model=model,
            groups=groups,
            optimisers=build_optimisers(groups),
            loader=Loader(STREAM, max_len=16, micro_tokens=20, num_micro=1, seed=seed, source="test"),
            guard=SpikeGuard(),
        )
        self.steps(num_steps)

    def steps(self, count):
        learner, balancer = self.learner, QuantileBalancer()
        return [
            train_step(learner.model, next(learner.loader), learner.optimisers, balancer=balancer, guard=learner.guard)
            for _ in range(count)
        ]

    def restore(self, point, num_steps=9):
        return restore_(point, self.learner, num_steps)

    def bias(self):
        return self.learner.model.get_submodule(GATE).e_score_correction_bias

    def moments(self):
        """By parameter and what it is of it."""
        return {
            f"{name} {key}": value
            for group, optimiser in zip(self.learner.groups, self.learner.optimisers, strict=True)
            for name, parameter in group.parameters
            for key, value in optimiser.state[parameter].items()
        }


def through_disk(run, folder, progress=PROGRESS):
    ResumeWriter(folder).save(take_point(run.learner, progress), wait=True)
    return load_resume_point(folder)


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


@pytest.fixture(scope="module")
def point(tmp_path_factory):
    """Of a run of two steps."""
    return through_disk(Trained(0, 2), tmp_path_factory.mktemp("run"))


def test_what_was_taken_comes_back_into_fresh_objects_and_goes_on_alike(tmp_path):
    first, second = Trained(0, 2), Trained(0)
    initialise_(second.learner.model, 5)
    assert second.restore(through_disk(first, tmp_path)) == PROGRESS
    assert_same(second.learner.model.state_dict(), first.learner.model.state_dict())
    assert_same(second.moments(), first.moments())
    torch.rand(3)
    assert first.steps(3) == second.steps(3)
    assert_same(second.learner.model.state_dict(), first.learner.model.state_dict())
    assert second.learner.guard.state() == first.learner.guard.state()
    assert first.bias().abs().max() > 0


def test_how_many_steps_there_are_is_what_the_run_says_now(point):
    assert Trained(0).restore(point, 12) == replace(PROGRESS, num_steps=12)


def test_a_point_holds_model_balancers_moments_generators_and_the_place_in_the_data(point):
    run = Trained(0)
    kinds = {name.split(".", 2)[1] for name in point.names if name.startswith("optimiser.")}
    assert kinds == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    matrices, others = (
        sum(len(group.parameters) for group in run.learner.groups if group.optimiser == name)
        for name in ("Muon", "AdamW")
    )
    assert len(point.names) == len(run.learner.model.state_dict()) + matrices + 3 * others + 1
    assert f"model.{GATE}.e_score_correction_bias" in point.names
    run.steps(2)
    assert point.step == 2 and point.about == {
        "progress": asdict(PROGRESS),
        "loader": run.learner.loader.state(),
        "guard": run.learner.guard.state(),
    }


def test_restoring_sets_the_random_numbers_back(tmp_path):
    point = through_disk(Trained(0), tmp_path)
    want = torch.rand(3)
    Trained(1).restore(point)
    assert torch.equal(torch.rand(3), want)


def test_before_the_first_step_an_optimiser_has_nothing_to_take(tmp_path):
    point = through_disk(Trained(0), tmp_path, Progress())
    assert not [name for name in point.names if name.startswith("optimiser.")]
    assert Trained(1).restore(point).step == 0


def test_a_parameter_without_a_gradient_so_far_has_no_moments_when_it_is_back(tmp_path):
    first, second = Trained(0, 2), Trained(0)
    parameter = first.learner.model.get_parameter(MATRIX)
    for optimiser in first.learner.optimisers:
        optimiser.state.pop(parameter, None)
    second.restore(through_disk(first, tmp_path))
    assert_same(second.moments(), first.moments())
    assert first.steps(2) == second.steps(2)


# pytorch/torchtitan#1222: the bias trained, every checkpoint held zeros, since the buffer was not written but bound
# anew. The rest of its kind: any module state that a saver holds on to instead of asking for it at every save.
def test_a_buffer_that_was_bound_anew_is_saved_as_it_is(tmp_path):
    first, second = Trained(0, 1), Trained(0)
    writer = ResumeWriter(tmp_path)
    for step in range(2, 6):
        writer.save(take_point(first.learner, Progress(step=step)))
        gate = first.learner.model.get_submodule(GATE)
        gate.e_score_correction_bias = gate.e_score_correction_bias + step * torch.arange(6.0)
        first.steps(1)
        gate.e_score_correction_bias = gate.e_score_correction_bias + torch.arange(6.0) / 64
    writer.save(take_point(first.learner, Progress(step=6)), wait=True)
    second.restore(load_resume_point(tmp_path))
    assert second.bias().abs().max() > 0 and torch.equal(second.bias(), first.bias())
    assert first.steps(1) == second.steps(1)  # among it how many tokens each expert got


@pytest.mark.parametrize(
    "name",
    [
        f"model.{MATRIX}",
        f"model.{GATE}.e_score_correction_bias",
        f"optimiser.exp_avg.{GATE}.weight",
        f"optimiser.exp_avg_sq.{GATE}.weight",
        f"optimiser.step.{GATE}.weight",
        f"optimiser.momentum_buffer.{MATRIX}",
        "random.cpu",
    ],
)
def test_what_is_of_another_shape_or_dtype_is_refused_by_name_and_nothing_is_written(point, name):
    shape, dtype = point.names[name]
    run = Trained(1)
    before = {key: value.clone() for key, value in run.learner.model.state_dict().items()}
    for other in (((*shape, 1), dtype), (shape, torch.float64), (shape[::-1] + (2,), dtype)):
        with pytest.raises(ValueError) as raised:
            run.restore(replace(point, names={**point.names, name: other}))
        assert str(raised.value) == (f"resume: {name}: wanted {dtype} {list(shape)}, got {other[1]} {list(other[0])}")
    assert_same(run.learner.model.state_dict(), before)
    assert not run.moments()


@pytest.mark.parametrize(
    "name",
    [
        f"model.{MATRIX}",
        f"model.{GATE}.e_score_correction_bias",
        f"optimiser.exp_avg.{GATE}.weight",
        f"optimiser.step.{GATE}.weight",
        "random.cpu",
    ],
)
def test_what_is_missing_is_refused_by_name(point, name):
    names = {other: kind for other, kind in point.names.items() if other != name}
    with pytest.raises(ValueError, match=f"^resume: {name} is missing$"):
        Trained(0).restore(replace(point, names=names))


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
    with pytest.raises(ValueError, match=f"^resume: {name} belongs to nothing of this run$"):
        Trained(0).restore(replace(point, names={**point.names, name: ((2,), torch.float32)}))


def test_a_place_that_the_data_does_not_have_is_refused(point):
    place = {**point.about["loader"], "piece": 999}
    with pytest.raises(ValueError, match="^loader: "):
        Trained(0).restore(replace(point, about={**point.about, "loader": place}))
