"""How many tokens Muon needs for the loss that AdamW ends at, both tuned on one grid."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

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

MATRIX_LRS = (0.0015, 0.003, 0.006, 0.012, 0.024, 0.048)
OTHER_LRS = (0.003, 0.006)
OPTIMISERS = {"Muon": "muon", "AdamW": "adamw"}
# Of AdamW's tokens, each with a schedule of its own: how far a run gets is known where its rate has fallen.
SHARES = (1.0, 0.75, 0.6, 0.45)
_TUNED_AT = 0  # the seed that rates are chosen by; the comparison does not use it


def tuning(optimiser: str, matrix_lr: float, other_lr: float) -> Variant:
    """A point of the grid."""
    return Variant(
        name=f"tuning {optimiser}, {matrix_lr:g} and {other_lr:g}",
        settings=_settings(optimiser, matrix_lr, other_lr, 1.0),
    )


def compared(optimiser: str, matrix_lr: float, other_lr: float, share: float) -> Variant:
    """The best point, at seeds that did not choose it."""
    name = optimiser if share == 1 else f"{optimiser}, {share:.0%} of the tokens"
    return Variant(name=name, settings=_settings(optimiser, matrix_lr, other_lr, share))


def _settings(optimiser: str, matrix_lr: float, other_lr: float, share: float) -> dict[str, object]:
    return {"matrices": OPTIMISERS[optimiser], "matrix_lr": matrix_lr, "other_lr": other_lr, "share": share}


def run(variant: Variant, seed: int, folder: Path, say: Say) -> Result:
    settings = dict(variant.settings)
    recipe = replace(RECIPE, num_steps=round(RECIPE.num_steps * settings.pop("share")), **settings)
    model = fresh_model(MODEL, seed)
    return train_on_text(model, recipe, read_text(folder), QuantileBalancer(), seed=seed, say=say, source="muon")


def plan(results: Results, num_seeds: int) -> list[Job]:
    """The whole grid at the tuning seed; then the best of each at `num_seeds` others, Muon at every share."""
    jobs = [(tuning(*point), _TUNED_AT) for point in _grid()]
    if any(results.find(variant.name, seed) is None for variant, seed in jobs):
        return jobs
    seeds = range(_TUNED_AT + 1, _TUNED_AT + 1 + num_seeds)
    jobs += [(compared("AdamW", *best(results, "AdamW"), 1.0), seed) for seed in seeds]
    return jobs + [(compared("Muon", *best(results, "Muon"), share), seed) for share in SHARES for seed in seeds]


def best(results: Results, optimiser: str) -> tuple[float, float]:
    """The rates of the grid's lowest final loss."""
    return min(
        ((m, o) for name, m, o in _grid() if name == optimiser), key=lambda rates: _tuned(results, optimiser, *rates)
    )


def _grid() -> list[tuple[str, float, float]]:
    return [(name, m, o) for name in OPTIMISERS for m in MATRIX_LRS for o in OTHER_LRS]


def _tuned(results: Results, optimiser: str, matrix_lr: float, other_lr: float) -> float:
    return results.value(tuning(optimiser, matrix_lr, other_lr).name, _TUNED_AT, "final")


def judge(results: Results) -> list[Verdict]:
    verdicts = [
        at_most(
            "share of AdamW's tokens in which Muon, its rate fallen too, has AdamW's final loss",
            shares(results),
            0.75,
            3,
        ),
        at_most("final loss, Muon less AdamW, the same tokens", results.difference("Muon", "AdamW", "final"), 0, 4),
    ]
    for name in OPTIMISERS:
        matrix_lr, other_lr = best(results, name)
        inside = matrix_lr not in (MATRIX_LRS[0], MATRIX_LRS[-1])
        verdicts.append(
            Verdict(
                goal=f"{name}: the best rate of the matrices is no edge of the grid",
                target="inside",
                found=f"{matrix_lr:g} (others {other_lr:g})",
                outcome=MET if inside else MISSED,
            )
        )
    return verdicts


