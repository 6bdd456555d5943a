"""trivium train: a K3 by a recipe on a folder of text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trivium.cli.options import Device


def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="nano, nano-long, micro, mini or k3")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(help="fields of the recipe: muon_lr=.03 model.num_layers=8 ...; --show lists them"),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="a folder of text or code, or one file")] = None,
    minutes: Annotated[float | None, typer.Option(help="how long to train, 10 where no steps are given")] = None,
    steps: Annotated[int | None, typer.Option(help="train for so many steps, however long they take")] = None,
    name: Annotated[str | None, typer.Option(help="name of the run; else train-RECIPE, train-RECIPE-2, ...")] = None,
    out: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
    save_every: Annotated[float, typer.Option(help="seconds between two saves, the most that a kill can cost")] = 60.0,
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(help="of the initialisation and the order of the text")] = 0,
    show: Annotated[
        bool, typer.Option("--show", help="print the run's fields and their values, and train nothing")
    ] = False,
) -> None:
    """Train a K3 by a recipe on a folder of text of your own.

    Ctrl-C saves; the same command goes on. Under torchrun every process takes a part:
    torchrun --nproc-per-node 2 -m trivium train micro --data DIR
    """
    from trivium.cli.pretraining import run
    from trivium.recipes.override import describe, override
    from trivium.recipes.pretraining import pretraining

    config = pretraining(recipe, minutes=minutes, num_steps=steps, save_every_s=save_every, device=device, seed=seed)
    check_once(context, changes or [])
    config = override(config, changes or [])
    if show:
        typer.echo("\n".join(describe(config)))
        return
    if data is None:
        raise ValueError("data: wanted a folder of text, as in --data DIR")
    run(config, data=data, out=out, name=name, command=context.obj)


# Options that are fields of the recipe, too.
_FIELDS = {
    "minutes": "length.seconds",
    "steps": "length.num_steps",
    "save_every": "save_every_s",
    "device": "device",
    "seed": "seed",
}


def check_once(context: typer.Context, changes: list[str]) -> None:
    """Raises ValueError for a field that is given as an option and as a change."""
    names = {change.partition("=")[0].strip() for change in changes}
    for option, field in _FIELDS.items():
        source = context.get_parameter_source(option)
        if field in names and source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"{field}: was given already, as --{option.replace('_', '-')}; wanted it once")
