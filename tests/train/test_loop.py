"""The loop with steps that only take time: what it logs, when it scores, saves and stops."""

import json
import os
import signal
import threading
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from trivium.train.balance import Balance
from trivium.train.heldout import Heldout
from trivium.train.log import RunLog
from trivium.train.loop import Progress, stop_asked, train_loop
from trivium.train.schedule import Length, Schedule
from trivium.train.stages import Stage
from trivium.train.step import StepResult

BALANCE = Balance(max_vio=0.5, idle_experts=3, out_of_range=0)
RESULT = StepResult(loss=2.0, grad_norm=1.0, num_tokens=10, num_bytes=30, balance=BALANCE)
HELDOUT = Heldout(loss=3.0, bpb=1.25, num_tokens=100, num_bytes=300)
STEPS_8 = Length(seconds=1.0, num_steps=8)
ONE_STAGE = (Stage(max_len=5, share=1.0),)


class Run:
    """The run the loop is part of: its step, its data, its clock and its keeper, all of them empty."""

    def __init__(self, *, step_s=1.0, eval_s=0.0, save_s=0.0, on_step=None, skips=(), stage=0):
        self.now_s = 100.0
        self.step_s, self.eval_s, self.save_s, self.on_step = step_s, eval_s, save_s, on_step
        self.step = 0
        self.evals, self.saves, self.plans, self.looks, self.stages, self.begun = [], [], [], [], [], []
        self.skips = skips
        self.stage = stage

    def __next__(self):
        return [self]

    def enter_stage(self, index, max_len):
        self.stages.append((index, max_len))
        before, self.stage = self.stage, index
        return index != before

    def begin_stage(self):
        self.begun.append(self.step + 1)

    def clock(self):
        return self.now_s

    def make_step(self, batches, *, look):
        self.step += 1
        if look:
            look(None)
        self.now_s += self.step_s
        if self.on_step:
            self.on_step(self.step)
        if self.step in self.skips:
            return replace(RESULT, loss=float("nan"), balance=None, skipped="the loss is nan")
        return replace(RESULT, loss=float(self.step))

    def look(self, model):
        self.looks.append(self.step)

    def evaluate(self, step, tokens):
        assert (step, tokens) == (self.step, 10 * self.step)
        self.now_s += self.eval_s
        self.evals.append(self.step)
        return HELDOUT

    def plan(self, num_steps):
        self.plans.append((self.step, num_steps))

    def save(self, progress):
        assert progress.step == self.step
        self.saves.append(progress)
        self.now_s += self.save_s


@pytest.fixture
def train(tmp_path):
    """(lines of metrics.jsonl, progress, interrupted) of a run."""

    def trained(run, length, *, start=None, num_evals=4, save_every_s=1e9, stages=ONE_STAGE):
        start = Progress() if start is None else start
        run.step = start.step
        optimiser = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        optimiser.param_groups[0]["full_lr"] = 0.1
        path = tmp_path / "metrics.jsonl"
        with RunLog(path, Console(quiet=True), step=start.step, clock=run.clock) as log:
            result = train_loop(
                run.make_step,
                run,
                [optimiser],
                Schedule(warmup_steps=2),
                stages,
                length,
                log,
                run,
                start,
                num_evals=num_evals,
                eval_s=run.eval_s,
                save_every_s=save_every_s,
                clock=run.clock,
            )
        return [json.loads(line) for line in path.read_text().splitlines()], *result

    return trained


def press(number, at_step):
    def on_step(step):
        if step == at_step:
            os.kill(os.getpid(), number)

    return on_step


