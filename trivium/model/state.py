"""What a model keeps of the tokens it has seen: an overwritten state per KDA layer, growing latents per MLA layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trivium.config import TILE, K3Config
from trivium.ops.rows import Rows, Tile


@dataclass(frozen=True, kw_only=True, eq=False)
class Pending:
    """Projected inputs of the tokens behind the last grid point, in their places of one tile of 16; zeros elsewhere."""

    qkv_SCX: Tensor  # before the convolution, q|k|v joined: C = 16, X = 3 H K
    decay_in_SCHK: Tensor
    beta_in_SCH: Tensor
    counts: tuple[int, ...]  # tokens kept, 0 to 15 a sequence


@dataclass(frozen=True, kw_only=True, eq=False)
class KdaState:
    """One KDA layer's memory of S sequences. `state_SHKV` is float32; the window holds the last three inputs of the
    convolution, oldest first. With `pending` (deterministic mode) both are those of the last grid point."""

    state_SHKV: Tensor
    window_S3X: Tensor
    pending: Pending | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class MlaState:
    """One MLA layer's memory: normed latents [U, R] and raw shared keys [U, J] of all tokens, sequence by sequence.

    `table` is None: the rows are contiguous.
    """

    latent: Tensor
    shared_key: Tensor
    table: Tensor | None = None

    def append(self, latent_TR: Tensor, shared_key_TJ: Tensor, rows: Rows) -> MlaState:
        """Each sequence's new rows behind its old ones."""
        if isinstance(rows, Tile):
            latent_TR, shared_key_TJ = latent_TR[rows.first : rows.last], shared_key_TJ[rows.first : rows.last]
        elif rows.num_sequences > 1 and any(rows.past):
            return MlaState(
                latent=_interleave(self.latent, latent_TR, rows),
                shared_key=_interleave(self.shared_key, shared_key_TJ, rows),
            )
        return MlaState(
            latent=torch.cat([self.latent, latent_TR]), shared_key=torch.cat([self.shared_key, shared_key_TJ])
        )


def _interleave(old_UR: Tensor, new_TR: Tensor, rows: Rows) -> Tensor:
    pieces = zip(old_UR.split(rows.past), new_TR.split(rows.lengths), strict=True)
    return torch.cat([half for pair in pieces for half in pair])


LayerState = KdaState | MlaState


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelState:
    """Every layer's state, and how many tokens each sequence has fed in."""

    layers: tuple[LayerState, ...]
    lengths: tuple[int, ...]

    def sequence(self, s: int) -> ModelState:
        """The state of one sequence alone."""
        start = sum(self.lengths[:s])
        own = slice(start, start + self.lengths[s])
        return ModelState(
            layers=tuple(
                _kda_slice(layer, s)
                if isinstance(layer, KdaState)
                else MlaState(latent=layer.latent[own], shared_key=layer.shared_key[own])
                for layer in self.layers
            ),
            lengths=(self.lengths[s],),
        )

    @classmethod
    def join(cls, states: list[ModelState]) -> ModelState:
        """One state of all these sequences, in this order."""
        return cls(
            layers=tuple(_join_layer(layers) for layers in zip(*(state.layers for state in states), strict=True)),
            lengths=tuple(length for state in states for length in state.lengths),
        )


def _kda_slice(layer: KdaState, s: int) -> KdaState:
    own = slice(s, s + 1)
    pending = layer.pending
    if pending is not None:
        pending = Pending(
            qkv_SCX=pending.qkv_SCX[own],
            decay_in_SCHK=pending.decay_in_SCHK[own],
            beta_in_SCH=pending.beta_in_SCH[own],
            counts=pending.counts[own],
        )
    return KdaState(state_SHKV=layer.state_SHKV[own], window_S3X=layer.window_S3X[own], pending=pending)


def _join_layer(layers: tuple[LayerState, ...]) -> LayerState:
    if isinstance(layers[0], MlaState):
        return MlaState(
            latent=torch.cat([layer.latent for layer in layers]),
            shared_key=torch.cat([layer.shared_key for layer in layers]),
        )
    joined = KdaState(
        state_SHKV=torch.cat([layer.state_SHKV for layer in layers]),
        window_S3X=torch.cat([layer.window_S3X for layer in layers]),
    )
    if layers[0].pending is None:
        return joined
    pendings = [layer.pending for layer in layers]
    return replace(
        joined,
        pending=Pending(
            qkv_SCX=torch.cat([pending.qkv_SCX for pending in pendings]),
            decay_in_SCHK=torch.cat([pending.decay_in_SCHK for pending in pendings]),
            beta_in_SCH=torch.cat([pending.beta_in_SCH for pending in pendings]),
            counts=tuple(count for pending in pendings for count in pending.counts),
        ),
    )


def empty_state(
    config: K3Config, num_sequences: int, *, dtype: torch.dtype, device: torch.device, deterministic: bool
) -> ModelState:
    """The state of sequences that have fed nothing in: zeros, and latents of no tokens."""
    S, H, K = num_sequences, config.kda.num_heads, config.kda.head_dim
    like = {"dtype": dtype, "device": device}
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def kda() -> KdaState:
        pending = None
        if deterministic:
            pending = Pending(
                qkv_SCX=torch.zeros(S, TILE, 3 * H * K, **like),
                decay_in_SCHK=torch.zeros(S, TILE, H, K, **like),
                beta_in_SCH=torch.zeros(S, TILE, H, **like),
                counts=(0,) * S,
            )
        return KdaState(
            state_SHKV=torch.zeros(S, H, K, K, dtype=state_dtype, device=device),
            window_S3X=torch.zeros(S, 3, 3 * H * K, **like),
            pending=pending,
        )

    def mla() -> MlaState:
        return MlaState(
            latent=torch.zeros(0, config.mla.kv_lora_rank, **like),
            shared_key=torch.zeros(0, config.mla.qk_rope_head_dim, **like),
        )

    layers = tuple(mla() if config.is_mla(layer_idx) else kda() for layer_idx in range(config.num_layers))
    return ModelState(layers=layers, lengths=(0,) * S)
