"""Activation checkpointing: a layer keeps its inputs alone, and is run once more in the backward for all the rest.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174; torch's `checkpoint` without reentry.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from trivium.model.kimi_k3 import KimiK3
from trivium.model.layer import DecoderLayer
from trivium.model.recompute import recomputing


class Recomputed:
    """The layers that are run again in a backward, counted since they were wrapped.

    `wrapped` forwards went through the wrapper; `owed` of them had something to give a gradient to, and are to be run
    again; `count` were.
    """

    def __init__(self, layers: list[DecoderLayer]) -> None:
        self.layers = layers
        self.wrapped = self.owed = self.count = 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def undo(self) -> None:
        """The layers have their own forwards again."""
        for layer in self.layers:
            if isinstance(vars(layer).get("forward"), _Forward):
                del layer.forward


def checkpoint_layers(model: KimiK3) -> Recomputed:
    """Run every decoder layer again in the backward, in training with gradients; other forwards are as they were.

    Loss and gradients are the same bits. Between forward and backward a layer holds what came in: of T tokens of width D
    one sum or block [T, D] more than the layer below. One backward makes `count` grow by the number of layers; where it
    does not, something goes around the layers' forwards. Parameters and their names are untouched, and `fully_shard` may
    come behind. Raises ValueError for a layer whose forward was replaced before.
    """
    layers = list(model.language_model.model.layers)
    for layer in layers:
        if "forward" in vars(layer):
            raise ValueError(f"checkpoint_layers: {layer.name} has another forward already; undo that first")
    recomputed = Recomputed(layers)
    for layer in layers:
        layer.forward = _Forward(layer, recomputed)
    return recomputed


class _Forward:
    """A layer's forward in the place of its own. An object and no closure, so that a copied model runs its own layers."""

    def __init__(self, layer: DecoderLayer, recomputed: Recomputed) -> None:
        self.layer, self.recomputed = layer, recomputed

    def __call__(self, *args: Any) -> Any:
        run = type(self.layer).forward
        if not (self.layer.training and torch.is_grad_enabled()):
            return run(self.layer, *args)
        # Nothing in a layer is random.
        options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": self._contexts}
        stream, state = checkpoint(run, self.layer, *args, **options)
        self.recomputed.wrapped += 1
        self.recomputed.owed += stream.sum_TD.requires_grad
        return stream, state

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._again()

    @contextmanager
    def _again(self) -> Iterator[None]:
        self.recomputed.count += 1
        with recomputing():
            yield
