"""A pretraining run on the console: run it, and show what came of it. Shared by quickstart and train."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import typer
from rich.console import Console

from trivium.api import Model, load
from trivium.cli.command import again_line, shell_line
from trivium.data.source import Document
from trivium.parallel.world import open_world
from trivium.recipes.pretraining import Outcome, pretrain_on_text
from trivium.train.pretrain import PretrainConfig
from trivium.train.run_folder import write_text

SAMPLE_TOKENS = 120
TEMPERATURE = 0.7
SEED = 0
# What a model of Python is asked to go on with; of other text, the beginnings of files it has not seen.
PYTHON_PROMPTS = ("def __init__(self", "import os\nimport sys\n", '"""')
_NUM_PROMPTS = 3
_PROMPT_CHARS = 40


def run(config: PretrainConfig, *, data: Path | None, out: Path, name: str | None, command: list[str]) -> None:
    """Train, print everything, and exit with 130 where the run was interrupted. `data` None: Python's own library."""
    with open_world(config.device) as world:
        console = Console(highlight=False, soft_wrap=True, quiet=not world.is_first)
        outcome = pretrain_on_text(
            config,
            data=data,
            out=out,
            name=name,
            command=command,
            console=console,
            show=partial(show_run, python=data is None, console=console),
            world=world,
        )
    if outcome is not None and outcome.report is None:
        show_interruption(outcome, command, console)
        raise typer.Exit(130)


def show_run(outcome: Outcome, *, python: bool, console: Console) -> None:
    """Print the report, a sample and what to type next, and write samples.md.

    Raises RuntimeError when the checkpoint, loaded again, does not write what the trained model writes.
    """
    assert outcome.report is not None and outcome.result.model is not None
    folder, tokenizer = outcome.folder, outcome.corpus.tokenizer
    console.print()
    console.print(outcome.report.table())
    outcome.result.model.eval()
    in_memory = Model(network=outcome.result.model, tokenizer=tokenizer)
    loaded = load(folder, device=outcome.result.model.device)
    text = outcome.corpus.text
    # The held-out part of a file may be nothing but empty lines.
    prompts = PYTHON_PROMPTS if python else _beginnings(text.heldout) or _beginnings(text.train)
    how = {"max_tokens": SAMPLE_TOKENS, "temperature": TEMPERATURE, "seed": SEED}
    texts = []
    for prompt in prompts:
        sample = loaded.generate(prompt, **how)
        if not texts and sample.ids != in_memory.generate(prompt, **how).ids:
            raise RuntimeError(f"{folder}: the checkpoint, loaded again, does not write what the trained model writes")
        texts.append(prompt + sample.text)
    about = f"At temperature {TEMPERATURE}, seed {SEED}, {SAMPLE_TOKENS} tokens behind each prompt:\n"
    write_text(folder / "samples.md", "\n".join([about, *(f"````\n{text}\n````\n" for text in texts)]))
    console.print("\na sample, from the trained model and from its files alike:\n")
    console.print(texts[0], markup=False, highlight=False)
    again = ("--temperature", str(TEMPERATURE), "--seed", str(SEED), "--max-tokens", str(SAMPLE_TOKENS))
    run = str(folder)
    console.print(
        f"\nwritten to {run}: the checkpoint, plot.png, samples.md and all figures in run.json\n\n"
        "what to type next\n"
        f"  the sample again:   {shell_line('generate', run, '--prompt', prompts[0], *again)}\n"
        f"  the loss as a plot: {shell_line('plot', run)}\n"
        f"  experts as MXFP4:   {shell_line('convert', run, f'{run}-packed', '--pack-experts')}\n"
        f"  in Python:          trivium.load({run!r}).generate({prompts[0]!r}).text",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def show_interruption(outcome: Outcome, command: list[str], console: Console) -> None:
    """Say where an interrupted run stands and how it goes on."""
    progress = outcome.result.progress
    of = f" of {progress.num_steps}" if progress.num_steps else ""
    console.print(
        f"interrupted after step {progress.step}{of}, saved to {outcome.folder}\n"
        f"  go on:              {again_line(*command)}\n"
        f"  as it is now:       {shell_line('generate', str(outcome.folder), '--prompt', '...')}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _beginnings(documents: Iterable[Document]) -> tuple[str, ...]:
    texts = (document.text.lstrip()[:_PROMPT_CHARS] for document in documents)
    # Cut at a word's end, so that the model does not begin inside one.
    cut = (text if len(text) < _PROMPT_CHARS else text.rsplit(maxsplit=1)[0] for text in texts if text)
    return tuple(dict.fromkeys(cut))[:_NUM_PROMPTS]
