"""What a step looks like layer by layer: gradient norms, AttnRes weights, decay, output sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trivium.data.batch import Batch
from trivium.model.kimi_k3 import KimiK3
from trivium.model.trace import trace, trace_names
from trivium.parallel.world import ALONE, World

_TRACED = ("_read.weight", ".stream", ".decay")
# The last number of float32 below 1: a half-life of 11.6 million tokens; a decay of 1 would have none.
_SLOWEST_DECAY = 1 - 2**-24

Row = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class GradNorms:
    """2-norms of the gradients of each decoder layer, of embedding and head, and of the rest together."""

    layers: Row
    embedding: float
    head: float
    rest: float


@dataclass(frozen=True, kw_only=True)
class Layers:
    """One line of layers.jsonl: a step's gradients, and the model behind it on a few held-out tokens.

    Everything but `output_read` has an entry a layer. `mixer_read`, `ffn_read` and `output_read` are the AttnRes
    weights of each source, oldest block first and the running sum last, mean over the tokens. `half_life_tokens` has a
    number a KDA head, the median over tokens and channels of ln 2 / -ln decay; None for an MLA layer. `stream_rms` is
    of the running sum behind the layer, `mixer_rms` and `ffn_rms` of what the two sublayers added to it. A number that
    is not finite is null in the file and nan when read.
    """

    step: int
    tokens: int
    grad_norm: GradNorms
    mixer_read: tuple[Row, ...]
    ffn_read: tuple[Row, ...]
    output_read: Row
    half_life_tokens: tuple[Row | None, ...]
    stream_rms: Row
    mixer_rms: Row
    ffn_rms: Row

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step: wanted at least 1, got {self.step}")
        want = len(self.stream_rms)
        lengths = {field.name: len(getattr(self, field.name)) for field in fields(self) if field.name in _PER_LAYER}
        for name, got in {**lengths, "grad_norm.layers": len(self.grad_norm.layers)}.items():
            if got != want:
                raise ValueError(f"{name}: wanted {want} layers, as many as stream_rms has, got {got}")

    @property
    def num_layers(self) -> int:
        return len(self.stream_rms)

    def to_json(self) -> dict[str, Any]:
        return _nulled(asdict(self))

    @classmethod
    def from_json(cls, content: Any) -> Layers:
        """Raises ValueError with the field that is missing or is not what it should be."""
        values = _fields_of(cls, content, "")
        grads = _fields_of(GradNorms, values["grad_norm"], "grad_norm.")
        return cls(
            step=_whole("step", values["step"]),
            tokens=_whole("tokens", values["tokens"]),
            grad_norm=GradNorms(
                layers=_row("grad_norm.layers", grads["layers"]),
                **{name: _number(f"grad_norm.{name}", grads[name]) for name in ("embedding", "head", "rest")},
            ),
            **{name: _rows(name, values[name]) for name in ("mixer_read", "ffn_read")},
            half_life_tokens=_rows("half_life_tokens", values["half_life_tokens"], holes=True),
            **{name: _row(name, values[name]) for name in ("output_read", "stream_rms", "mixer_rms", "ffn_rms")},
        )


_PER_LAYER = ("mixer_read", "ffn_read", "half_life_tokens", "mixer_rms", "ffn_rms")


@torch.no_grad()
def grad_norms(model: KimiK3, world: World = ALONE) -> GradNorms:
    """The norms of the gradients as they are, between backward and update; a parameter without one counts as 0.

    Sharded or not: the squared sums of all shards are added in float64 by one collective.
    """
    text = model.language_model
    parts = [*text.model.layers, text.model.embed_tokens, text.lm_head]
    owned = [list(part.parameters()) for part in parts]
    taken = {id(parameter) for part in owned for parameter in part}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    squares = torch.stack([_square_sum(part, world, model.device) for part in [*owned, rest]])
    *layers, embedding, head, other = [math.sqrt(square) for square in world.sum(squares.tolist())]
    return GradNorms(layers=tuple(layers), embedding=embedding, head=head, rest=other)


def look(model: KimiK3, batch: Batch, *, step: int, tokens: int, grads: GradNorms) -> Layers:
    """The model on the tokens of `batch`, behind step `step`, whose gradients were `grads`.

    One forward without gradients, in eval mode; nothing of the model changes. Of a sharded model it is collective:
    every process hands over the same batch, and gets the same numbers.
    """
    config = model.config
    names = [name for name in trace_names(config) if name.endswith(_TRACED)]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), trace(model, names) as kept, _outputs_rms(model) as rms:
            model(batch.ids_T, batch.rows, pixels=batch.pixels)
    finally:
        model.train(was_training)
    layers = [f"layers.{layer_idx}" for layer_idx in range(config.num_layers)]
    return Layers(
        step=step,
        tokens=tokens,
        grad_norm=grads,
        mixer_read=tuple(_mean_weights(kept[f"{layer}.mixer_read.weight"]) for layer in layers),
        ffn_read=tuple(_mean_weights(kept[f"{layer}.ffn_read.weight"]) for layer in layers),
        output_read=_mean_weights(kept["output_read.weight"]),
        half_life_tokens=tuple(
            None if config.is_mla(layer_idx) else _half_life_tokens(kept[f"{layer}.self_attn.decay"])
            for layer_idx, layer in enumerate(layers)
        ),
        stream_rms=tuple(float(_rms(kept[f"{layer}.stream"])) for layer in layers),
        mixer_rms=tuple(float(mixer) for mixer, _ in rms),
        ffn_rms=tuple(float(ffn) for _, ffn in rms),
    )


def _square_sum(parameters: list[nn.Parameter], world: World, device: torch.device) -> Tensor:
    """What this process has to add to the sum of squares, float64; what all hold whole is the first one's to add."""
    own = [torch.zeros((), dtype=torch.float64, device=device)]
    for parameter in parameters:
        grad = parameter.grad
        sharded = False
        if isinstance(grad, DTensor):
            sharded = any(placement.is_shard() for placement in grad.placements)
            grad = grad.to_local()
        if grad is not None and (sharded or world.is_first):
            own.append(torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2)
    return torch.stack(own).sum()


