"""Token shards: a stream on disk, written once, and read by every process of a run without holding it.

    manifest.json          what follows, in all and shard by shard, with the SHA-256 of every file
    bytes-per-id.bin       int64, bytes of text that each id stands for
    tokens-00000.bin       uint16 where the vocabulary fits, else uint32
    tokens-00000.starts    int64, the bounds of the shard's documents, from 0 to its number of tokens
    tokens-00000.counted   uint8, 1 for each token that counts as a target; without it all do

All numbers are little-endian. A document lies in one shard, so a shard can be read by itself. Every file is written under
a temporary name and then renamed, the manifest last: a folder that has one is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trivium.data.pack import check_span, count_targets

MANIFEST, BYTES_PER_ID = "manifest.json", "bytes-per-id.bin"
VERSION = 2
# 128 MB of uint16: large enough that files are few, small enough to copy one again.
SHARD_TOKENS = 2**26
# A document may be 200 MB of text, and the bytes of its ids are 8 bytes each.
_BLOCK_TOKENS = 2**20
_PART = ".part"


class Counted(NamedTuple):
    """A document's ids, and which of them (bool) count as targets."""

    ids: NDArray[np.integer[Any]]
    counted: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard in the manifest; `name` is that of its tokens, `starts_sha256` of the bounds beside them.

    `counted_sha256` is of what counts, "" where all does.
    """

    name: str
    num_tokens: int
    num_documents: int
    sha256: str
    starts_sha256: str
    counted_sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """manifest.json. `text` and `tokenizer` are fingerprints of what the tokens were made from and by.

    Every document begins with `first_id`; `num_bytes` is that of what counts.
    """

    version: int
    vocab_size: int
    dtype: str
    first_id: int
    text: str
    tokenizer: str
    num_tokens: int
    num_documents: int
    num_bytes: int
    num_bytes_sha256: str
    shards: tuple[Shard, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Shards:
    """A `pack.Stream` over the shards of a folder: the bounds are in memory, the tokens stay on disk until read."""

    manifest: Manifest
    starts: NDArray[np.int64]
    num_bytes_W: Tensor
    parts: tuple[NDArray[Any], ...]  # the tokens of each shard, memory-mapped
    counted: tuple[NDArray[np.uint8] | None, ...]  # and what counts of them
    bounds: tuple[int, ...]  # of the shards, in tokens

    @property
    def num_targets(self) -> int:
        return count_targets(self.starts)

    @property
    def num_bytes(self) -> int:
        return self.manifest.num_bytes

    @property
    def ids_T(self) -> Tensor:
        return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int32), *self.parts], dtype=np.int32))

    @property
    def weight_T(self) -> Tensor | None:
        """Which tokens count, bool, in memory; None where all do."""
        if all(counted is None for counted in self.counted):
            return None
        return self.weights(0, self.bounds[-1]).bool()

    def read(self, first: int, end: int) -> Tensor:
        ids = np.empty(end - first, dtype=np.int64)
        for idx, here, there in self._spans(first, end):
            ids[there] = self.parts[idx][here]
        return torch.from_numpy(ids)

    def weights(self, first: int, end: int) -> Tensor:
        weights = np.ones(end - first, dtype=np.float32)
        for idx, here, there in self._spans(first, end):
            counted = self.counted[idx]
            if counted is not None:
                weights[there] = counted[here]
        return torch.from_numpy(weights)

    def _spans(self, first: int, end: int) -> Iterator[tuple[int, slice, slice]]:
        """The shards that have [first, end): where in the shard, and where in what is read."""
        check_span(first, end, self.bounds[-1])
        at = first
        while at < end:
            idx = bisect_right(self.bounds, at) - 1
            start, stop = self.bounds[idx], min(end, self.bounds[idx + 1])
            yield idx, slice(at - start, stop - start), slice(at - first, stop - first)
            at = stop


def write_shards(
    folder: Path,
    documents: Iterable[NDArray[np.integer[Any]] | Counted],
    *,
    num_bytes_W: Tensor,
    first_id: int,
    text: str,
    tokenizer: str,
    shard_tokens: int = SHARD_TOKENS,
) -> Shards:
    """Write documents of token ids as shards, and open them. One document is held at a time.

    Each begins with `first_id`, [BOS] for text, and either all of them say what counts or none does.

    A shard ends with the first document that brings it to `shard_tokens`. Shards that were there before are removed
    first; where it fails or is killed there is no manifest, and the next call begins anew. Raises ValueError for a
    document that does not begin with that id or has an id that is none of the W, and OSError.
    """
    if shard_tokens < 1:
        raise ValueError(f"shards: shard_tokens: wanted at least 1, got {shard_tokens}")
    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder)
    num_bytes = num_bytes_W.numpy().astype("<i8")
    dtype = "uint16" if len(num_bytes) <= 2**16 else "uint32"
    try:
        with _writing(folder / BYTES_PER_ID) as file:
            file.write(num_bytes.tobytes())
        num_bytes_sha256 = file.sha256.hexdigest()
        checked = _checked(documents, len(num_bytes), first_id)
        shards: list[Shard] = []
        total = 0
        for first in checked:
            path = folder / _name(len(shards))
            starts = array("q", [0])
            flags: list[NDArray[np.bool_]] = []
            with _writing(path) as file:
                document: tuple[NDArray[np.integer[Any]], NDArray[np.bool_] | None] | None = first
                while document is not None:
                    ids, counted = document
                    for at in range(0, len(ids), _BLOCK_TOKENS):
                        block = ids[at : at + _BLOCK_TOKENS]
                        file.write(block.astype(_stored(dtype)).tobytes())
                        held = block if counted is None else block[counted[at : at + _BLOCK_TOKENS]]
                        total += int(num_bytes[held].sum())
                    if counted is not None:
                        flags.append(counted)
                    starts.append(starts[-1] + len(ids))
                    document = None if starts[-1] >= shard_tokens else next(checked, None)
            with _writing(path.with_suffix(".starts")) as starts_file:
                starts_file.write(np.array(starts, dtype="<i8").tobytes())
            counted_sha256 = ""
            if flags:
                with _writing(path.with_suffix(".counted")) as counted_file:
                    counted_file.write(np.concatenate(flags).astype(np.uint8).tobytes())
                counted_sha256 = counted_file.sha256.hexdigest()
            shards.append(
                Shard(
                    name=path.name,
                    num_tokens=starts[-1],
                    num_documents=len(starts) - 1,
                    sha256=file.sha256.hexdigest(),
                    starts_sha256=starts_file.sha256.hexdigest(),
                    counted_sha256=counted_sha256,
                )
            )
        manifest = Manifest(
            version=VERSION,
            vocab_size=len(num_bytes),
            dtype=dtype,
            first_id=first_id,
            text=text,
            tokenizer=tokenizer,
            num_tokens=sum(shard.num_tokens for shard in shards),
            num_documents=sum(shard.num_documents for shard in shards),
            num_bytes=total,
            num_bytes_sha256=num_bytes_sha256,
            shards=tuple(shards),
        )
        _sync(folder)
        with _writing(folder / MANIFEST) as file:
            file.write((json.dumps(asdict(manifest), indent=2) + "\n").encode())
        _sync(folder)
    except BaseException:
        _clear(folder)
        raise
    return open_shards(folder)


def open_shards(folder: Path, *, verify: bool = False) -> Shards:
    """The shards of a folder as a stream.

    What is read whole is hashed at once: the bounds, and the bytes of each id. Of the tokens the size is looked at, and
    with `verify` the SHA-256 and the largest id. Raises ValueError with the file, what came and what was wanted.
    """
    manifest = read_manifest(folder)
    stored = _stored(manifest.dtype)
    num_bytes = _read_hashed(folder / BYTES_PER_ID, manifest.vocab_size, manifest.num_bytes_sha256)
    parts, flags, starts, bounds = [], [], [np.zeros(1, dtype=np.int64)], [0]
    for shard in manifest.shards:
        path = folder / shard.name
        starts_path = path.with_suffix(".starts")
        own = _read_hashed(starts_path, shard.num_documents + 1, shard.starts_sha256)
        if own[0] or own[-1] != shard.num_tokens or (np.diff(own) < 1).any():
            raise ValueError(f"{starts_path}: wanted bounds that rise from 0 to {shard.num_tokens}")
        _check_size(path, shard.num_tokens * stored.itemsize)
        if verify:
            _check_hash(path, shard.sha256)
        part = np.asarray(np.memmap(path, dtype=stored, mode="r"))
        if verify and part.max() >= manifest.vocab_size:
            raise ValueError(f"{path}: has the id {part.max()}, wanted ids below {manifest.vocab_size}")
        parts.append(part)
        flags.append(_counted(path.with_suffix(".counted"), shard, verify) if shard.counted_sha256 else None)
        starts.append(own[1:] + bounds[-1])
        bounds.append(bounds[-1] + shard.num_tokens)
    return Shards(
        manifest=manifest,
        starts=np.concatenate(starts),
        num_bytes_W=torch.from_numpy(num_bytes),
        parts=tuple(parts),
        counted=tuple(flags),
        bounds=tuple(bounds),
    )


def reuse_shards(folder: Path, made_of: Mapping[str, str], say: Callable[[str], None]) -> Shards | None:
    """The shards of a folder if they were made of this `text` and by this `tokenizer`, verified; None where they were not."""
    if not (folder / MANIFEST).exists():
        return None
    try:
        manifest = read_manifest(folder)
        other = [name for name, value in made_of.items() if getattr(manifest, name) != value]
        if not other:
            shards = open_shards(folder, verify=True)
            say(f"{folder}: {manifest.num_tokens:,} tokens are there already")
            return shards
        say(f"{folder}: of another {' and '.join(other)}, written anew")
    except ValueError as error:
        say(f"{error}; written anew")
    return None


def read_manifest(folder: Path) -> Manifest:
    """manifest.json alone. Raises ValueError with the field that is wrong, or the version that is not known."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read: {error.strerror}; shards without a manifest are not whole"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise ValueError(f"{path}: version: wanted {VERSION}, got {version!r}")
    if not isinstance(content.get("shards"), list):
        raise ValueError(f"{path}: shards: wanted a list, got {content.get('shards')!r}")
    shards = tuple(_fields_of(Shard, shard, f"{path}: shard {idx}") for idx, shard in enumerate(content["shards"]))
    manifest: Manifest = _fields_of(Manifest, {**content, "shards": shards}, str(path))
    if manifest.dtype not in ("uint16", "uint32"):
        raise ValueError(f"{path}: dtype: wanted uint16 or uint32, got {manifest.dtype}")
    for name in ("num_tokens", "num_documents"):
        in_all = sum(getattr(shard, name) for shard in shards)
        if getattr(manifest, name) != in_all:
            raise ValueError(f"{path}: {name}: the shards come to {in_all}, got {getattr(manifest, name)}")
    for idx, shard in enumerate(shards):
        # Also keeps a manifest from naming a file outside its folder.
        if shard.name != _name(idx):
            raise ValueError(f"{path}: shard {idx}: name: wanted {_name(idx)}, got {shard.name}")
        if not 1 <= shard.num_documents <= shard.num_tokens:
            raise ValueError(
                f"{path}: shard {idx}: {shard.num_documents} documents cannot have {shard.num_tokens} tokens"
            )
    return manifest


