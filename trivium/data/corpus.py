"""Corpus: from a folder to what a run trains on and what it is measured by.

`gather_text` needs no torch, and `read_heldout` no tokenizer library: what needs them is imported where it is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any

from trivium.data.clean import drop_duplicates
from trivium.data.source import Document, fingerprint, folder_of_text, split_by_source, standard_library

if TYPE_CHECKING:
    from trivium.chat.tokenizer import Tokenizer
    from trivium.data.pack import Stream, TokenStream
    from trivium.data.shards import Shards

HELDOUT_FILE = "heldout.jsonl"
TOKENS = "tokens"
HELDOUT_TOKENS = "heldout"

# Byte pairs are counted in so much of a longer text. The ranks of a few thousand most frequent pairs do not change
# with more of it, and 200 MB would take minutes.
SAMPLE_BYTES = 32_000_000
_SAMPLE_BLOCK_CHARS = 2**16

# 3,840 ranks took 60 to 80 KB of Python source, 52 to 64 KB of prose about Python, 108 KB of licences, which repeat
# themselves.
BYTES_PER_RANK = 21


@dataclass(frozen=True, kw_only=True)
class Text:
    """Text to train on and text held out, without duplicates.

    `what` names where it came from. `left_out` is what could not be read: reason -> paths. `exact` and `near` duplicates
    were dropped; `near` is None where they were not looked for. `fingerprint` is of all that is kept, before the split.
    """

    what: str
    train: tuple[Document, ...]
    heldout: tuple[Document, ...]
    left_out: dict[str, tuple[str, ...]]
    exact: int
    near: int | None
    fingerprint: str

    @property
    def heldout_is(self) -> str:
        """What was held out: "whole top-level names", "whole files" or "the last part of FILE"."""
        cut = {document.path for document in self.train} & {document.path for document in self.heldout}
        if cut:
            return f"the last part of {min(cut)}"
        shared = {document.source for document in self.train} & {document.source for document in self.heldout}
        return "whole files" if shared else "whole top-level names"

    def about(self) -> dict[str, Any]:
        """What run.json says of it."""
        by_file = self.heldout_is != "whole top-level names"
        return {
            "what": self.what,
            "fingerprint": self.fingerprint,
            "train_files": len(self.train),
            "train_bytes": _num_bytes(self.train),
            "heldout": self.heldout_is,
            "heldout_files": len(self.heldout),
            "heldout_bytes": _num_bytes(self.heldout),
            "heldout_names": sorted({document.path if by_file else document.source for document in self.heldout}),
            "left_out": {reason: len(paths) for reason, paths in self.left_out.items()},
            "exact": self.exact,
            "near": self.near,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """A text, the tokenizer of it, and both of its parts as tokens."""

    text: Text
    tokenizer: Tokenizer
    train: Stream
    heldout: TokenStream


def gather_text(data: Path | None, *, say: Callable[[str], None] = lambda stage: None) -> Text:
    """Read a folder of text, or the standard library for None; drop duplicates; hold out a part. `say` hears each stage.

    Raises ValueError when there is no text or too little.
    """
    what = f"the standard library of Python {python_version()}" if data is None else str(data)
    say(f"reading {what}")
    reading = standard_library() if data is None else folder_of_text(data)
    say(f"looking for duplicates in {_size(reading.documents)}")
    cleaned = drop_duplicates(reading.documents)
    seen = fingerprint(cleaned.documents)
    train, heldout = split_by_source(cleaned.documents)
    return Text(
        what=what,
        train=tuple(train),
        heldout=tuple(heldout),
        left_out=reading.left_out,
        exact=cleaned.exact,
        near=cleaned.near,
        fingerprint=seen,
    )


def build_corpus(
    text: Text,
    *,
    num_ranks: int,
    tokenizer: Tokenizer | None = None,
    folder: Path | None = None,
    say: Callable[[str], None] = lambda stage: None,
) -> Corpus:
    """Both parts as tokens, by `tokenizer` or by one of `num_ranks` trained on the training text.

    It is trained on all of the text up to 32 MB, else on blocks of it spread evenly that come to so much. With a
    `folder` the training tokens are shards in folder/tokens, which other processes open with `shards.open_shards`;
    those that are there are used if they are of this text and tokenizer and whole, else written anew. Raises ValueError
    for a tokenizer of other ranks, and for text that does not give so many. `say` hears each stage.
    """
    if tokenizer is None:
        tokenizer = _train_tokenizer(text.train, num_ranks, say)
    elif tokenizer.num_ranks != num_ranks:
        raise ValueError(f"data: wanted a tokenizer of {num_ranks} ranks, got one of {tokenizer.num_ranks}")
    if folder is None:
        say(f"tokenizing {_size(text.train)}")
        train: Stream = stream_of(text.train, tokenizer)
    else:
        train = _shards_of(text.train, tokenizer, folder / TOKENS, say)
    return Corpus(text=text, tokenizer=tokenizer, train=train, heldout=stream_of(text.heldout, tokenizer))


def stream_of(documents: Iterable[Document], tokenizer: Tokenizer) -> TokenStream:
    """[BOS] and the tokens of each document, with how many bytes each id stands for: 0 for a control id."""
    from trivium.data.ids import num_bytes_of_ids
    from trivium.data.pack import tokenize

    return tokenize(documents, tokenizer.encode, bos_id=tokenizer.bos_id, num_bytes_W=num_bytes_of_ids(tokenizer))


def write_heldout(folder: str | Path, documents: Iterable[Document]) -> None:
    """Write heldout.jsonl, an object a line, so that a run can be scored again without its data.

    It is written under a temporary name, then renamed; on OSError what was there before stays.
    """
    path = Path(folder) / HELDOUT_FILE
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w", encoding="utf-8", newline="\n") as file:
            for document in documents:
                fields = {"source": document.source, "path": document.path, "text": document.text}
                file.write(json.dumps(fields, ensure_ascii=False) + "\n")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(f"{path}: cannot be written: {error.strerror or error}; what was there is kept") from error


def read_heldout(folder: str | Path) -> list[Document]:
    """The documents of heldout.jsonl. Raises ValueError with the file, and the line that is none."""
    path = Path(folder) / HELDOUT_FILE
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    if lines.pop():
        raise ValueError(f"{path}: line {len(lines) + 1}: cut off, wanted a line end")
    documents = []
    for line_num, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: line {line_num}: not JSON: {error}") from error
        if not isinstance(fields, dict) or {name: type(value) for name, value in fields.items()} != dict.fromkeys(
            ("source", "path", "text"), str
        ):
            raise ValueError(f"{path}: line {line_num}: wanted an object of the strings source, path and text")
        documents.append(Document(**fields))
    if not documents:
        raise ValueError(f"{path}: no document in it")
    return documents


def _shards_of(documents: Sequence[Document], tokenizer: Tokenizer, folder: Path, say: Callable[[str], None]) -> Shards:
    """The same as shards: those in the folder, or new ones."""
    from trivium.data.ids import fingerprint_of_tokenizer, num_bytes_of_ids
    from trivium.data.pack import token_documents
    from trivium.data.shards import reuse_shards, write_shards

    made_of = {"text": fingerprint(documents), "tokenizer": fingerprint_of_tokenizer(tokenizer)}
    there = reuse_shards(folder, made_of, say)
    if there is not None:
        return there
    say(f"tokenizing {_size(documents)} to {folder}")
    num_bytes_W = num_bytes_of_ids(tokenizer)
    ids = token_documents(documents, tokenizer.encode, bos_id=tokenizer.bos_id, num_bytes_W=num_bytes_W)
    return write_shards(folder, ids, num_bytes_W=num_bytes_W, first_id=tokenizer.bos_id, **made_of)


def _train_tokenizer(documents: Sequence[Document], num_ranks: int, say: Callable[[str], None]) -> Tokenizer:
    from trivium.chat.tokenizer import train_tokenizer

    num_bytes = _num_bytes(documents)
    if num_bytes > SAMPLE_BYTES:
        say(f"training the tokenizer on {_megabytes(SAMPLE_BYTES)} of {_size(documents)}")
        texts = _sample(documents, SAMPLE_BYTES / num_bytes)
    else:
        say(f"training the tokenizer on {_size(documents)}")
        texts = (document.text for document in documents)
    try:
        return train_tokenizer(texts, num_ranks)
    except ValueError as error:
        raise ValueError(
            f"data: {error}; {num_bytes:,} bytes are left to train on, and {num_ranks:,} ranks want roughly "
            f"{num_ranks * BYTES_PER_RANK // 1000:,} KB"
        ) from error


def _sample(documents: Iterable[Document], share: float) -> Iterator[str]:
    """Blocks of the texts, spread evenly: each that keeps what was taken within `share` of what was seen."""
    taken = seen = 0
    for document in documents:
        for start in range(0, len(document.text), _SAMPLE_BLOCK_CHARS):
            block = document.text[start : start + _SAMPLE_BLOCK_CHARS]
            num_bytes = len(block.encode())
            seen += num_bytes
            if taken + num_bytes <= share * seen:
                taken += num_bytes
                yield block


def _num_bytes(documents: Iterable[Document]) -> int:
    return sum(document.num_bytes for document in documents)


def _size(documents: Sequence[Document]) -> str:
    return f"{len(documents):,} files, {_megabytes(_num_bytes(documents))}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB"
