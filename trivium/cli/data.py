"""trivium data: training data made ready."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Make training data ready.")


@app.callback()
def data() -> None:
    pass


@app.command()
def chat(
    file: Annotated[Path, typer.Argument(help="conversations, one Chat Completions request to a line (JSONL)")],
    run: Annotated[Path, typer.Option(help="whose tokenizer: a run, or a released folder")],
    out: Annotated[
        Path | None, typer.Option(help="the folder to write; else the file's name without its ending")
    ] = None,
) -> None:
    """Conversations to token shards, with the loss on what the assistant writes: for trivium sft RUN --data FOLDER.

    Some are held out, by a hash of what they say. A call whose arguments are no JSON carries no loss.
    """
    import numpy as np

    from trivium.chat.tokenizer import Tokenizer
    from trivium.data.chat import build_chat, num_counted

    folder = file.with_suffix("") if out is None else out
    streams = build_chat(file, Tokenizer.from_folder(run), folder, lambda line: typer.echo(line))
    train = streams.train
    lengths = np.diff(train.starts)
    typer.echo(
        f"{len(lengths):,} conversations to learn from, {len(streams.heldout.starts) - 1} held out\n"
        f"{train.manifest.num_tokens:,} tokens, of which the assistant writes {num_counted(train):,}; the longest "
        f"conversation has {lengths.max():,}\n"
        f"written to {folder}"
    )
