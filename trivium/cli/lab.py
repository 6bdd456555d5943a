"""trivium lab: experiments that reproduce published claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def lab(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="the experiment; without it, all are listed")] = None,
    seeds: Annotated[int | None, typer.Option(help="how many seeds of each variant; else the experiment's own")] = None,
    parallel: Annotated[int, typer.Option(help="how many runs at a time")] = 1,
    threads: Annotated[int, typer.Option(help="threads of each run")] = 2,
    variant: Annotated[list[str] | None, typer.Option(help="make only this variant's runs; may be repeated")] = None,
    out: Annotated[Path, typer.Option(help="folder of the finished runs and of the text they train on")] = Path(
        "runs/lab"
    ),
    docs: Annotated[Path, typer.Option(help="folder of the pages")] = Path("docs/lab"),
) -> None:
    """Make the runs of an experiment that are missing, and write its page when all are there.

    Each run is kept as it finishes. Ctrl-C loses only what is under way; the same command goes on.
    """
    from trivium.lab.catalogue import EXPERIMENTS

    if name is None:
        for experiment in EXPERIMENTS.values():
            typer.echo(f"{experiment.name:<10} {experiment.title}")
        return
    if name not in EXPERIMENTS:
        raise ValueError(f"lab: wanted one of {', '.join(EXPERIMENTS)}, got {name!r}")
    from trivium.lab.page import write_page
    from trivium.lab.runner import run_missing

    experiment = EXPERIMENTS[name]
    num_seeds = experiment.num_seeds if seeds is None else seeds
    results, complete, facts = run_missing(
        experiment,
        out,
        num_seeds=num_seeds,
        parallel=parallel,
        threads=threads,
        say=typer.echo,
        variants=variant or (),
    )
    if not complete:
        typer.echo("some runs are still missing, so no page is written")
        return
    command = " ".join(["trivium", "lab", name, *([] if seeds is None else ["--seeds", str(seeds)])])
    page = write_page(experiment, results, docs, num_seeds=num_seeds, facts=facts, command=command)
    for verdict in experiment.judge(results):
        typer.echo(f"{verdict.outcome}: {verdict.goal}: {verdict.found} (wanted {verdict.target})")
    typer.echo(f"written to {page}")
