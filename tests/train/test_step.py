"""A step that is not to be applied is as if it had not been: no weight, moment, bias or counter knows of it."""

import math
from dataclasses import replace

import pytest
import torch

from tests.runs import metrics_of
from tests.train.test_pretrain import CONFIG, SHORT, TEXTS, new_model, new_optimisers, stream_of, trained
from trivium.checkpoint.resume import load_resume_point
from trivium.data.loader import Loader
from trivium.train import step as step_file
from trivium.train.balance import QuantileBalancer
from trivium.train.guard import SpikeGuard
from trivium.train.loss import cross_entropy
from trivium.train.run_folder import read_run
from trivium.train.step import train_step

STREAM = stream_of(TEXTS[:8])


class Course:
    """A run of two micro-batches a step; `spoilt` is what the loss is multiplied by in a step of its own."""

    def __init__(self, patch, guard=None):
        self.patch, self.guard = patch, guard
        self.model = new_model()
        self.optimisers = new_optimisers(self.model)
        self.balancer = QuantileBalancer(method="histogram", ema=0.5)
        self.loader = Loader(STREAM, max_len=32, micro_tokens=32, num_micro=2, seed=0, source="test")
        self.batches = [next(self.loader) for _ in range(20)]

    def step(self, idx, spoilt=1.0):
        with self.patch.context() as patch:
            patch.setattr(step_file, "cross_entropy", lambda *arguments: spoilt * cross_entropy(*arguments))
            return train_step(
                self.model,
                self.batches[idx],
                self.optimisers,
                balancer=self.balancer,
                clip_norm=1.0,
                logit_limit=100.0,
                guard=self.guard,
            )

    def state(self):
        """Copies of weights, biases, moments and counters by name."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        kept = {
            f"{names[parameter]} {key}": value
            for optimiser in self.optimisers
            for parameter, values in optimiser.state.items()
            for key, value in values.items()
        }
        assert {name.rpartition(" ")[2] for name in kept} <= {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
        return {name: value.clone() for name, value in {**self.model.state_dict(), **kept}.items()}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_a_step_that_is_not_finite_moves_nothing_is_counted_and_the_next_goes_on(spoilt, monkeypatch):
    course, other = Course(monkeypatch, SpikeGuard()), Course(monkeypatch, SpikeGuard())
    for each in (course, other):
        each.step(0)
        each.step(1)
    before = course.state()
    result = course.step(2, spoilt)
    assert result.skipped.startswith(f"loss {spoilt:g} and gradient norm nan") and result.balance is None
    assert result.num_tokens == 64 and not math.isfinite(result.loss)
    assert_same(course.state(), before)
    assert course.guard.num_skipped == 1
    assert all(parameter.grad is None for parameter in course.model.parameters())
    for idx in (3, 4):  # the other never saw the batch between
        assert course.step(idx) == other.step(idx)
    assert_same(course.state(), other.state())


def test_a_spike_moves_nothing_either(monkeypatch):
    course, other = (Course(monkeypatch, SpikeGuard(window=8, max_skips=4)) for _ in range(2))
    for idx in range(8):
        course.step(idx)
        other.step(idx)
    before = course.state()
    result = course.step(8, 3.0)
    assert "spikes" in result.skipped and math.isfinite(result.grad_norm)
    assert_same(course.state(), before)
    assert course.step(9) == other.step(9)
    assert_same(course.state(), other.state())


def test_without_a_guard_it_raises_and_moves_nothing(monkeypatch):
    course = Course(monkeypatch)
    course.step(0)
    before = course.state()
    with pytest.raises(FloatingPointError, match="^step: the loss is nan and the gradient's norm nan, wanted finite"):
        course.step(1, math.nan)
    assert_same(course.state(), before)
    assert course.step(2).skipped is None


def test_a_run_skips_counts_logs_and_goes_on(monkeypatch, tmp_path):
    """Its fifth step is spoilt: a number that is not one is null in the file, and the reason stands beside it."""
    made = []

    def spoilt(*arguments):
        made.append(1)
        return cross_entropy(*arguments) * (math.nan if len(made) == 5 else 1)

    monkeypatch.setattr(step_file, "cross_entropy", spoilt)
    out = trained(SHORT, tmp_path).out
    lines = metrics_of(tmp_path)
    reason = "loss nan and gradient norm nan, wanted finite ones"
    assert [line["skipped"] for line in lines] == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert [line["reason"] for line in lines] == [reason if step == 5 else None for step in range(1, 10)]
    fields = ("loss", "grad_norm", "max_vio", "idle_experts", "out_of_range")
    assert [lines[4][name] for name in fields] == [None] * 5
    assert all(math.isfinite(line["loss"]) for line in lines if line["step"] != 5)
    assert f"step 5 of 9 · skipped: {reason} · " in out and "skipped so far 1" in out
    about = read_run(tmp_path)
    assert (about["steps"], about["skipped_steps"], about["tokens"]) == (9, 1, 9 * 72)
    assert CONFIG.moe.num_experts > lines[5]["idle_experts"]


@pytest.mark.parametrize("save_every_s", [60.0, 1e-6])
def test_a_run_whose_last_step_is_skipped_ends_with_its_checkpoint(monkeypatch, tmp_path, save_every_s):
    """The weights are sound, and one bad text is not the run's end: gone on with, it would only meet it again."""
    made = []

    def spoilt(*arguments):
        made.append(1)
        return cross_entropy(*arguments) * (math.nan if len(made) == 9 else 1)

    monkeypatch.setattr(step_file, "cross_entropy", spoilt)
    run = trained(replace(SHORT, save_every_s=save_every_s), tmp_path)
    assert metrics_of(tmp_path)[-1]["reason"] is not None and "not saved" not in run.out
    assert load_resume_point(tmp_path).step == 9 and (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("clip_norm", [0.01, 1e6, None])
def test_the_optimisers_get_gradients_of_the_clipped_norm(clip_norm):
    seen = []
    for limit in (None, clip_norm):
        model = new_model()
        optimisers = new_optimisers(model)
        optimisers[0].register_step_pre_hook(
            lambda *_, model=model: seen.append({name: p.grad.clone() for name, p in model.named_parameters()})
        )
        batches = next(Loader(STREAM, max_len=32, micro_tokens=32, num_micro=2, seed=0, source="test"))
        result = train_step(model, batches, optimisers, balancer=QuantileBalancer(), clip_norm=limit)
    plain, clipped = seen
    norm = float(torch.nn.utils.get_total_norm(plain.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-6) and 0.01 < norm < 1e6
    factor = 0.01 / norm if clip_norm == 0.01 else 1.0
    for name, grad in plain.items():  # one factor for all of them
        torch.testing.assert_close(clipped[name], grad * factor, rtol=1e-6, atol=0)
