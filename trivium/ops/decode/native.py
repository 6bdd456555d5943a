"""The step's structures as decode_plan.h has them, filled by name."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.mxfp4 import PackedWeight

# Parts of a step, in the order of `Phase` in cpu.cpp.
PHASES = (
    *("kda in", "kda state", "kda out", "mla in", "mla query", "mla keys", "mla value", "mla out"),
    *("dense in", "dense out", "moe in", "moe up", "moe down", "moe out", "head"),
)


class _Weight(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("scale", c_void_p), ("kind", c_int64)]


def _fields(ints: str = "", vectors: str = "", weights: str = "", floats: str = "") -> list[tuple[str, Any]]:
    kinds = ((ints, c_int64), (floats, c_double), (weights, _Weight), (vectors, c_void_p))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class _Layer(ctypes.Structure):
    _fields_ = [
        *_fields(ints="is_mla is_dense opens_block", vectors="mixer_query mixer_norm ffn_query ffn_norm"),
        *_fields(weights="q k v f_a f_b b", vectors="taps rate dt_bias o_norm"),
        *_fields(weights="q_a q_b kv_a kv_b", vectors="q_a_norm kv_a_norm"),
        *_fields(weights="g o gate up down"),
        *_fields(weights="router latent_down latent_up w1 w3 w2", vectors="router_bias latent_norm"),
    ]


class _Plan(ctypes.Structure):
    _fields_ = [
        *_fields(ints="num_layers hidden vocab kda_heads kda_dim"),
        *_fields(ints="mla_heads q_rank kv_rank nope_dim rest_dim value_dim"),
        *_fields(ints="dense_width num_experts num_active latent expert_width shared_width"),
        *_fields(floats="eps latent_eps lower_bound situ_bound situ_up_bound routed_scale"),
        *_fields(weights="embed lm_head", vectors="out_query out_norm layers"),
    ]


class _Memory(ctypes.Structure):
    _fields_ = _fields(vectors="state ring")


class NativePlan:
    """The plan in memory; `address` is what the kernel takes. Its tensors are kept alive."""

    def __init__(self, numbers: Mapping[str, int | float], top: Mapping[str, Any], layers: Sequence[dict]) -> None:
        self._tensors = (dict(top), [dict(layer["tensors"]) for layer in layers])
        self._layers = (_Layer * len(layers))()
        for native, layer in zip(self._layers, layers, strict=True):
            for name in ("is_mla", "is_dense", "opens_block"):
                setattr(native, name, int(layer[name]))
            _fill(native, layer["tensors"])
        self._plan = _Plan(num_layers=len(layers), layers=ctypes.addressof(self._layers), **numbers)
        _fill(self._plan, top)
        self.address = ctypes.addressof(self._plan)


def _fill(native: ctypes.Structure, tensors: Mapping[str, Tensor | PackedWeight]) -> None:
    kinds = dict(native._fields_)
    for name, tensor in tensors.items():
        if kinds[name] is c_void_p:
            setattr(native, name, tensor.data_ptr())
        elif isinstance(tensor, PackedWeight):
            setattr(native, name, _Weight(tensor.packed.data_ptr(), tensor.scale.data_ptr(), 2))
        else:
            setattr(native, name, _Weight(tensor.data_ptr(), None, int(tensor.dtype == torch.bfloat16)))


def run_step(
    plan: NativePlan,
    memory: Sequence[tuple[Tensor, Tensor | None]],
    token_id: int,
    position: int,
    logits_W: Tensor,
    seconds: Tensor | None,
) -> None:
    """One step of the kernel: `memory` is (state, ring) of every layer."""
    native = (_Memory * len(memory))()
    for own, (state, ring) in zip(native, memory, strict=True):
        own.state, own.ring = state.data_ptr(), None if ring is None else ring.data_ptr()
    cpu.call("decode_step", plan.address, ctypes.addressof(native), token_id, position, logits_W, seconds)


def product(weight: Tensor | PackedWeight, x_K: Tensor, first: int, last: int) -> Tensor:
    """Rows `first` to `last` of a weight [N, K] (packed: [1, N, K]) times x, as the step computes them."""
    *_, N, K = weight.shape
    y_N = x_K.new_zeros(N)
    if isinstance(weight, PackedWeight):
        cpu.call("decode_product", weight.packed, weight.scale, 2, K, first, last, x_K, y_N)
    else:
        cpu.call("decode_product", weight, None, int(weight.dtype == torch.bfloat16), K, first, last, x_K, y_N)
    return y_N[first:last]


def structure_sizes() -> dict[str, tuple[int, int]]:
    """Bytes of every structure, here and in the kernels, and the number of phases."""
    there = cpu.numbers([0] * 5)
    cpu.call("decode_sizes", there)
    here = [ctypes.sizeof(kind) for kind in (_Weight, _Layer, _Plan, _Memory)] + [len(PHASES)]
    return dict(
        zip(("Weight", "Layer", "Plan", "Memory", "PHASES"), zip(here, there.tolist(), strict=True), strict=True)
    )