def _name(idx: int) -> str:
    return f"tokens-{idx:05d}.bin"


def _stored(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _counted(path: Path, shard: Shard, verify: bool) -> NDArray[np.uint8]:
    _check_size(path, shard.num_tokens)
    if verify:
        _check_hash(path, shard.counted_sha256)
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


def _checked(
    documents: Iterable[NDArray[np.integer[Any]] | Counted], vocab_size: int, first_id: int
) -> Iterator[tuple[NDArray[np.integer[Any]], NDArray[np.bool_] | None]]:
    says = None
    for idx, document in enumerate(documents):
        ids, counted = document if isinstance(document, Counted) else (document, None)
        if not len(ids) or ids[0] != first_id:
            raise ValueError(f"shards: document {idx}: wanted id {first_id} first, got {ids[:1].tolist()}")
        if says not in (None, counted is not None):
            raise ValueError(f"shards: document {idx}: either all documents say what counts, or none does")
        says = counted is not None
        if counted is not None and counted.shape != ids.shape:
            raise ValueError(f"shards: document {idx}: wanted {len(ids)} flags of what counts, got {len(counted)}")
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(
                f"shards: document {idx}: wanted ids from 0 to {vocab_size - 1}, got {ids.min()} to {ids.max()}"
            )
        yield ids, counted


def _clear(folder: Path) -> None:
    """Remove what is ours, the manifest before all else."""
    for pattern in (
        MANIFEST,
        f"{MANIFEST}{_PART}",
        f"{BYTES_PER_ID}*",
        "tokens-*.bin*",
        "tokens-*.starts*",
        "tokens-*.counted*",
    ):
        for path in folder.glob(pattern):
            path.unlink()


class _Hashed:
    """A file to write to that hashes what goes through it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, content: bytes) -> None:
        self.sha256.update(content)
        self._file.write(content)


@contextmanager
def _writing(path: Path) -> Iterator[_Hashed]:
    """A file that gets its name when the block ends without error and all of it is on disk."""
    part = path.with_name(path.name + _PART)
    try:
        with part.open("wb") as file:
            yield _Hashed(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise OSError(f"{path}: cannot be written: {error.strerror or error}") from error


def _sync(folder: Path) -> None:
    """Make the renames last through a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fields_of(kind: Any, content: Any, where: str) -> Any:
    """A manifest's object as a dataclass: every field of its type, and no other."""
    if not isinstance(content, dict):
        raise ValueError(f"{where}: wanted an object, got {content!r}")
    types = {field.name: {"int": int, "str": str}.get(str(field.type), tuple) for field in fields(kind)}
    if set(content) != set(types):
        raise ValueError(f"{where}: wanted the fields {', '.join(types)}; got {', '.join(content)}")
    for name, value in content.items():
        if type(value) is not types[name] or (types[name] is int and value < 0):
            wanted = {int: "a whole number from 0 on", str: "a string"}[types[name]]
            raise ValueError(f"{where}: {name}: wanted {wanted}, got {value!r}")
    return kind(**content)


def _read_hashed(path: Path, count: int, sha256: str) -> NDArray[np.int64]:
    """A whole file of `count` int64."""
    _check_size(path, count * 8)
    _check_hash(path, sha256)
    return np.fromfile(path, dtype="<i8").astype(np.int64, copy=False)


def _check_size(path: Path, wanted: int) -> None:
    try:
        got = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    if got != wanted:
        raise ValueError(f"{path}: wanted {wanted:,} bytes, got {got:,}")


def _check_hash(path: Path, wanted: str) -> None:
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != wanted:
        raise ValueError(f"{path}: wanted the SHA-256 {wanted}, got {got}: this is not what was written")
