"""Points from which a run goes on exactly: resume/step-00001200/, the two newest kept.

A point is written under a temporary name, synced and then renamed: a folder named step-... is whole, however the process
that wrote it ended. `resume/latest` is a link to the newest, for people; the reader takes the newest that is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file
from torch import Tensor

from trivium.checkpoint.replacement import sync_folder
from trivium.checkpoint.safetensors import write_tensors

TENSORS, ABOUT, LATEST = "tensors.safetensors", "state.json", "latest"
_SAVING, _GONE = ".saving", ".gone"
_NAME = re.compile(r"step-(\d{8,})")

_STORED = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class ResumePoint:
    """Where a run stands after `step` steps: tensors by name, and what else it needs as JSON."""

    step: int
    tensors: dict[str, Tensor]
    about: dict[str, Any]


def save_resume_point(run: Path, point: ResumePoint, *, keep: int = 2) -> Path:
    """Write run/resume/step-NNNNNNNN, then keep it and the `keep` - 1 before it; returns the new folder.

    Raises OSError with the folder and the reason. Points saved before are then still there.
    """
    root = run / "resume"
    folder = root / f"step-{point.step:08d}"
    part = folder.with_name(folder.name + _SAVING)
    try:
        root.mkdir(exist_ok=True)
        _sweep(root)
        part.mkdir()
        written = _write(part / TENSORS, lambda file: _write_all(file, point.tensors))
        about = {"step": point.step, **point.about}
        about["sha256"] = _seal(written, about)
        _write(part / ABOUT, lambda file: file.write((json.dumps(about, indent=2) + "\n").encode()))
        sync_folder(part)
        if folder.exists():  # one that could not be read
            folder.rename(folder.with_name(folder.name + _GONE))
        part.rename(folder)
        link = root / (LATEST + _SAVING)
        link.symlink_to(folder.name, target_is_directory=True)
        link.replace(root / LATEST)
        sync_folder(root)
    except OSError as error:
        if part.exists():
            shutil.rmtree(part, ignore_errors=True)
        raise OSError(f"{folder}: cannot be saved: {error.strerror or error}; what was saved before is kept") from error
    points = _points(root)
    newer = points.index(folder)  # what lies ahead could not be read when the run went on from before it
    for old in (*points[:newer], *points[newer + keep :]):
        # Renamed first, so that nothing half removed has the name of a point.
        old.rename(old.with_name(old.name + _GONE))
    _sweep(root)
    return folder


def load_resume_point(run: Path, say: Callable[[str], None] = lambda line: None) -> ResumePoint | None:
    """The newest point that is whole, None where none was ever saved; `say` hears of each that is damaged.

    Raises ValueError when there are points and all are damaged.
    """
    root = run / "resume"
    points = _points(root) if root.is_dir() else []
    for folder in points:
        try:
            return _read(folder)
        except (OSError, ValueError, KeyError, RecursionError) as error:
            say(f"{folder}: damaged, not used: {error}")
    if points:
        raise ValueError(f"{root}: all {len(points)} points are damaged; remove that folder to begin the run anew")
    return None


def _points(root: Path) -> list[Path]:
    """Newest first."""
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _read(folder: Path) -> ResumePoint:
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    if not isinstance(about, dict):
        raise ValueError(f"{ABOUT}: wanted a JSON object, got {type(about).__name__}")
    with (folder / TENSORS).open("rb") as file:
        found = hashlib.file_digest(file, "sha256")
    if about.pop("sha256") != _seal(found, about):
        raise ValueError("the SHA-256 differs: this is not what was written")
    step = about.pop("step")
    return ResumePoint(step=step, tensors=load_file(folder / TENSORS), about=about)


def _seal(tensors: hashlib._Hash, about: dict[str, Any]) -> str:
    """The SHA-256 of the tensors' file and of all else that state.json says."""
    tensors.update(json.dumps(about, sort_keys=True).encode())
    return tensors.hexdigest()


def _write(path: Path, fill: Callable[[BinaryIO], object]) -> hashlib._Hash:
    """Write and sync a file; returns the SHA-256 of it, under way."""
    with path.open("wb") as file:
        hashing = _Hashing(file)
        fill(hashing)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    return hashing.digest


class _Hashing:
    """A file to write to that hashes what goes through it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, content: bytes | memoryview) -> int:
        self.digest.update(content)
        return self._file.write(content)


def _write_all(file: BinaryIO, tensors: dict[str, Tensor]) -> None:
    def bytes_of(name: str) -> memoryview:
        return tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data

    write_tensors(file, [(name, _STORED[t.dtype], tuple(t.shape)) for name, t in tensors.items()], bytes_of)


def _sweep(root: Path) -> None:
    """Remove what an earlier save left half done."""
    for path in root.iterdir():
        if path.name.endswith((_SAVING, _GONE)):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)