def test_by_the_clock_the_number_of_steps_is_fixed_from_the_first_ones(train):
    run = Run()
    lines, progress, interrupted = train(run, Length(seconds=20.0))
    # Three steps are 3 s, more than 8 % of the time; 0.2 s of the rest are for saving, 16 steps fit into 16.8 s.
    assert run.plans == [(3, 19)]
    assert progress == Progress(step=19, tokens=190, time_s=19.0, num_steps=19) and not interrupted
    assert [line["step"] for line in lines] == list(range(1, 20))
    # Warm-up of 2 steps, constant to 40 %: 8 steps are 42 % of 19.
    lr = [line["lr"] for line in lines]
    assert lr[:8] == pytest.approx([0.05] + 7 * [0.1])
    assert lr[18] == pytest.approx(0.1 * (1 - 0.98 * (18 / 19 - 0.4) / 0.6))


def test_the_first_steps_are_timed_for_8_percent_of_the_time(train):
    run = Run(step_s=0.5)
    train(run, Length(seconds=100.0))
    # After 16 steps, 8 s; 100 - 8 - 1 s are 182 steps more.
    assert run.plans == [(16, 198)]


def test_what_evaluating_takes_is_part_of_the_time(train):
    run = Run(eval_s=2.0)
    _, progress, _ = train(run, Length(seconds=20.0))
    assert run.plans == [(3, 3 + 8)]  # 20 - 3 - 0.2 - 4 * 2 = 8.8 s
    assert run.evals == [6, 9] and progress.time_s == 11 + 2 * 2  # the one due at 3 came before the number was known


def test_steps_that_were_made_fit_the_schedule_even_when_time_is_over(train):
    run = Run(step_s=10.0)
    train(run, Length(seconds=20.0))
    assert run.plans == [(3, 5)]  # 2 of 5 is where the decay begins


def test_evaluations_are_evenly_over_the_steps_and_not_behind_the_last(train):
    for length, num_evals, want in (
        (Length(seconds=20.0), 4, [5, 10, 15]),  # of 19
        (STEPS_8, 2, [4]),
        (STEPS_8, 1, []),
        (STEPS_8, 8, [1, 2, 3, 4, 5, 6, 7]),
        (STEPS_8, 80, [1, 2, 3, 4, 5, 6, 7]),
        (Length(seconds=1.0, num_steps=1), 2, []),
    ):
        run = Run()
        lines, _, _ = train(run, length, num_evals=num_evals)
        assert run.evals == want
        assert [line["step"] for line in lines if line["heldout_bpb"] == 1.25] == want


def test_a_number_of_steps_counts_instead_of_the_clock(train):
    run = Run()
    lines, progress, interrupted = train(run, STEPS_8)
    assert (progress.step, progress.num_steps, interrupted, run.plans) == (8, 8, False, [])
    assert lines[-1]["lr"] == pytest.approx(0.1 * (1 - 0.98 * (7 / 8 - 0.4) / 0.6))


def test_it_is_saved_as_planned_at_every_interval_and_at_the_end_and_no_step_twice(train):
    for length, save_every_s, save_s, want in (
        (Length(seconds=20.0), 1e9, 0.0, [3, 19]),
        (Length(seconds=20.0), 6.0, 0.0, [3, 9, 15, 19]),
        (STEPS_8, 4.0, 0.0, [4, 8]),
        (STEPS_8, 3.0, 0.0, [3, 6, 8]),
        (STEPS_8, 1e9, 0.0, [8]),
        (Length(seconds=1.0, num_steps=25), 4.0, 1.0, [4, 13, 22, 25]),  # nine parts training, one part saving
    ):
        run = Run(save_s=save_s)
        _, progress, _ = train(run, length, save_every_s=save_every_s)
        assert [saved.step for saved in run.saves] == want
        for saved in run.saves:
            assert (saved.tokens, saved.num_steps) == (10 * saved.step, progress.num_steps)
            assert saved.time_s == saved.step + save_s * run.saves.index(saved)


