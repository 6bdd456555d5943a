"""The released tensors, one table: name, shape and dtype on disk <-> our parameter. No torch here.

Parameters keep their released names, with two differences. The routed experts of a layer are stacked:
`experts.{e}.w1.weight` is row e of `experts.w1.weight`. `A_log` has one entry a head; on disk zeros follow up to a
multiple of 128.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trivium.checkpoint.safetensors import ITEM_BYTES
from trivium.config import K3Config, VisionConfig

Shape = tuple[int, ...]

# dtype as config.json spells it -> as safetensors spells it.
STORED_DTYPE = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}
MXFP4_GROUP = 32  # columns that share one scale byte


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One released tensor. `expert` is the row of `parameter` that it fills, None for all of it.

    `padding` zeros stand at the end of the stored tensor (A_log) and are not in the parameter.
    """

    name: str
    shape: Shape
    dtype: str
    parameter: str
    expert: int | None = None
    padding: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def released_tensors(config: K3Config, *, packed: bool) -> Iterator[TensorSpec]:
    """Every tensor of the released layout: the text layers, what is around them, projector, vision tower.

    `packed`: routed experts as MXFP4, two U8 tensors a matrix; else one in the trunk's dtype, which is config.dtype.
    """
    trunk = STORED_DTYPE[config.dtype]
    for layer_idx in range(config.num_layers):
        prefix = f"language_model.model.layers.{layer_idx}."
        yield from _specs(prefix, _layer(config), trunk)
        if config.is_mla(layer_idx):
            yield from _specs(f"{prefix}self_attn.", _mla(config), trunk)
        else:
            yield from _kda(f"{prefix}self_attn.", config, trunk)
        if config.is_dense(layer_idx):
            yield from _specs(f"{prefix}mlp.", _mlp(config.hidden_size, config.intermediate_size), trunk)
        else:
            yield from _moe(f"{prefix}block_sparse_moe.", config, trunk, packed)
    yield from _specs("language_model.", _ends(config), trunk)
    if config.vision:
        yield from _specs("mm_projector.", _projector(config.vision), trunk)
        yield from _specs("vision_tower.", _vision_tower(config.vision), trunk)


