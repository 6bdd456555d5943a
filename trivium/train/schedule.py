"""How many steps a run has, and the learning rate over them, as a factor on each group's own rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# The first steps of a run by the clock are timed until this share of its time is over. Few enough to come before any
# schedule decays, many enough that one disturbed step does not count.
TIMED_SHARE = 0.08
_MIN_TIMED = 3


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long a run is: so many steps, or as many as fit into `seconds` at the pace of the first ones."""

    seconds: float
    num_steps: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"minutes: wanted a number above 0, got {self.seconds / 60:g}")
        if self.num_steps is not None and self.num_steps < 1:
            raise ValueError(f"steps: wanted at least 1, got {self.num_steps}")

    def fixed_steps(self, step: int, steps_s: Sequence[float], time_s: float, reserved_s: float) -> int | None:
        """The number of steps in all, as step `step` is done; None while more have to be timed.

        `steps_s` are the seconds of the last steps, one after the other; the first of a process is slower, and left
        out. `time_s` is the run's time up to now, `reserved_s` what evaluating and saving will still take.
        """
        if len(steps_s) < _MIN_TIMED or time_s < TIMED_SHARE * self.seconds:
            return None
        left_s = self.seconds - time_s - reserved_s
        return step + max(0, int(left_s / max(1e-9, median(steps_s[1:]))))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up over `warmup_steps`, then constant, then linear to `final` at the end.

    The constant part ends at the share `decay_from` of the run.
    """

    warmup_steps: int = 10
    decay_from: float = 0.4
    final: float = 0.02

    def __post_init__(self) -> None:
        if self.warmup_steps < 1:
            raise ValueError(f"warmup_steps: wanted at least 1, got {self.warmup_steps}")
        if not 0 <= self.decay_from < 1:
            raise ValueError(f"decay_from: wanted a share in [0, 1), got {self.decay_from}")
        if not 0 <= self.final <= 1:
            raise ValueError(f"final: wanted a factor in [0, 1], got {self.final}")

    def factor(self, step: int, num_steps: int | None) -> float:
        """The factor for step `step`, counted from 1, of `num_steps`.

        None: not known yet, but so many that the constant part has not ended (`min_steps`).
        """
        warmup = min(1.0, step / self.warmup_steps)
        if num_steps is None:
            return warmup
        progress = (step - 1) / num_steps
        decayed = max(0.0, min(1.0, (progress - self.decay_from) / (1 - self.decay_from)))
        return warmup * (1 - (1 - self.final) * decayed)

    def min_steps(self, num_done: int) -> int:
        """The fewest steps a run can have of which `num_done` were made before their number was known."""
        return max(num_done, math.ceil((num_done - 1) / self.decay_from))
