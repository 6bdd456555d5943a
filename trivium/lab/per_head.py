"""Muon on each head's block by itself beside Muon on whole matrices: a language model, a planted skew, and the time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from trivium.lab.experiment import (
    Column,
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
    rounded,
    thinned,
)
from trivium.lab.text import prepare_text, read_text
from trivium.lab.training import Recipe, fresh_model, small_model, train_on_text
from trivium.model.heads import Blocks
from trivium.ops.newton_schulz import orthogonalise
from trivium.train.balance import QuantileBalancer
from trivium.train.groups import build_optimisers, parameter_groups
from trivium.train.schedule import Schedule

MODEL = small_model()
RECIPE = Recipe(num_steps=240, step_tokens=4096, max_len=256)

WHOLE, PER_HEAD = "whole matrices", "per head"
LM = tuple(Variant(name=name, settings={"task": "text", "per_head": name == PER_HEAD}) for name in (WHOLE, PER_HEAD))
TOY = tuple(
    Variant(name=f"planted skew, {name}", settings={"task": "skew", "per_head": name == PER_HEAD})
    for name in (WHOLE, PER_HEAD)
)
TIME = Variant(name="time of Newton-Schulz", settings={"task": "time"})

HEADS, HEAD_DIM, WIDTH = 8, 16, 128
TOY_STEPS, TOY_LR, TOY_ROWS = 120, 0.02, 64
SKEW = 1e4  # how many times the gradient of the first head the last one's is, evenly between in its logarithm
TIMED = ((8, 64, 512), (8, 128, 1024), (12, 128, 1536))  # heads, rows of a head, columns


def run(variant: Variant, seed: int, folder: Path, say: Say) -> Result:
    match variant.settings["task"]:
        case "text":
            recipe = replace(RECIPE, per_head=variant.settings["per_head"])
            model, text = fresh_model(MODEL, seed), read_text(folder)
            return train_on_text(model, recipe, text, QuantileBalancer(), seed=seed, say=say, source="per-head")
        case "skew":
            return planted_skew(per_head=variant.settings["per_head"], seed=seed)
        case _:
            return newton_schulz_times(seed)


class HeadsOnly(nn.Module):
    """One matrix of `HEADS` heads, W [H·K, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(HEADS * HEAD_DIM, WIDTH))

    def head_blocks(self) -> dict[str, Blocks]:
        return {"weight": Blocks(rows=(HEAD_DIM,) * HEADS)}


def planted_skew(*, per_head: bool, seed: int) -> Result:
    """Learn W from W x for random x, head h's loss weighted SKEW^(h/7): of Muon no head should learn less for it.

    Numbers: `worst`, the largest relative error |W_h - W*_h|² / |W*_h|² of a head at the end; `ratio`, the largest over
    the smallest norm of a head's update where one head's gradient is a hundred times the others'.
    """
    generator = torch.Generator().manual_seed(seed)
    weight_H = SKEW ** (torch.arange(HEADS) / (HEADS - 1))
    target = torch.linalg.qr(torch.randn(HEADS * HEAD_DIM, WIDTH, generator=generator))[0]
    model, optimisers = _toy(per_head)
    errors = []
    for step in range(1, TOY_STEPS + 1):
        for group in optimisers[0].param_groups:
            group["lr"] = TOY_LR * Schedule().factor(step, TOY_STEPS)
        x_ND = torch.randn(TOY_ROWS, WIDTH, generator=generator)
        miss_NHK = (x_ND @ (model.weight - target).T).unflatten(1, (HEADS, HEAD_DIM))
        (miss_NHK.square().mean((0, 2)) @ weight_H).backward()
        optimisers[0].step()
        optimisers[0].zero_grad()
        errors.append(max(_relative_errors(model.weight.detach(), target)))
    return Result(
        numbers={"worst": rounded(errors[-1]), "ratio": rounded(_update_ratio(per_head, generator))},
        curves={"worst": thinned([float(step + 1) for step in range(TOY_STEPS)], errors)},
    )


def _toy(per_head: bool) -> tuple[HeadsOnly, list[torch.optim.Optimizer]]:
    model = HeadsOnly()
    groups = parameter_groups(model, muon_lr=TOY_LR, adamw_lr=TOY_LR, weight_decay=0.0, per_head=per_head)
    return model, build_optimisers(groups)


def _relative_errors(weight: Tensor, target: Tensor) -> list[float]:
    miss_H = (weight - target).unflatten(0, (HEADS, HEAD_DIM)).square().sum((1, 2))
    return (miss_H / target.unflatten(0, (HEADS, HEAD_DIM)).square().sum((1, 2))).tolist()


def _update_ratio(per_head: bool, generator: torch.Generator) -> float:
    model, optimisers = _toy(per_head)
    grad = torch.randn(HEADS * HEAD_DIM, WIDTH, generator=generator)
    grad[:HEAD_DIM] *= 100
    model.weight.grad = grad
    optimisers[0].step()
    norm_H = model.weight.detach().unflatten(0, (HEADS, HEAD_DIM)).flatten(1).norm(dim=1)
    return float(norm_H.max() / norm_H.min())


