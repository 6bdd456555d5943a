"""How many tokens Muon needs for the loss that AdamW ends at, both tuned on one grid."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

from trivium.lab.experiment import (
    MET,
    MISSED,
    Column,
    Estimate,
    Experiment,
    Job,
    Panel,
    Picture,
    Result,
    Results,
    Say,
    Variant,
    Verdict,
    at_most,
)
from trivium.lab.text import prepare_text, read_text
from trivium.lab.training import Recipe, fresh_model, small_model, train_on_text
from trivium.train.balance import QuantileBalancer

MODEL = small_model()
RECIPE = Recipe(num_steps=240, step_tokens=4096, max_len=256, num_evals=12)

OPTIMISERS = {"Muon": "muon", "AdamW": "adamw"}
# Of AdamW's tokens, each with a schedule of its own: how far a run gets is known where its rate has fallen.
SHARES = (1.0, 0.85, 0.75, 0.65)
_TUNED_AT = 0  # the seed that the grid is searched with; the comparison does not use it


class Point(NamedTuple):
    """Of the grid, which is the same for both: the matrices' rate and momentum, and the rate of everything else.

    Momentum is Muon's, and AdamW's first beta.
    """

    matrix_lr: float
    other_lr: float
    momentum: float

    def __str__(self) -> str:
        return f"{self.matrix_lr:g}, others {self.other_lr:g}, momentum {self.momentum:g}"


MATRIX_LRS = (0.003, 0.006, 0.012, 0.024, 0.048, 0.096)
OTHER_LRS = (0.006, 0.012)
MOMENTA = (0.3, 0.6, 0.9)
GRID = tuple(Point(*point) for point in product(MATRIX_LRS, OTHER_LRS, MOMENTA))
USUAL = 0.9  # AdamW's momentum where nobody tunes it
USUAL_NAME = f"AdamW, momentum {USUAL:g}"


def tuning(optimiser: str, point: Point) -> Variant:
    """A point of the grid."""
    return Variant(name=f"tuning {optimiser}, {point}", settings=_settings(optimiser, point, 1.0))


def compared(optimiser: str, point: Point, share: float) -> Variant:
    """The best point, at seeds that did not choose it."""
    name = optimiser if share == 1 else f"{optimiser}, {share:.0%} of the tokens"
    return Variant(name=name, settings=_settings(optimiser, point, share))


def _settings(optimiser: str, point: Point, share: float) -> dict[str, object]:
    return {"matrices": OPTIMISERS[optimiser], **point._asdict(), "share": share}


def run(variant: Variant, seed: int, folder: Path, say: Say) -> Result:
    settings = dict(variant.settings)
    recipe = replace(RECIPE, num_steps=round(RECIPE.num_steps * settings.pop("share")), **settings)
    model = fresh_model(MODEL, seed)
    return train_on_text(model, recipe, read_text(folder), QuantileBalancer(), seed=seed, say=say, source="muon")


def plan(results: Results, num_seeds: int) -> list[Job]:
    """The whole grid at the tuning seed; then the best of each at `num_seeds` others, Muon at every share."""
    jobs = [(tuning(name, point), _TUNED_AT) for name in OPTIMISERS for point in GRID]
    if any(results.find(variant.name, seed) is None for variant, seed in jobs):
        return jobs
    usual = replace(compared("AdamW", best(results, "AdamW", momentum=USUAL), 1.0), name=USUAL_NAME)
    variants = [compared("AdamW", best(results, "AdamW"), 1.0), usual]
    variants += [compared("Muon", best(results, "Muon"), share) for share in SHARES]
    return jobs + [(variant, _TUNED_AT + 1 + seed) for variant in variants for seed in range(num_seeds)]


def best(results: Results, optimiser: str, *, momentum: float | None = None) -> Point:
    """The grid's point of the lowest final loss, of all or of those with this momentum."""
    points = [point for point in GRID if momentum in (None, point.momentum)]
    return min(points, key=lambda point: _tuned(results, optimiser, point))


def _tuned(results: Results, optimiser: str, point: Point) -> float:
    return results.value(tuning(optimiser, point).name, _TUNED_AT, "final")


def judge(results: Results) -> list[Verdict]:
    verdicts = [
        at_most(
            "share of AdamW's tokens in which Muon, its rate fallen too, has AdamW's final loss",
            shares(results, "AdamW"),
            0.75,
            3,
        ),
        at_most(f"the same of AdamW with momentum {USUAL:g}, its rates tuned", shares(results, USUAL_NAME), 0.75, 3),
        at_most("final loss, Muon less AdamW, the same tokens", results.difference("Muon", "AdamW", "final"), 0, 4),
    ]
    for name in OPTIMISERS:
        point = best(results, name)
        ends = (*MATRIX_LRS[:: len(MATRIX_LRS) - 1], *MOMENTA[:: len(MOMENTA) - 1])
        inside = not {point.matrix_lr, point.momentum} & set(ends)
        verdicts.append(
            Verdict(
                goal=f"{name}: the best rate and momentum of the matrices are no edge of the grid",
                target="inside",
                found=str(point),
                outcome=MET if inside else MISSED,
            )
        )
    return verdicts


