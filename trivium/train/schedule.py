"""The learning rate over a run, as a factor on each group's own rate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up over `warmup_steps`, then constant, then linear to `final` at the end.

    The constant part ends at the share `decay_from` of the run. How far the run has come is for the caller to say, in
    [0, 1]: by the clock or by a count of steps.
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

    def factor(self, step: int, progress: float) -> float:
        """The factor for step `step`, counted from 1, of a run that has come as far as `progress`."""
        warmup = min(1.0, step / self.warmup_steps)
        decayed = max(0.0, min(1.0, (progress - self.decay_from) / (1 - self.decay_from)))
        return warmup * (1 - (1 - self.final) * decayed)