def newton_schulz_times(seed: int) -> Result:
    """Milliseconds of one matrix whole and cut into its heads, by turns in this process; the median of each."""
    generator = torch.Generator().manual_seed(seed)
    numbers: dict[str, float | None] = {}
    for heads, rows, columns in TIMED:
        whole = torch.randn(1, heads * rows, columns, generator=generator)
        cut = whole.view(heads, rows, columns)
        times: dict[str, list[float]] = {"whole": [], "cut": []}
        for name, stack in _by_turns(whole, cut):
            begun_s = time.perf_counter()
            orthogonalise(stack)
            times[name].append(1e3 * (time.perf_counter() - begun_s))
        for name, found in times.items():
            numbers[f"{name} {heads}×{rows}×{columns}"] = rounded(median(found[1:]))
        numbers[f"ratio {heads}×{rows}×{columns}"] = rounded(median(times["cut"][1:]) / median(times["whole"][1:]))
    return Result(numbers=numbers)


def _by_turns(whole: Tensor, cut: Tensor, count: int = 8) -> Iterator[tuple[str, Tensor]]:
    for _ in range(count):
        yield "whole", whole
        yield "cut", cut


def plan(results: Results, num_seeds: int) -> list[Job]:
    """Text with every seed; the toy and the clock, which take seconds, with three."""
    jobs = [(variant, seed) for seed in range(num_seeds) for variant in LM]
    return jobs + [(variant, seed) for seed in range(min(3, num_seeds)) for variant in (*TOY, TIME)]


def judge(results: Results) -> list[Verdict]:
    toy_whole, toy_per_head = (variant.name for variant in TOY)
    return [
        at_most("final loss on text, per head less whole", results.difference(PER_HEAD, WHOLE, "final"), 0.003, 4),
        at_most(
            "one head's gradient × 100, per head: largest / smallest head update",
            results.estimate(toy_per_head, "ratio"), 1.02, 3,
        ),
        at_most(
            f"gradients skewed up to {SKEW:g} times: worst head's error, per head less whole",
            results.difference(toy_per_head, toy_whole, "worst"), 0, 4, wanted="< 0",
        ),
        *(
            at_most(f"time of Newton-Schulz, {shape}: per head / whole", results.estimate(TIME.name, f"ratio {shape}"), 1, 2)
            for shape in _shapes()
        ),
    ]  # fmt: skip


def _shapes() -> list[str]:
    return [f"{heads}×{rows}×{columns}" for heads, rows, columns in TIMED]


def notes(results: Results) -> list[str]:
    lines = ["| heads × rows × columns | whole, ms | per head, ms |", "| --- | ---: | ---: |"]
    for shape in _shapes():
        whole, cut = (results.estimate(TIME.name, f"{name} {shape}").text(2) for name in ("whole", "cut"))
        lines.append(f"| {shape} | {whole} | {cut} |")
    return ["Newton-Schulz of one matrix, whole and per head by turns in one process:", "\n".join(lines)]


def pictures(results: Results) -> list[Picture]:
    text = tuple((variant.name, variant.name, "heldout") for variant in LM)
    toy = tuple((name, variant.name, "worst") for name, variant in zip((WHOLE, PER_HEAD), TOY, strict=True))
    skew = Panel(title="the worst head's relative error", lines=toy, log_y=True)
    return [
        Picture(title="Text", x="tokens", panels=(Panel(title="held out, nats a token (an excerpt)", lines=text),)),
        Picture(title="Planted skew", x="step", panels=(skew,)),
    ]


EXPERIMENT = Experiment(
    name="per-head",
    title="Per-Head Muon beside Muon on whole matrices",
    claim="Kimi K3 technical report: Newton-Schulz per head keeps the heads' updates of one size. Elsewhere a small gain "
    "(modded-nanogpt#253: -.0012) or none (modded-nanogpt#47, dion#122).",
    setting=f"*Text*: a K3 of {MODEL.num_layers} layers, width {MODEL.hidden_size}, {MODEL.kda.num_heads} heads, "
    f"{RECIPE.num_steps} steps of {RECIPE.step_tokens:,} tokens of Python source, Muon at {RECIPE.matrix_lr} per head or "
    "whole, all else the same; the update's RMS is that of the whole matrix either way. *Planted skew*: one matrix of "
    f"{HEADS} heads of {HEAD_DIM} × {WIDTH} learns a random orthogonal one, the loss of each head weighted from 1 to "
    f"{SKEW:g}; {TOY_STEPS} steps at {TOY_LR}. *Time*: one matrix, whole and per head by turns.",
    settings={
        "model": asdict(replace(MODEL, source={})),
        "recipe": asdict(RECIPE),
        "toy": [HEADS, HEAD_DIM, WIDTH, TOY_STEPS, TOY_LR, TOY_ROWS, SKEW],
        "timed": TIMED,
    },
    variants=(*LM, *TOY, TIME),
    num_seeds=6,
    plan=plan,
    prepare=prepare_text,
    run=run,
    judge=judge,
    columns=(
        Column(number="final", heading="final held-out loss", digits=4),
        Column(number="worst", heading="worst head's error", digits=4),
        Column(number="ratio", heading="largest / smallest head update", digits=3),
    ),
    pictures=pictures,
    notes=notes,
    noise="final",
)
