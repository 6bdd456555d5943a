"""trivium generate: text from a run or a checkpoint, as it comes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    run: Annotated[Path, typer.Argument(help="a run's folder, or one in the released layout")],
    prompt: Annotated[str, typer.Option(help="the text to go on with")],
    max_tokens: Annotated[int, typer.Option(min=1, help="at most so many tokens")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token")] = 1.0,
    top_p: Annotated[float, typer.Option(help="sample from the likeliest tokens that hold this share")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same text")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32; else what the file says")] = None,
) -> None:
    """Go on with a prompt."""
    from trivium.api import load

    model = load(run, device=device, dtype=dtype)
    pieces = model.stream(prompt, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    typer.echo(prompt, nl=False)
    for piece in pieces:
        typer.echo(piece.text, nl=False)
    typer.echo()
