"""The training loop: steps until the time or the number of steps is used up, or somebody presses Ctrl-C."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trivium.data.batch import Batch
from trivium.model.kimi_k3 import KimiK3
from trivium.train.heldout import Heldout
from trivium.train.log import Metrics, RunLog
from trivium.train.schedule import Schedule
from trivium.train.step import train_step


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a run is: by the clock, or by steps where `num_steps` is given."""

    seconds: float
    num_steps: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"minutes: wanted a number above 0, got {self.seconds / 60:g}")
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(f"steps: wanted at least 1, got {self.num_steps}")

    def progress(self, step: int, time_s: float) -> float:
        """The share of the run that is over after `step` steps and `time_s` seconds."""
        return time_s / self.seconds if self.num_steps is None else step / self.num_steps

    def left_s(self, step: int, time_s: float) -> float:
        """Seconds to the end; by steps, at the pace so far."""
        if self.num_steps is None:
            return self.seconds - time_s
        return (self.num_steps - step) * time_s / max(1, step)


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    num_steps: int
    num_tokens: int
    time_s: float
    interrupted: bool


def train_loop(
    model: KimiK3,
    batches: Iterator[Batch],
    optimisers: Sequence[torch.optim.Optimizer],
    schedule: Schedule,
    length: Length,
    log: RunLog,
    *,
    evaluate: Callable[[], Heldout],
    num_evals: int,
    clock: Callable[[], float] = time.monotonic,
) -> LoopResult:
    """One batch a step. `evaluate` is called `num_evals` times, evenly over the run; its time is part of the run's.

    Ctrl-C lets the step under way finish and ends the run; a second one ends it at once.
    """
    model.train()
    start_s = clock()
    step = num_tokens = 0
    progress = 0.0
    with stop_asked() as asked:
        while progress < 1 and not asked.is_set():
            step += 1
            step_start_s = clock()
            factor = schedule.factor(step, progress)
            for optimiser in optimisers:
                for group in optimiser.param_groups:
                    group["lr"] = group["full_lr"] * factor
            result = train_step(model, [next(batches)], optimisers)
            step_end_s = clock()
            num_tokens += result.num_tokens
            before, progress = progress, length.progress(step, step_end_s - start_s)
            # A run by the clock sees its end come: the whole held-out text is scored there anyway.
            due = int(progress * num_evals) > int(before * num_evals) and progress < 1
            heldout = evaluate() if due else None
            log.write(
                Metrics(
                    step=step,
                    tokens=num_tokens,
                    time_s=round(step_end_s - start_s, 3),
                    loss=result.loss,
                    lr=optimisers[0].param_groups[0]["lr"],
                    grad_norm=result.grad_norm,
                    tokens_per_s=round(result.num_tokens / max(1e-9, step_end_s - step_start_s), 1),
                    heldout_loss=heldout.loss if heldout else None,
                    heldout_bpb=heldout.bpb if heldout else None,
                    max_vio=result.balance.max_vio,
                    idle_experts=result.balance.idle_experts,
                ),
                length.left_s(step, clock() - start_s),
            )
            progress = max(progress, length.progress(step, clock() - start_s))
        interrupted = asked.is_set()
    return LoopResult(num_steps=step, num_tokens=num_tokens, time_s=clock() - start_s, interrupted=interrupted)


@contextmanager
def stop_asked() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; from the second on it interrupts as ever."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # signals reach the main thread alone
        return

    def ask(number: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