def test_metrics_hold_every_field(train):
    lines, _, _ = train(Run(step_s=0.5, eval_s=1.0), Length(seconds=1.0, num_steps=2), num_evals=2)
    assert lines == [
        {
            "step": 1,
            "tokens": 10,
            "time_s": 0.5,
            "loss": 1.0,
            "lr": pytest.approx(0.05),
            "grad_norm": 1.0,
            "tokens_per_s": 20.0,
            "heldout_loss": 3.0,
            "heldout_bpb": 1.25,
            "max_vio": 0.5,
            "idle_experts": 3,
            "out_of_range": 0,
            "clipped_heads": 0,
            "skipped": 0,
            "reason": None,
            "max_len": 5,
        },
        {
            "step": 2,
            "tokens": 20,
            "time_s": 2.0,  # behind the second of scoring
            "loss": 2.0,
            "lr": pytest.approx(0.1 * (1 - 0.98 * 0.1 / 0.6)),
            "grad_norm": 1.0,
            "tokens_per_s": 20.0,
            "heldout_loss": None,
            "heldout_bpb": None,
            "max_vio": 0.5,
            "idle_experts": 3,
            "out_of_range": 0,
            "clipped_heads": 0,
            "skipped": 0,
            "reason": None,
            "max_len": 5,
        },
    ]


def test_a_skipped_step_is_counted_and_says_why(train):
    run = Run(skips=(2, 5))
    lines, progress, _ = train(run, STEPS_8)
    assert [line["skipped"] for line in lines] == [0, 1, 1, 1, 2, 2, 2, 2] and progress.skipped == 2
    assert [line["step"] for line in lines if line["reason"] == "the loss is nan"] == [2, 5]
    assert (lines[1]["loss"], lines[1]["max_vio"], lines[1]["idle_experts"]) == (None, None, None)
    run = Run(on_step=press(signal.SIGINT, 3), skips=(2, 5))
    _, progress, _ = train(run, STEPS_8)
    again = Run(skips=(2, 5))
    assert train(again, STEPS_8, start=progress)[0] == lines


def test_the_stages_of_a_run_are_entered_at_their_steps_and_the_model_is_looked_at_where_it_is_scored(train):
    run = Run()
    stages = (Stage(max_len=2, share=0.5), Stage(max_len=4, share=0.25), Stage(max_len=9, share=0.25))
    lines, _, _ = train(run, STEPS_8, stages=stages)
    assert run.stages == 4 * [(0, 2)] + 2 * [(1, 4)] + 2 * [(2, 9)]
    assert [line["max_len"] for line in lines] == [2, 2, 2, 2, 4, 4, 9, 9]
    assert run.looks == run.evals == [2, 4, 6]
    assert run.begun == [5, 7]


THREE = (Stage(max_len=2, share=0.5), Stage(max_len=4, share=0.25), Stage(max_len=9, share=0.25))


@pytest.mark.parametrize("stopped_in", [3, 4, 5, 6, 7])
def test_a_stage_begins_once_also_where_the_run_stopped_at_its_border(train, stopped_in):
    """Stopped behind step 4 nothing of the second stage was given out: it begins with the step that goes on."""
    cut = Run(on_step=press(signal.SIGINT, stopped_in))
    _, progress, _ = train(cut, STEPS_8, stages=THREE)
    assert progress.step == stopped_in
    rest = Run(stage=cut.stage)  # a loader's state has its stage
    train(rest, STEPS_8, stages=THREE, start=progress)
    assert cut.begun + rest.begun == [5, 7]


def test_by_the_clock_stages_begin_when_their_number_of_steps_is_known(train):
    stages = (Stage(max_len=2, share=0.5), Stage(max_len=4, share=0.5))
    run = Run()
    lines, progress, _ = train(run, Length(seconds=20.0), stages=stages)
    assert run.plans == [(3, 19)] and progress.step == 19
    assert [line["max_len"] for line in lines] == 10 * [2] + 9 * [4]  # 9.5 of 19, to the even number
    assert run.begun == [11]


