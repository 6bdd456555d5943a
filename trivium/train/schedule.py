"""How many steps a run has, and the learning rate over them, as a factor on each group's own rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

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
    """The learning rate over a run, as a factor: a linear warm-up to 1, then what `kind` says.

    wsd: constant up to the share `decay_from` of the run (None: .4), then linear to `final` at its end (None: .02).
    cosine: from the warm-up on half a cosine to `final` (None: .1, where Kimi K2's report has its rate end, 2e-4 to
    2e-5). The warm-up takes `warmup_steps`, or the share `warmup_share` of the steps, at least one; neither given: 10
    steps of wsd, 1% of a cosine.
    """

    kind: Literal["wsd", "cosine"] = "wsd"
    warmup_steps: int | None = None
    warmup_share: float | None = None
    decay_from: float | None = None
    final: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("wsd", "cosine"):
            raise ValueError(f"kind: wanted wsd or cosine, got {self.kind!r}")
        if self.warmup_steps is not None and self.warmup_share is not None:
            raise ValueError(
                f"warmup_steps: wanted either steps or a share, got {self.warmup_steps} and warmup_share "
                f"{self.warmup_share}"
            )
        if self.warmup_steps is not None and self.warmup_steps < 1:
            raise ValueError(f"warmup_steps: wanted at least 1, got {self.warmup_steps}")
        if self.warmup_share is not None and not 0 <= self.warmup_share < 1:
            raise ValueError(f"warmup_share: wanted a share in [0, 1), got {self.warmup_share}")
        if self.decay_from is not None and self.kind == "cosine":
            raise ValueError(f"decay_from: wanted none, a cosine decays from its warm-up on; got {self.decay_from}")
        if self.decay_from is not None and not 0 <= self.decay_from < 1:
            raise ValueError(f"decay_from: wanted a share in [0, 1), got {self.decay_from}")
        if self.final is not None and not 0 <= self.final <= 1:
            raise ValueError(f"final: wanted a factor in [0, 1], got {self.final}")

    def factor(self, step: int, num_steps: int | None) -> float:
        """The factor for step `step`, counted from 1, of `num_steps`.

        The decay has come as far as the steps before `step` have; so no step is made at a `final` of 0. `num_steps`
        None: not known yet, but so many that the constant part has not ended (`min_steps`). Raises ValueError for a
        schedule that cannot do without their number.
        """
        if num_steps is None:
            self.check_clock()
            return min(1.0, step / self._warmup(None))
        warmup_steps = self._warmup(num_steps)
        warmup = min(1.0, step / warmup_steps)
        if self.kind == "cosine":
            if step <= warmup_steps:
                return warmup
            decayed = (1 - math.cos(math.pi * (step - 1 - warmup_steps) / (num_steps - warmup_steps))) / 2
            return 1 - (1 - self._final) * decayed
        progress = (step - 1) / num_steps
        decayed = max(0.0, min(1.0, (progress - self._decay_from) / (1 - self._decay_from)))
        return warmup * (1 - (1 - self._final) * decayed)

    def min_steps(self, num_done: int) -> int:
        """The fewest steps a run can have of which `num_done` were made before their number was known."""
        self.check_clock()
        return max(num_done, math.ceil((num_done - 1) / self._decay_from))

    def check_steps(self, num_steps: int | None) -> None:
        """Raises ValueError for a warm-up, given in steps, that is not over before the run is."""
        if None not in (self.warmup_steps, num_steps) and self.warmup_steps >= num_steps > 1:
            raise ValueError(
                f"schedule.warmup_steps: wanted fewer than the {num_steps} steps of the run, got {self.warmup_steps}"
            )

    def check_clock(self) -> None:
        """Raises ValueError where a run by the clock cannot have this schedule.

        Its first steps are made, and timed, at the rate they would have whatever the number of all steps.
        """
        if self.kind == "cosine":
            raise ValueError(
                "schedule: a cosine wants the number of steps from the first one on, and a run by the clock does not "
                "know it; give the number of steps, or kind wsd"
            )
        if self.warmup_share is not None:
            raise ValueError(
                f"warmup_share: a run by the clock does not know what {self.warmup_share} of its steps are; give the "
                "number of steps, or warmup_steps"
            )
        if self._decay_from < TIMED_SHARE:
            raise ValueError(
                f"decay_from: a run by the clock times its first steps at the full rate and wants at least {TIMED_SHARE}"
                f", got {self._decay_from}; give the number of steps, or a later decay"
            )

    def _warmup(self, num_steps: int | None) -> int:
        if num_steps is None or self.warmup_steps is not None or (self.kind, self.warmup_share) == ("wsd", None):
            return 10 if self.warmup_steps is None else self.warmup_steps
        return max(1, round((0.01 if self.warmup_share is None else self.warmup_share) * num_steps))

    @property
    def _decay_from(self) -> float:
        return 0.4 if self.decay_from is None else self.decay_from

    @property
    def _final(self) -> float:
        if self.final is None:
            return 0.1 if self.kind == "cosine" else 0.02
        return self.final
