"""Arguments and options that several verbs have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
TalkingRun = Annotated[
    Path,
    typer.Argument(
        help="a run's folder, or one in the released layout; else the shipped nano-chat", show_default=False
    ),
]
TalkingDtype = Annotated[
    str | None,
    typer.Option(
        help="bfloat16 or float32; else float32 on a CPU, and elsewhere what the file says", show_default=False
    ),
]