def test_a_first_stage_that_was_longer_than_its_share_when_the_steps_were_known_ends_at_once(train):
    """Four times scoring takes most of the time: of 20 steps a tenth are 2, and 3 were made by then."""
    stages = (Stage(max_len=2, share=0.1), Stage(max_len=4, share=0.9))
    run = Run(eval_s=2.0)
    lines, *_ = train(run, Length(seconds=20.0), stages=stages)
    assert run.plans == [(3, 11)] and [line["max_len"] for line in lines] == 3 * [2] + 8 * [4]
    assert run.begun == [4]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_ends_the_step_saves_and_gives_the_signals_back(train, number):
    before = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    run = Run(on_step=press(number, 3))
    lines, progress, interrupted = train(run, STEPS_8)
    assert len(lines) == 3 and interrupted
    assert run.saves == [progress] == [Progress(step=3, tokens=30, time_s=3.0, num_steps=8)]
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == before


def test_asked_to_stop_before_its_steps_are_known_it_is_saved_without_them(train):
    run = Run(on_step=press(signal.SIGINT, 2))
    _, progress, interrupted = train(run, Length(seconds=20.0))
    assert run.saves == [progress] == [Progress(step=2, tokens=20, time_s=2.0, num_steps=None)]
    assert interrupted and run.plans == []
    # And goes on timing where it stopped: of 20 s 5 are over behind step 5, 0.2 are for saving.
    run = Run()
    _, progress, _ = train(run, Length(seconds=20.0), start=progress)
    assert run.plans == [(5, 19)] and progress == Progress(step=19, tokens=190, time_s=19.0, num_steps=19)


def test_asked_to_stop_in_its_last_step_it_has_ended(train):
    _, progress, interrupted = train(Run(on_step=press(signal.SIGINT, 8)), STEPS_8)
    assert progress.step == 8 and not interrupted


def test_asked_to_stop_as_its_steps_are_fixed_it_is_saved_once(train):
    run = Run(on_step=press(signal.SIGINT, 3))
    _, progress, interrupted = train(run, Length(seconds=20.0))
    assert interrupted and [saved.step for saved in run.saves] == [3] and progress.num_steps == 19


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_interrupts_and_gives_the_signals_back(first):
    # A shell that starts a script in the background has it ignore Ctrl-C, and the tests with it.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt), stop_asked() as asked:
        assert not asked.is_set()
        os.kill(os.getpid(), first)
        assert asked.is_set()
        os.kill(os.getpid(), signal.SIGINT)
    after = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    signal.signal(signal.SIGINT, inherited)
    assert after == before


def test_outside_the_main_thread_no_signal_is_touched():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with stop_asked() as asked:
            seen.append((asked.is_set(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


def test_it_goes_on_in_the_middle(train):
    whole, cut = Run(), Run(on_step=press(signal.SIGINT, 11))
    length = Length(seconds=20.0)
    want, end, _ = train(whole, length)
    _, progress, _ = train(cut, length)
    rest = Run()
    got, again, interrupted = train(rest, length, start=progress)
    assert got == want and again == end and not interrupted
    assert rest.plans == [] and [saved.step for saved in rest.saves] == [19]
    assert cut.evals + rest.evals == whole.evals


def test_where_nothing_is_left_to_do_nothing_is_done(train):
    _, done, _ = train(Run(), STEPS_8)
    run = Run()
    lines, progress, interrupted = train(run, STEPS_8, start=done)
    assert (progress, interrupted) == (done, False)
    assert len(lines) == 8 and (run.evals, run.saves, run.plans) == ([], [], [])


def test_a_step_that_fails_leaves_the_signals_and_the_saves_before_it(train):
    before = signal.getsignal(signal.SIGINT)

    def fail(step):
        if step == 6:
            raise FloatingPointError("step: the loss is nan")

    run = Run(on_step=fail)
    with pytest.raises(FloatingPointError):
        train(run, STEPS_8, save_every_s=2.0)
    assert [saved.step for saved in run.saves] == [2, 4]
    assert signal.getsignal(signal.SIGINT) is before
