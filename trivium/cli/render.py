"""trivium render: a conversation as the tokens that a model is given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trivium.cli.command import SHIPPED, check_shipped


def render(
    messages: Annotated[Path, typer.Argument(help="a Chat Completions request as JSON, - for standard input")],
    run: Annotated[
        Path, typer.Option(help="whose tokenizer: a run, or a released folder; else nano-chat's", show_default=False)
    ] = SHIPPED,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object with the ids")] = False,
) -> None:
    """Show a conversation in K3's chat format, each segment as it is encoded.

    `add_generation_prompt` false in the file: no answer is asked for. Control tokens stand out in colour; where there is
    none, as in a pipe, a control string that somebody typed looks like one.
    """
    from rich.console import Console

    from trivium.chat.completions import read_request
    from trivium.chat.render import Renderer, shown
    from trivium.chat.render import render as rendered
    from trivium.chat.tokenizer import Tokenizer
    from trivium.cli.tokens import coloured, read_json

    check_shipped(run)
    body = read_json(messages)
    if isinstance(body, list):
        body = {"messages": body}
    if not isinstance(body, dict):
        raise ValueError(f"{messages}: wanted an object with messages, or a list of them, got {type(body).__name__}")
    answer = body.get("add_generation_prompt", True)
    if not isinstance(answer, bool):
        raise ValueError(f"{messages}: add_generation_prompt: wanted true or false, got {answer!r}")
    rendering = rendered(read_request(body), answer=answer)
    renderer = Renderer(Tokenizer.from_folder(run))
    prompt = renderer.encode(rendering)
    if as_json:
        content = {
            "ids": prompt.ids,
            "num_tokens": prompt.num_tokens,
            "num_stub": prompt.num_stub,
            "channel": prompt.channel,
            "segments": [shown(segment) for segment in rendering.segments],
        }
        typer.echo(json.dumps(content, ensure_ascii=False))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(coloured([(shown(segment), renderer.ids_of(segment)) for segment in rendering.segments], renderer))
    stub = f" and {prompt.num_stub} that open the answer" if prompt.num_stub else ""
    console.print(f"\n{prompt.num_tokens} tokens{stub}", markup=False)