def shares(results: Results) -> Estimate:
    """Seed by seed, the share of the tokens at which Muon's line through its final losses meets AdamW's final loss."""
    found = []
    for adamw in results.of("AdamW"):
        names = [(share, compared("Muon", *best(results, "Muon"), share).name) for share in sorted(SHARES)]
        points = [(share, results.value(name, adamw.seed, "final")) for share, name in names]
        found.append(crossing(points, results.value("AdamW", adamw.seed, "final")))
    return Estimate.of(found)


def crossing(points: list[tuple[float, float]], target: float) -> float:
    """Where the losses (x, loss) first come down to `target`, linear in log x between two of them.

    The first x where they begin below it, infinite where they never do.
    """
    for (x, loss), (next_x, next_loss) in pairwise(points):
        if loss <= target:
            return x
        if next_loss <= target:
            part = (loss - target) / (loss - next_loss)
            return math.exp(math.log(x) + part * (math.log(next_x) - math.log(x)))
    return math.inf


def notes(results: Results) -> list[str]:
    columns = [(name, other_lr) for name in OPTIMISERS for other_lr in OTHER_LRS]
    lines = [
        "| rate of the matrices | " + " | ".join(f"{name}, others {other_lr:g}" for name, other_lr in columns) + " |",
        "| ---: |" + " ---: |" * len(columns),
    ]
    for matrix_lr in MATRIX_LRS:
        losses = [_tuned(results, name, matrix_lr, other_lr) for name, other_lr in columns]
        lines.append(
            f"| {matrix_lr:g} | " + " | ".join(f"{x:.4f}" if math.isfinite(x) else "diverged" for x in losses) + " |"
        )
    on_the_way = [
        crossing(list(zip(*muon.result.curves["heldout"], strict=True)), adamw.result.curves["heldout"][1][-1])
        / adamw.result.curves["heldout"][0][-1]
        for muon, adamw in zip(results.of("Muon"), results.of("AdamW"), strict=True)
    ]
    along = Estimate.of(on_the_way).text(3)
    return [
        f"The grid, final held-out loss at seed {_TUNED_AT}, which the comparison leaves out:",
        "\n".join(lines),
        f"Read along Muon's whole run instead, whose rate has not fallen yet where the curves cross: {along} of the tokens.",
    ]


def shown(results: Results) -> list[str]:
    return [name for name in results.variants if not name.startswith("tuning")]


def pictures(results: Results) -> list[Picture]:
    panels = tuple(
        Panel(title=title, lines=tuple((name, name, curve) for name in shown(results)))
        for title, curve in (("held-out text, nats a token (an excerpt)", "heldout"), ("training loss", "loss"))
    )
    return [Picture(title="Muon beside AdamW", x="tokens", panels=panels)]


EXPERIMENT = Experiment(
    name="muon",
    title="Muon beside AdamW",
    claim="Muon needs about half of AdamW's compute (Moonlight, arXiv 2502.16982: .52×), or three quarters (small mixtures of "
    "experts trained in public: 1.2 to 1.3×).",
    setting=f"A K3 of {MODEL.num_layers} layers, width {MODEL.hidden_size}, {MODEL.moe.num_experts} experts of which "
    f"{MODEL.moe.num_experts_per_token} are active; {RECIPE.num_steps} steps of {RECIPE.step_tokens:,} tokens of Python "
    "source, rates constant for 40% of the run, then falling to 2%. The matrices are under per-Head Muon or under AdamW "
    f"(.9, .95), both with decay {RECIPE.weight_decay:g}; everything else is under AdamW in both. Both have the same grid: "
    f"matrices {', '.join(f'{lr:g}' for lr in MATRIX_LRS)}, everything else {', '.join(f'{lr:g}' for lr in OTHER_LRS)}. "
    "The best point of each is then run at seeds of its own, Muon also with fewer tokens and a schedule as much shorter.",
    settings={"model": asdict(replace(MODEL, source={})), "recipe": asdict(RECIPE)},
    variants=tuple(tuning(*point) for point in _grid()),
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
