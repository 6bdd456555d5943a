"""A checkpoint in the released layout, read into a model and written back.

Reading checks every name, shape and dtype (`index`) before it allocates, then streams into the model's own parameters;
writing streams out of them. Both hold the model plus one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from safetensors import safe_open
from torch import Tensor

from trivium.checkpoint.index import INDEX, SINGLE, Index, check_published, read_index
from trivium.checkpoint.names import STORED_DTYPE, TensorSpec, released_tensors
from trivium.checkpoint.replacement import Folder, Replacement
from trivium.checkpoint.safetensors import write_tensors
from trivium.config import K3Config
from trivium.model.kimi_k3 import KimiK3
from trivium.ops import mxfp4

SINGLE_FILE_BYTES = 5 * 10**9  # from here on one file a decoder layer, as released

TORCH_DTYPE = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
READABLE = {**TORCH_DTYPE, "float64": torch.float64}  # to compare against; nothing is stored so
STORED_TORCH_DTYPE = {
    **{STORED_DTYPE[name]: dtype for name, dtype in TORCH_DTYPE.items()},
    "F64": torch.float64,
    "U8": torch.uint8,
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What it takes to save as the checkpoint was: the file of every tensor, and values wider than our parameter.

    `wide` holds A_log where it is stored in float64. Those numbers are written back wherever the parameter still is
    what they round to.
    """

    file_of: dict[str, str]
    wide: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Published:
    model: KimiK3
    config: K3Config
    layout: Layout


# --- Reading ----------------------------------------------------------------------------------------------------


def read_published(
    folder: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    experts: str = "unpacked",
) -> Published:
    """The model of a folder (or of its one .safetensors or index file).

    `dtype` is the trunk's, and that of unpacked experts; None is what config.json says. What is always float32 stays
    so. `experts="packed"` keeps the MXFP4 bytes and raises ValueError unless every routed expert is stored so.
    """
    if experts not in ("unpacked", "packed"):
        raise ValueError(f"experts: wanted unpacked or packed, got {experts!r}")
    config, index = check_published(folder)
    if experts == "packed":
        for spec in index.specs:
            if spec.expert is not None and spec.dtype != "U8":
                raise ValueError(
                    f"{index.paths[index.file_of[spec.name]]}: {spec.name}: experts kept packed want {spec.name}_packed"
                    f", got {spec}; read it with experts unpacked"
                )
    trunk = _torch_dtype(config.dtype if dtype is None else dtype, READABLE)
    with torch.device(device):
        model = KimiK3(config, dtype=trunk, experts=experts)
    wide = _fill_(model, index)
    return Published(model=model, config=config, layout=Layout(file_of=index.file_of, wide=wide))


@torch.no_grad()
def _fill_(model: KimiK3, index: Index) -> dict[str, Tensor]:
    """Copy every stored tensor to its place; returns the values stored in float64."""
    targets = model.state_dict()
    unfilled = set(targets)
    wide = {}
    handles = {name: safe_open(path, framework="pt") for name, path in index.paths.items()}

    def stored(name: str) -> Tensor:
        return cast(Tensor, handles[index.file_of[name]].get_tensor(name))

    # In the order of the bytes on disk.
    for spec in sorted(index.specs, key=lambda spec: (index.file_of[spec.name], index.stored[spec.name].start)):
        parameter = spec.parameter
        decodes = spec.dtype == "U8" and parameter not in targets
        if decodes and parameter.endswith("_scale"):
            continue  # read with its codes
        parameter = parameter.removesuffix("_packed") if decodes else parameter
        target = targets[parameter] if spec.expert is None else targets[parameter][spec.expert]
        if decodes:
            scales_U8 = stored(spec.name.removesuffix("_packed") + "_scale")
            value = mxfp4.unpack(stored(spec.name), scales_U8, target.dtype)
            if not value.isfinite().all():
                reach = (
                    f"its scales reach byte {int(scales_U8.max())}, beyond {str(target.dtype).removeprefix('torch.')}"
                )
                raise ValueError(f"{index.paths[index.file_of[spec.name]]}: {spec.name}: {reach}; keep experts packed")
            del scales_U8
        else:
            value = stored(spec.name)
        if value.dtype == torch.float64:
            wide[spec.name] = value.clone()  # outlives the file's mapping
        if spec.padding:
            value = value[: -spec.padding]
        target.copy_(_converted(spec.name, value, target.dtype))
        del value
        unfilled.discard(parameter)
    assert not unfilled, f"no released tensor fills {min(unfilled)}"
    return wide


def _torch_dtype(dtype: str | torch.dtype, allowed: dict[str, torch.dtype]) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype in allowed.values():
        return dtype
    if isinstance(dtype, str) and dtype in allowed:
        return allowed[dtype]
    raise ValueError(f"dtype: wanted one of {', '.join(allowed)}, got {dtype}")


