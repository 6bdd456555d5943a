"""Documents: the text that every machine has, or a folder of one's own, and what of it is held out."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

HELDOUT_BYTES = 256 * 1024
# Held out is a tenth. Less than 1 KiB of it would measure the few lines it happens to be.
MIN_BYTES = 10 * 1024

# Tests say the same thing a thousand times over, and what is installed is not the same on any two machines. encodings
# is 1.4 MB of character tables: a sixth of all tokens, and nobody's prose or code.
_LEFT_OUT = frozenset({"__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages", "encodings"})

# A video among text is known by its head: it is not read whole. A NUL further on is found in what was read.
_HEAD_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text. `source` is the top-level module or folder it came from, `path` says where in its collection it lies."""

    source: str
    path: str
    text: str

    @property
    def num_bytes(self) -> int:
        """Bytes in UTF-8."""
        return len(self.text) if self.text.isascii() else len(self.text.encode())


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was read, by path, and what was not: reason -> paths, for every file that was looked for and has no text.

    The reasons: "binary" (has a NUL byte), "broken link", "empty" (or nothing but whitespace), "link to a folder",
    "name not UTF-8", "not a regular file", "not UTF-8", "unreadable", "vanished" (between listing and reading).
    """

    documents: tuple[Document, ...]
    left_out: dict[str, tuple[str, ...]]


def standard_library() -> Reading:
    """The running interpreter's standard library: its .py source, without tests, character tables and installed packages.

    Raises ValueError when this interpreter has none on disk.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    left_out: dict[str, list[str]] = defaultdict(list)
    names = _names_below(folder, lambda name: name not in _LEFT_OUT, left_out)
    return _not_empty(folder, _read(folder, [name for name in names if name.endswith(".py")], left_out))


def folder_of_text(folder: str | Path) -> Reading:
    """Every file of UTF-8 text under `folder`; hidden files and folders are passed over. One file is a folder of one.

    A byte order mark is dropped. Raises ValueError when there is no text, with what was found instead.
    """
    folder = Path(folder)
    left_out: dict[str, list[str]] = defaultdict(list)
    if os.path.isfile(folder):
        reading = _read(folder.parent, [folder.name], left_out)
        if not reading.documents:
            raise ValueError(f"data: {folder} is {', '.join(reading.left_out)}; wanted UTF-8 text")
        return reading
    if not os.path.isdir(folder):
        raise ValueError(f"data: {folder} is neither a folder nor a file, wanted a folder of UTF-8 text or one file")
    names = _names_below(folder, lambda name: not name.startswith("."), left_out)
    return _not_empty(folder, _read(folder, names, left_out))


