"""trivium parse: the ids of an answer, or of a whole prompt, as messages."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trivium.cli.command import SHIPPED, check_shipped


class What(StrEnum):
    think = "think"
    response = "response"
    prompt = "prompt"


def parse(
    ids: Annotated[
        Path, typer.Argument(help="a list of token ids as JSON, or an object with ids; - for standard input")
    ],
    run: Annotated[
        Path, typer.Option(help="whose tokenizer: a run, or a released folder; else nano-chat's", show_default=False)
    ] = SHIPPED,
    what: Annotated[
        What, typer.Option("--as", help="an answer behind a prompt that opened think, or response; or a whole prompt")
    ] = What.think,
    tools: Annotated[
        Path | None, typer.Option(help="the tools that are declared, as JSON; else a call of any is taken")
    ] = None,
) -> None:
    """Read token ids back: what is reasoning, what is said, which calls are whole, and what is wrong with the rest.

    A prompt is printed as a request that `trivium render` takes, with the channel that its answer begins in.
    """
    from trivium.chat.completions import read_request, write_request
    from trivium.chat.parse import parse as parsed
    from trivium.chat.tokenizer import Tokenizer
    from trivium.chat.transcript import read_transcript
    from trivium.cli.tokens import read_json

    check_shipped(run)
    body = read_json(ids)
    if isinstance(body, dict):
        body = body.get("ids")
    if not isinstance(body, list) or not all(type(id_) is int for id_ in body):
        raise ValueError(f"{ids}: wanted a list of token ids, or an object with ids")
    tokenizer = Tokenizer.from_folder(run)
    if what is What.prompt:
        transcript = read_transcript(body, tokenizer)
        content = {**write_request(transcript.conversation), "channel": transcript.channel}
        if transcript.channel is None:
            content["add_generation_prompt"] = False
    else:
        asked = {"role": "user", "content": ""}  # a request wants a message
        declared = (
            None if tools is None else read_request({"messages": [asked], "tools": read_json(tools)}).options.tools
        )
        answer = parsed(body, tokenizer, channel=what.value, tools=declared)
        content = asdict(answer)
    typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
