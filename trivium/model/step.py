"""The fused decode step of a KimiK3: one token of one sequence in one call, where the CPU's kernels serve.

`Stepper` is a model as `trivium.ops.decode` reads it, `DecodeState` one sequence's state that the step changes in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn.modules import module as hooks

from trivium.config import K3Config
from trivium.model import trace
from trivium.model.decoder import Decoder, Embedding, LanguageModel
from trivium.model.kda import KimiDeltaAttention, ShortConv
from trivium.model.kimi_k3 import KimiK3
from trivium.model.layer import DecoderLayer
from trivium.model.layers import Linear, Mlp, RMSNorm
from trivium.model.mla import LATENT_NORM_EPS, GatedMla
from trivium.model.moe import DenseStack, Experts, LatentMoe, PackedStack, Router
from trivium.model.state import KdaState, LayerState, MlaState, ModelState
from trivium.ops import cpu
from trivium.ops.decode import (
    MAX_ACTIVE,
    MAX_BLOCKS,
    DecodeLayer,
    DecodePlan,
    DecodeSizes,
    LayerMemory,
    decode_step,
    padded,
    row_width,
)
from trivium.ops.mxfp4 import PackedWeight

# Of every module of a text model whose forward the step stands for: a subclass may compute something else.
_KINDS = {LanguageModel, Decoder, Embedding, torch.nn.ModuleList, DecoderLayer, RMSNorm, Linear, Mlp}
_KINDS |= {KimiDeltaAttention, ShortConv, GatedMla, LatentMoe, Router, Experts, DenseStack, PackedStack}


def serves(network: KimiK3) -> bool:
    """Whether a Stepper of this model can stand for its forward now.

    Not in deterministic mode, not while a trace runs, and not where a module was replaced by another kind, has hooks, or
    computes with other numbers than the config's.
    """
    config = network.config
    return (
        cpu.missing is None
        and network.device.type == "cpu"
        and network.dtype in (torch.float32, torch.bfloat16)
        and network.compute_dtype in (None, network.dtype)
        and not network.deterministic
        and not trace.is_running()
        and not (hooks._global_forward_hooks or hooks._global_forward_pre_hooks)
        and not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
        and all(_is_as_built(module, config) for module in network.language_model.modules())
        and config.moe.num_experts_per_token <= MAX_ACTIVE
        and config.num_layers <= MAX_BLOCKS
    )


def _is_as_built(module: torch.nn.Module, config: K3Config) -> bool:
    if type(module) not in _KINDS or "forward" in vars(module):
        return False
    if isinstance(module, RMSNorm):
        return module.eps in (config.rms_norm_eps, LATENT_NORM_EPS)
    if isinstance(module, Router):
        return (module.num_active, module.scale) == (config.moe.num_experts_per_token, config.moe.routed_scaling_factor)
    if isinstance(module, Mlp | Experts):
        return module.bounds == {"bound": config.activation_situ_beta, "up_bound": config.activation_situ_linear_beta}
    return not isinstance(module, KimiDeltaAttention) or module.lower_bound == config.kda.gate_lower_bound


@dataclass(kw_only=True, eq=False)
class DecodeState:
    """One sequence's state, in memory that grows: `length` tokens, of which an MLA layer has room for more."""

    memory: list[LayerMemory]
    length: int

    @classmethod
    @torch.no_grad()
    def of(cls, config: K3Config, state: ModelState) -> DecodeState:
        """A copy of the state of one sequence. Raises ValueError for several, and for the deterministic mode's."""
        if len(state.lengths) != 1:
            raise ValueError(f"decode: wanted the state of one sequence, got {len(state.lengths)}")
        length = state.lengths[0]
        memory = []
        for layer in state.layers:
            if isinstance(layer, MlaState):
                width = row_width(config.mla.kv_lora_rank, config.mla.qk_rope_head_dim)
                rows_UP = torch.zeros(_capacity(length), width, dtype=torch.float32, device="cpu")
                rows_UP[:length, : layer.latent.shape[1]] = layer.latent
                _shared_key(rows_UP, config)[:length] = layer.shared_key
                memory.append(LayerMemory(rows_UP))
            elif layer.pending is not None:
                raise ValueError("decode: this state was kept in deterministic mode")
            else:
                ring_4X = torch.zeros(4, layer.window_S3X.shape[-1], dtype=torch.float32, device="cpu")
                ring_4X[[(length + i) % 4 for i in range(1, 4)]] = layer.window_S3X[0].float()
                memory.append(LayerMemory(layer.state_SHKV[0].clone(memory_format=torch.contiguous_format), ring_4X))
        return cls(memory=memory, length=length)

    def to_state(self, config: K3Config, dtype: torch.dtype) -> ModelState:
        """The same as a ModelState of a model of this dtype, which shares no memory with it."""
        layers: list[LayerState] = []
        for own in self.memory:
            if own.ring is None:
                rows_UP = own.state[: self.length]
                latent, shared_key = rows_UP[:, : config.mla.kv_lora_rank], _shared_key(rows_UP, config)
                layers.append(MlaState(latent=latent.to(dtype, copy=True), shared_key=shared_key.to(dtype, copy=True)))
            else:
                window_3X = own.ring[[(self.length + i) % 4 for i in range(1, 4)]]
                layers.append(KdaState(state_SHKV=own.state.clone()[None], window_S3X=window_3X.to(dtype)[None]))
        return ModelState(layers=tuple(layers), lengths=(self.length,))

    def make_room(self) -> None:
        """For one token more: an MLA memory that is full doubles."""
        for own in self.memory:
            if own.ring is None and len(own.state) == self.length:
                grown = own.state.new_zeros(_capacity(self.length), own.state.shape[1])
                grown[: self.length] = own.state
                own.state = grown


