"""Whether a model without positions, trained short, finds needles in long texts after little more training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from trivium.data.batch import Batch
from trivium.data.pack import TokenStream
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
    at_least,
    at_most,
    rounded,
)
from trivium.lab.needles import Needles, haystacks, needle_accuracy
from trivium.lab.text import VOCAB_SIZE, prepare_text, read_text
from trivium.lab.training import Recipe, fresh_model, optimisers_of, small_model, train_steps
from trivium.model.kimi_k3 import KimiK3
from trivium.ops.rows import Rows
from trivium.train.balance import QuantileBalancer
from trivium.train.loss import token_nll
from trivium.train.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Stage:
    """`num_steps` steps of sequences of `length` tokens."""

    length: int
    num_steps: int


MODEL = small_model(num_layers=3)
RECIPE = Recipe(num_steps=3000, step_tokens=2048, max_len=256)
# Ids of control tokens, which no text holds. All answers together weigh a little more than the text: of 64 keys, at a
# weight of 4, nothing was found after 200 steps of 2,048 tokens at length 256; like this, in texts of 64 alone, .73 of
# the needles after 300 steps of 1,024, and .98 after 1,000.
TASK = Needles(first_key=VOCAB_SIZE - 128, num_keys=32, first_value=VOCAB_SIZE - 64, num_values=32, answer_weight=16.0)
NUM_PAIRS = 16
# In the first stage half of the tokens are in texts so short, where there is less to find a needle in.
SHORT_LEN, SHORT_PAIRS = 64, 8
# At 2,048 tokens a step: 3% and 7% of the first stage. The last has one sequence of 4,096 a step: 5%.
STAGES = (
    Stage(length=256, num_steps=3000),
    Stage(length=512, num_steps=90),
    Stage(length=1024, num_steps=210),
    Stage(length=4096, num_steps=75),
)
FIRST, GOAL = STAGES[0].length, 4 * STAGES[0].length
LENGTHS = (256, 512, 1024, 2048, 4096)
DEPTHS = tuple((pair + 0.5) / NUM_PAIRS for pair in range(NUM_PAIRS))
HAYSTACKS = 32
RATE_AFTER = 0.1  # of the first stage's full rate, where that stage ends and all others stay
BINS = (0, 64, 128, 256, 512, 1024, 2048, 4096)

GROWN, SHORT = "grown", "first length only"
VARIANTS = (
    Variant(name=GROWN, settings={"stages": [asdict(stage) for stage in STAGES]}),
    Variant(name=SHORT, settings={"stages": [{**asdict(stage), "length": FIRST} for stage in STAGES]}),
)
MOMENTS = ("after the first stage", f"after {GOAL}", "at the end")


def run(variant: Variant, seed: int, folder: Path, say: Say) -> Result:
    """Train through the stages; needles by length and depth behind the first, behind GOAL, and at the end.

    Numbers: `LENGTH, MOMENT`, the mean over the depths; `worst`, the least depth at GOAL behind that stage; `rise`, the
    held-out loss from position GOAL on less that of the second half of the first length. Curves: `learnt`, over tokens
    of the first stage; `MOMENT` over length; `depth LENGTH` at the end; `position`.
    """
    text = read_text(folder)
    model = fresh_model(MODEL, seed)
    optimisers, balancer = optimisers_of(model, RECIPE), QuantileBalancer()
    generator = torch.Generator().manual_seed(seed)
    numbers: dict[str, float | None] = {}
    curves: dict[str, tuple[list[float], list[float]]] = {"learnt": ([], [])}
    stages = [Stage(**stage) for stage in variant.settings["stages"]]
    schedule, step, tokens = Schedule(final=RATE_AFTER), 0, 0
    for number, (stage, planned) in enumerate(zip(stages, STAGES, strict=True)):
        steps = range(step + 1, step + stage.num_steps + 1)
        step_tokens = max(RECIPE.step_tokens, planned.length)  # the same tokens in every variant
        batches = _batches(text.train, stage, step_tokens, number == 0, generator)
        # Behind the first stage the schedule stays at its last factor.
        for step, result in train_steps(model, batches, optimisers, balancer, schedule, steps, STAGES[0].num_steps):
            tokens += result.num_tokens
            if step % 100 == 0 or step == steps[-1]:
                found = _mean(_accuracy(model, text.heldout, stage.length))
                say(f"step {step}, length {stage.length}: loss {result.loss:.3f}, needles found {found:.3f}")
                if number == 0:
                    curves["learnt"][0].append(float(tokens))
                    curves["learnt"][1].append(rounded(found))
        moment = {0: 0, 2: 1, 3: 2}.get(number)
        if moment is not None:
            by_length = {length: _accuracy(model, text.heldout, length) for length in LENGTHS}
            numbers |= {f"{length}, {MOMENTS[moment]}": rounded(_mean(found)) for length, found in by_length.items()}
            curves[MOMENTS[moment]] = (
                [float(length) for length in LENGTHS],
                [rounded(_mean(found)) for found in by_length.values()],
            )
            if moment == 1:
                numbers["worst"] = rounded(min(by_length[GOAL]))
    curves |= {f"depth {length}": (list(DEPTHS), [rounded(x) for x in found]) for length, found in by_length.items()}
    losses = loss_by_position(model, text.heldout)
    curves["position"] = ([float(end) for end in BINS[1:]], [rounded(loss) for loss in losses])
    late = [(end - start, loss) for (start, end), loss in zip(pairwise(BINS), losses, strict=True) if start >= GOAL]
    second_half = losses[BINS.index(FIRST) - 1]
    numbers["rise"] = rounded(sum(n * loss for n, loss in late) / sum(n for n, _ in late) - second_half)
    return Result(numbers=numbers, curves=curves)


def _batches(
    text: TokenStream, stage: Stage, step_tokens: int, mixed: bool, generator: torch.Generator
) -> Iterator[list[Batch]]:
    """Steps of texts of the stage's length; `mixed`: of half as many, and short ones for the other half of the tokens."""
    kinds = [(stage.length, NUM_PAIRS, step_tokens)]
    if mixed:
        kinds = [(stage.length, NUM_PAIRS, step_tokens // 2), (SHORT_LEN, SHORT_PAIRS, step_tokens // 2)]
    while True:
        batches = []
        for length, num_pairs, num_tokens in kinds:
            count = num_tokens // length
            depth_SP = torch.rand(count, num_pairs, generator=generator)
            batches.append(haystacks(TASK, text.ids_T, [length] * count, depth_SP, generator)[0])
        yield batches


def _accuracy(model: KimiK3, heldout: TokenStream, length: int) -> list[float]:
    return needle_accuracy(model, TASK, heldout.ids_T, length=length, depths=DEPTHS, count=HAYSTACKS, seed=0)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@torch.no_grad()
def loss_by_position(model: KimiK3, heldout: TokenStream) -> list[float]:
    """Nats a token of plain held-out text between the positions BINS, in documents that reach the last of them."""
    model.eval()
    longest = BINS[-1]
    total_P, count = torch.zeros(longest, dtype=torch.float64), 0
    for start, end in pairwise(heldout.starts):
        if end - start <= longest:
            continue
        ids_T = heldout.ids_T[start : start + longest + 1].long()
        hidden_TD, _ = model(ids_T[:-1], Rows.one(longest))
        total_P += token_nll(hidden_TD, model.language_model.lm_head.weight, ids_T[1:]).double()
        count += 1
    if not count:
        raise ValueError(f"length: no held-out document has more than {longest} tokens")
    return [float(total_P[start:end].mean() / count) for start, end in pairwise(BINS)]


def judge(results: Results) -> list[Verdict]:
    extra = sum(stage.num_steps for stage in STAGES[1:3]) / STAGES[0].num_steps
    at_goal = f"{GOAL}, {MOMENTS[1]}"
    return [
        at_least(f"needles found at {GOAL}, after {extra:.0%} more tokens, mean over depths", results.estimate(GROWN, at_goal), 0.9, 3),
        at_least(f"the same, the worst of {NUM_PAIRS} depths", results.estimate(GROWN, "worst"), 0.9, 3),
        at_least(f"needles found at {LENGTHS[-1]}, at the end", results.estimate(GROWN, f"{LENGTHS[-1]}, {MOMENTS[2]}"), 0.9, 3),
        at_most(
            f"held-out loss from position {GOAL} on, less that at {FIRST // 2} to {FIRST}", results.estimate(GROWN, "rise"), 0.05, 3
        ),
    ]  # fmt: skip


def notes(results: Results) -> list[str]:
    runs = results.of(GROWN)
    lines = [
        "| depth | " + " | ".join(f"{length:,}" for length in LENGTHS) + " |",
        "| --- |" + " ---: |" * len(LENGTHS),
    ]
    for idx, depth in enumerate(DEPTHS):
        cells = [_mean([run.result.curves[f"depth {length}"][1][idx] for run in runs]) for length in LENGTHS]
        lines.append(f"| {depth:.2f} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    return [f'Needles found by depth and length, "{GROWN}", at the end, mean over seeds:', "\n".join(lines)]


def pictures(results: Results) -> list[Picture]:
    names = [variant.name for variant in VARIANTS]
    by_length = (
        (MOMENTS[0], GROWN, MOMENTS[0]),
        *((f"{n}, {moment}", n, moment) for n in names for moment in MOMENTS[1:]),
    )
    by_depth = tuple((f"{length:,} tokens", GROWN, f"depth {length}") for length in LENGTHS)
    return [
        Picture(title="Needles found by length", x="tokens a text", log_x=True, panels=(
            Panel(title="share of the needles, mean over depths", lines=by_length, marks={"goal": 0.9}),)),
        Picture(title=f"Needles found by depth, {GROWN}, at the end", x="depth, share of the text", panels=(
            Panel(title="share of the needles", lines=by_depth),)),
        Picture(title="Loss by position", x="position in the text", log_x=True, panels=(
            Panel(title="held-out text, nats a token", lines=tuple((name, name, "position") for name in names)),)),
        Picture(title="The first stage", x="tokens", panels=(
            Panel(title=f"share of the needles found at {FIRST}", lines=tuple((name, name, "learnt") for name in names)),)),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    name="length",
    title="Length grown without positions",
    claim="Kimi Linear (arXiv 2510.26692) and K3: with NoPE in full attention and KDA around it, a longer context wants no "
    "rescaling, only a little training.",
    setting=f"A K3 of {MODEL.num_layers} layers, width {MODEL.hidden_size}, on Python source in which {NUM_PAIRS} pairs "
    f"of a key and a value ({TASK.num_keys} and {TASK.num_values} ids of their own) lie at random depths; at the end all "
    f"keys come again in another order, and the values have to. An answer weighs {TASK.answer_weight:g} times a token of "
    f"text in the loss; in the first stage half of the tokens are in texts of {SHORT_LEN} with {SHORT_PAIRS} pairs. Stages: "
    + ", ".join(f"{stage.num_steps} steps of {max(RECIPE.step_tokens, stage.length):,} tokens at length {stage.length:,}" for stage in STAGES)
    + f"; the rate falls to {RATE_AFTER:g} in the first and stays there. *{SHORT}* sees the same tokens at length {FIRST} "
    f"throughout. Needles are looked for in {HAYSTACKS} held-out texts a length, at {NUM_PAIRS} depths; found is "
    "where the value is the likeliest of all ids. Loss by position is of plain held-out text.",
    settings={
        "model": asdict(replace(MODEL, source={})),
        "recipe": asdict(RECIPE),
        "task": asdict(TASK),
        "pairs": [NUM_PAIRS, SHORT_LEN, SHORT_PAIRS],
        "looked for": {"haystacks": HAYSTACKS, "lengths": LENGTHS, "depths": DEPTHS, "bins": BINS},
        "stages": [asdict(stage) for stage in STAGES],
        "rate_after": RATE_AFTER,
    },
    variants=VARIANTS,
    prepare=prepare_text,
    run=run,
    judge=judge,
    columns=(
        *(Column(number=f"{length}, {moment}", heading=f"needles at {length:,} {moment}", digits=3)
          for moment in MOMENTS[:1] for length in (FIRST, GOAL)),
        Column(number=f"{GOAL}, {MOMENTS[1]}", heading=f"needles at {GOAL:,} {MOMENTS[1]}", digits=3),
        *(Column(number=f"{length}, {MOMENTS[2]}", heading=f"needles at {length:,} {MOMENTS[2]}", digits=3)
          for length in (GOAL, LENGTHS[-1])),
        Column(number="rise", heading=f"loss past {GOAL:,} less loss to {FIRST}", digits=3),
    ),
    pictures=pictures,
    notes=notes,
    noise=f"{GOAL}, {MOMENTS[1]}",
)  # fmt: skip
