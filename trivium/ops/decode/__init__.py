"""One new token of one sequence through a whole text model in one call, whose cost is the weights' bytes.

Here is what such a step is told: sizes, weights, and one sequence's memory, which it changes in place. That it is K3's
forward (docs/model.md) stands in `cpu.cpp`, and the definition it must equal is the model's own forward; which tensor
of a model is which stands in `trivium.model.step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.decode.native import PHASES, NativePlan, run_step
from trivium.ops.mxfp4 import PackedWeight

__all__ = ["PHASES", "DecodeLayer", "DecodePlan", "DecodeSizes", "LayerMemory", "decode_step", "padded", "row_width"]

MAX_ACTIVE, MAX_BLOCKS = 64, 255  # of cpu.cpp, which keeps both on the stack


def padded(width: int) -> int:
    """To whole vectors of the widest instruction set, as in decode_plan.h."""
    return -(-width // 16) * 16


def row_width(kv_rank: int, rest_dim: int) -> int:
    """Of a token's row in an MLA memory: the latent, then the shared key, each padded with zeros."""
    return padded(kv_rank) + padded(rest_dim)


@dataclass(frozen=True, kw_only=True)
class DecodeSizes:
    """The numbers of a model; names as in decode_plan.h."""

    hidden: int
    vocab: int
    kda_heads: int
    kda_dim: int
    mla_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rest_dim: int
    value_dim: int
    dense_width: int
    num_experts: int
    num_active: int
    latent: int
    expert_width: int
    shared_width: int
    eps: float
    latent_eps: float
    lower_bound: float
    situ_bound: float
    situ_up_bound: float
    routed_scale: float


@dataclass(frozen=True, kw_only=True)
class DecodeLayer:
    """One decoder layer: its kind and its tensors, by the names of decode_plan.h."""

    is_mla: bool
    is_dense: bool
    opens_block: bool
    tensors: Mapping[str, Tensor | PackedWeight]


class LayerMemory:
    """One layer's memory of one sequence, float32, contiguous, changed in place by every step.

    KDA: `state` [H, K, V] and `ring` [4, 3 H K], the convolution's last inputs, that of position t in row t mod 4.
    MLA: `state` [capacity, row_width], rows of the tokens so far, and no ring.
    """

    def __init__(self, state: Tensor, ring: Tensor | None = None) -> None:
        self.state, self.ring = state, ring


class DecodePlan:
    """A model as the step reads it. Raises ValueError for a tensor that is missing, or of another shape or dtype.

    Matrices are float32 or bfloat16, the routed experts also packed; vectors are float32. Nothing is copied: the plan
    reads its tensors' memory at every step and keeps them alive.
    """

    def __init__(self, sizes: DecodeSizes, top: Mapping[str, Tensor], layers: list[DecodeLayer]) -> None:
        if cpu.missing:
            raise ValueError(f"decode: {cpu.missing}")
        if not 1 <= sizes.num_active <= sizes.num_experts:
            raise ValueError(f"decode: wanted 1 to {sizes.num_experts} active experts, got {sizes.num_active}")
        if sizes.num_active > MAX_ACTIVE or sum(layer.opens_block for layer in layers) > MAX_BLOCKS:
            raise ValueError(
                f"decode: wanted at most {MAX_ACTIVE} active experts and {MAX_BLOCKS} residual blocks, "
                f"got {sizes.num_active} and {sum(layer.opens_block for layer in layers)}"
            )
        _check("decode", top, _top_shapes(sizes))
        for idx, layer in enumerate(layers):
            _check(f"decode: layer {idx}", layer.tensors, _layer_shapes(sizes, layer))
        self.sizes, self.layers = sizes, tuple(layers)
        numbers = {field.name: getattr(sizes, field.name) for field in fields(sizes)}
        self.native = NativePlan(numbers, top, [vars(layer) for layer in layers])

    def check(self, memory: list[LayerMemory], token_id: int, position: int) -> None:
        """Raises ValueError where the step would read or write what is not there."""
        s = self.sizes
        if position < 0:
            raise ValueError(f"decode: wanted a position of at least 0, got {position}")
        if not 0 <= token_id < s.vocab:
            raise ValueError(f"decode: wanted a token id in [0, {s.vocab}), got {token_id}")
        if len(memory) != len(self.layers):
            raise ValueError(f"decode: wanted the memory of {len(self.layers)} layers, got {len(memory)}")
        for idx, (layer, own) in enumerate(zip(self.layers, memory, strict=True)):
            if layer.is_mla:
                rows = len(own.state) if own.state.ndim else 0
                if rows <= position:
                    raise ValueError(f"decode: layer {idx} has room for {rows} tokens, got position {position}")
                wanted = {"state": (own.state, (rows, row_width(s.kv_rank, s.rest_dim)))}
            else:
                wanted = {
                    "state": (own.state, (s.kda_heads, s.kda_dim, s.kda_dim)),
                    "ring": (own.ring, (4, 3 * s.kda_heads * s.kda_dim)),
                }
            for name, (tensor, shape) in wanted.items():
                _check_memory(f"decode: layer {idx}'s {name}", tensor, shape, torch.float32)