def _capacity(length: int) -> int:
    return max(256, 2 * length)


def _shared_key(rows_UP: Tensor, config: K3Config) -> Tensor:
    start = padded(config.mla.kv_lora_rank)
    return rows_UP[:, start : start + config.mla.qk_rope_head_dim]


class Stepper:
    """`stepper(token_id, state)`: logits [W], float32, behind one more token of the state's sequence.

    Weights are read where the model has them, small vectors were copied: a model that was trained on, or loaded into, needs
    a new one. Raises ValueError for a model that the step does not serve.
    """

    def __init__(self, network: KimiK3) -> None:
        if not serves(network):
            raise ValueError(
                "decode: this model is not one that the fused step serves here; see trivium.model.step.serves"
            )
        text = network.language_model
        top = {"embed": _matrix(text.model.embed_tokens), "lm_head": _matrix(text.lm_head)}
        top |= {"out_query": _query(text.model.output_attn_res_norm, text.model.output_attn_res_proj)}
        top |= {"out_norm": _vector(text.model.norm.weight)}
        self.plan = DecodePlan(_sizes(network.config), top, [_layer(layer) for layer in text.model.layers])
        # Tensors made in inference mode count no changes and cannot be changed outside of it.
        self._tensors = [x for x in (*text.parameters(), *text.buffers()) if not x.is_inference()]
        self._changes = self._count_changes()

    @property
    def is_stale(self) -> bool:
        """Whether a weight or a buffer is known to have been written to since.

        Some writes leave no mark: through `.data` or numpy, of torch's fused optimisers, and another tensor put in its place.
        """
        return self._count_changes() != self._changes

    def _count_changes(self) -> int:
        return sum(map(attrgetter("_version"), self._tensors))

    def __call__(self, token_id: int, state: DecodeState, seconds: Tensor | None = None) -> Tensor:
        state.make_room()
        logits_W = decode_step(self.plan, state.memory, token_id, state.length, seconds)
        state.length += 1
        return logits_W


