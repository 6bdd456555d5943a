"""One decoder layer: read the stream, mix between tokens, read again, mix between channels ."""

from __future__ import annotations

from torch import Tensor, nn

from trivium.config import K3Config
from trivium.model import trace
from trivium.model.kda import KimiDeltaAttention
from trivium.model.layers import Linear, Mlp, RMSNorm
from trivium.model.mla import GatedMla
from trivium.model.moe import LatentMoe
from trivium.model.residual import ResidualStream, read
from trivium.model.state import LayerState
from trivium.ops.rows import Rows


class DecoderLayer(nn.Module):
    """The 0-based layer `layer_idx`: KDA or Gated MLA, then a dense MLP or LatentMoE (docs/model.md, 14-18)."""

    def __init__(self, config: K3Config, layer_idx: int, packed: bool) -> None:
        super().__init__()
        self.name = f"layers.{layer_idx}"
        self.opens_block = config.opens_block(layer_idx)
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(D, eps)
        self.post_attention_layernorm = RMSNorm(D, eps)
        self.self_attention_res_norm = RMSNorm(D, eps)
        self.self_attention_res_proj = Linear(D, 1)
        self.mlp_res_norm = RMSNorm(D, eps)
        self.mlp_res_proj = Linear(D, 1)
        if config.is_mla(layer_idx):
            self.self_attn = GatedMla(config)
        else:
            self.self_attn = KimiDeltaAttention(config, f"{self.name}.self_attn")
        self.is_dense = config.is_dense(layer_idx)
        if self.is_dense:
            self.mlp = Mlp(config, config.intermediate_size)
        else:
            self.block_sparse_moe = LatentMoe(config, f"{self.name}.moe", packed)

    def forward(
        self, stream: ResidualStream, rows: Rows, state: LayerState | None
    ) -> tuple[ResidualStream, LayerState | None]:
        x_TD = read(stream, self.self_attention_res_norm, self.self_attention_res_proj, f"{self.name}.mixer_read")
        if self.opens_block:  # after the read: the block that closes here was still live in it
            stream = stream.close_block()
        mixed_TD, state = self.self_attn(self.input_layernorm(x_TD), rows, state)
        stream = stream.add(mixed_TD)
        x_TD = read(stream, self.mlp_res_norm, self.mlp_res_proj, f"{self.name}.ffn_read")
        stream = stream.add(self._ffn(self.post_attention_layernorm(x_TD), rows))
        trace.record(f"{self.name}.stream", lambda: stream.sum_TD)
        return stream, state

    def _ffn(self, x_TD: Tensor, rows: Rows) -> Tensor:
        return self.mlp(x_TD) if self.is_dense else self.block_sparse_moe(x_TD, rows)
