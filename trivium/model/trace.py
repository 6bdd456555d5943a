"""Looking inside: `trace` keeps named tensors of every forward that runs in its block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from trivium.config import K3Config

_active: Trace | None = None


class Trace(Mapping[str, Tensor]):
    """What was recorded, by name. Tokens of several forwards follow one another.

    `layers.L.stream` [T, D] (running sum after the layer) · `layers.L.self_attn.decay` [T, H, K] in (0, 1) and `.beta`
    [T, H] of KDA layers · `layers.L.mixer_read.weight` and `.ffn_read.weight` [N, T] · `layers.L.moe.experts` [T, A]
    sorted by id and `.moe.weights` [T, A] · `output_read.weight` [N, T] · `final_hidden` [T, D].
    """

    def __init__(self, network: object, names: Sequence[str] | None) -> None:
        self.network = network
        self.listening = False  # while the network's own forward runs
        self._patterns = names
        self._pieces: dict[str, list[Tensor]] = {}
        self._token_dim: dict[str, int] = {}
        self.tokens = slice(None)  # which rows of a forward are tokens: part of a tile in deterministic mode

    def wants(self, name: str) -> bool:
        return self._patterns is None or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def keep(self, name: str, value: Tensor, token_dim: int) -> None:
        index = (slice(None),) * token_dim + (self.tokens,)
        self._pieces.setdefault(name, []).append(value.detach()[index].clone())
        self._token_dim[name] = token_dim

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._pieces:
            raise KeyError(f"{name}: not recorded; there are {', '.join(self) or 'no tensors: no forward ran'}")
        return torch.cat(self._pieces[name], dim=self._token_dim[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


@contextmanager
def trace(model: Any, names: Sequence[str] | None = None) -> Iterator[Trace]:
    """Record the forwards of `model` (a KimiK3, or the Model that holds one) inside the block.

    `names` limits what is kept, with * and ? as in file names.

    Raises ValueError for a name that this model has not, or when another trace is running.
    """
    global _active
    if _active is not None:
        raise ValueError("trace: another trace is running; one at a time")
    if isinstance(names, str):
        raise ValueError(f"trace: names wants a sequence of names, got the string {names!r}")
    known = trace_names(model.config)
    for pattern in names or ():
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ValueError(f"trace: this model has no {pattern!r}; names are like {known[0]!r} or {known[-1]!r}")
    _active = Trace(getattr(model, "network", model), names)
    try:
        yield _active
    finally:
        _active = None


def trace_names(config: K3Config) -> list[str]:
    """Every name that a forward of this model can record."""
    names = []
    for layer_idx in range(config.num_layers):
        layer = f"layers.{layer_idx}"
        names += [f"{layer}.mixer_read.weight", f"{layer}.ffn_read.weight", f"{layer}.stream"]
        if not config.is_mla(layer_idx):
            names += [f"{layer}.self_attn.decay", f"{layer}.self_attn.beta"]
        if not config.is_dense(layer_idx):
            names += [f"{layer}.moe.experts", f"{layer}.moe.weights"]
    return [*names, "output_read.weight", "final_hidden"]


def record(name: str, make: Callable[[], Tensor], token_dim: int = 0) -> None:
    """Keep make() under this name if a running trace wants it; costs nothing otherwise."""
    if _active is not None and _active.listening and _active.wants(name):
        with torch.no_grad():
            _active.keep(name, make(), token_dim)


def is_running() -> bool:
    """Whether some trace is: a forward that records nothing must then not stand in for the model's own."""
    return _active is not None


@contextmanager
def running(network: object) -> Iterator[None]:
    """Around a network's forward: only that of the traced network is recorded."""
    if _active is None:
        yield
        return
    before, _active.listening = _active.listening, _active.network is network
    try:
        yield
    finally:
        if _active is not None:
            _active.listening = before


@contextmanager
def rows_between(first: int, last: int) -> Iterator[None]:
    """Inside the block only these rows of a forward are tokens worth keeping."""
    if _active is None:
        yield
        return
    before, _active.tokens = _active.tokens, slice(first, last)
    try:
        yield
    finally:
        if _active is not None:
            _active.tokens = before
