import io
import json
import os
import signal
from dataclasses import replace
from itertools import count, repeat

import pytest
import torch
from rich.console import Console

from trivium.train import loop as loop_file
from trivium.train.heldout import Heldout
from trivium.train.log import Metrics, RunLog, clock_time
from trivium.train.loop import Length, stop_asked, train_loop
from trivium.train.schedule import Schedule
from trivium.train.step import Balance, StepResult

RESULT = StepResult(loss=2.0, grad_norm=1.0, num_tokens=10, num_bytes=30, balance=Balance(max_vio=0.5, idle_experts=0))
HELDOUT = Heldout(loss=3.0, bpb=1.25, num_tokens=100, num_bytes=300)


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def run(tmp_path, monkeypatch, length, *, step_s=1.0, eval_s=0.0, num_evals=4, on_step=None):
    """The loop with steps that only take time: what it logged, how often it evaluated, its result."""
    clock, evals, numbers = Clock(), [], count(1)

    def step(model, batches, optimisers):
        clock.now_s += step_s
        number = next(numbers)
        if on_step:
            on_step(number)
        return replace(RESULT, loss=float(number))

    def evaluate():
        clock.now_s += eval_s
        evals.append(clock.now_s - 100)
        return HELDOUT

    monkeypatch.setattr(loop_file, "train_step", step)
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    optimiser.param_groups[0]["full_lr"] = 0.1
    path = tmp_path / "metrics.jsonl"
    with RunLog(path, Console(quiet=True), clock) as log:
        result = train_loop(
            torch.nn.Linear(1, 1),
            repeat(None),
            [optimiser],
            Schedule(warmup_steps=2),
            length,
            log,
            evaluate=evaluate,
            num_evals=num_evals,
            clock=clock,
        )
    return [json.loads(line) for line in path.read_text().splitlines()], evals, result


def test_by_the_clock_the_run_ends_with_its_time(tmp_path, monkeypatch):
    lines, evals, result = run(tmp_path, monkeypatch, Length(seconds=20.0))
    assert result.num_steps == len(lines) == 20 and result.num_tokens == 200
    assert result.time_s == 20 and not result.interrupted
    assert evals == [5, 10, 15]  # a fourth would repeat the final one
    assert [line["step"] for line in lines if line["heldout_bpb"] == 1.25] == [5, 10, 15]
    # Warm-up of 2 steps; step 20 starts at 19/20 of the time: 1 - .98 * (.95 - .4) / .6.
    assert [lines[0]["lr"], lines[1]["lr"], lines[7]["lr"]] == pytest.approx([0.05, 0.1, 0.1])
    assert lines[19]["lr"] == pytest.approx(0.1 * (1 - 0.98 * 0.55 / 0.6))


def test_the_time_of_evaluating_is_part_of_the_run(tmp_path, monkeypatch):
    _, evals, result = run(tmp_path, monkeypatch, Length(seconds=20.0), eval_s=2.0)
    assert result.num_steps == 20 - 2 * len(evals) == 14


def test_a_number_of_steps_counts_instead_of_the_clock(tmp_path, monkeypatch):
    lines, evals, result = run(tmp_path, monkeypatch, Length(seconds=1.0, num_steps=8), num_evals=2)
    assert result.num_steps == 8 and evals == [4]
    assert lines[-1]["lr"] == pytest.approx(0.1 * (1 - 0.98 * (7 / 8 - 0.4) / 0.6))


def test_metrics_hold_every_field(tmp_path, monkeypatch):
    lines, _, _ = run(tmp_path, monkeypatch, Length(seconds=1.0, num_steps=2), step_s=0.5)
    assert lines[1] == {
        "step": 2,
        "tokens": 20,
        "time_s": 1.0,
        "loss": 2.0,
        "lr": pytest.approx(0.1 * (1 - 0.98 * 0.1 / 0.6)),
        "grad_norm": 1.0,
        "tokens_per_s": 20.0,
        "heldout_loss": None,
        "heldout_bpb": None,
        "max_vio": 0.5,
        "idle_experts": 0,
    }


def test_ctrl_c_lets_the_step_finish_and_ends_the_run(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT)

    def press(step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    lines, _, result = run(tmp_path, monkeypatch, Length(seconds=20.0), on_step=press)
    assert len(lines) == 3 and result.interrupted
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_interrupts():
    with pytest.raises(KeyboardInterrupt), stop_asked() as asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.is_set()
        os.kill(os.getpid(), signal.SIGINT)


def test_the_line_says_where_the_run_is(tmp_path):
    console = Console(record=True, width=40, force_terminal=False, file=io.StringIO())
    metrics = Metrics(
        step=7,
        tokens=70,
        time_s=3.5,
        loss=5.4321,
        lr=0.1,
        grad_norm=1.0,
        tokens_per_s=2114.0,
        heldout_loss=4.0,
        heldout_bpb=1.811,
        max_vio=0.4,
        idle_experts=0,
    )
    with RunLog(tmp_path / "metrics.jsonl", console) as log:
        log.write(metrics, 134.2)
    assert console.export_text() == (
        "step 7 · loss 5.432 · 2,114 tokens/s · held-out 1.811 bits/byte · idle experts 0 · 2:14 left\n"
    )


@pytest.mark.parametrize(("seconds", "want"), [(134.2, "2:14"), (59.6, "1:00"), (0.2, "0:00"), (-3.0, "0:00")])
def test_clock_time(seconds, want):
    assert clock_time(seconds) == want


def test_a_run_of_no_length_is_refused():
    with pytest.raises(ValueError, match="^minutes: wanted a number above 0, got 0$"):
        Length(seconds=0.0)
    with pytest.raises(ValueError, match="^steps: wanted at least 1, got 0$"):
        Length(seconds=1.0, num_steps=0)