def decode_step(
    plan: DecodePlan, memory: list[LayerMemory], token_id: int, position: int, seconds: Tensor | None = None
) -> Tensor:
    """Logits [W], float32, behind this token, which is number `position` of its sequence; `memory` then holds it too.

    Everything between the weights is float32, also where they are bfloat16. The bits do not depend on the number of
    threads. `seconds` (float64 [len(PHASES)]) is what each phase took, added up.
    """
    plan.check(memory, token_id, position)
    if seconds is not None:
        _check_memory("decode: seconds", seconds, (len(PHASES),), torch.float64)
    logits_W = cpu.empty(plan.sizes.vocab)
    run_step(plan.native, [(own.state, own.ring) for own in memory], token_id, position, logits_W, seconds)
    return logits_W


# --- What has which shape ------------------------------------------------------------------------------------------

VECTORS = {"mixer_query", "mixer_norm", "ffn_query", "ffn_norm", "taps", "rate", "dt_bias", "o_norm"}
VECTORS |= {"q_a_norm", "kv_a_norm", "router_bias", "latent_norm", "out_query", "out_norm"}
ROUTED = {"w1", "w3", "w2"}


def _top_shapes(s: DecodeSizes) -> dict[str, tuple[int, ...]]:
    table = (s.vocab, s.hidden)
    return {"embed": table, "lm_head": table, "out_query": (s.hidden,), "out_norm": (s.hidden,)}


def _layer_shapes(s: DecodeSizes, layer: DecodeLayer) -> dict[str, tuple[int, ...]]:
    D, E, L, F = s.hidden, s.num_experts, s.latent, s.expert_width
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("mixer_query", "mixer_norm", "ffn_query", "ffn_norm"), (D,))
    if layer.is_mla:
        width, per_head = s.mla_heads * s.value_dim, s.nope_dim + s.value_dim
        shapes |= {"q_a": (s.q_rank, D), "q_a_norm": (s.q_rank,), "kv_a_norm": (s.kv_rank,)}
        shapes |= {"q_b": (s.mla_heads * (s.nope_dim + s.rest_dim), s.q_rank)}
        shapes |= {"kv_a": (s.kv_rank + s.rest_dim, D), "kv_b": (s.mla_heads * per_head, s.kv_rank)}
    else:
        width, K = s.kda_heads * s.kda_dim, s.kda_dim
        shapes |= dict.fromkeys(("q", "k", "v"), (width, D))
        shapes |= {"f_a": (K, D), "f_b": (width, K), "b": (s.kda_heads, D), "taps": (4, 3 * width)}
        shapes |= {"rate": (s.kda_heads,), "dt_bias": (width,), "o_norm": (K,)}
    shapes |= {"g": (width, D), "o": (D, width)}
    own = s.dense_width if layer.is_dense else s.shared_width
    shapes |= {"gate": (own, D), "up": (own, D), "down": (D, own)}
    if not layer.is_dense:
        shapes |= {"router": (E, D), "router_bias": (E,), "latent_down": (L, D), "latent_up": (D, L)}
        shapes |= {"latent_norm": (L,), "w1": (E, F, L), "w3": (E, F, L), "w2": (E, L, F)}
    return shapes


def _check_memory(what: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor is None:
        raise ValueError(f"{what}: wanted {dtype} {shape}, got none")
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{what}: wanted {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
    if not _is_plain(tensor):
        raise ValueError(f"{what}: wanted contiguous memory of the CPU, got {tensor.device}, strides {tensor.stride()}")


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _check(where: str, tensors: Mapping[str, Tensor | PackedWeight], wanted: dict[str, tuple[int, ...]]) -> None:
    if tensors.keys() != wanted.keys():
        raise ValueError(f"{where}: wanted {', '.join(sorted(wanted))}, got {', '.join(sorted(tensors))}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != wanted[name]:
            raise ValueError(f"{where}: {name} wants shape {wanted[name]}, got {tuple(tensor.shape)}")
        if isinstance(tensor, PackedWeight):
            if name not in ROUTED:
                raise ValueError(f"{where}: {name} is packed, only routed experts may be")
            if not (_is_plain(tensor.packed) and _is_plain(tensor.scale)):
                raise ValueError(f"{where}: {name} wants contiguous memory of the CPU")
        elif tensor.dtype not in ((torch.float32,) if name in VECTORS else (torch.float32, torch.bfloat16)):
            raise ValueError(
                f"{where}: {name} is {tensor.dtype}, wanted float32{'' if name in VECTORS else ' or bfloat16'}"
            )
        elif not _is_plain(tensor):
            raise ValueError(f"{where}: {name} wants contiguous memory of the CPU")
    if len({isinstance(tensors[name], PackedWeight) for name in ROUTED & tensors.keys()}) > 1:
        raise ValueError(f"{where}: w1, w3 and w2 are all packed, or none is")