def split_by_source(
    documents: Sequence[Document], heldout_bytes: int = HELDOUT_BYTES
) -> tuple[list[Document], list[Document]]:
    """(training, held out): the second is at most `heldout_bytes` and at most a tenth of the text.

    Held out is every whole source in turn that still fits, in the order of the SHA-256 of their names. Where they come
    to less than half of what may be held out, whole files are, by their paths in the same way. Where these do too, it
    is the last part of the largest file, from a line end on if there is one: a document of its own under the same path.
    Raises ValueError for less text than `MIN_BYTES`.
    """
    num_bytes = [document.num_bytes for document in documents]
    total = sum(num_bytes)
    if total < MIN_BYTES:
        raise ValueError(f"data: {total:,} bytes of text, wanted at least {MIN_BYTES:,}, of which a tenth is held out")
    limit = min(heldout_bytes, total // 10)
    for name_of in (attrgetter("source"), attrgetter("path")):
        size: Counter[str] = Counter()
        for document, count in zip(documents, num_bytes, strict=True):
            size[name_of(document)] += count
        held = _first_that_fit(size, limit)
        if 2 * sum(size[name] for name in held) >= limit:
            return (
                [document for document in documents if name_of(document) not in held],
                [document for document in documents if name_of(document) in held],
            )
    _, _, idx = min(
        (-count, document.path, idx) for idx, (document, count) in enumerate(zip(documents, num_bytes, strict=True))
    )
    first, last = _cut(documents[idx], min(limit, num_bytes[idx] // 2))
    return [*documents[:idx], first, *documents[idx + 1 :]], [last]


def fingerprint(documents: Iterable[Document]) -> str:
    """SHA-256 over every path and text in order, to tell whether two runs saw the same data."""
    seen = hashlib.sha256()
    for document in documents:
        for part in (document.path.encode(), document.text.encode()):
            seen.update(len(part).to_bytes(8, "big"))
            seen.update(part)
    return seen.hexdigest()


def _names_below(folder: Path, wanted: Callable[[str], bool], left_out: dict[str, list[str]]) -> list[str]:
    """Every file below, as a path from `folder`. No name that is not wanted, nor anything in such a folder."""
    names = []

    def failed(error: OSError) -> None:
        reason = "vanished" if isinstance(error, FileNotFoundError) else "unreadable"
        left_out[reason].append(_shown(os.path.relpath(error.filename, folder)))

    for at, folders, files in os.walk(folder, onerror=failed):
        below = os.path.relpath(at, folder)
        folders[:] = filter(wanted, folders)
        # os.walk does not enter them, so that links in a circle end.
        links = [name for name in folders if os.path.islink(os.path.join(at, name))]
        if links:
            left_out["link to a folder"] += [_shown(os.path.normpath(os.path.join(below, name))) for name in links]
        names += [os.path.normpath(os.path.join(below, name)) for name in files if wanted(name)]
    return names


def _read(folder: Path, names: Iterable[str], left_out: dict[str, list[str]]) -> Reading:
    documents = []
    for name in names:
        # Such a name can be neither printed nor written.
        text, reason = _text_of(folder / name) if _shown(name) == name else ("", "name not UTF-8")
        if reason:
            left_out[reason].append(_shown(name))
            continue
        path = Path(name)
        source = path.parts[0] if len(path.parts) > 1 else path.stem
        documents.append(Document(source=source, path=path.as_posix(), text=text))
    documents.sort(key=attrgetter("path"))
    return Reading(
        documents=tuple(documents), left_out={reason: tuple(sorted(left_out[reason])) for reason in sorted(left_out)}
    )


def _not_empty(folder: Path, reading: Reading) -> Reading:
    if not reading.documents:
        found = ", ".join(f"{len(paths)} {reason}" for reason, paths in reading.left_out.items())
        raise ValueError(
            f"data: {folder} holds {found or 'no file that is not hidden'}; wanted at least one file of UTF-8 text"
        )
    return reading


def _text_of(path: Path) -> tuple[str, str]:
    """(text, ""), or ("", why there is none)."""
    try:
        # Asked before it is opened: opening a FIFO waits for a writer, and a device may have no end.
        if not stat.S_ISREG(path.stat().st_mode):
            return "", "not a regular file"
        with path.open("rb") as file:
            if b"\0" in file.read(_HEAD_BYTES):
                return "", "binary"
            file.seek(0)
            content = file.read()
    except OSError as error:
        if path.is_symlink() and error.errno in (errno.ENOENT, errno.ELOOP):
            return "", "broken link"
        return "", "vanished" if error.errno == errno.ENOENT else "unreadable"
    if b"\0" in content:
        return "", "binary"
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return "", "not UTF-8"
    return (text, "") if text and not text.isspace() else ("", "empty")


def _shown(name: str) -> str:
    """The name, with bytes that are no UTF-8 written as \\udc.."""
    return name.encode("utf-8", "backslashreplace").decode()


def _first_that_fit(size: dict[str, int], limit: int) -> set[str]:
    held = set()
    for name in sorted(size, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if 0 < size[name] <= limit:
            held.add(name)
            limit -= size[name]
    return held


def _cut(document: Document, num_bytes: int) -> tuple[Document, Document]:
    """The document in two, the second of at most `num_bytes`; from a line end on if that leaves half of them."""
    last = document.text[-num_bytes:].encode()[-num_bytes:]
    line = last.find(b"\n") + 1
    # Bytes of a character that begins before the cut are dropped from its end, and so stay in the first part.
    text = last[line if len(last) - line >= num_bytes // 2 else 0 :].decode(errors="ignore")
    rest = document.text[: len(document.text) - len(text)]
    return (
        Document(source=document.source, path=document.path, text=rest),
        Document(source=document.source, path=document.path, text=text),
    )
