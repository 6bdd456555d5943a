"""trivium cost: what a model costs, by arithmetic on its config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from trivium.config import PRESETS, K2Config, K3Config, preset
from trivium.cost.params import count_params, params_table, published_params

app = typer.Typer(no_args_is_help=True, help="What a model costs, by arithmetic on its config.")


@app.callback()
def cost() -> None:
    """What a model costs, by arithmetic on its config."""


@app.command()
def params(
    model: Annotated[str, typer.Argument(help="a preset, a config.json, or a folder that holds one")],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Parameters by component, in all and active per token."""
    config = _config(model)
    if as_json:
        count, published = count_params(config), published_params(config)
        content = {
            "model": model,
            "total": count.total,
            "active": count.active,
            "padding": count.padding,
            "components": {row.component: {"total": row.total, "active": row.active} for row in count.rows},
            "published": {"total": published.total, "active": published.active} if published else None,
        }
        typer.echo(json.dumps(content, indent=2))
        return
    data = params_table(config)
    table = Table(title=f"Parameters of {model}", title_justify="left")
    for name in data.header:
        table.add_column(name, justify="left" if name == data.header[0] else "right", no_wrap=True)
    for row in data.rows:
        table.add_row(*row)
    table.add_section()
    table.add_row(*data.sum)
    if data.published:
        table.add_row(*data.published)
    console = Console()
    console.print(table)
    for note in data.notes:
        console.print(note, highlight=False)


def _config(model: str) -> K3Config | K2Config:
    """A preset by name; anything else is a path. A file or folder named like a preset needs a ./ before it."""
    if model in PRESETS:
        return preset(model)
    if not Path(model).exists():
        raise ValueError(f"model: wanted one of {', '.join(PRESETS)}, or a config file or folder, got {model!r}")
    return K3Config.from_json(model)
