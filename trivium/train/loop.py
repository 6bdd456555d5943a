"""The training loop: steps until their number is reached, or somebody asks it to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trivium.data.batch import Batch
from trivium.model.kimi_k3 import KimiK3
from trivium.parallel.world import ALONE, World
from trivium.train.heldout import Heldout
from trivium.train.log import Metrics, RunLog
from trivium.train.schedule import Length, Schedule
from trivium.train.stages import Stage, stage_at
from trivium.train.step import StepResult


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come: steps, tokens, and seconds of training, pauses between two processes left out.

    `skipped` of the steps were not applied. `num_steps` is the number of steps in all, None as long as it is not known.
    """

    step: int = 0
    tokens: int = 0
    time_s: float = 0.0
    skipped: int = 0
    num_steps: int | None = None


class Source(Protocol):
    """Where the loop gets a step's micro-batches: a `Loader`."""

    def __next__(self) -> list[Batch]: ...
    def enter_stage(self, index: int, max_len: int) -> bool: ...


class Keeper(Protocol):
    """What the loop asks of the run it is part of. Of several processes all ask, in the same order."""

    def look(self, model: KimiK3) -> None:
        """Between the gradients and the update of a step behind which the held-out text is scored."""

    def evaluate(self, step: int, tokens: int) -> Heldout: ...

    def plan(self, num_steps: int) -> None:
        """The number of steps is known from here on."""

    def begin_stage(self) -> None:
        """The next step is the first of a stage that is not the first one."""

    def save(self, progress: Progress) -> None: ...


class Step(Protocol):
    """`train_step` with everything given but the data."""

    def __call__(self, batches: list[Batch], *, look: Callable[[KimiK3], None] | None) -> StepResult: ...


def train_loop(
    make_step: Step,
    source: Source,
    optimisers: Sequence[torch.optim.Optimizer],
    schedule: Schedule,
    stages: Sequence[Stage],
    length: Length,
    log: RunLog,
    keeper: Keeper,
    start: Progress,
    *,
    num_evals: int,
    eval_s: float,
    save_every_s: float,
    world: World = ALONE,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Progress, bool]:
    """Steps from `start` on; returns how far it came and whether it was asked to stop before the end.

    Held-out text is scored `num_evals` times, evenly over the steps (`eval_s` is what once takes), but not behind the
    last step. The run is saved when its number of steps is fixed, every `save_every_s` seconds, and at the end. The
    first Ctrl-C or SIGTERM lets the step under way finish, saves and returns; a second Ctrl-C interrupts. Of several
    processes the first one's clock counts, and a signal to any of them.
    """
    num_steps = start.num_steps if length.num_steps is None else length.num_steps
    step, tokens, skipped = start.step, start.tokens, start.skipped
    start_s = clock() - start.time_s
    steps_s: list[float] = []
    saved_step, saved_s, save_s = step, clock(), 0.0
    stopped = False

    def save() -> None:
        nonlocal saved_step, saved_s, save_s
        begun_s = clock()
        log.sync()
        time_s = begun_s - start_s
        keeper.save(Progress(step=step, tokens=tokens, time_s=time_s, skipped=skipped, num_steps=num_steps))
        saved_step, saved_s = step, clock()
        save_s = saved_s - begun_s

    with stop_asked() as asked:
        while (num_steps is None or step < num_steps) and not stopped:
            step += 1
            step_start_s = clock()
            factor = schedule.factor(step, num_steps)
            for optimiser in optimisers:
                for group in optimiser.param_groups:
                    group["lr"] = group["full_lr"] * factor
            stage = stage_at(stages, step, num_steps)
            if source.enter_stage(stage, stages[stage].max_len):
                keeper.begin_stage()
            due = num_steps is not None and _eval_due(step, num_steps, num_evals)
            result = make_step(next(source), look=keeper.look if due else None)
            step_end_s = clock()
            tokens += result.num_tokens
            skipped += result.skipped is not None
            steps_s.append(step_end_s - step_start_s)
            heldout = keeper.evaluate(step, tokens) if due else None
            left_s = None
            if num_steps is not None:
                left_s = (num_steps - step) * (clock() - start_s - start.time_s) / len(steps_s)
            log.write(
                Metrics(
                    step=step,
                    tokens=tokens,
                    time_s=round(step_end_s - start_s, 3),
                    loss=result.loss,
                    lr=optimisers[0].param_groups[0]["lr"],
                    grad_norm=result.grad_norm,
                    tokens_per_s=round(result.num_tokens / max(1e-9, steps_s[-1]), 1),
                    heldout_loss=heldout.loss if heldout else None,
                    heldout_bpb=heldout.bpb if heldout else None,
                    max_vio=result.balance.max_vio if result.balance else None,
                    idle_experts=result.balance.idle_experts if result.balance else None,
                    out_of_range=result.balance.out_of_range if result.balance else None,
                    clipped_heads=result.clipped_heads,
                    skipped=skipped,
                    reason=result.skipped,
                    max_len=stages[stage].max_len,
                ),
                num_steps,
                left_s,
            )
            fixed, save_due = None, False
            if num_steps is None:
                # What a save takes is not known yet: a hundredth of the time between two is close for a small model.
                reserved_s = num_evals * eval_s + length.seconds * 0.01
                fixed = length.fixed_steps(step, steps_s, clock() - start_s, reserved_s)
            else:
                # However long a save takes, nine tenths of the time are for training.
                save_due = clock() - saved_s >= max(save_every_s, 9 * save_s)
            stopped, fixed, save_due = _agreed(world, asked.is_set(), fixed, save_due)
            if fixed is not None:
                num_steps = max(fixed, schedule.min_steps(step))
                keeper.plan(num_steps)
            if fixed is not None or save_due:
                save()
        if step > saved_step:
            save()
    progress = Progress(step=step, tokens=tokens, time_s=clock() - start_s, skipped=skipped, num_steps=num_steps)
    return progress, num_steps is None or step < num_steps


def _agreed(world: World, asked: bool, fixed: int | None, save_due: bool) -> tuple[bool, int | None, bool]:
    """One answer for all processes: stop where any was asked to, the rest as the first one's clock says."""
    own = (float(asked), float(fixed or 0) * world.is_first, float(save_due) * world.is_first)
    asked_sum, fixed_sum, due_sum = world.sum([*own])
    return asked_sum > 0, int(fixed_sum) or None, due_sum > 0


def _eval_due(step: int, num_steps: int, num_evals: int) -> bool:
    """Evenly over the steps; never behind the last one: the whole text is scored there."""
    return step < num_steps and step * num_evals // num_steps > (step - 1) * num_evals // num_steps


@contextmanager
def stop_asked() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; from the second Ctrl-C on it interrupts as ever."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # signals reach the main thread alone
        return

    def ask(number: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
