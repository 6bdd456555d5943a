"""Several files of one folder, replaced as one.

Every new file is written and synced under NAME.saving. Then `saving.json`, which lists what to rename and what to
remove, is renamed into place: that one rename is the moment the save counts. Before it the old files are the
checkpoint, after it the new ones, wherever the renames that follow were interrupted: a reader looks through `Folder`,
and the next save finishes what it finds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

JOURNAL = "saving.json"
SUFFIX = ".saving"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """What a folder holds, looked at through a save that was interrupted after it counted."""

    path: Path
    replaced: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    @classmethod
    def at(cls, path: Path) -> Folder:
        journal = path / JOURNAL
        if not journal.exists():
            return cls(path=path)
        try:
            content = json.loads(journal.read_text(encoding="utf-8"))
            return cls(path=path, replaced=_names(content["replaced"]), removed=_names(content["removed"]))
        except OSError as error:
            raise ValueError(f"{journal}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{journal}: wanted the lists replaced and removed of an interrupted save") from error

    def file(self, name: str) -> Path:
        """Where the file lies now: under its name, or still under its temporary one."""
        temporary = self.path / (name + SUFFIX)
        return temporary if name in self.replaced and temporary.exists() else self.path / name

    def has(self, name: str) -> bool:
        return name not in self.removed and self.file(name).is_file()

    def finish(self) -> None:
        """Do the renames and removals that are left. Raises OSError; what was done stays done."""
        if not self.replaced:
            return
        # The index goes away first and comes back last, so that a reader who knows no journal finds no shards rather
        # than old and new ones mixed.
        indexes = [name for name in (*self.replaced, *self.removed) if name.endswith(".index.json")]
        for name in indexes:
            if name in self.removed or (self.path / (name + SUFFIX)).exists():
                (self.path / name).unlink(missing_ok=True)
        for name in sorted(self.replaced, key=lambda name: (name in indexes, name)):
            temporary = self.path / (name + SUFFIX)
            if temporary.exists():
                os.replace(temporary, self.path / name)
        for name in self.removed:
            (self.path / name).unlink(missing_ok=True)
        sync_folder(self.path)
        (self.path / JOURNAL).unlink()


class Replacement:
    """Collects the new files of a folder and puts them in place together when the `with` block ends without error.

    An error in the block, a full disk above all, removes the temporary files; the folder is as it was. One save at a
    time writes to a folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: list[str] = []
        self._removed: list[str] = []

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            Folder.at(self.path).finish()
            for temporary in self.path.glob(f"*{SUFFIX}"):  # of a save that ended before it counted
                temporary.unlink()
        except OSError as error:
            raise OSError(f"{self.path}: cannot be written: {error.strerror or error}") from error
        return self

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        """Write a new file through `fill`. Raises OSError with the file's name and the reason."""
        self._written.append(name)
        try:
            with (self.path / (name + SUFFIX)).open("wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            reason = error.strerror or error
            raise OSError(f"{self.path / name}: cannot be written: {reason}; nothing was replaced") from error

    def remove(self, name: str) -> None:
        """Remove an old file once the new ones are in place."""
        self._removed.append(name)

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
            return
        removed = [name for name in self._removed if name not in self._written]
        journal = json.dumps({"replaced": self._written, "removed": removed}).encode()
        try:
            self.write(JOURNAL, lambda file: file.write(journal))
            sync_folder(self.path)
            os.replace(self.path / (JOURNAL + SUFFIX), self.path / JOURNAL)
        except OSError:
            self._discard()
            raise
        try:
            sync_folder(self.path)
            Folder.at(self.path).finish()
        except OSError as error:
            raise OSError(
                f"{self.path}: saved, but not every file could be renamed: {error.strerror or error}; "
                f"the folder is read through {JOURNAL}, and the next save finishes"
            ) from error

    def _discard(self) -> None:
        for name in self._written:
            (self.path / (name + SUFFIX)).unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the folder's renames last through a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _names(content: object) -> tuple[str, ...]:
    """A journal's list. A name that leads out of the folder is refused: a checkpoint may come from anywhere."""
    if not isinstance(content, list) or not all(type(name) is str for name in content):
        raise ValueError(f"wanted a list of names, got {content!r}")
    for name in content:
        if name != Path(name).name or name in ("", ".", ".."):
            raise ValueError(f"wanted the name of a file, got {name!r}")
    return tuple(content)
