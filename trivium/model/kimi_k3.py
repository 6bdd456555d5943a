"""Kimi K3, whole: text model, vision tower and projector, and its one signature: model(ids, rows, state)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.config import TILE, K3Config
from trivium.model import trace
from trivium.model.decoder import LanguageModel
from trivium.model.mla import GatedMla
from trivium.model.moe import LatentMoe
from trivium.model.state import KdaState, ModelState, empty_state
from trivium.model.vision import Projector, VisionTower, scatter_features
from trivium.ops.pixels import Pixels
from trivium.ops.rows import Rows, Tile


class KimiK3(nn.Module):
    """Parameters carry the released names, the routed experts stacked; they start as raw memory.

    `dtype` is that of everything not float32 by definition (None: what the config says); `experts` "packed" keeps the
    routed experts as MXFP4 bytes, for inference. Build under `torch.device("meta")` to allocate nothing.

    `compute_dtype` is that of the activations, None for the parameters' own. With float32 parameters and bfloat16 here
    every matrix and norm weight is rounded where it is used, as a bfloat16 model's would be, and its gradient arrives
    in float32: an update smaller than bfloat16's steps is not lost. What is float32 in a bfloat16 model stays so.

    With `deterministic` set, equalities are bitwise on the CPU: any cut, any batch, decode and prefill. The model then
    runs on one tile of 16 rows of one sequence at a time (see `Tile`), without gradients.
    """

    def __init__(
        self,
        config: K3Config,
        *,
        dtype: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
        experts: str = "unpacked",
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(config, K3Config):
            raise ValueError(f"config: wanted a K3Config, got {type(config).__name__}")
        if experts not in ("unpacked", "packed"):
            raise ValueError(f'experts: wanted "unpacked" or "packed", got {experts!r}')
        if compute_dtype is not None and not compute_dtype.is_floating_point:
            raise ValueError(f"compute_dtype: wanted a floating dtype, got {compute_dtype}")
        self.config = config
        self.compute_dtype = compute_dtype
        self.deterministic = deterministic
        with _default_dtype(dtype or getattr(torch, config.dtype)):
            self.language_model = LanguageModel(config, packed=experts == "packed")
            if config.vision is not None:
                self.vision_tower = VisionTower(config.vision)
                self.mm_projector = Projector(config.vision)

    @property
    def dtype(self) -> torch.dtype:
        return self.language_model.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.language_model.lm_head.weight.device

    def forward(
        self, ids_T: Tensor, rows: Rows, state: ModelState | None = None, *, pixels: Pixels | None = None
    ) -> tuple[Tensor, ModelState | None]:
        """hidden_TD behind the final norm, and the state behind these tokens (None when none came in).

        `rows.past_S` must say what the state holds. `pixels` are the images whose placeholders the ids hold, one id a
        merged window (`expand_placeholders`).
        """
        _check_inputs(ids_T, rows, state, self.deterministic)
        if self.deterministic and self.training and torch.is_grad_enabled():
            raise ValueError("deterministic: this mode has no gradients; train in the default mode, or call eval()")
        with trace.running(self):
            return self._forward(ids_T, rows, state, pixels)

    def _forward(
        self, ids_T: Tensor, rows: Rows, state: ModelState | None, pixels: Pixels | None
    ) -> tuple[Tensor, ModelState | None]:
        if self.deterministic:
            with torch.no_grad():
                hidden_TD, new_state = self._by_tiles(self.embed(ids_T, pixels), rows, state)
                return hidden_TD, None if state is None else new_state
        hidden_TD, layers = self.language_model.model(self.embed(ids_T, pixels), rows, state and state.layers)
        if state is None:
            return hidden_TD, None
        return hidden_TD, ModelState(layers=layers, lengths=_lengths_after(rows))

    def embed(self, ids_T: Tensor, pixels: Pixels | None = None) -> Tensor:
        """Embedding rows [T, D]; image positions are overwritten by projector rows, in order."""
        embed_TD = self.language_model.model.embed_tokens(ids_T)
        embed_TD = embed_TD.to(self.compute_dtype or embed_TD.dtype)
        if pixels is None:
            return embed_TD
        if self.config.vision is None:
            raise ValueError("pixels: this model has no vision tower (no vision_config)")
        feature_MD = self.mm_projector(self.vision_tower(pixels, self.compute_dtype))
        return scatter_features(embed_TD, ids_T, feature_MD, self.config.media_placeholder_token_id)

    def head(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, W] of the rows the caller wants, in their dtype."""
        if not self.deterministic:
            return self.language_model.lm_head(hidden_TD)
        with torch.no_grad():  # each row alone at the top of a tile: one shape and one place for all
            logits = [
                self.language_model.lm_head(F.pad(row_1D, (0, 0, 0, TILE - 1)))[:1] for row_1D in hidden_TD[:, None]
            ]
            return torch.cat(logits) if logits else hidden_TD.new_empty(0, self.config.vocab_size)

    def empty_state(self, num_sequences: int) -> ModelState:
        """The state of sequences that have fed nothing in."""
        return empty_state(
            self.config,
            num_sequences,
            dtype=self.compute_dtype or self.dtype,
            device=self.device,
            deterministic=self.deterministic,
        )

    def mla_layers(self) -> list[GatedMla]:
        """Every Gated MLA mixer, in order."""
        return [layer.self_attn for layer in self.language_model.model.layers if isinstance(layer.self_attn, GatedMla)]

    def moe_layers(self) -> list[LatentMoe]:
        """Every MoE layer's feed-forward, in order."""
        return [layer.block_sparse_moe for layer in self.language_model.model.layers if not layer.is_dense]

    def _by_tiles(self, embed_TD: Tensor, rows: Rows, state: ModelState | None) -> tuple[Tensor, ModelState]:
        """Every sequence tile by tile over the absolute grid of 16 positions."""
        state = state or self.empty_state(rows.num_sequences)
        hidden, states = [embed_TD[:0]], []
        for s in range(rows.num_sequences):
            own = state.sequence(s)
            layers, position = own.layers, own.lengths[0]
            end = position + rows.lengths[s]
            while position < end:
                first = position % TILE
                last = min(TILE, first + end - position)
                at = rows.starts[s] + position - rows.past[s]
                tile_TD = F.pad(embed_TD[at : at + last - first], (0, 0, first, TILE - last))
                tile = Tile.at(position - first, first, last, embed_TD.device)
                with trace.rows_between(first, last):
                    hidden_TD, layers = self.language_model.model(tile_TD, tile, layers)
                hidden.append(hidden_TD[first:last])
                position += last - first
            states.append(ModelState(layers=layers, lengths=(end,)))
        return torch.cat(hidden), ModelState.join(states) if states else state


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _lengths_after(rows: Rows) -> tuple[int, ...]:
    return tuple(past + length for past, length in zip(rows.past, rows.lengths, strict=True))


def _check_inputs(ids_T: Tensor, rows: Rows, state: ModelState | None, deterministic: bool) -> None:
    if ids_T.dim() != 1 or ids_T.dtype != torch.int64:
        raise ValueError(f"ids: wanted int64 [T], got {ids_T.dtype} {list(ids_T.shape)}")
    if rows.num_tokens != len(ids_T):
        raise ValueError(f"rows: hold {rows.num_tokens} tokens, but there are {len(ids_T)} ids")
    if rows.slots_S is not None:
        raise ValueError("rows.slots_S: this model keeps no pool of states, give one state a sequence")
    held = state.lengths if state is not None else (0,) * rows.num_sequences
    if rows.past != held:
        raise ValueError(f"rows.past_S: {rows.past} tokens, but the state holds {held}")
    for layer in state.layers if state is not None else ():
        if isinstance(layer, KdaState) and (layer.pending is not None) != deterministic:
            mode = "deterministic" if deterministic else "default"
            raise ValueError(f"state: it was kept in the other mode, this model runs in {mode} mode")