def packed_pair(spec: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    """The MXFP4 form of one expert's matrix [.., columns]: codes [.., columns / 2] and scales [.., columns / 32]."""
    *rows, columns = spec.shape
    codes, scales = (
        TensorSpec(
            name=f"{spec.name}{suffix}",
            shape=(*rows, columns // per_byte),
            dtype="U8",
            parameter=f"{spec.parameter}{suffix}",
            expert=spec.expert,
        )
        for suffix, per_byte in (("_packed", 2), ("_scale", MXFP4_GROUP))
    )
    return codes, scales


def _specs(prefix: str, shapes: dict[str, Shape], dtype: str) -> Iterator[TensorSpec]:
    for suffix, shape in shapes.items():
        yield TensorSpec(name=prefix + suffix, shape=shape, dtype=dtype, parameter=prefix + suffix)


def _layer(config: K3Config) -> dict[str, Shape]:
    D = config.hidden_size
    return {
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
        "self_attention_res_norm.weight": (D,),
        "self_attention_res_proj.weight": (1, D),
        "mlp_res_norm.weight": (D,),
        "mlp_res_proj.weight": (1, D),
    }


def _kda(prefix: str, config: K3Config, trunk: str) -> Iterator[TensorSpec]:
    D, H, K, width = config.hidden_size, config.kda.num_heads, config.kda.head_dim, config.kda.width
    linears: dict[str, Shape] = {f"{name}_proj.weight": (width, D) for name in "qkvg"}
    linears |= {
        "f_a_proj.weight": (K, D),
        "f_b_proj.weight": (width, K),
        "b_proj.weight": (H, D),
        "o_proj.weight": (D, width),
    }
    yield from _specs(prefix, linears, trunk)
    in_float32: dict[str, Shape] = {
        f"{name}_conv1d.weight": (width, 1, config.kda.short_conv_kernel_size) for name in "qkv"
    }
    in_float32 |= {"dt_bias": (width,), "o_norm.weight": (K,)}
    yield from _specs(prefix, in_float32, "F32")
    padded = config.kda.padded_num_heads
    yield TensorSpec(
        name=f"{prefix}A_log", shape=(padded,), dtype="F32", parameter=f"{prefix}A_log", padding=padded - H
    )


def _mla(config: K3Config) -> dict[str, Shape]:
    D, mla = config.hidden_size, config.mla
    out = mla.num_heads * mla.v_head_dim
    return {
        "q_a_proj.weight": (mla.q_lora_rank, D),
        "q_a_layernorm.weight": (mla.q_lora_rank,),
        "q_b_proj.weight": (mla.num_heads * mla.qk_head_dim, mla.q_lora_rank),
        "kv_a_proj_with_mqa.weight": (mla.kv_lora_rank + mla.qk_rope_head_dim, D),
        "kv_a_layernorm.weight": (mla.kv_lora_rank,),
        "kv_b_proj.weight": (mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        "g_proj.weight": (out, D),
        "o_proj.weight": (D, out),
    }


def _mlp(width: int, intermediate: int) -> dict[str, Shape]:
    return {
        "gate_proj.weight": (intermediate, width),
        "up_proj.weight": (intermediate, width),
        "down_proj.weight": (width, intermediate),
    }


def _moe(prefix: str, config: K3Config, trunk: str, packed: bool) -> Iterator[TensorSpec]:
    D, moe = config.hidden_size, config.moe
    L, F = moe.routed_expert_hidden_size, moe.moe_intermediate_size
    linears: dict[str, Shape] = {
        "gate.weight": (moe.num_experts, D),
        "routed_expert_down_proj.weight": (L, D),
        "routed_expert_norm.weight": (L,),
        "routed_expert_up_proj.weight": (D, L),
    }
    yield from _specs(prefix, linears, trunk)
    yield from _specs(prefix, {"gate.e_score_correction_bias": (moe.num_experts,)}, "F32")
    yield from _specs(f"{prefix}shared_experts.", _mlp(D, moe.shared_intermediate_size), trunk)
    for expert in range(moe.num_experts):
        for matrix, shape in (("w1", (F, L)), ("w2", (L, F)), ("w3", (F, L))):  # gate, down, up
            spec = TensorSpec(
                name=f"{prefix}experts.{expert}.{matrix}.weight",
                shape=shape,
                dtype=trunk,
                parameter=f"{prefix}experts.{matrix}.weight",
                expert=expert,
            )
            if packed:
                yield from packed_pair(spec)
            else:
                yield spec


def _ends(config: K3Config) -> dict[str, Shape]:
    D, W = config.hidden_size, config.vocab_size
    return {
        "model.embed_tokens.weight": (W, D),
        "lm_head.weight": (W, D),
        "model.norm.weight": (D,),
        "model.output_attn_res_norm.weight": (D,),
        "model.output_attn_res_proj.weight": (1, D),
    }


def _projector(vision: VisionConfig) -> dict[str, Shape]:
    return {
        "proj.0.weight": (vision.merged_size, vision.merged_size),
        "proj.2.weight": (vision.text_hidden_size, vision.merged_size),
        "post_norm.weight": (vision.text_hidden_size,),
    }


def _vision_tower(vision: VisionConfig) -> dict[str, Shape]:
    D, wide, qkv = vision.vt_hidden_size, vision.vt_intermediate_size, vision.qkv_hidden_size
    shapes: dict[str, Shape] = {
        "patch_embed.proj.weight": (D, 3, vision.patch_size, vision.patch_size),
        "patch_embed.pos_emb.weight": (vision.init_pos_emb_height, vision.init_pos_emb_width, D),
        "encoder.final_layernorm.weight": (D,),
    }
    for block in range(vision.vt_num_hidden_layers):
        shapes |= {
            f"encoder.blocks.{block}.norm0.weight": (D,),
            f"encoder.blocks.{block}.norm1.weight": (D,),
            f"encoder.blocks.{block}.wqkv.weight": (3 * qkv, D),
            f"encoder.blocks.{block}.wo.weight": (D, qkv),
            f"encoder.blocks.{block}.mlp.fc0.weight": (wide, D),
            f"encoder.blocks.{block}.mlp.fc1.weight": (D, wide),
        }
    return shapes
