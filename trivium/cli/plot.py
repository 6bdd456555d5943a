"""trivium plot: the curves of one run, or of several in one picture, and what their layers looked like in another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plot(
    runs: Annotated[list[Path], typer.Argument(help="the folders of one or more runs")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="the picture; else plot.png, in the folder of a single run, in the current one for several. "
            "The layers are in layers.png beside plot.png, in NAME.layers.png beside NAME.png"
        ),
    ] = None,
) -> None:
    """Draw the curves and the layers of runs, finished or under way."""
    from trivium.evals.plot import plot_runs

    default = runs[0] / "plot.png" if len(runs) == 1 else Path("plot.png")
    for path in plot_runs(runs, out or default):
        typer.echo(f"written to {path}")