def _converted(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    if value.dtype == dtype:
        return value
    converted = value.to(dtype)
    # A weight beyond what the dtype reaches (float16: 65504) would silently become infinite.
    if not converted.isfinite().all() and value.isfinite().all():
        most, what = torch.finfo(dtype).max, str(dtype).removeprefix("torch.")
        raise ValueError(f"{name}: wanted at most {most:g} for {what}, got {value.abs().max().item():g}")
    return converted


# --- Writing ----------------------------------------------------------------------------------------------------


def write_published(
    model: KimiK3,
    folder: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    pack_experts: bool = False,
    layout: Layout | None = None,
) -> None:
    """Save under the released names, with config.json and generation_config.json; what was there is replaced.

    `dtype` is the trunk's, None for the model's own. Experts that the model holds packed are written packed; others
    are written unpacked, or packed by `pack_experts`. With a `layout` of the same tensors every tensor goes to the file
    it came from; else one file, from 5 GB on one a decoder layer. Raises OSError with the file and the reason, and then
    nothing saved before is lost.
    """
    state = model.state_dict()
    held = state["language_model.model.embed_tokens.weight"].dtype
    trunk = _torch_dtype(held if dtype is None else dtype, TORCH_DTYPE)
    packed = pack_experts or any(name.endswith(".weight_packed") for name in state)
    config = replace(model.config, dtype=_name_of(trunk)).with_packed_experts(packed)

    wide = layout.wide if layout else {}
    specs = {}
    for spec in released_tensors(config, packed=packed):
        specs[spec.name] = replace(spec, dtype="F64") if spec.name in wide else spec
    if layout and layout.file_of.keys() == specs.keys():
        file_of = layout.file_of
    else:
        file_of = default_files(specs.values())

    in_file: dict[str, list[TensorSpec]] = {}
    for name, file in file_of.items():
        in_file.setdefault(file, []).append(specs[name])
    source = _Source(specs, state, wide)
    with Replacement(Path(folder)) as new:
        for file, here in sorted(in_file.items()):
            tensors = [(spec.name, spec.dtype, spec.shape) for spec in here]
            new.write(file, partial(write_tensors, tensors=tensors, bytes_of=source.bytes_of))
        new.write("generation_config.json", _json(_generation_config(config)))
        new.write("config.json", _json(config.to_json()))
        if in_file.keys() != {SINGLE}:
            total_bytes = sum(spec.num_bytes for spec in specs.values())
            new.write(
                INDEX, _json({"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(file_of.items()))})
            )
        for name in _files_of_previous_save(Path(folder)):
            new.remove(name)


def default_files(specs: Iterable[TensorSpec], single_file_bytes: int = SINGLE_FILE_BYTES) -> dict[str, str]:
    """One file below the limit; else one a decoder layer, then the text model's ends, projector and vision tower."""
    specs = list(specs)
    if sum(spec.num_bytes for spec in specs) < single_file_bytes:
        return {spec.name: SINGLE for spec in specs}
    layers = "language_model.model.layers."
    rest = ("language_model", "mm_projector", "vision_tower")
    part_of = {}
    for spec in specs:
        if spec.name.startswith(layers):
            part_of[spec.name] = (0, int(spec.name.removeprefix(layers).split(".")[0]))
        else:
            part_of[spec.name] = (1, rest.index(spec.name.split(".")[0]))
    parts = sorted(set(part_of.values()))
    file_of_part = {
        part: f"model-{number:05d}-of-{len(parts):06d}.safetensors" for number, part in enumerate(parts, start=1)
    }
    return {name: file_of_part[part] for name, part in part_of.items()}


class _Source:
    """The bytes of one released tensor at a time, out of the model's stacked parameters."""

    def __init__(self, specs: dict[str, TensorSpec], state: dict[str, Tensor], wide: dict[str, Tensor]) -> None:
        self._specs = specs
        self._state = state
        self._wide = wide
        self._pair: tuple[tuple[str, int | None], tuple[Tensor, Tensor]] | None = None

    def bytes_of(self, name: str) -> memoryview:
        spec = self._specs[name]
        value = self._tensor(spec).detach().cpu()
        if spec.padding:
            value = torch.cat([value, value.new_zeros(spec.padding)])
        if spec.name in self._wide:
            exact = self._wide[spec.name]
            value = torch.where(exact.to(value.dtype) == value, exact, value.double())
        value = _converted(spec.name, value, STORED_TORCH_DTYPE[spec.dtype])
        assert value.shape == spec.shape, f"{spec.name}: wanted {spec}, got {list(value.shape)}"
        return value.contiguous().view(-1).view(torch.uint8).numpy().data

    def _tensor(self, spec: TensorSpec) -> Tensor:
        if spec.parameter in self._state:
            value = self._state[spec.parameter]
            return value if spec.expert is None else value[spec.expert]
        # Packed while writing. The scales of a matrix mostly follow its codes, but another shard may hold them.
        parameter = spec.parameter.removesuffix("_packed").removesuffix("_scale")
        if self._pair is None or self._pair[0] != (parameter, spec.expert):
            try:
                self._pair = (parameter, spec.expert), mxfp4.pack(self._state[parameter][spec.expert])
            except ValueError as error:  # a weight that is not finite
                raise ValueError(f"{spec.name}: {error}") from error
        codes, scales = self._pair[1]
        return codes if spec.name.endswith("_packed") else scales


def _name_of(dtype: torch.dtype) -> str:
    return next(name for name, known in TORCH_DTYPE.items() if known == dtype)


def _generation_config(config: K3Config) -> dict[str, Any]:
    text = config.to_json()["text_config"]
    length = {"max_length": text["max_position_embeddings"]} if "max_position_embeddings" in text else {}
    return {**length, "eos_token_id": config.eos_token_id}


def _json(content: dict[str, Any]) -> Callable[[BinaryIO], object]:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return lambda file: file.write(text.encode())


def _files_of_previous_save(folder: Path) -> list[str]:
    where = Folder.at(folder)
    files = [name for name in (SINGLE, INDEX) if where.has(name)]
    if where.has(INDEX):
        try:
            files += sorted(set(read_index(where.file(INDEX))[0].values()))
        except ValueError:
            pass  # an index that cannot be read names no file that is surely ours
    return [name for name in files if where.has(name)]