def shares(results: Results, other: str) -> Estimate:
    """Seed by seed, the share of the tokens at which Muon's line through its final losses meets the other's final loss."""
    names = [(share, compared("Muon", best(results, "Muon"), share).name) for share in sorted(SHARES)]
    found = []
    for run in results.of(other):
        points = [(share, results.value(name, run.seed, "final")) for share, name in names]
        found.append(crossing(points, results.value(other, run.seed, "final")))
    return Estimate.of(found)


def crossing(points: list[tuple[float, float]], target: float) -> float:
    """Where the losses (x, loss) first come down to `target`, linear in log x between two of them.

    The first x where they begin below it, infinite where they never do; -inf where what has the target diverged.
    """
    if not math.isfinite(target):
        return -math.inf
    for (x, loss), (next_x, next_loss) in pairwise(points):
        if loss <= target:
            return x
        if next_loss <= target:
            part = (loss - target) / (loss - next_loss)
            return math.exp(math.log(x) + part * (math.log(next_x) - math.log(x)))
    return math.inf


def notes(results: Results) -> list[str]:
    columns = [(name, momentum) for name in OPTIMISERS for momentum in MOMENTA]
    lines = [
        "| rate of the matrices, of everything else | " + " | ".join(f"{name}, {momentum:g}" for name, momentum in columns) + " |",
        "| ---: |" + " ---: |" * len(columns),
    ]  # fmt: skip
    for matrix_lr, other_lr in product(MATRIX_LRS, OTHER_LRS):
        losses = [_tuned(results, name, Point(matrix_lr, other_lr, momentum)) for name, momentum in columns]
        cells = [f"{loss:.4f}" if math.isfinite(loss) else "diverged" for loss in losses]
        lines.append(f"| {matrix_lr:g}, {other_lr:g} | " + " | ".join(cells) + " |")
    return [
        f"The grid by optimiser and momentum, final held-out loss at seed {_TUNED_AT}, which the comparison leaves out:",
        "\n".join(lines),
    ]


def shown(results: Results) -> list[str]:
    return [name for name in results.variants if not name.startswith("tuning")]


def pictures(results: Results) -> list[Picture]:
    panels = tuple(
        Panel(title=title, lines=tuple((name, name, curve) for name in shown(results)))
        for title, curve in (("held-out text, nats a token (an excerpt)", "heldout"), ("training loss", "loss"))
    )
    return [Picture(title="Muon beside AdamW", x="tokens", panels=panels)]


def _list(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


EXPERIMENT = Experiment(
    name="muon",
    title="Muon beside AdamW",
    claim="Muon needs about half of AdamW's compute (Moonlight, arXiv 2502.16982: .52×), or three quarters (small mixtures of "
    "experts trained in public: 1.2 to 1.3×).",
    setting=f"A K3 of {MODEL.num_layers} layers, width {MODEL.hidden_size}, {MODEL.moe.num_experts} experts of which "
    f"{MODEL.moe.num_experts_per_token} are active; {RECIPE.num_steps} steps of {RECIPE.step_tokens:,} tokens of Python "
    "source, rates constant for 40% of the run, then falling to 2%. The matrices are under per-Head Muon or under AdamW, "
    f"both with decay {RECIPE.weight_decay:g}; everything else is under AdamW (.9, .95) in both. Both have the same grid: "
    f"rates of the matrices {_list(MATRIX_LRS)}, of everything else {_list(OTHER_LRS)}, momentum of the matrices "
    f"{_list(MOMENTA)} (AdamW's first beta; its second is .95). "
    "The best point of each is then run at seeds of its own, Muon also with fewer tokens and a schedule as much shorter.",
    settings={"model": asdict(replace(MODEL, source={})), "recipe": asdict(RECIPE)},
    variants=tuple(tuning(name, point) for name in OPTIMISERS for point in GRID),
    plan=plan,
    prepare=prepare_text,
    run=run,
    judge=judge,
    columns=(
        Column(number="final", heading="final held-out loss", digits=4),
        Column(number="max_vio", heading="median MaxVio", digits=2),
    ),
    shown=shown,
    pictures=pictures,
    notes=notes,
    noise="final",
)
