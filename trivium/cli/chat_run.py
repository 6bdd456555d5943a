"""An SFT run on the console: run it, and show what came of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import typer
from rich.console import Console

from trivium.cli.command import again_line, shell_line
from trivium.evals.chat import table
from trivium.parallel.world import open_world
from trivium.recipes.sft import ChatData, SftOutcome, sft_on_conversations
from trivium.train.pretrain import PretrainConfig


def train(
    config: PretrainConfig, *, base: Path, data: ChatData, out: Path, name: str | None, command: list[str]
) -> None:
    """Train, print everything, and exit with 130 where the run was interrupted."""
    with open_world(config.device) as world:
        console = Console(highlight=False, soft_wrap=True, quiet=not world.is_first)
        outcome = sft_on_conversations(
            config,
            base=base,
            data=data,
            out=out,
            name=name,
            command=command,
            console=console,
            show=partial(_show, console=console),
            world=world,
        )
    if outcome is not None and outcome.result.interrupted:
        progress = outcome.result.progress
        console.print(
            f"interrupted after step {progress.step} of {progress.num_steps or '?'}, saved to {outcome.folder}\n"
            f"  go on: {again_line(*command)}",
            markup=False,
        )
        raise typer.Exit(130)


def _show(outcome: SftOutcome, *, console: Console) -> None:
    console.print()
    if outcome.reports is not None:
        console.print(table(outcome.reports))
    run = str(outcome.folder)
    console.print(
        f"\nwritten to {run}: the checkpoint, plot.png and all figures in run.json\n\n"
        "what to type next\n"
        f"  talk to it:       {shell_line('chat', run)}\n"
        f"  experts as MXFP4: {shell_line('convert', run, f'{run}-packed', '--pack-experts')}",
        markup=False,
    )
