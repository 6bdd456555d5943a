"""The whole model on one page: K3Config and its parts, the presets, and the released config.json in and out.

A config is a value: frozen, complete and checked when built. A variant is `dataclasses.replace`.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# A chunk of KDA is made of tiles of 16 tokens. Inside one tile exp(-cumulative log decay) is formed against the tile's
# first row, so it grows over at most 15 steps; float32 holds e^88.7 and keeps normal numbers down to e^-87.3. The
# bound is what the smaller of the two allows: 15 * 5.8 = 87.0.
TILE = 16
LOWEST_DECAY_BOUND = -math.floor(10 * 87.33 / (TILE - 1)) / 10


_MOST = 10**18  # no size or factor of a model comes near it, and beyond it config.json is not read back


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _MOST:
            raise ValueError(f"{name}: wanted a positive whole number, got {value!r}")


def _positive_number(owner: object, *names: str) -> None:
    for name in names:
        if not 0 < getattr(owner, name) < _MOST:  # nor nan
            raise ValueError(f"{name}: wanted a positive number, got {getattr(owner, name)!r}")


@dataclass(frozen=True, kw_only=True)
class KdaConfig:
    """Kimi Delta Attention: H heads of K = V = head_dim channels."""

    num_heads: int
    head_dim: int
    short_conv_kernel_size: int = 4
    gate_lower_bound: float = -5.0

    def __post_init__(self) -> None:
        _positive(self, "num_heads", "head_dim", "short_conv_kernel_size")
        if self.short_conv_kernel_size != 4:
            raise ValueError(f"short_conv_kernel_size: wanted 4 taps, got {self.short_conv_kernel_size}")
        if not LOWEST_DECAY_BOUND <= self.gate_lower_bound < 0:
            raise ValueError(
                f"gate_lower_bound: {self.gate_lower_bound} is outside [{LOWEST_DECAY_BOUND}, 0): over the {TILE - 1} "
                f"steps of a tile of {TILE} tokens exp(-sum of log decay) must stay inside float32"
            )

    @property
    def width(self) -> int:
        """Channels of q, of k and of v, over all heads."""
        return self.num_heads * self.head_dim

    @property
    def state_numel(self) -> int:
        """Numbers in one sequence's state of one layer: H * K * V."""
        return self.num_heads * self.head_dim * self.head_dim

    @property
    def padded_num_heads(self) -> int:
        """Length of the stored A_log: heads rounded up to a multiple of 128, zeros behind."""
        return -(-self.num_heads // 128) * 128


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """Gated multi-head latent attention. The `rope` channels exist and are used, but nothing rotates them."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        _positive(self, *self.__dataclass_fields__)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Stable LatentMoE: all routed experts work in one latent of routed_expert_hidden_size channels."""

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, "num_experts", "num_experts_per_token", "num_shared_experts")
        _positive(self, "moe_intermediate_size", "routed_expert_hidden_size")
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_token {self.num_experts_per_token} is more than num_experts {self.num_experts}"
            )
        _positive_number(self, "routed_scaling_factor")

    @property
    def shared_intermediate_size(self) -> int:
        """The shared experts are one MLP of this width."""
        return self.num_shared_experts * self.moe_intermediate_size


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Vision tower and projector (patchmergerv2): patches to rows of the text model's width."""

    patch_size: int
    init_pos_emb_height: int
    init_pos_emb_width: int
    init_pos_emb_time: int
    vt_hidden_size: int
    vt_intermediate_size: int
    vt_num_hidden_layers: int
    vt_num_attention_heads: int
    qkv_hidden_size: int
    text_hidden_size: int
    projector_ln_eps: float = 1e-5

    def __post_init__(self) -> None:
        _positive(self, *(name for name in self.__dataclass_fields__ if name != "projector_ln_eps"))
        if self.vt_hidden_size % 2:
            raise ValueError(f"vt_hidden_size {self.vt_hidden_size} is odd: half of a frame's time term are sines")
        # The rotation turns pairs of channels, half of them by column and half by row.
        if self.qkv_hidden_size % (4 * self.vt_num_attention_heads):
            raise ValueError(
                f"qkv_hidden_size {self.qkv_hidden_size} is no multiple of 4 * vt_num_attention_heads "
                f"{self.vt_num_attention_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.qkv_hidden_size // self.vt_num_attention_heads

    @property
    def merged_size(self) -> int:
        """Width of a merged 2 x 2 window of patches."""
        return 4 * self.vt_hidden_size


@dataclass(frozen=True, kw_only=True)
class K3Config:
    """Kimi K3. `source` is the config.json it was read from; `to_json` writes ours over it and keeps the rest."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    attn_res_block_size: int  # in decoder layers of two sublayers each
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig
    vision: VisionConfig | None = None
    full_attn_layers: tuple[int, ...] | None = None  # 1-based, as released; None = every fourth and the last
    num_dense_layers: int = 1
    rms_norm_eps: float = 1e-5
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    dtype: str = "float32"
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    media_placeholder_token_id: int
    source: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        _positive(self, "num_layers", "hidden_size", "vocab_size", "intermediate_size", "attn_res_block_size")
        for name, released in (("num_dense_layers", "first_k_dense_replace"), *((name, name) for name in _TOKEN_IDS)):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{released}: wanted a whole number of at least 0, got {value!r}")
        if self.num_layers > 10**6:  # lists of its layers are made
            raise ValueError(f"num_hidden_layers: wanted at most a million, got {self.num_layers}")
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"first_k_dense_replace {self.num_dense_layers} is more than num_hidden_layers {self.num_layers}"
            )
        if list(self.mla_layers) != sorted(set(self.mla_layers)) or not isinstance(self.mla_layers, tuple):
            raise ValueError(f"full_attn_layers: wanted a tuple of rising layer numbers, got {self.mla_layers!r}")
        outside = [layer for layer in self.mla_layers if not 1 <= layer <= self.num_layers]
        if outside:
            raise ValueError(
                f"full_attn_layers names layer {outside[0]}, but num_hidden_layers is {self.num_layers} (1-based)"
            )
        if self.vision and self.vision.text_hidden_size != self.hidden_size:
            raise ValueError(
                f"text_hidden_size {self.vision.text_hidden_size} of vision_config is not hidden_size "
                f"{self.hidden_size} of text_config"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: wanted one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in _TOKEN_IDS:
            if getattr(self, name) >= self.vocab_size:
                raise ValueError(f"{name} {getattr(self, name)} is outside vocab_size {self.vocab_size}")
        _positive_number(self, "rms_norm_eps", "activation_situ_beta", "activation_situ_linear_beta")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """1-based numbers of the layers with Gated MLA; every other layer is KDA."""
        if self.full_attn_layers is not None:
            return self.full_attn_layers
        return tuple(n for n in range(1, self.num_layers + 1) if n % 4 == 0 or n == self.num_layers)

    def is_mla(self, layer_idx: int) -> bool:
        """Whether the 0-based layer holds Gated MLA."""
        return layer_idx + 1 in self.mla_layers

    def is_dense(self, layer_idx: int) -> bool:
        """Whether the 0-based layer's feed-forward is one dense MLP."""
        return layer_idx < self.num_dense_layers

    def opens_block(self, layer_idx: int) -> bool:
        """Whether the 0-based layer closes the residual block before it and starts the next."""
        return layer_idx % self.attn_res_block_size == 0

    @property
    def packs_experts(self) -> bool:
        """Whether the config says that the routed experts are stored as MXFP4."""
        return bool(self.source.get("text_config", {}).get("quantization_config"))

    def with_packed_experts(self, packed: bool) -> K3Config:
        """The same model whose config does, or does not, say that the routed experts are stored as MXFP4."""
        if packed == self.packs_experts:
            return self
        source = self.to_json()
        if packed:
            source["text_config"]["quantization_config"] = copy.deepcopy(_QUANTIZATION)
        else:
            del source["text_config"]["quantization_config"]
        _check_quantization(source["text_config"], self.moe)
        return replace(self, source=source)

    @classmethod
    def from_json(cls, source: str | Path | dict[str, Any]) -> K3Config:
        """Read the released config.json: a file, a folder that holds one, or its contents as a dict.

        Raises ValueError for a value of another model, a missing field, or two fields that contradict each other.
        """
        if isinstance(source, dict):
            return _from_released(cls, source)
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:  # broken JSON, bytes that are no UTF-8, a million brackets
            raise ValueError(f"{path}: not a JSON file: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path}: wanted a JSON object, got {type(content).__name__}")
        try:
            return _from_released(cls, content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """The released config.json of this model; fields we do not know are those of `source`."""
        return _to_released(self)


@dataclass(frozen=True, kw_only=True)
class K2Config:
    """Kimi K2's geometry, for the cost tables only: MLA everywhere, experts on the full width, plain residuals."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_dense_layers: int
    mla: MlaConfig
    moe: MoeConfig


# --- The released config.json: one table, read and written through it ---------------------------------------------

DTYPES = ("bfloat16", "float32", "float16")

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id")

# (section, released name) -> (part of K3Config, attribute). A section is "" (top), text, linear or vision.
_FIELDS: dict[tuple[str, str], tuple[str, str]] = {
    ("text", "num_hidden_layers"): ("", "num_layers"),
    ("text", "first_k_dense_replace"): ("", "num_dense_layers"),
    **{("text", name): ("", name) for name in ("hidden_size", "vocab_size", "intermediate_size")},
    **{("text", name): ("", name) for name in ("attn_res_block_size", "rms_norm_eps")},
    **{("text", name): ("", name) for name in ("activation_situ_beta", "activation_situ_linear_beta")},
    ("", "dtype"): ("", "dtype"),
    **{("", name): ("", name) for name in _TOKEN_IDS},
    **{("linear", name): ("kda", name) for name in KdaConfig.__dataclass_fields__},
    ("text", "num_attention_heads"): ("mla", "num_heads"),
    **{("text", name): ("mla", name) for name in list(MlaConfig.__dataclass_fields__)[1:]},
    **{("text", name): ("moe", name) for name in MoeConfig.__dataclass_fields__},
    **{("vision", name): ("vision", name) for name in VisionConfig.__dataclass_fields__},
}

# What the one architecture here fixes: any other value is another model.
_FIXED: dict[str, dict[str, Any]] = {
    "": {"model_type": "kimi_k3", "tie_word_embeddings": False},
    "text": {
        "hidden_act": "situ",
        "latent_moe_use_norm": True,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
    },
    "linear": {"use_full_rank_gate": True},
    "vision": {
        **dict.fromkeys(("attn_bias", "linear_bias", "patch_embed_proj_bias"), False),
        "activation_func": "gelu_pytorch_tanh",
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm",
        "pos_emb_interpolation_mode": "bilinear",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
    },
}

# Fields that say again what another field says: (section, name, section, name of the other).
_SAID_TWICE = (
    ("text", "num_key_value_heads", "text", "num_attention_heads"),
    ("text", "dtype", "", "dtype"),
    *(("text", name, "", name) for name in _TOKEN_IDS[:3]),
    ("vision", "mm_hidden_size", "vision", "vt_hidden_size"),
)

# fmt: off
_QUANTIZATION: dict[str, Any] = {
    "config_groups": {"group_0": {
        "format": "mxfp4-pack-quantized", "input_activations": None, "output_activations": None, "targets": ["Linear"],
        "weights": {
            "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
            "observer": "minmax", "observer_kwargs": {}, "scale_dtype": "torch.uint8", "strategy": "group",
            "symmetric": True, "type": "float", "zp_dtype": None,
        },
    }},
    "format": "mxfp4-pack-quantized", "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
        "re:.*vision_tower.*", "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
}
# fmt: on


def _sections(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    text = content.get("text_config")
    if not isinstance(text, dict):
        raise ValueError("text_config is missing: not the config.json of a Kimi K3")
    linear = text.get("linear_attn_config")
    if not isinstance(linear, dict):
        raise ValueError("text_config.linear_attn_config is missing: not the config.json of a Kimi K3")
    sections = {"": content, "text": text, "linear": linear}
    if content.get("vision_config") is not None:
        sections["vision"] = content["vision_config"]
        if not isinstance(sections["vision"], dict):
            raise ValueError(f"vision_config: wanted an object, got {json.dumps(sections['vision'])}")
    return sections


def _from_released(cls: type[K3Config], content: dict[str, Any]) -> K3Config:
    sections = _sections(content)
    for section, fixed in _FIXED.items():
        for name, wanted in fixed.items():
            got = sections.get(section, {}).get(name, wanted)
            if got != wanted or isinstance(got, bool) != isinstance(wanted, bool):
                raise ValueError(f"{name}: wanted {json.dumps(wanted)}, got {json.dumps(got)}")
    for section, name, other_section, other in _SAID_TWICE:
        if section not in sections or name not in sections[section]:
            continue
        got, wanted = sections[section][name], sections[other_section].get(other)
        if got != wanted:
            raise ValueError(f"{name} {got!r} of {section}_config is not {other} {wanted!r}")
    parts: dict[str, dict[str, Any]] = {"": {}, "kda": {}, "mla": {}, "moe": {}, "vision": {}}
    for (section, name), (part, attribute) in _FIELDS.items():
        if section not in sections:
            continue
        if name not in sections[section]:
            raise ValueError(f"{name} is missing")
        parts[part][attribute] = _plain_value(name, sections[section][name])
    moe = MoeConfig(**parts["moe"])
    _check_quantization(sections["text"], moe)
    return cls(
        **parts[""],
        kda=KdaConfig(**parts["kda"]),
        mla=MlaConfig(**parts["mla"]),
        moe=moe,
        vision=VisionConfig(**parts["vision"]) if "vision" in sections else None,
        full_attn_layers=_full_attn_layers(sections["linear"], parts[""]["num_layers"]),
        source=copy.deepcopy(content),
    )


def _plain_value(name: str, value: Any) -> Any:
    if name == "dtype":
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_MOST < value < _MOST:  # nor nan
        raise ValueError(f"{name}: wanted a number, got {json.dumps(value)[:40]}")
    return value


def _full_attn_layers(linear: dict[str, Any], num_layers: int) -> tuple[int, ...] | None:
    for name in ("kda_layers", "full_attn_layers"):
        layers = linear.get(name)
        if not isinstance(layers, list) or not all(type(n) is int for n in layers):
            raise ValueError(f"{name}: wanted a list of layer numbers, got {json.dumps(layers)}")
    kda, full = linear["kda_layers"], linear["full_attn_layers"]
    both = sorted(set(kda) & set(full))
    if both:
        raise ValueError(f"layer {both[0]} is in both kda_layers and full_attn_layers")
    outside = sorted(n for n in [*kda, *full] if not 1 <= n <= num_layers)
    if outside:
        name = "kda_layers" if outside[0] in kda else "full_attn_layers"
        raise ValueError(f"{name} names layer {outside[0]}, but num_hidden_layers is {num_layers} (1-based)")
    missing = sorted(set(range(1, num_layers + 1)) - set(kda) - set(full))
    if missing:
        raise ValueError(f"layer {missing[0]} is in neither kda_layers nor full_attn_layers")
    by_rule = [n for n in range(1, num_layers + 1) if n % 4 == 0 or n == num_layers]
    return None if sorted(full) == by_rule else tuple(sorted(full))


def _check_quantization(text: dict[str, Any], moe: MoeConfig) -> None:
    quantization = text.get("quantization_config")
    if quantization is None:
        return
    if not isinstance(quantization, dict) or not isinstance(quantization.get("config_groups", {}), dict):
        raise ValueError(f"quantization_config: wanted an object with config_groups, got {json.dumps(quantization)}")
    if quantization.get("format") != "mxfp4-pack-quantized":
        raise ValueError(f'format: wanted "mxfp4-pack-quantized", got {json.dumps(quantization.get("format"))}')
    for group in quantization.get("config_groups", {}).values():
        weights = group.get("weights") if isinstance(group, dict) else None
        for name, wanted in (("group_size", 32), ("num_bits", 4)):
            got = weights.get(name) if isinstance(weights, dict) else None
            if got != wanted:
                raise ValueError(f"{name}: wanted {wanted}, got {json.dumps(got)}")
    for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
        if getattr(moe, name) % 32:
            raise ValueError(f"{name} {getattr(moe, name)} is no multiple of group_size 32 of quantization_config")


def _to_released(config: K3Config) -> dict[str, Any]:
    content = copy.deepcopy(config.source) or _released_template()
    if config.vision is None:
        if content.get("vision_config") is not None:
            del content["vision_config"]
    elif content.get("vision_config") is None:
        content["vision_config"] = {**_FIXED["vision"], "init_pos_emb_time": config.vision.init_pos_emb_time}
    sections = _sections(content)
    for (section, name), (part, attribute) in _FIELDS.items():
        if section in sections:
            sections[section][name] = getattr(getattr(config, part) if part else config, attribute)
    for section, name, other_section, other in _SAID_TWICE:
        if section in sections and (name in sections[section] or not config.source):
            sections[section][name] = sections[other_section][other]
    kda_layers = [n for n in range(1, config.num_layers + 1) if n not in config.mla_layers]
    for name, layers in (("full_attn_layers", config.mla_layers), ("kda_layers", kda_layers)):
        there = sections["linear"].get(name)
        if there is None or sorted(there) != list(layers):  # in the order they came, where they are the same
            sections["linear"][name] = list(layers)
    return content


def _released_template() -> dict[str, Any]:
    text = {
        **_FIXED["text"],
        "architectures": ["KimiLinearForCausalLM"],
        "linear_attn_config": dict(_FIXED["linear"]),
        "max_position_embeddings": 1048576,
        "use_cache": True,
        "use_grouped_topk": True,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        **_FIXED[""],
        "text_config": text,
    }


# --- Presets ----------------------------------------------------------------------------------------------------


def preset(name: str) -> K3Config | K2Config:
    """A config by name: `k3` as released, `k2` for the cost tables only, `nano`, `micro` and `mini` to train,
    `bench` and `bench-xl` to measure speed."""
    if name not in PRESETS:
        raise ValueError(f"preset: wanted one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]()


def model_preset(name: str) -> K3Config:
    """`preset`, for a model to build: K2 is refused, since only its costs are here."""
    config = preset(name)
    if not isinstance(config, K3Config):
        raise ValueError(f"preset: {name!r} is for the cost tables only, no such model is built here")
    return config


def _special_ids(num_ranks: int) -> dict[str, Any]:
    """vocab_size and the special ids that follow `num_ranks` byte-pair ranks: 256, as released."""
    return {
        "vocab_size": num_ranks + 256,
        "bos_token_id": num_ranks,
        "eos_token_id": num_ranks + 2,
        "media_placeholder_token_id": num_ranks + 21,
        "pad_token_id": num_ranks + 255,
    }


def _mla(*sizes: int) -> MlaConfig:
    """Heads, q rank, kv rank, and per head: nope, rest and value channels."""
    return MlaConfig(**dict(zip(MlaConfig.__dataclass_fields__, sizes, strict=True)))


def _moe(*sizes: int) -> MoeConfig:
    """Experts, active ones, shared ones, expert width, latent width."""
    return MoeConfig(**dict(zip(list(MoeConfig.__dataclass_fields__)[:5], sizes, strict=True)))


def _vision(*sizes: int) -> VisionConfig:
    """Patch; grid height, width and frames; width, feed-forward, layers, heads, q|k|v width; the text model's width."""
    return VisionConfig(**dict(zip(list(VisionConfig.__dataclass_fields__)[:10], sizes, strict=True)))


def _k3() -> K3Config:
    config = K3Config(
        num_layers=93,
        hidden_size=7168,
        intermediate_size=33792,
        attn_res_block_size=12,
        kda=KdaConfig(num_heads=96, head_dim=128),
        mla=_mla(96, 1536, 512, 128, 64, 128),
        moe=_moe(896, 16, 2, 3072, 3584),
        vision=_vision(14, 64, 64, 4, 1024, 4096, 27, 12, 1536, 7168),
        dtype="bfloat16",
        **_special_ids(163584),
    )
    return config.with_packed_experts(True)


def _k2() -> K2Config:
    return K2Config(
        num_layers=61,
        hidden_size=7168,
        vocab_size=163840,
        intermediate_size=18432,
        num_dense_layers=1,
        mla=_mla(64, 1536, 512, 128, 64, 128),
        moe=_moe(384, 8, 1, 2048, 7168),
    )


def _nano() -> K3Config:
    return K3Config(
        num_layers=6,
        hidden_size=192,
        intermediate_size=384,
        attn_res_block_size=4,
        kda=KdaConfig(num_heads=3, head_dim=64),
        mla=_mla(3, 64, 48, 32, 16, 32),
        moe=_moe(48, 4, 2, 64, 96),
        **_special_ids(3840),
    )


def _micro() -> K3Config:
    return K3Config(
        num_layers=12,
        hidden_size=512,
        intermediate_size=1408,
        attn_res_block_size=4,
        kda=KdaConfig(num_heads=8, head_dim=64),
        mla=_mla(8, 192, 128, 64, 32, 64),
        moe=_moe(64, 6, 2, 128, 256),
        **_special_ids(7936),
    )


def _mini() -> K3Config:
    return K3Config(
        num_layers=24,
        hidden_size=1024,
        intermediate_size=1536,
        attn_res_block_size=4,
        kda=KdaConfig(num_heads=4, head_dim=64),
        mla=_mla(4, 256, 128, 64, 32, 64),
        moe=_moe(128, 8, 1, 256, 384),
        **_special_ids(16128),
    )


def _bench() -> K3Config:
    """The "small hybrid" of the speed tables: peers are measured at this geometry."""
    return K3Config(
        num_layers=8,
        hidden_size=512,
        intermediate_size=1408,
        attn_res_block_size=4,
        kda=KdaConfig(num_heads=8, head_dim=64),
        mla=_mla(8, 256, 128, 64, 32, 64),
        moe=_moe(16, 2, 1, 128, 256),
        **_special_ids(31744),
    )


def _bench_xl() -> K3Config:
    """Over 600 MB of float32 weights a token, which no cache holds."""
    return K3Config(
        num_layers=16,
        hidden_size=1024,
        intermediate_size=2816,
        attn_res_block_size=4,
        kda=KdaConfig(num_heads=8, head_dim=128),
        mla=_mla(8, 384, 256, 128, 64, 128),
        moe=_moe(16, 2, 1, 512, 512),
        **_special_ids(31744),
    )


PRESETS: dict[str, Callable[[], K3Config | K2Config]] = {
    "k3": _k3,
    "k2": _k2,
    "nano": _nano,
    "micro": _micro,
    "mini": _mini,
    "bench": _bench,
    "bench-xl": _bench_xl,
}
