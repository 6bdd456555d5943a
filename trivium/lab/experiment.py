"""An experiment: a published claim, the variants it compares, and the verdict over their runs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Say = Callable[[str], None]

# 97.5% points of Student's t for 1, 2, ... degrees of freedom. A mean of more than ten seeds takes the last: too wide.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the ways that are compared. `settings` is what its runs differ in from the others', as JSON."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run found: single numbers, and curves as (x, y). A number that is not finite is kept as None."""

    numbers: dict[str, float | None]
    curves: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run. `made_by` are the machine, the versions and the threads."""

    variant: str
    seed: int
    fingerprint: str
    seconds: float
    made_by: dict[str, Any]
    result: Result

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Run:
        result = content["result"]
        curves = {name: (list(xs), list(ys)) for name, (xs, ys) in result["curves"].items()}
        return cls(**{**content, "result": Result(numbers=result["numbers"], curves=curves)})


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over seeds and half the width of its 95% t-interval, which is infinite for one seed.

    Where a number is not finite there is no interval, and the mean is what it is: inf where something never came or a
    loss diverged, -inf where what it is compared with did, nan where both did.
    """

    mean: float
    half: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        if not values:
            raise ValueError("estimate: wanted the numbers of at least one seed, got none")
        if not all(map(math.isfinite, values)):
            return cls(mean=sum(values), half=0.0, count=len(values))
        mean = math.fsum(values) / len(values)
        half = (
            math.inf
            if len(values) == 1
            else _T[min(len(values) - 1, len(_T)) - 1] * spread(values) / len(values) ** 0.5
        )
        return cls(mean=mean, half=half, count=len(values))

    def text(self, digits: int) -> str:
        """`mean ± half`, or the mean alone where one seed gives no interval."""
        if not math.isfinite(self.mean):
            return {math.inf: "never", -math.inf: "the other diverged"}.get(self.mean, "both diverged")
        return f"{self.mean:.{digits}f}" + (f" ± {self.half:.{digits}f}" if math.isfinite(self.half) else "")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A goal, what was wanted, what was found, and which of OUTCOMES that is."""

    goal: str
    target: str
    found: str
    outcome: str


MET, MET_WITHIN, MISSED_WITHIN, MISSED = "met", "met, within noise", "not met, within noise", "not met"


class Results:
    """The finished runs of one experiment."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = tuple(runs)

    def find(self, variant: str, seed: int) -> Run | None:
        return next((run for run in self.runs if (run.variant, run.seed) == (variant, seed)), None)

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(run.variant for run in self.runs))

    def of(self, variant: str) -> list[Run]:
        """The variant's runs by rising seed."""
        return sorted((run for run in self.runs if run.variant == variant), key=lambda run: run.seed)

    def values(self, variant: str, number: str) -> list[float]:
        """The number of every seed that has it, infinite where it was not finite."""
        runs = [run for run in self.of(variant) if number in run.result.numbers]
        return [self.value(variant, run.seed, number) for run in runs]

    def value(self, variant: str, seed: int, number: str) -> float:
        """The number of one run, infinite where it was not finite."""
        run = self.find(variant, seed)
        if run is None or number not in run.result.numbers:
            raise ValueError(f"results: no {number} of {variant}, seed {seed}")
        value = run.result.numbers[number]
        return math.inf if value is None else value

    def estimate(self, variant: str, number: str) -> Estimate:
        return Estimate.of(self.values(variant, number))

    def difference(self, variant: str, other: str, number: str) -> Estimate:
        """`variant` minus `other`, seed by seed: the same initialisation and the same data on both sides."""
        seeds = [run.seed for run in self.of(variant) if self.find(other, run.seed) is not None]
        return Estimate.of([self.value(variant, seed, number) - self.value(other, seed, number) for seed in seeds])

    def noise(self, number: str) -> float | None:
        """Standard deviation from seed to seed, pooled over the variants that have two runs or more; None without."""
        groups = [values for values in (self.values(name, number) for name in self.variants) if len(values) > 1]
        groups = [values for values in groups if all(map(math.isfinite, values))]
        freedom = sum(len(values) - 1 for values in groups)
        if not freedom:
            return None
        return math.sqrt(sum(spread(values) ** 2 * (len(values) - 1) for values in groups) / freedom)


