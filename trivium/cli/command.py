"""The command line as text: what somebody would type."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import trivium

# A small model that was taught to talk, so that `trivium chat` has one at once. run.json says how it was made.
SHIPPED = Path(trivium.__file__).parent / "shipped" / "nano-chat"


def dtype_on(device: str, dtype: str | None) -> str | None:
    """What a model is loaded in where nobody says it: float32 on a CPU, whose kernels take no other, else what the file says."""
    return "float32" if dtype is None and device == "cpu" else dtype


def shell_line(*arguments: str) -> str:
    """The line that runs trivium with these arguments, quoted for a shell."""
    # Behind `make quickstart` no `trivium` is on the path, but the program that runs this is.
    program = ["trivium"] if shutil.which("trivium") else [sys.executable, "-m", "trivium"]
    return shlex.join([*program, *arguments])


def again_line(*arguments: str) -> str:
    """The line that begins this run once more: under torchrun where torchrun began it."""
    num_processes, num_hosts = os.environ.get("WORLD_SIZE", "1"), os.environ.get("GROUP_WORLD_SIZE", "1")
    if num_processes == "1" or num_hosts != "1":  # of several hosts each has a line of its own
        return shell_line(*arguments)
    return shlex.join(["torchrun", "--nproc-per-node", num_processes, "-m", "trivium", *arguments])


def check_shipped(folder: Path) -> None:
    """Raises ValueError where nobody named a run and this installation has no model of its own."""
    if folder == SHIPPED and not folder.is_dir():
        raise ValueError("no model is shipped with this installation: name a run, such as `trivium sft` makes")


def check_finished(folder: Path) -> None:
    """Raises ValueError, with the command that goes on, where the folder is a run's and holds no model yet."""
    check_shipped(folder)
    from trivium.checkpoint.index import INDEX, SINGLE
    from trivium.checkpoint.replacement import Folder

    try:
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # no run, or one whose checkpoint may be sound all the same
    if not isinstance(about, dict) or about.get("finished") is not False:
        return
    held = Folder.at(folder)
    if held.has(SINGLE) or held.has(INDEX):
        return
    command = about.get("command")
    known = isinstance(command, list) and command and all(isinstance(part, str) for part in command)
    line = f": {shell_line(*command)}" if known else ""
    raise ValueError(f"{folder}: this run is unfinished; the command that began it, run again, finishes it{line}")
