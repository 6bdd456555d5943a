"""trivium generate: text from a run or a checkpoint, as it comes."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Annotated

import typer

from trivium.cli.command import check_finished
from trivium.cli.options import Device


def generate(
    run: Annotated[Path, typer.Argument(help="a run's folder, or one in the released layout")],
    prompt: Annotated[str, typer.Option(help="the text to go on with")],
    max_tokens: Annotated[int, typer.Option(min=1, help="at most so many tokens")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token")] = 1.0,
    top_p: Annotated[float, typer.Option(help="sample from the likeliest tokens that hold this share")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same text; else one is drawn")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end before this text; may be given several times")] = None,
    device: Device = "cpu",
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32; else what the file says")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object, at the end")] = False,
) -> None:
    """Go on with a prompt."""
    check_finished(run)

    from trivium.api import load

    model = load(run, device=device, dtype=dtype)
    seed = secrets.randbelow(2**32) if seed is None else seed
    how = {"temperature": temperature, "top_p": top_p, "seed": seed}
    if as_json:
        text = model.generate(prompt, max_tokens=max_tokens, stop=stop or (), **how)
        content = {
            "prompt": prompt,
            "ids": text.ids,
            "text": text.text,
            "logprobs": text.logprobs,
            "finish_reason": text.finish_reason,
            **how,
        }
        typer.echo(json.dumps(content))
        return
    pieces = model.stream(prompt, max_tokens=max_tokens, stop=stop or (), **how)
    typer.echo(prompt, nl=False)  # which flushes, here and below: a reader behind a pipe sees each piece as it comes
    for piece in pieces:
        typer.echo(piece.text, nl=False)
    typer.echo()
