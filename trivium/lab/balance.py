"""Whether quantile balancing keeps every expert busy in real training, beside the sign rule and an auxiliary loss."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trivium.config import MoeConfig
from trivium.data.loader import Loader
from trivium.lab.baselines import AuxiliaryLoss, NoBalancing, SignRule
from trivium.lab.experiment import (
    Column,
    Experiment,
    Panel,
    Picture,
    Result,
    Results,
    Say,
    Variant,
    Verdict,
    at_most,
    rounded,
)
from trivium.lab.text import LabText, prepare_text, read_text
from trivium.lab.training import Recipe, fresh_model, small_model, train_on_text
from trivium.model.kimi_k3 import KimiK3
from trivium.ops.balance import count_experts, max_violation, quantile_balance_
from trivium.train.balance import Balancer, QuantileBalancer

MODEL = small_model(num_experts=64, num_active=4, expert_size=32)
RECIPE = Recipe(num_steps=300, step_tokens=4096, max_len=128)

QUANTILE = (
    Variant(name="quantile, exact", settings={"balancer": "quantile", "method": "exact", "ema": 0.0}),
    Variant(name="quantile, histogram", settings={"balancer": "quantile", "method": "histogram", "ema": 0.0}),
    Variant(name="quantile, histogram, EMA .9", settings={"balancer": "quantile", "method": "histogram", "ema": 0.9}),
)
OTHERS = (
    Variant(name="sign rule, step .001", settings={"balancer": "sign", "step": 0.001}),
    Variant(name="sign rule, step .003", settings={"balancer": "sign", "step": 0.003}),
    Variant(name="sign rule, step .01", settings={"balancer": "sign", "step": 0.01}),
    Variant(name="auxiliary loss, weight .01", settings={"balancer": "auxiliary", "weight": 0.01}),
    Variant(name="none", settings={"balancer": "none"}),
)
# Steps in which a balancer that knows the future could still not do better, and a pool it may look at before.
_POOL, _FRESH = 16, 16


def run(variant: Variant, seed: int, folder: Path, say: Say) -> Result:
    """Train once; of the quantile variants also what an oracle's bias would give behind the last step."""
    text = read_text(folder)
    model = fresh_model(MODEL, seed)
    result = train_on_text(model, RECIPE, text, balancer_of(variant), seed=seed, say=say, source="balance")
    numbers = {
        **result.numbers,
        "noise_floor": rounded(noise_floor(MODEL.moe, RECIPE.step_tokens, len(model.moe_layers()))),
    }
    if variant.settings["balancer"] == "quantile":
        numbers["oracle"] = rounded(oracle(model, text, seed))
    return replace(result, numbers=numbers)


def balancer_of(variant: Variant) -> Balancer:
    settings = variant.settings
    match settings["balancer"]:
        case "quantile":
            return QuantileBalancer(method=settings["method"], ema=settings["ema"])
        case "sign":
            return SignRule(step=settings["step"])
        case "auxiliary":
            return AuxiliaryLoss(weight=settings["weight"])
        case _:
            return NoBalancing()