def _sizes(config: K3Config) -> DecodeSizes:
    mla, moe = config.mla, config.moe
    return DecodeSizes(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        kda_heads=config.kda.num_heads,
        kda_dim=config.kda.head_dim,
        mla_heads=mla.num_heads,
        q_rank=mla.q_lora_rank,
        kv_rank=mla.kv_lora_rank,
        nope_dim=mla.qk_nope_head_dim,
        rest_dim=mla.qk_rope_head_dim,
        value_dim=mla.v_head_dim,
        dense_width=config.intermediate_size,
        num_experts=moe.num_experts,
        num_active=moe.num_experts_per_token,
        latent=moe.routed_expert_hidden_size,
        expert_width=moe.moe_intermediate_size,
        shared_width=moe.shared_intermediate_size,
        eps=config.rms_norm_eps,
        latent_eps=LATENT_NORM_EPS,
        lower_bound=config.kda.gate_lower_bound,
        situ_bound=config.activation_situ_beta,
        situ_up_bound=config.activation_situ_linear_beta,
        routed_scale=moe.routed_scaling_factor,
    )


def _layer(layer: DecoderLayer) -> DecodeLayer:
    mixer = layer.self_attn
    tensors = {
        "mixer_query": _query(layer.self_attention_res_norm, layer.self_attention_res_proj),
        "mixer_norm": _vector(layer.input_layernorm.weight),
        "ffn_query": _query(layer.mlp_res_norm, layer.mlp_res_proj),
        "ffn_norm": _vector(layer.post_attention_layernorm.weight),
        "g": _matrix(mixer.g_proj),
        "o": _matrix(mixer.o_proj),
        **(_mla(mixer) if isinstance(mixer, GatedMla) else _kda(mixer)),
        **(_mlp(layer.mlp) if layer.is_dense else _moe(layer.block_sparse_moe)),
    }
    return DecodeLayer(
        is_mla=isinstance(mixer, GatedMla), is_dense=layer.is_dense, opens_block=layer.opens_block, tensors=tensors
    )


def _kda(kda: KimiDeltaAttention) -> dict[str, Tensor]:
    taps_X4 = torch.cat([kda.q_conv1d.weight, kda.k_conv1d.weight, kda.v_conv1d.weight])[:, 0]
    return {
        "q": _matrix(kda.q_proj),
        "k": _matrix(kda.k_proj),
        "v": _matrix(kda.v_proj),
        "f_a": _matrix(kda.f_a_proj),
        "f_b": _matrix(kda.f_b_proj),
        "b": _matrix(kda.b_proj),
        "taps": _vector(taps_X4.T),
        "rate": _vector(kda.A_log.float().exp()),
        "dt_bias": _vector(kda.dt_bias),
        "o_norm": _vector(kda.o_norm.weight),
    }


def _mla(mla: GatedMla) -> dict[str, Tensor]:
    return {
        "q_a": _matrix(mla.q_a_proj),
        "q_b": _matrix(mla.q_b_proj),
        "kv_a": _matrix(mla.kv_a_proj_with_mqa),
        "kv_b": _matrix(mla.kv_b_proj),
        "q_a_norm": _vector(mla.q_a_layernorm.weight),
        "kv_a_norm": _vector(mla.kv_a_layernorm.weight),
    }


def _mlp(mlp: Mlp) -> dict[str, Tensor]:
    return {"gate": _matrix(mlp.gate_proj), "up": _matrix(mlp.up_proj), "down": _matrix(mlp.down_proj)}


def _moe(moe: LatentMoe) -> dict[str, Tensor | PackedWeight]:
    return {
        **_mlp(moe.shared_experts),
        "router": _matrix(moe.gate),
        "router_bias": _vector(moe.gate.e_score_correction_bias),
        "latent_down": _matrix(moe.routed_expert_down_proj),
        "latent_up": _matrix(moe.routed_expert_up_proj),
        "latent_norm": _vector(moe.routed_expert_norm.weight),
        "w1": _stack(moe.experts.w1),
        "w3": _stack(moe.experts.w3),
        "w2": _stack(moe.experts.w2),
    }


def _matrix(module: torch.nn.Module) -> Tensor:
    return module.weight.detach().contiguous()


def _stack(stack: DenseStack | PackedStack) -> Tensor | PackedWeight:
    return stack.value(torch.float32) if isinstance(stack, PackedStack) else _matrix(stack)


def _vector(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _query(norm: RMSNorm, proj: Linear) -> Tensor:
    return _vector(norm.weight) * _vector(proj.weight[0])
