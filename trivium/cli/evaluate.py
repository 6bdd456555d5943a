"""trivium eval: a model's scores."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from trivium.cli.command import SHIPPED, check_finished, dtype_on
from trivium.cli.options import Device, TalkingDtype, TalkingRun

app = typer.Typer(no_args_is_help=True)


@app.callback()
def evaluate() -> None:
    """Score a model."""


@app.command()
def chat(
    run: TalkingRun = SHIPPED,
    dialogues: Annotated[int, typer.Option(min=1, help="how many are answered")] = 400,
    seed: Annotated[
        int | None, typer.Option(help="another one asks other questions; else the run's", show_default=False)
    ] = None,
    device: Device = "cpu",
    dtype: TalkingDtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Let a model answer generated dialogues that it did not learn from, with tools, and check what it says.

    The scores that it got at the end of its training stand beside, of 400 dialogues of the run's seed.
    """
    from rich.console import Console

    from trivium.api import load
    from trivium.evals.chat import ChatReport, table
    from trivium.evals.chat import evaluate as scores_of
    from trivium.train.run_folder import RUN, read_run

    check_finished(run)
    where = run if run.is_dir() else run.parent
    about = read_run(where) if (where / RUN).exists() else {}
    recorded = about.get("report", {}).get("chat")
    columns = {} if recorded is None else {f"in {RUN}": ChatReport.from_json(recorded)}
    seed = about.get("seed", 0) if seed is None else seed
    model = load(run, device=device, dtype=dtype_on(device, dtype))
    if model.tokenizer is None:
        raise ValueError(f"{run}: has no tokenizer, so it cannot be talked to")
    console = Console(highlight=False, soft_wrap=True)

    def say(line: str) -> None:
        if not as_json:
            console.print(line, markup=False)

    say(f"{run}: {dialogues} held-out dialogues of seed {seed}")
    found = scores_of(
        model.network,
        model.tokenizer,
        num_dialogues=dialogues,
        num_efforts=min(40, dialogues),
        seed=seed,
        say=say,
    )
    if as_json:
        typer.echo(json.dumps({"run": str(run), "dialogues": dialogues, "seed": seed, **found.to_json()}, indent=2))
        return
    console.print(table({"now": found, **columns}))
