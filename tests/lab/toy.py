"""An experiment of milliseconds: a number a variant, a tenth more with each seed."""

import time
from dataclasses import replace

from trivium.lab.experiment import Column, Experiment, Panel, Picture, Result, Variant, at_most


def run(variant, seed, folder, say):
    with (folder / "calls").open("a") as calls:
        calls.write(f"{variant.name} {seed}\n")
    if variant.settings.get("fails"):
        raise ValueError("this one fails")
    while (folder / f"hold-{variant.name}").exists():
        time.sleep(0.01)
    say("half way")
    value = variant.settings["value"] + seed / 10
    return Result(numbers={"final": value, "bad": None}, curves={"loss": ([1.0, 2.0], [2 * value, value])})


def judge(results):
    return [at_most("low below high", results.difference("low", "high", "final"), 0, 2)]


TOY = Experiment(
    name="toy",
    title="A toy",
    claim="Low is below high.",
    setting="Nothing is trained.",
    settings={"size": 1},
    variants=(Variant(name="low", settings={"value": 1.0}), Variant(name="high", settings={"value": 2.0})),
    num_seeds=2,
    run=run,
    judge=judge,
    columns=(Column(number="final", heading="final", digits=2), Column(number="bad", heading="bad", digits=2)),
    pictures=lambda results: [
        Picture(
            title="Loss",
            x="step",
            panels=(Panel(title="loss", lines=(("low", "low", "loss"), ("high", "high", "loss"))),),
        )
    ],
    noise="final",
)


def failing():
    """The same with a third variant that fails."""
    return replace(TOY, variants=(*TOY.variants, Variant(name="broken", settings={"fails": True})))
