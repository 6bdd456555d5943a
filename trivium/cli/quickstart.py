"""trivium quickstart: a small K3 of one's own, from nothing, in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def quickstart(
    context: typer.Context,
    minutes: Annotated[float, typer.Option(help="how long to train")] = 4.0,
    steps: Annotated[int | None, typer.Option(help="train for so many steps, however long they take")] = None,
    data: Annotated[Path | None, typer.Option(help="a folder of text to train on; else Python's own library")] = None,
    name: Annotated[str | None, typer.Option(help="name of the run; else quickstart, quickstart-2, ...")] = None,
    out: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
    seed: Annotated[int, typer.Option(help="of the initialisation and the order of the text")] = 0,
) -> None:
    """Train a small K3 on text that every machine has: no download, two cores, four minutes.

    Ctrl-C saves; the same command goes on.
    """
    import torch

    from trivium.cli.pretraining import run
    from trivium.recipes.quickstart import NUM_THREADS
    from trivium.recipes.quickstart import quickstart as recipe

    config = recipe(minutes=minutes, num_steps=steps, seed=seed)
    torch.set_num_threads(NUM_THREADS)
    run(config, data=data, out=out, name=name, command=context.obj)
