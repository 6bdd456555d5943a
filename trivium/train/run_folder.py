"""A run's folder: who may write to it, and how a file gets into it whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any


def claim_run_folder(root: str | Path, name: str, *, exact: bool) -> Path:
    """Make `root`/`name` and return it. A folder that is there already is never written to.

    Then `exact` raises ValueError, else the next free of name-2, name-3, ... is taken.
    """
    if not name or name != Path(name).name or name.startswith("."):
        raise ValueError(f"name: wanted the name of one folder, got {name!r}")
    root = Path(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{root}: cannot be made a folder of runs: {error.strerror}") from error
    for number in count(1):
        folder = root / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()  # fails for all but one of two who want it at once
            return folder
        except FileExistsError as error:
            if exact:
                raise ValueError(f"{folder}: is there already and is not overwritten; choose another name") from error
    raise AssertionError("count ends")


@contextmanager
def released_if_untrained(folder: Path) -> Iterator[None]:
    """Where the block fails, or is interrupted, before the folder holds a model or a step, the folder goes away again."""
    try:
        yield
    except BaseException:
        files = sorted(folder.iterdir())
        if all(file.name == "metrics.jsonl" and file.stat().st_size == 0 for file in files):
            for file in files:
                file.unlink()
            folder.rmdir()
        raise


def write_text(path: Path, text: str) -> None:
    """The whole file or none of it: written and synced under a temporary name, then renamed."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: dict[str, Any]) -> None:
    """`write_text` of the content as JSON."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
