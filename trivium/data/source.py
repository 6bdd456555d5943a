"""Documents: the text that every machine has, or a folder of one's own, and what of it is held out."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

HELDOUT_BYTES = 256 * 1024

# Tests say the same thing a thousand times over, and what is installed is not the same on any two machines. encodings
# is 1.4 MB of character tables: a sixth of all tokens, and nobody's prose or code.
_LEFT_OUT = frozenset({"__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages", "encodings"})


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text. `source` is the top-level module or folder it came from, `path` says where in its collection it lies."""

    source: str
    path: str
    text: str

    @property
    def num_bytes(self) -> int:
        """Bytes in UTF-8."""
        return len(self.text.encode())


def standard_library() -> list[Document]:
    """The running interpreter's standard library: its .py source by path, without tests, character tables and installed packages."""
    folder = Path(sysconfig.get_path("stdlib"))
    return _read(folder, (path for path in folder.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(folder).parts)))


def folder_of_text(folder: str | Path) -> list[Document]:
    """Every file of UTF-8 text under `folder`, by path; hidden and binary files are left out.

    Raises ValueError when it is no folder or holds no text.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"data: {folder} is not a folder")
    return _read(
        folder,
        (path for path in folder.rglob("*") if not any(part[0] == "." for part in path.relative_to(folder).parts)),
    )


def split_by_source(
    documents: Sequence[Document], heldout_bytes: int = HELDOUT_BYTES
) -> tuple[list[Document], list[Document]]:
    """(training, held out): whole sources are held out, in the order of the SHA-256 of their names.

    Held out is every source in turn that still fits into `heldout_bytes`, or into a tenth of the text where that is
    less. Raises ValueError when no source is small enough.
    """
    size = dict.fromkeys((document.source for document in documents), 0)
    for document in documents:
        size[document.source] += document.num_bytes
    room = limit = min(heldout_bytes, sum(size.values()) // 10)
    held = set()
    for source in sorted(size, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if 0 < size[source] <= room:
            held.add(source)
            room -= size[source]
    if not held:
        raise ValueError(
            f"data: nothing to hold out: none of the {len(size)} top-level names has at most {limit} bytes, "
            "a tenth of the text; split the text over more files"
        )
    return (
        [document for document in documents if document.source not in held],
        [document for document in documents if document.source in held],
    )


def fingerprint(documents: Iterable[Document]) -> str:
    """SHA-256 over every path and text in order, to tell whether two runs saw the same data."""
    seen = hashlib.sha256()
    for document in documents:
        for part in (document.path.encode(), document.text.encode()):
            seen.update(len(part).to_bytes(8, "big") + part)
    return seen.hexdigest()


def _read(folder: Path, paths: Iterable[Path]) -> list[Document]:
    documents = []
    for path in sorted(paths):
        if not path.is_file():
            continue
        content = path.read_bytes()
        if b"\0" in content:
            continue
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        name = path.relative_to(folder)
        source = name.parts[0] if len(name.parts) > 1 else name.stem
        documents.append(Document(source=source, path=name.as_posix(), text=text))
    if not any(document.text for document in documents):
        raise ValueError(f"data: {folder} holds no file of UTF-8 text")
    return documents