@contextmanager
def _outputs_rms(model: KimiK3) -> Iterator[list[list[Tensor]]]:
    """A list a layer, which a forward in the block fills: RMS of the mixer's output, then of the feed-forward's."""
    rms, handles = [], []
    for layer in model.language_model.model.layers:
        own: list[Tensor] = []
        rms.append(own)
        for module in (layer.self_attn, layer.mlp if layer.is_dense else layer.block_sparse_moe):
            handles.append(module.register_forward_hook(lambda _, __, output, own=own: own.append(_rms(output))))
    try:
        yield rms
    finally:
        for handle in handles:
            handle.remove()


def _rms(output: Tensor | tuple[Tensor, Any]) -> Tensor:
    """Over tokens and channels; a mixer's output comes with its state."""
    output_TD = output[0] if isinstance(output, tuple) else output
    return output_TD.float().square().mean().sqrt()


def _mean_weights(weight_NT: Tensor) -> Row:
    return tuple(weight_NT.float().mean(dim=1).tolist())


def _half_life_tokens(decay_THK: Tensor) -> Row:
    half_life_THK = -math.log(2) / decay_THK.float().clamp(max=_SLOWEST_DECAY).log()
    return tuple(half_life_THK.transpose(0, 1).flatten(1).median(dim=1).values.tolist())


def _nulled(value: Any) -> Any:
    """Numbers that are not finite become None: JSON has none."""
    if isinstance(value, dict):
        return {name: _nulled(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_nulled(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _fields_of(kind: type, content: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{prefix.removesuffix('.') or 'layers'}: wanted a JSON object, got {_shown(content)}")
    missing = [field.name for field in fields(kind) if field.name not in content]
    if missing:
        raise ValueError(f"{prefix}{missing[0]} is missing")
    return content


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: wanted a whole number, got {_shown(value)}")
    return value


def _number(name: str, value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: wanted a number or null, got {_shown(value)}")
    return float(value)


def _row(name: str, value: Any) -> Row:
    if not isinstance(value, list):
        raise ValueError(f"{name}: wanted a list of numbers, got {_shown(value)}")
    return tuple(_number(name, number) for number in value)


def _rows(name: str, value: Any, *, holes: bool = False) -> tuple[Row | None, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: wanted a list of lists, got {_shown(value)}")
    return tuple(None if holes and row is None else _row(name, row) for row in value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
