"""The length curriculum: how long the pieces of documents are, stage by stage of one run."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# A run by the clock knows its number of steps after a twelfth of its time or so, and is in its first stage until then.
FIRST_BY_CLOCK = 0.1
# Of the sum of the shares: what rounding to a few digits may cost.
_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Pieces of at most `max_len` tokens for the share `share` of the run's steps, and so of its tokens."""

    max_len: int
    share: float

    def __post_init__(self) -> None:
        if self.max_len < 1:
            raise ValueError(f"max_len: wanted at least 1, got {self.max_len}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share: wanted one in (0, 1], got {self.share}")


# The lengths are those of small experiments; the shares are ours: 512 and 1,024 get a tenth of what 256 gets, so that
# four times the first length is reached within 10% extra tokens.
CPU_STAGES = (
    Stage(max_len=256, share=0.8),
    Stage(max_len=512, share=0.04),
    Stage(max_len=1024, share=0.04),
    Stage(max_len=4096, share=0.12),
)
# Kimi K3's lengths; what share each had was never published, these are ours.
PAPER_STAGES = (
    Stage(max_len=8 * 1024, share=0.9),
    Stage(max_len=64 * 1024, share=0.07),
    Stage(max_len=256 * 1024, share=0.02),
    Stage(max_len=1024 * 1024, share=0.01),
)


def check_stages(stages: Sequence[Stage], num_steps: int | None) -> None:
    """Raises ValueError where the stages are no curriculum, or none of a run of `num_steps`.

    Lengths rise, shares sum to 1, and each stage gets a step. `num_steps` None, as by the clock: the first stage has at
    least a tenth.
    """
    if not stages:
        raise ValueError("stages: wanted at least one, got none")
    for before, after in pairwise(stages):
        if before.max_len >= after.max_len:
            raise ValueError(f"stages: wanted lengths that rise, got {after.max_len} behind {before.max_len}")
    total = math.fsum(stage.share for stage in stages)
    if abs(total - 1) > _TOLERANCE:
        raise ValueError(f"stages: wanted shares that sum to 1, those of {len(stages)} stages sum to {total:.9g}")
    if num_steps is None and stages[0].share < FIRST_BY_CLOCK:
        raise ValueError(
            f"stages: a run by the clock does not know at first when the {len(stages)} stages change; give the number of "
            f"steps, or a first stage of at least {FIRST_BY_CLOCK:g}, got {stages[0].share:g}"
        )
    if num_steps is not None and num_steps < len(stages):
        raise ValueError(f"stages: {len(stages)} stages want a step each, the run has {num_steps}")


def stage_at(stages: Sequence[Stage], step: int, num_steps: int | None) -> int:
    """The index of the stage that step `step`, counted from 1, of `num_steps` belongs to; None: not known yet, the first."""
    if num_steps is None:
        check_stages(stages, None)
        return 0
    if not 1 <= step <= num_steps:
        raise ValueError(f"stages: wanted a step from 1 to {num_steps}, got {step}")
    return bisect_left(last_steps(stages, num_steps), step)


def last_steps(stages: Sequence[Stage], num_steps: int) -> tuple[int, ...]:
    """The last step of each stage: its share of the steps, rounded, but each has at least one."""
    check_stages(stages, num_steps)
    last, done = [], 0.0
    for idx, stage in enumerate(stages):
        done += stage.share
        earliest = last[-1] + 1 if last else 1
        latest = num_steps - (len(stages) - 1 - idx)
        last.append(min(max(round(done * num_steps), earliest), latest))
    last[-1] = num_steps
    return tuple(last)