def noise_floor(moe: MoeConfig, num_tokens: int, num_layers: int, *, count: int = 20) -> float:
    """Median MaxVio, the largest of `num_layers`, where every token takes its experts by chance, all alike."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        drawn = [
            torch.rand(num_tokens, moe.num_experts, generator=generator).topk(moe.num_experts_per_token).indices
            for _ in range(num_layers)
        ]
        found.append(
            max(max_violation(experts_NA.flatten().bincount(minlength=moe.num_experts)) for experts_NA in drawn)
        )
    return median(found)


@torch.no_grad()
def oracle(model: KimiK3, text: LabText, seed: int) -> float:
    """Median MaxVio of steps whose bias was balanced over sixteen other steps, of the same weights.

    What no balancer can beat that sets the bias before it sees the step: text comes in documents, so that a step's
    tokens are less alike from step to step than draws by chance.
    """
    num_active = model.config.moe.num_experts_per_token
    loader = Loader(
        text.train,
        max_len=RECIPE.max_len,
        micro_tokens=RECIPE.step_tokens,
        num_micro=1,
        seed=seed + 1000,
        source="oracle",
    )
    scores: list[list[torch.Tensor]] = [[] for _ in model.moe_layers()]
    hooks = [
        layer.gate.register_forward_hook(lambda module, inputs, chosen, into=into: into.append(chosen.scores_TE))
        for layer, into in zip(model.moe_layers(), scores, strict=True)
    ]
    model.eval()
    for _ in range(_POOL + _FRESH):
        (batch,) = next(loader)
        model(batch.ids_T, batch.rows)
    for hook in hooks:
        hook.remove()
    worst = [0.0] * _FRESH
    for of_layer in scores:
        bias_E = torch.zeros(model.config.moe.num_experts)
        pool_NE = torch.cat(of_layer[:_POOL]).float()
        for _ in range(8):
            quantile_balance_(bias_E, pool_NE, num_active)
        for idx, score_NE in enumerate(of_layer[_POOL:]):
            worst[idx] = max(worst[idx], max_violation(count_experts(score_NE.float(), bias_E, num_active)))
    return median(worst)


def judge(results: Results) -> list[Verdict]:
    floor = results.estimate("quantile, exact", "noise_floor").mean
    best = min((variant.name for variant in OTHERS), key=lambda name: results.estimate(name, "final").mean)
    verdicts = []
    for variant in QUANTILE:
        name = variant.name
        verdicts += [
            at_most(f"{name}: most experts idle in any step from the fifth on", results.estimate(name, "idle_late"), 0, 0),
            at_most(
                f"{name}: median MaxVio", results.estimate(name, "max_vio"), 1.5 * floor, 3,
                wanted=f"≤ 1.5 × the draws' {floor:.3f} = {1.5 * floor:.3f}",
            ),
            _beside_oracle(results, name),
            at_most(
                f"{name}: final loss less that of the best other, {best}", results.difference(name, best, "final"), 0.002, 4
            ),
        ]  # fmt: skip
    return verdicts


def _beside_oracle(results: Results, name: str) -> Verdict:
    known = results.estimate(name, "oracle").mean
    return at_most(
        f"{name}: median MaxVio beside the oracle's", results.estimate(name, "max_vio"), 1.5 * known, 3,
        wanted=f"≤ 1.5 × the oracle's {known:.3f} = {1.5 * known:.3f}",
    )  # fmt: skip


def pictures(results: Results) -> list[Picture]:
    names = [variant.name for variant in (*QUANTILE, *OTHERS)]

    def panel(title: str, curve: str, **given: Any) -> Panel:
        return Panel(title=title, lines=tuple((name, name, curve) for name in names), **given)

    marks = {
        "draws by chance": results.estimate("quantile, exact", "noise_floor").mean,
        "the oracle": results.estimate("quantile, exact", "oracle").mean,
    }
    balance = (
        panel("MaxVio: busiest expert / mean − 1", "max_vio", log_y=True, marks=marks),
        panel("experts without a token, over all layers", "idle"),
    )
    losses = (panel("held-out text, nats a token (an excerpt)", "heldout"), panel("training loss", "loss"))
    return [
        Picture(title="How evenly the experts are used", x="step", log_x=True, panels=balance),
        Picture(title="What the model learns", x="tokens", panels=losses),
    ]


EXPERIMENT = Experiment(
    name="balance",
    title="Quantile balancing in real training",
    claim="Kimi K3 technical report: the selection bias set by quantiles keeps the experts balanced without a rate to "
    "tune, where the sign rule lags or swings.",
    setting=f"A K3 of {MODEL.num_layers} layers (three with experts), width {MODEL.hidden_size}, "
    f"{MODEL.moe.num_experts} experts of which {MODEL.moe.num_experts_per_token} are active, trained "
    f"{RECIPE.num_steps} steps of {RECIPE.step_tokens:,} tokens of Python source in pieces of {RECIPE.max_len}; per-Head "
    f"Muon at {RECIPE.matrix_lr}, AdamW at {RECIPE.other_lr}. MaxVio is the largest over the layers, of the routes as the "
    "step took them; its median is over all steps from the fifth on. *Draws by chance* is the same figure where every "
    "token takes its experts at random; *the oracle* is a bias balanced over 16 other steps of the final weights: text "
    "comes in documents, so even that one is off.",
    settings={"model": asdict(replace(MODEL, source={})), "recipe": asdict(RECIPE), "pool": _POOL, "fresh": _FRESH},
    variants=(*QUANTILE, *OTHERS),
    prepare=prepare_text,
    run=run,
    judge=judge,
    columns=(
        Column(number="final", heading="final held-out loss", digits=4),
        Column(number="max_vio", heading="median MaxVio", digits=3),
        Column(number="idle_late", heading="most idle experts, step ≥ 5", digits=0),
        Column(number="oracle", heading="oracle's MaxVio", digits=3),
    ),
    pictures=pictures,
    noise="final",
)
