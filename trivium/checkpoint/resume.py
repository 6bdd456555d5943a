"""Points from which a run goes on exactly: resume/step-00001200/, the two newest kept.

A point is what torch.distributed.checkpoint (DCP) writes, one file a process and `.metadata`, and state.json: what is
no tensor, and the SHA-256 of every file and of state.json itself. One process and many write the same format, and any
other number of them reads it; of several all see one file system. A point is written under a temporary name and synced
by all, then renamed by the first: a folder named step-... is whole, however the processes that wrote it ended.
`resume/latest` is a link to the newest, for people; the reader takes the newest that is whole.

`.metadata` is a pickle. It is opened behind its SHA-256 alone; but that guards against damage, not against malice:
trust a resume point no further than code from where it came.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as dcp_loader
import torch.distributed.checkpoint.state_dict_saver as dcp_saver
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from trivium.checkpoint.replacement import sync_folder

T = TypeVar("T")

ABOUT, LATEST = "state.json", "latest"
_SAVING, _GONE = ".saving", ".gone"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True, eq=False)
class RunState:
    """Where a run stands after `step` steps: tensors by name, and what else it needs as JSON.

    Of several processes each has all the names. A DTensor is saved shard by shard; a plain tensor is the first
    process's, as `about` is.
    """

    step: int
    tensors: dict[str, Tensor]
    about: dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class ResumePoint:
    """A `RunState` on disk. `names`: shape, of the whole tensor, and dtype of everything in it."""

    step: int
    about: dict[str, Any]
    names: dict[str, tuple[tuple[int, ...], torch.dtype]]
    folder: Path

    def read_(self, targets: dict[str, Tensor]) -> None:
        """Fill the targets in place; a DTensor takes its shard, however the stored one was cut. Collective.

        Raises ValueError, before anything is read, for a name that is not here or is of another shape or dtype;
        OSError with the folder and the reason.
        """
        for name, target in targets.items():
            if name not in self.names:
                raise ValueError(f"resume: {name} is missing")
            shape, dtype = self.names[name]
            if shape != tuple(target.shape) or dtype != target.dtype:
                raise ValueError(
                    f"resume: {name}: wanted {target.dtype} {list(target.shape)}, got {dtype} {list(shape)}"
                )
        _quieten()
        try:
            dcp_loader.load(
                dict(targets),
                storage_reader=FileSystemReader(self.folder),
                no_dist=not dist.is_initialized(),
            )
        except CheckpointException as error:
            raise OSError(f"{self.folder}: cannot be read: {_reason(error)}") from error


class ResumeWriter:
    """Writes a run's resume points in the background, one at a time, and keeps the `keep` newest.

    Of several processes all make one, and call it in one order. What they tell one another for a save goes through a
    process group of its own, so that it may mix with the collectives of training in any order.
    """

    def __init__(self, run: Path, *, keep: int = 2) -> None:
        _quieten()
        self._root, self._keep = run / "resume", keep
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="resume")
        self._saving: Future[None] | None = None

    def save(self, state: RunState, *, wait: bool = False) -> None:
        """Copy the state to host memory and return; run/resume/step-NNNNNNNN appears when all of it is on the disk.

        Raises what `finish` does, of the save before, and then begins no new one. `wait`: of this one too.
        """
        self.finish()
        about = json.loads(json.dumps(state.about))
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.tensors.items()}
        self._saving = self._thread.submit(self._write, state.step, about, tensors)
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way, if there is one.

        Raises OSError with the folder and the reason where it failed, in every process. Points saved before are then
        still there.
        """
        if self._saving is None:
            return
        wait([self._saving])
        saving, self._saving = self._saving, None
        saving.result()

    def _write(self, step: int, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        folder = self._root / f"step-{step:08d}"
        part = folder.with_name(folder.name + _SAVING)
        # Synced by ourselves: DCP syncs .metadata before the last of it has left the buffer.
        files = _Files(part, sync_files=False, per_thread_copy_ahead=0)
        try:
            self._first(lambda: self._begin(part))
            dcp_saver.save(
                tensors,
                storage_writer=files,
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=self._group,
                no_dist=self._group is None,
            )
            sums = self._each(lambda: self._sums(part, files))
            content = {
                "step": step,
                "about": about,
                "files": {name: sum_ for own in sums for name, sum_ in own.items()},
            }
            self._first(lambda: self._put_in_place(part, folder, content))
        except (Exception, CheckpointException) as error:
            if self._rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            raise OSError(f"{folder}: cannot be saved: {_reason(error)}; what was saved before is kept") from error

    def _begin(self, part: Path) -> None:
        self._root.mkdir(exist_ok=True)
        _sweep(self._root)
        part.mkdir()

    def _sums(self, part: Path, files: _Files) -> dict[str, str]:
        """Of the files that this process wrote. Raises what kept it from writing them."""
        if files.failure is not None:
            raise files.failure
        return {path.name: _synced_sum(path) for path in part.glob(f"__{self._rank}_*")}

    def _put_in_place(self, part: Path, folder: Path, content: dict[str, Any]) -> None:
        files = content["files"]
        files.update({path.name: _synced_sum(path) for path in part.iterdir() if path.name not in files})
        content["sha256"] = _seal(content)
        with (part / ABOUT).open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        sync_folder(part)
        if folder.exists():  # one that could not be read
            folder.rename(folder.with_name(folder.name + _GONE))
        part.rename(folder)
        link = self._root / (LATEST + _SAVING)
        link.symlink_to(folder.name, target_is_directory=True)
        link.replace(self._root / LATEST)
        sync_folder(self._root)
        points = _points(self._root)
        newer = points.index(folder)  # what lies ahead could not be read when the run went on from before it
        for old in (*points[:newer], *points[newer + self._keep :]):
            # Renamed first, so that nothing half removed has the name of a point.
            old.rename(old.with_name(old.name + _GONE))
        _sweep(self._root)

    def _first(self, act: Callable[[], None]) -> None:
        """Let the first process do it, while the others wait."""
        self._each(act if self._rank == 0 else lambda: None)

    def _each(self, act: Callable[[], T]) -> list[T]:
        """What `act` returns in every process. An error of one is raised in all: none is left waiting for it."""
        try:
            outcome: tuple[T | None, Exception | None] = (act(), None)
        except (OSError, RuntimeError) as error:
            outcome = (None, error)
        outcomes = _gather(outcome, self._group)
        for _, failed in outcomes:
            if failed is not None:
                raise failed
        return [result for result, _ in outcomes]  # type: ignore[misc]


def load_resume_point(run: Path, say: Callable[[str], None] = lambda line: None) -> ResumePoint | None:
    """The newest point that is whole, None where none was ever saved. Collective: all processes get the same one.

    Each checks its share of the files. In the first process `say` hears of every point that is damaged. Raises
    ValueError when there are points and all are damaged.
    """
    root = run / "resume"
    group = dist.group.WORLD if dist.is_initialized() else None
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    points = _gather(_points(root) if root.is_dir() else [], group)[0]
    for folder in points:
        content, damage = {}, None
        try:
            content = _checked(folder, rank, size)
        except (OSError, ValueError, RecursionError) as error:
            damage = str(error)
        damages = [found for found in _gather(damage, group) if found is not None]
        if not damages:
            return ResumePoint(step=content["step"], about=content["about"], names=_names(folder), folder=folder)
        if rank == 0:
            say(f"{folder}: damaged, not used: {damages[0]}")
    if points:
        raise ValueError(f"{root}: all {len(points)} points are damaged; remove that folder to begin the run anew")
    return None


class _Files(FileSystemWriter):
    """DCP's writer, which keeps what fails in `failure` and has DCP go on.

    torch.save answers a failed write with a RuntimeError about positions where something was left in its buffer: the
    OSError is behind it. DCP sends an error on with its traceback, which on Python 3.13 torch 2.11 cannot pickle: the
    other processes would wait for ever.
    """

    failure: Exception | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        nothing: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        nothing.set_result([])
        with self._kept():
            return super().write_data(plan, planner)
        return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self._kept():
            super().finish(metadata, results)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            self.failure = error.__context__ if isinstance(error.__context__, OSError) else error


def _checked(folder: Path, rank: int, size: int) -> dict[str, Any]:
    """What state.json says, when it and this process's share of the files are what was written."""
    content = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{ABOUT}: wanted a JSON object, got {type(content).__name__}")
    if content.pop("sha256", None) != _seal(content):
        raise ValueError(f"{ABOUT}: the SHA-256 differs: this is not what was written")
    for name, wanted in sorted(content["files"].items())[rank::size]:
        if _sum(folder / name) != wanted:
            raise ValueError(f"{name}: the SHA-256 differs: this is not what was written")
    return content


def _names(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: (tuple(kind.size), kind.properties.dtype) for name, kind in stored.items()}  # type: ignore[union-attr]


def _points(root: Path) -> list[Path]:
    """Newest first."""
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _seal(content: dict[str, Any]) -> str:
    """The SHA-256 of what state.json says, and by that of every file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _synced_sum(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _sum(path)


def _sweep(root: Path) -> None:
    """Remove what an earlier save left half done."""
    for path in root.iterdir():
        if path.name.endswith((_SAVING, _GONE)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The values of all processes of the group by rank; None is one process by itself."""
    if group is None:
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "gloo" in str(error):
        return "another process does not answer"
    return str(error).partition("\n")[0] or type(error).__name__


def _quieten() -> None:
    """No word from DCP that one process is one process; said by the thread that saves, too, so the filter stays."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
