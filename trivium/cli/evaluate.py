"""trivium eval: a model's scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Score a model.")


@app.callback()
def _verbs() -> None:
    """Score a model."""


@app.command()
def chat(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="a run's folder, or one in the released layout; else the shipped nano-chat", show_default=False
        ),
    ] = None,
    dialogues: Annotated[int, typer.Option(min=1, help="how many are answered")] = 400,
    seed: Annotated[int, typer.Option(help="another one asks other questions")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bfloat16 or float32; else float32 on a CPU, which is slow in the other, and there what the file says",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Let a model answer generated dialogues that it did not learn from, with tools, and check what it says.

    What is known of it already, from the end of its training, stands beside.
    """
    from rich.console import Console

    from trivium.api import load
    from trivium.cli.command import SHIPPED, check_finished
    from trivium.evals.chat import ChatReport, evaluate, table
    from trivium.train.run_folder import RUN, read_run

    folder = SHIPPED if run is None else run
    check_finished(folder)
    model = load(folder, device=device, dtype="float32" if dtype is None and device == "cpu" else dtype)
    if model.tokenizer is None:
        raise ValueError(f"{folder}: has no tokenizer, so it cannot be talked to")
    console = Console(highlight=False, soft_wrap=True)
    say = (lambda line: None) if as_json else console.print
    say(f"{folder}: {dialogues} held-out dialogues")
    found = evaluate(
        model.network,
        model.tokenizer,
        num_dialogues=dialogues,
        num_efforts=min(40, dialogues),
        seed=seed,
        say=say,
    )
    if as_json:
        typer.echo(json.dumps({"run": str(folder), "dialogues": dialogues, "seed": seed, **found.to_json()}, indent=2))
        return
    columns = {folder.name: found}
    recorded = read_run(folder).get("report", {}).get("chat") if (folder / RUN).exists() else None
    if recorded is not None:
        columns[f"in {RUN}"] = ChatReport.from_json(recorded)
    console.print(table(columns))
