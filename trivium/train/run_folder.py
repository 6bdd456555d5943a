"""A run's folder: who may write to it, what run.json says, and how a file gets into it whole."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from trivium.chat.vocabulary import CONFIG_FILE, RANKS_FILE
from trivium.data.corpus import HELDOUT_FILE, HELDOUT_TOKENS, TOKENS

RUN = "run.json"
# What a run writes before its run.json is there, the held-out text first: all that is left of one killed before that.
_BEGINNING = {HELDOUT_FILE, HELDOUT_TOKENS, TOKENS, RANKS_FILE, CONFIG_FILE, RUN}
_ABSENT = object()


@contextmanager
def open_run(
    root: str | Path, name: str, *, exact: bool, same: dict[str, Any], say: Callable[[str], None] = lambda line: None
) -> Iterator[tuple[Path, bool]]:
    """(`root`/`name`, whether a run goes on there), locked against other processes until the block ends.

    A run goes on where the folder's run.json says it is unfinished and agrees with `same`, field by field; a field that
    is a dict is compared by those of its keys that `same` has. A finished run is never written to, nor an unfinished
    one of other arguments: then `exact` raises ValueError, else the next of name-2, name-3, ... is tried, and `say`
    hears why an unfinished one was left alone. A folder that has no run.json when the block fails goes away again.
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
            folder.mkdir(exist_ok=True)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except (FileExistsError, NotADirectoryError):  # a file
            why, unfinished = "is a file", False
        except OSError as error:
            raise ValueError(f"{folder}: cannot be made a run's folder: {error.strerror}") from error
        else:
            try:
                why, unfinished = _why_not(folder, handle, same)
            except BaseException:
                os.close(handle)
                raise
            if why is None:
                break
            os.close(handle)
        if exact:
            raise ValueError(f"{folder}: {why}; choose another name")
        if unfinished:
            say(f"{folder}: {why}; left alone")
    try:
        yield folder, (folder / RUN).exists()
    except BaseException:
        if not (folder / RUN).exists():
            shutil.rmtree(folder, ignore_errors=True)  # it held nothing but such beginnings when it was locked
        raise
    finally:
        os.close(handle)


def read_run(folder: Path) -> dict[str, Any]:
    """run.json. Raises ValueError when it is not there or no JSON object."""
    path = folder / RUN
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: wanted a JSON object, got {type(content).__name__}")
    return content


def update_run(folder: Path, **fields: Any) -> None:
    """Set fields of run.json, which need not exist yet."""
    content = read_run(folder) if (folder / RUN).exists() else {}
    write_json(folder / RUN, {**content, **fields})


def write_text(path: Path, text: str) -> None:
    """The whole file or none of it: written and synced under a temporary name, then renamed."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(f"{path}: cannot be written: {error.strerror or error}; what was there is kept") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """`write_text` of the content as JSON."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _why_not(folder: Path, handle: int, same: dict[str, Any]) -> tuple[str | None, bool]:
    """Why this run may not write to the folder, None where it may; and whether an unfinished run lies there."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it however the process ends
    except OSError:
        return "another process is writing to it", True
    if not (folder / RUN).exists():
        names = {path.name.removesuffix(".part") for path in folder.iterdir()}
        ours = not names or (names <= _BEGINNING and not names.isdisjoint({HELDOUT_FILE, HELDOUT_TOKENS, TOKENS}))
        return (None if ours else "is there already and holds no run"), False
    there = read_run(folder)
    if there.get("finished") is not False:
        return "holds a finished run, which is never overwritten", False
    wanted = json.loads(json.dumps(same))  # tuples as the lists they are in the file
    for name, got, want in _differences(there, wanted):
        return f"holds an unfinished run with another {name}: {_shown(got)} there, {_shown(want)} here", True
    return None, True


def _differences(there: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name, want in wanted.items():
        got = there.get(name, _ABSENT)
        if isinstance(want, dict) and isinstance(got, dict):
            yield from _differences(got, want, f"{prefix}{name}.")
        elif got != want:
            yield prefix + name, got, want


def _shown(value: Any) -> str:
    return "nothing" if value is _ABSENT else json.dumps(value)
