"""What a folder in the released layout holds, checked against the table of names. No torch, and no tensor is allocated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trivium.checkpoint.names import TensorSpec, packed_pair, released_tensors
from trivium.checkpoint.replacement import Folder
from trivium.checkpoint.safetensors import Entry, read_header
from trivium.config import K3Config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class Index:
    """What is on disk: the specs that the files hold (packed or not, matrix by matrix), where, and how."""

    specs: tuple[TensorSpec, ...]
    stored: dict[str, Entry]
    file_of: dict[str, str]
    paths: dict[str, Path]


def check_published(folder: str | Path) -> tuple[K3Config, Index]:
    """Read config and headers, and hold them against the table of released tensors; no tensor is allocated.

    Raises ValueError, naming the file and the tensor, what came and what was wanted: a shard missing or truncated, a
    tensor missing, unknown, in two forms, of another shape or dtype, an expert's codes without their scales, an index
    that disagrees with its shards, or A_log padding that is not zero.
    """
    where, file, is_index = _entrance(Path(folder))
    config = K3Config.from_json(where.file("config.json"))
    if is_index:
        file_of, total_bytes = read_index(where.file(file))
    else:
        file_of, total_bytes = dict.fromkeys(read_header(where.file(file)), file), None
    paths = {name: where.file(name) for name in sorted(set(file_of.values()))}
    for name, path in paths.items():
        if not where.has(name):
            count = sum(shard == name for shard in file_of.values())
            raise ValueError(f"{path}: is missing, but {file} puts {count} tensors in it")
    stored = _read_headers(paths, file_of)
    num_bytes = sum(entry.num_bytes for entry in stored.values())
    if total_bytes not in (None, num_bytes):
        raise ValueError(f"{where.file(file)}: total_size says {total_bytes} bytes, the shards hold {num_bytes}")
    index = Index(specs=_match(config, stored, file_of, paths, where.path), stored=stored, file_of=file_of, paths=paths)
    _check_padding(index)
    return config, index


def _entrance(path: Path) -> tuple[Folder, str, bool]:
    """The folder, the file to start from, and whether that is an index."""
    if path.is_file():
        if not path.name.endswith((".index.json", ".safetensors")):
            raise ValueError(f"{path}: wanted a folder, a .safetensors file or its .index.json")
        return Folder.at(path.parent), path.name, path.name.endswith(".index.json")
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder")
    where = Folder.at(path)
    if not where.has(INDEX) and not where.has(SINGLE):
        raise ValueError(f"{path}: wanted {SINGLE} or {INDEX} in it, found neither")
    if where.has(INDEX) and where.has(SINGLE) and SINGLE not in read_index(where.file(INDEX))[0].values():
        raise ValueError(f"{path}: holds {SINGLE} and an index that does not name it; name the one to read")
    return (where, INDEX, True) if where.has(INDEX) else (where, SINGLE, False)


def read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """Tensor to file, and the total size in bytes where the index tells it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    file_of = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
        raise ValueError(f"{path}: wanted a weight_map of tensor names to file names")
    for file in sorted(set(file_of.values())):
        if Path(file).name != file:
            raise ValueError(f"{path}: weight_map: wanted the name of a file in this folder, got {file!r}")
    metadata = content.get("metadata")
    return file_of, metadata.get("total_size") if isinstance(metadata, dict) else None


def _read_headers(paths: dict[str, Path], file_of: dict[str, str]) -> dict[str, Entry]:
    stored: dict[str, Entry] = {}
    for file, path in paths.items():
        header = read_header(path)
        for name, entry in header.items():
            if file_of.get(name) != file:
                elsewhere = f"puts it in {file_of[name]}" if name in file_of else "does not name it"
                raise ValueError(f"{path}: {name}: the file holds this tensor, the index {elsewhere}")
            stored[name] = entry
    for name, file in file_of.items():
        if name not in stored:
            raise ValueError(f"{paths[file]}: {name}: the index puts this tensor here, the file does not hold it")
    return stored


def _match(
    config: K3Config, stored: dict[str, Entry], file_of: dict[str, str], paths: dict[str, Path], folder: Path
) -> tuple[TensorSpec, ...]:
    """The specs that the stored tensors fill, each checked."""
    specs: list[TensorSpec] = []
    missing: list[TensorSpec] = []
    for spec in released_tensors(config, packed=False):
        codes, scales = packed_pair(spec) if spec.expert is not None else (spec, spec)
        if codes.name != spec.name and codes.name in stored:
            if spec.name in stored:
                raise ValueError(f"{paths[file_of[spec.name]]}: {spec.name}: stored twice, packed and unpacked")
            if scales.name not in stored:
                raise ValueError(
                    f"{paths[file_of[codes.name]]}: {codes.name}: packed without its scale, wanted {scales.name} "
                    f"{scales}"
                )
            specs += (codes, scales)
        elif spec.name in stored:
            specs.append(spec)
        else:
            missing.append(codes if config.packs_experts or scales.name in stored else spec)
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ValueError(f"{folder}: {missing[0].name}: tensor is missing, wanted {missing[0]}{more}")
    for spec in specs:
        entry = stored[spec.name]
        # The release stores A_log in float32; files that keep it in float64 exist, and lose nothing by being read.
        wide_a_log = entry.dtype == "F64" and spec.name.endswith(".A_log")
        if entry.shape != spec.shape or (entry.dtype != spec.dtype and not wide_a_log):
            raise ValueError(f"{paths[file_of[spec.name]]}: {spec.name}: wanted {spec}, got {entry}")
    unknown = sorted(set(stored) - {spec.name for spec in specs})
    if unknown:
        name = unknown[0]
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise ValueError(f"{paths[file_of[name]]}: {name}: no tensor of this config, got {stored[name]}{more}")
    return tuple(specs)


def _check_padding(index: Index) -> None:
    for spec in index.specs:
        if not spec.padding:
            continue
        path, entry = index.paths[index.file_of[spec.name]], index.stored[spec.name]
        with path.open("rb") as file:
            file.seek(entry.start)
            values = np.frombuffer(file.read(entry.num_bytes), "<f8" if entry.dtype == "F64" else "<f4")
        first = len(values) - spec.padding
        wrong = np.flatnonzero(values[first:] != 0)
        if len(wrong):
            at = first + int(wrong[0])
            raise ValueError(
                f"{path}: {spec.name}: wanted zeros behind the {first} heads, got {float(values[at]):g} at {at}"
            )
