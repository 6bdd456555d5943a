"""trivium lab: experiments that reproduce published claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def lab(
    name: Annotated[str | None, typer.Argument(help="the experiment; without it, all are listed")] = None,
    seeds: Annotated[int | None, typer.Option(help="how many seeds of each variant; else the experiment's own")] = None,
    parallel: Annotated[int, typer.Option(help="how many runs at a time")] = 1,
    threads: Annotated[int, typer.Option(help="threads of each run")] = 2,
    variant: Annotated[list[str] | None, typer.Option(help="make only this variant's runs; may be repeated")] = None,
    out: Annotated[Path, typer.Option(help="folder of the finished runs and of the text they train on")] = Path(
        "runs/lab"
    ),
    docs: Annotated[Path, typer.Option(help="folder of the pages")] = Path("docs/lab"),
    redraw: Annotated[
        bool, typer.Option("--redraw", help="write the page anew from the runs beside it; run nothing")
    ] = False,
) -> None:
    """Make the runs of an experiment that are missing, and write its page when all are there.

    Each run is kept as it finishes. Ctrl-C loses only what is under way; the same command goes on.
    """
    from trivium.lab.lab import lab as run

    run(
        name,
        num_seeds=seeds,
        parallel=parallel,
        threads=threads,
        variants=variant or (),
        out=out,
        docs=docs,
        redraw=redraw,
        say=typer.echo,
    )
