"""trivium sft: a trained model on conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trivium.cli.options import Device


def sft(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="the run's folder, or one in the released layout, to begin with")],
    changes: Annotated[
        list[str] | None, typer.Argument(help="fields of the recipe: muon_lr=.01 ...; --show lists them")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="conversations, one to a line (JSONL); else generated ones with tools")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="how long to train: 30, or 10 on data of your own")] = None,
    steps: Annotated[int | None, typer.Option(help="train for so many steps, however long they take")] = None,
    dialogues: Annotated[int | None, typer.Option(min=1, help="how many to generate, else 12,000")] = None,
    name: Annotated[str | None, typer.Option(help="name of the run; else nano-chat or sft, with a number")] = None,
    out: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(help="of the order of the conversations, and of generated ones")] = 0,
    show: Annotated[
        bool, typer.Option("--show", help="print the run's fields and their values, and train nothing")
    ] = False,
) -> None:
    """Teach a trained model to talk: K3's chat format, with the loss on what the assistant writes.

    Without --data the recipe is nano-chat: generated conversations with tools, whose answers are checked at the end.
    """
    from dataclasses import replace

    from trivium.cli.command import check_finished
    from trivium.cli.train import check_once
    from trivium.recipes.override import describe, override
    from trivium.recipes.sft import RECIPES, from_path, generated

    if data is not None and dialogues is not None:
        raise ValueError("dialogues: with --data none are generated")
    if minutes is not None and steps is not None:
        raise ValueError(f"minutes: {steps} steps are given, and a run of a number of steps goes by no clock")
    recipe = RECIPES["nano-chat" if data is None else "sft"]
    config = replace(recipe(minutes=minutes, num_steps=steps, seed=seed), device=device)
    check_once(context, changes or [])
    config = override(config, changes or [])
    if show:
        typer.echo("\n".join(describe(config)))
        return
    check_finished(run)
    num = 12_000 if dialogues is None else dialogues
    if data is None:
        longest = config.stages[-1].max_len
        found = generated(num_dialogues=num, num_drills=num // 2, seed=seed, max_tokens=longest)
    else:
        found = from_path(data)
    from trivium.cli.chat_run import train

    train(config, base=run, data=found, out=out, name=name, command=context.obj)
