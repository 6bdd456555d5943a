"""Tokens on a console: control ids in one colour, the pieces of content in two by turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from trivium.chat.render import Renderer

CONTROL = "bold magenta"
PIECES = ("black on #cfe8cf", "black on #cfdff5")


def read_json(path: Path) -> Any:
    """The value of a JSON file, of standard input for -. Raises ValueError that names the file."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        return json.loads(text)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is no JSON: {error}") from error


def coloured(segments: Iterable[tuple[tuple[str, bool], Sequence[int]]], renderer: Renderer) -> Text:
    """Segments, each with what it shows and its ids, every token apart. A message ends its line."""
    text = Text()
    for (shown, is_control), ids in segments:
        if is_control:
            text.append(shown, CONTROL)
            if shown == "<|end_of_msg|>":
                text.append("\n")
        else:
            pieces(text, ids, renderer)
    return text


def pieces(text: Text, ids: Sequence[int], renderer: Renderer) -> None:
    """Append each id's own text: half a character is shown as U+FFFD."""
    for place, id_ in enumerate(ids):
        text.append(renderer.tokenizer.decode([id_]), PIECES[place % 2])
