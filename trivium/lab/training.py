"""Training small models, the one way for all experiments: a model, a recipe, and what was seen on the way."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from trivium.config import K3Config, KdaConfig, MlaConfig, MoeConfig, model_preset
from trivium.data.batch import Batch
from trivium.data.loader import Loader
from trivium.lab.experiment import Result, Say, rounded, thinned
from trivium.lab.text import NUM_RANKS, VOCAB_SIZE, LabText
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.ops import cpu
from trivium.train.balance import Balancer
from trivium.train.groups import build_optimisers, parameter_groups
from trivium.train.heldout import excerpt, score
from trivium.train.schedule import Schedule
from trivium.train.step import StepResult, train_step

_EXCERPT_LEN = 1024


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a small model is trained. `matrices` is the optimiser of all matrices, "muon" or "adamw", `matrix_lr` its rate.

    `momentum` is Muon's, or the first beta of that AdamW; its second is .95. Everything else is under AdamW (.9, .95) at
    `other_lr`. Rates warm up over 10 steps, stay until 40% of the run and fall linearly to 2%. `per_head` is whether
    Muon makes each head's block orthogonal by itself.
    """

    num_steps: int
    step_tokens: int = 4096
    max_len: int = 256
    matrices: str = "muon"
    matrix_lr: float = 0.02
    momentum: float = 0.95
    other_lr: float = 6e-3
    per_head: bool = True
    weight_decay: float = 0.1
    num_evals: int = 10
    eval_tokens: int = 16384

    def __post_init__(self) -> None:
        if self.matrices not in ("muon", "adamw"):
            raise ValueError(f'matrices: wanted "muon" or "adamw", got {self.matrices!r}')


def small_model(
    *,
    num_layers: int = 4,
    hidden_size: int = 128,
    num_heads: int = 4,
    num_experts: int = 16,
    num_active: int = 2,
    expert_size: int = 64,
    latent_size: int = 64,
) -> K3Config:
    """A K3 with every part, of 1 to 3 million parameters: three layers of KDA to one of MLA, two residual blocks."""
    head_dim = hidden_size // num_heads
    return replace(
        model_preset("nano"),
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        attn_res_block_size=2,
        vocab_size=VOCAB_SIZE,
        bos_token_id=NUM_RANKS,
        eos_token_id=NUM_RANKS + 2,
        media_placeholder_token_id=NUM_RANKS + 21,
        pad_token_id=NUM_RANKS + 255,
        kda=KdaConfig(num_heads=num_heads, head_dim=head_dim),
        mla=MlaConfig(
            num_heads=num_heads,
            q_lora_rank=hidden_size // 2,
            kv_lora_rank=3 * hidden_size // 8,
            qk_nope_head_dim=head_dim // 2,
            qk_rope_head_dim=head_dim // 2,
            v_head_dim=head_dim,
        ),
        moe=MoeConfig(
            num_experts=num_experts,
            num_experts_per_token=num_active,
            num_shared_experts=1,
            moe_intermediate_size=expert_size,
            routed_expert_hidden_size=latent_size,
        ),
    )


def fresh_model(config: K3Config, seed: int) -> KimiK3:
    """A model at its initialisation."""
    cpu.keep_memory()
    model = KimiK3(config)
    initialise_(model, seed)
    return model


def optimisers_of(model: KimiK3, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Of the recipe; under "adamw" the same groups, Muon's given to AdamW."""
    groups = parameter_groups(
        model,
        muon_lr=recipe.matrix_lr,
        adamw_lr=recipe.other_lr,
        muon_momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        per_head=recipe.per_head,
    )
    if recipe.matrices == "adamw":
        betas = (recipe.momentum, 0.95)
        groups = [
            replace(group, optimiser="AdamW", averages=betas) if group.optimiser == "Muon" else group
            for group in groups
        ]
    return build_optimisers(groups)


def train_steps(
    model: KimiK3,
    batches: Iterator[Sequence[Batch]],
    optimisers: Sequence[torch.optim.Optimizer],
    balancer: Balancer,
    schedule: Schedule,
    steps: Iterable[int],
    num_steps: int,
) -> Iterator[tuple[int, StepResult]]:
    """Make these steps of `num_steps`, counted from 1, and hand out each as it is done."""
    for step in steps:
        factor = schedule.factor(step, num_steps)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["full_lr"] * factor
        yield step, train_step(model, next(batches), optimisers, balancer=balancer)


def train_on_text(
    model: KimiK3, recipe: Recipe, text: LabText, balancer: Balancer, *, seed: int, say: Say, source: str
) -> Result:
    """Train on the text and score what is held out: on an excerpt on the way, on all of it at the end.

    Numbers: `final` held-out nats a token; `idle_late`, the most experts idle in one step from the fifth on, over all
    layers; `max_vio`, the median from there on. Curves over tokens: `loss`, `heldout`; over steps: `max_vio`,
    `idle`. A run that diverges has `final` None.
    """
    optimisers = optimisers_of(model, recipe)
    loader = Loader(
        text.train,
        max_len=recipe.max_len,
        micro_tokens=recipe.step_tokens,
        num_micro=1,
        seed=seed,
        source=source,
    )
    part = excerpt(text.heldout, recipe.eval_tokens, _EXCERPT_LEN)
    losses: list[float] = []
    max_vios: list[float] = []
    idles: list[float] = []
    heldout: list[tuple[float, float]] = []
    final = math.nan
    every = max(1, recipe.num_steps // recipe.num_evals)
    try:
        for step, result in train_steps(
            model, loader, optimisers, balancer, Schedule(), range(1, recipe.num_steps + 1), recipe.num_steps
        ):
            losses.append(result.loss)
            if result.balance is not None:
                max_vios.append(result.balance.max_vio)
                idles.append(float(result.balance.idle_experts))
            if step % every == 0:
                heldout.append((float(step * recipe.step_tokens), score(model, part).loss))
                say(f"step {step} of {recipe.num_steps}, loss {result.loss:.3f}, held out {heldout[-1][1]:.3f}")
        final = score(model, text.heldout).loss
    except FloatingPointError as error:
        say(f"diverged: {error}")
    tokens = [float((idx + 1) * recipe.step_tokens) for idx in range(len(losses))]
    steps = [float(idx + 1) for idx in range(len(max_vios))]
    return Result(
        numbers={
            "final": rounded(final),
            "idle_late": rounded(max(idles[4:], default=math.nan)),
            "max_vio": rounded(median(max_vios[4:]) if len(max_vios) > 4 else math.nan),
        },
        curves={
            "loss": thinned(tokens, losses),
            "heldout": ([x for x, _ in heldout], [float(f"{y:.5g}") for _, y in heldout]),
            "max_vio": thinned(steps, max_vios),
            "idle": thinned(steps, idles),
        },
    )
