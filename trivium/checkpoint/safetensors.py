"""The safetensors format: a header read and checked on its own, and a file written tensor by tensor.

A file is the length of the header (8 bytes, little-endian), the header (JSON, filled up with spaces to a multiple of 8
bytes) and the bytes of all tensors without gaps. Nothing here needs torch: bytes come from the caller as they are asked
for, so that writing holds one tensor at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

ITEM_BYTES = {
    dtype: item_bytes
    for item_bytes, dtypes in {8: "F64 I64 U64", 4: "F32 I32 U32", 2: "BF16 F16 I16 U16", 1: "U8 I8 BOOL"}.items()
    for dtype in dtypes.split()
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor of a header: its dtype as the format spells it, its shape, and its bytes [start, end) in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file by name, in the order of their bytes.

    Raises ValueError if the file cannot be read, is truncated, is no safetensors file, or has tensors that overlap or
    leave a gap.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            if size < 8:
                raise ValueError(f"{path}: truncated: wanted at least 8 bytes, got {size}")
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise ValueError(
                    f"{path}: truncated, or no safetensors file: wanted a header of {length} bytes, got {size - 8}"
                )
            text = file.read(length)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:  # broken JSON, or bytes that are no UTF-8
        raise ValueError(f"{path}: no safetensors file: the header is no JSON: {error}") from error
    if type(header) is not dict:
        raise ValueError(f"{path}: no safetensors file: the header wants a JSON object, got {type(header).__name__}")
    metadata = header.pop("__metadata__", {})
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        raise ValueError(f"{path}: no safetensors file: __metadata__ wants an object of strings")

    first = 8 + length
    entries = {name: _entry(path, name, content, first) for name, content in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    end = first
    for name, entry in entries.items():
        if entry.start != end:
            raise ValueError(f"{path}: {name}: wanted to start at byte {end - first}, got {entry.start - first}")
        end = entry.end
    if size < end:
        raise ValueError(f"{path}: truncated: wanted {end} bytes, got {size}")
    if size > end:
        raise ValueError(f"{path}: wanted {end} bytes, got {size}: {size - end} behind the last tensor")
    return entries


def _entry(path: Path, name: str, content: Any, first: int) -> Entry:
    try:
        dtype, shape, (start, end) = content["dtype"], tuple(content["shape"]), content["data_offsets"]
        well_formed = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        well_formed = False
    if not well_formed:
        raise ValueError(f"{path}: {name}: wanted dtype, shape and data_offsets, got {json.dumps(content)}")
    entry = Entry(dtype=dtype, shape=shape, start=first + start, end=first + end)
    # A dtype that is not in the table is refused by whoever wanted another one, with the tensor's name.
    wanted = math.prod(shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else entry.num_bytes
    if entry.num_bytes != wanted:
        raise ValueError(f"{path}: {name}: {entry} wants {wanted} bytes, got {entry.num_bytes}")
    return entry


def write_tensors(
    file: BinaryIO,
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    bytes_of: Callable[[str], memoryview | bytes],
) -> None:
    """Write a whole file of `tensors` (name, dtype, shape); `bytes_of(name)` is called once each, in file order.

    File order is by size of an item, largest first, then by name: every tensor then starts at a multiple of its item.
    """
    ordered = sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor[1]], tensor[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in ordered:
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for name, _, _ in ordered:
        content = bytes_of(name)
        start, end = header[name]["data_offsets"]
        assert memoryview(content).nbytes == end - start, f"{name}: promised {end - start} bytes"
        file.write(content)
        del content  # before the next one is made