Job = tuple[Variant, int]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the page's table: a number of the results."""

    number: str
    heading: str
    digits: int


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines (label, variant, curve), each the mean over its seeds with a band; `marks` are heights by name."""

    title: str
    lines: tuple[tuple[str, str, str], ...]
    log_y: bool = False
    marks: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Panels over the same x, one below the other; a label has one colour in all of them."""

    title: str
    x: str
    panels: tuple[Panel, ...]
    log_x: bool = False


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A claim with its source, how it is tried, and how the runs are judged.

    `setting` says in prose what is done, `settings` in JSON what every run reads: they are part of each run's
    fingerprint. `prepare(folder, say)` makes the data, once, and returns what identifies it. `run(variant, seed, folder,
    say)` is one run: in a process of its own, so it is a function of a module. `plan(results, num_seeds)` are all jobs
    that are wanted as far as the finished ones tell; None: every variant with every seed. `noise` is the number whose
    spread over seeds is the noise floor. `shown(results)` are the variants in the page's table, None is all;
    `notes(results)` are paragraphs of Markdown behind it.
    """

    name: str
    title: str
    claim: str
    setting: str
    settings: dict[str, Any]
    variants: tuple[Variant, ...]
    run: Callable[[Variant, int, Path, Say], Result]
    judge: Callable[[Results], list[Verdict]]
    columns: tuple[Column, ...]
    pictures: Callable[[Results], list[Picture]]
    noise: str
    num_seeds: int = 3
    shown: Callable[[Results], list[str]] | None = None
    prepare: Callable[[Path, Say], dict[str, Any]] = lambda folder, say: {}
    plan: Callable[[Results, int], list[Job]] | None = None
    notes: Callable[[Results], list[str]] = lambda results: []

    def jobs(self, results: Results, num_seeds: int) -> list[Job]:
        """All that is wanted as far as the finished runs tell."""
        if self.plan is not None:
            return self.plan(results, num_seeds)
        return [(variant, seed) for seed in range(num_seeds) for variant in self.variants]

    def fingerprint(self, variant: Variant, seed: int, facts: dict[str, Any]) -> str:
        """Of everything a run depends on but the code: settings of both kinds, seed, data."""
        read = [self.name, self.settings, variant.name, variant.settings, seed, facts]
        return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()[:16]


def at_most(goal: str, found: Estimate, target: float, digits: int, *, wanted: str = "") -> Verdict:
    """The verdict on a mean that should not lie above the target. `wanted` is how the target is written."""
    return Verdict(
        goal=goal,
        target=wanted or f"≤ {target:.{digits}f}",
        found=found.text(digits),
        outcome=_outcome(target - found.mean, found.half),
    )


def at_least(goal: str, found: Estimate, target: float, digits: int, *, wanted: str = "") -> Verdict:
    """The verdict on a mean that should not lie below the target."""
    return Verdict(
        goal=goal,
        target=wanted or f"≥ {target:.{digits}f}",
        found=found.text(digits),
        outcome=_outcome(found.mean - target if math.isfinite(found.mean) else -math.inf, found.half),
    )


def _outcome(margin: float, half: float) -> str:
    """Within noise where the interval holds the target's other side, too."""
    if margin >= 0:
        return MET if margin >= half else MET_WITHIN
    return MISSED_WITHIN if -margin <= half else MISSED


def spread(values: Sequence[float]) -> float:
    """Standard deviation of a sample of two or more."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def rounded(value: float) -> float | None:
    """Six significant digits, enough for a page and short in a file; None where it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def thinned(xs: Sequence[float], ys: Sequence[float], most: int = 80) -> tuple[list[float], list[float]]:
    """A curve for a picture: every point of the first twenty, then evenly, at most about `most`; the last one stays."""
    step = max(1, -(-(len(xs) - 20) // max(1, most - 20)))
    kept = [idx for idx in range(len(xs)) if idx < 20 or (len(xs) - 1 - idx) % step == 0]
    kept = [idx for idx in kept if math.isfinite(ys[idx])]
    return [float(f"{xs[idx]:.6g}") for idx in kept], [float(f"{ys[idx]:.5g}") for idx in kept]
