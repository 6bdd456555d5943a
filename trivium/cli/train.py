"""trivium train: a K3 of a preset's size on a folder of text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    context: typer.Context,
    preset: Annotated[str, typer.Argument(help="nano, micro, mini or k3")],
    data: Annotated[Path, typer.Option(help="a folder of text or code, or one file")],
    minutes: Annotated[float, typer.Option(help="how long to train")] = 10.0,
    steps: Annotated[int | None, typer.Option(help="train for so many steps, however long they take")] = None,
    name: Annotated[str | None, typer.Option(help="name of the run; else train-PRESET, train-PRESET-2, ...")] = None,
    out: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
    batch_tokens: Annotated[int | None, typer.Option(help="tokens a step; else by preset")] = None,
    max_len: Annotated[int | None, typer.Option(help="tokens of a document read at a time; else by preset")] = None,
    muon_lr: Annotated[float | None, typer.Option(help="of the matrices, × sqrt(max(1, out/in))")] = None,
    adamw_lr: Annotated[float | None, typer.Option(help="of all else")] = None,
    save_every: Annotated[float, typer.Option(help="seconds between two saves, the most that a kill can cost")] = 60.0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    seed: Annotated[int, typer.Option(help="of the initialisation and the order of the text")] = 0,
) -> None:
    """Train a K3 of a preset's size on a folder of text of your own.

    Ctrl-C saves; the same command goes on.
    """
    from trivium.cli.pretraining import run
    from trivium.recipes.pretraining import pretraining

    config = pretraining(
        preset,
        minutes=minutes,
        num_steps=steps,
        batch_tokens=batch_tokens,
        max_len=max_len,
        muon_lr=muon_lr,
        adamw_lr=adamw_lr,
        save_every_s=save_every,
        device=device,
        seed=seed,
    )
    run(config, data=data, out=out, name=name, command=context.obj)
