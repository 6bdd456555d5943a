"""The text model: embedding, decoder layers, the last read and the final norm, under the released names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.config import K3Config
from trivium.model import trace
from trivium.model.layer import DecoderLayer
from trivium.model.layers import Linear, RMSNorm
from trivium.model.residual import ResidualStream, read
from trivium.model.state import LayerState
from trivium.ops.rows import Rows


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, ids_T: Tensor) -> Tensor:
        return F.embedding(ids_T, self.weight)


class Decoder(nn.Module):
    """Embedding rows to hidden rows, layer by layer."""

    def __init__(self, config: K3Config, packed: bool) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = Embedding(config.vocab_size, D)
        self.layers = nn.ModuleList(DecoderLayer(config, layer_idx, packed) for layer_idx in range(config.num_layers))
        self.output_attn_res_norm = RMSNorm(D, eps)
        self.output_attn_res_proj = Linear(D, 1)
        self.norm = RMSNorm(D, eps)

    def forward(
        self, embed_TD: Tensor, rows: Rows, states: tuple[LayerState, ...] | None
    ) -> tuple[Tensor, tuple[LayerState, ...] | None]:
        """Hidden rows [T, D] behind the final norm, and every layer's new state."""
        stream = ResidualStream.start(embed_TD)
        new_states = []
        for layer_idx, layer in enumerate(self.layers):
            stream, state = layer(stream, rows, states and states[layer_idx])
            new_states.append(state)
        hidden_TD = self.norm(read(stream, self.output_attn_res_norm, self.output_attn_res_proj, "output_read"))
        trace.record("final_hidden", lambda: hidden_TD)
        return hidden_TD, tuple(new_states) if states is not None else None


class LanguageModel(nn.Module):
    """Decoder and lm_head, under the released names."""

    def __init__(self, config: K3Config, packed: bool) -> None:
        super().__init__()
        self.model = Decoder(config, packed)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
