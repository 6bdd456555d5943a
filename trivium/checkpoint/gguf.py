"""A checkpoint as one GGUF file that llama.cpp runs (architecture `kimi-k3`): the text model, and its tokenizer.

The format keeps our matrices as they are, under other names. What is stored otherwise: A_log as -exp(A_log), a
residual's norm and query as their product, kv_b_proj as two absorbed matrices of every head, a layer's experts
stacked, MXFP4 in another order of nibbles, and the MLA latents' projections scaled (`latent_scale`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from trivium.chat.vocabulary import Vocabulary
from trivium.checkpoint.replacement import SUFFIX, sync_folder
from trivium.config import K3Config
from trivium.model.kimi_k3 import KimiK3
from trivium.model.mla import LATENT_NORM_EPS
from trivium.ops import mxfp4

ARCHITECTURE = "kimi-k3"
BLOCK_BYTES = 17  # of 32 MXFP4 columns: the scale byte, then 16 bytes of nibbles
MAX_LAYERS, MAX_EXPERTS = 512, 1024  # fixed arrays in llama.cpp

# dtype of the matrices as we spell it -> as GGUF does.
KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
TORCH_KINDS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
FILE_TYPES = {"F32": "ALL_F32", "BF16": "MOSTLY_BF16", "F16": "MOSTLY_F16"}


def write_gguf(
    model: KimiK3,
    path: str | Path,
    *,
    vocabulary: Vocabulary | None = None,
    dtype: str | None = None,
    pack_experts: bool = False,
    name: str | None = None,
) -> None:
    """Write the text model to one file, under a temporary name that is renamed at the end.

    `dtype` is that of the matrices, None for the model's own; vectors, convolutions and the router are float32. Packed
    experts are written as MXFP4 with the values they have; others so by `pack_experts`. Without a `vocabulary` the file
    has none, and llama.cpp takes and gives ids. Raises ValueError for what the format cannot hold and for a file that
    is there already, ImportError without the package gguf, OSError with the file and the reason.
    """
    dtype = str(model.dtype).removeprefix("torch.") if dtype is None else dtype
    check_gguf(model.config, dtype)
    gguf, path = _gguf(), Path(path)
    _check_free(path)
    if vocabulary is not None and vocabulary.size != model.config.vocab_size:
        raise ValueError(f"vocabulary: wanted {model.config.vocab_size} ids, got {vocabulary.size}")

    tensors = list(gguf_tensors(model, KINDS[dtype], pack_experts=pack_experts))
    packed = any(tensor.kind == "MXFP4" for tensor in tensors)
    writer = gguf.GGUFWriter(None, ARCHITECTURE)
    writer.add_string("general.type", "model")
    writer.add_string("general.name", name or path.stem)
    writer.add_uint32(
        "general.file_type", gguf.LlamaFileType["MOSTLY_MXFP4_MOE" if packed else FILE_TYPES[KINDS[dtype]]]
    )
    writer.add_uint32("general.quantization_version", gguf.GGML_QUANT_VERSION)
    _add_geometry(writer, model.config)
    _add_vocabulary(writer, gguf, vocabulary, model.config)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.shape, None, tensor.num_bytes, raw_dtype=kind)

    temporary = path.with_name(path.name + SUFFIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer.write_header_to_file(temporary)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:  # one at a time: memory holds the model and one stack of experts
            writer.write_tensor_data(tensor.bytes().numpy())
        writer.flush()
        os.fsync(writer.fout[0].fileno())
        writer.close()
        _check_free(path)  # it may have come meanwhile
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def _check_free(path: Path) -> None:
    if path.exists():
        raise ValueError(f"{path}: is there already and is not overwritten; choose another file")


def check_gguf(config: K3Config, dtype: str) -> None:
    """Raises, before a model is loaded, for what `write_gguf` could not write of it."""
    _gguf()
    if dtype not in KINDS:
        raise ValueError(f"dtype: wanted one of {', '.join(KINDS)}, got {dtype!r}")
    heads, limit = (config.kda.num_heads, config.mla.num_heads), "llama.cpp's kimi-k3 cannot hold this model:"
    if heads[0] != heads[1]:
        raise ValueError(f"{limit} it wants one number of heads, got {heads[0]} of KDA and {heads[1]} of MLA")
    if len(config.mla_layers) in (0, config.num_layers):
        raise ValueError(
            f"{limit} it wants KDA and MLA layers, got {len(config.mla_layers)} MLA of {config.num_layers}"
        )
    for what, number, most in (
        ("layers", config.num_layers, MAX_LAYERS),
        ("experts", config.moe.num_experts, MAX_EXPERTS),
    ):
        if number > most:
            raise ValueError(f"{limit} it wants at most {most} {what}, got {number}")
    length = _context_length(config)
    if type(length) is not int or not 1 <= length < 2**32:
        raise ValueError(f"{limit} it wants max_position_embeddings from 1 to 2^32 - 1, got {length!r}")


def _gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ImportError("a GGUF file takes the package gguf: pip install trivium[gguf]") from error
    return gguf


# --- Tensors ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """One tensor of the file: its kind as GGUF spells it, and its value, made when it is asked for.

    The shape is in our order; the file holds it reversed. For MXFP4 the value is the blocks' bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    value: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        if self.kind == "MXFP4":
            return math.prod(self.shape) // mxfp4.GROUP_SIZE * BLOCK_BYTES
        return math.prod(self.shape) * TORCH_KINDS[self.kind].itemsize

    def bytes(self) -> Tensor:
        """The stored bytes, flat, uint8. Raises ValueError for a number that the kind cannot hold."""
        value = self.value().detach().cpu()
        if self.kind != "MXFP4":
            stored = value.to(TORCH_KINDS[self.kind])
            if not stored.isfinite().all():
                largest, most = value.abs().max().item(), torch.finfo(stored.dtype).max
                raise ValueError(f"{self.name}: wanted at most {most:g} for {self.kind}, got {largest:g}")
            value = stored
        return value.contiguous().view(-1).view(torch.uint8)


def gguf_tensors(model: KimiK3, kind: str, *, pack_experts: bool = False) -> Iterator[GgufTensor]:
    """Every tensor of the file, in the model's order; `kind` is that of the matrices."""
    text = "language_model."
    state = {name.removeprefix(text): value for name, value in model.state_dict().items() if name.startswith(text)}
    for name in state:
        yield from _tensors_of(name, state, model.config, kind, pack_experts)


def _tensors_of(
    name: str, state: dict[str, Tensor], config: K3Config, kind: str, pack_experts: bool
) -> Iterator[GgufTensor]:
    value = state[name]
    layer, suffix = _layer_of(name)
    block = "" if layer is None else f"blk.{layer}."
    if suffix.endswith(("_res_norm.weight", ".weight_scale")):
        return  # with the query, with the codes
    if suffix in NAMES:
        kept = "F32" if value.ndim == 1 or suffix in FLOAT32 else kind
        yield _tensor(block + NAMES[suffix], kept, value)
    elif suffix.endswith("_res_proj.weight"):
        norm = state[name.replace("_res_proj", "_res_norm")]
        yield GgufTensor(
            name=block + SCORES[suffix], shape=norm.shape, kind="F32", value=partial(_product, norm, value)
        )
    elif suffix == "self_attn.g_proj.weight":
        gate = "attn_gate" if config.is_mla(layer) else "ssm_g"
        yield _tensor(f"{block}{gate}.weight", kind, value)
    elif suffix.endswith("_conv1d.weight"):
        shape = (1, value.shape[0], 1, value.shape[2])
        yield _tensor(f"{block}ssm_conv1d_{suffix.split('.')[1][0]}.weight", "F32", value.reshape(shape))
    elif suffix == "self_attn.A_log":
        yield GgufTensor(name=f"{block}ssm_a", shape=value.shape, kind="F32", value=lambda: -value.double().exp())
    elif suffix in LATENT_ROWS:
        num_rows = value.shape[0] if suffix == Q_A else config.mla.kv_lora_rank
        scale = latent_scale(config.rms_norm_eps, kind)
        scaled = partial(_scaled, value, num_rows, scale)
        yield GgufTensor(name=block + LATENT_ROWS[suffix], shape=value.shape, kind=kind, value=scaled)
    elif suffix == "self_attn.kv_b_proj.weight":
        key_HKR, value_HVR = value.unflatten(0, (config.mla.num_heads, -1)).split(
            [config.mla.qk_nope_head_dim, config.mla.v_head_dim], dim=1
        )
        yield _tensor(f"{block}attn_k_b.weight", kind, key_HKR.transpose(1, 2))
        yield _tensor(f"{block}attn_v_b.weight", kind, value_HVR)
    else:
        yield from _experts(
            block, suffix, value, state.get(f"{name.removesuffix('_packed')}_scale"), kind, pack_experts
        )


def _layer_of(name: str) -> tuple[int | None, str]:
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    return (int(match[1]), match[2]) if match else (None, name)


def _tensor(name: str, kind: str, value: Tensor) -> GgufTensor:
    return GgufTensor(name=name, shape=tuple(value.shape), kind=kind, value=lambda: value)


def _product(norm_D: Tensor, proj_1D: Tensor) -> Tensor:
    return norm_D.float() * proj_1D[0].float()


def latent_scale(eps: float, kind: str) -> float:
    """What the rows that make an MLA latent are multiplied with.

    llama.cpp norms the two latents with the model's eps, the release with 1e-6. Of a scaled latent the norm is the
    same as of the latent with a smaller eps: c·x / sqrt(mean((c·x)²) + eps) = x / sqrt(mean(x²) + eps / c²), so
    c = sqrt(eps / 1e-6), 3.16. In 16 bits the nearest power of two, 4: the weights keep their bits, and eps is 6.25e-7.
    """
    scale = math.sqrt(eps / LATENT_NORM_EPS)
    return scale if kind == "F32" else 2.0 ** round(math.log2(scale))


def _scaled(weight: Tensor, num_rows: int, scale: float) -> Tensor:
    """The latent's rows scaled; the shared key's below them pass no norm and stay."""
    return torch.cat([weight[:num_rows].double() * scale, weight[num_rows:].double()])


def _experts(
    block: str, suffix: str, value: Tensor, scale_U8: Tensor | None, kind: str, pack_experts: bool
) -> Iterator[GgufTensor]:
    match = re.fullmatch(r"block_sparse_moe\.experts\.(w[123])\.weight(_packed)?", suffix)
    assert match, f"{suffix} has no place in a GGUF file"
    name = f"{block}{EXPERTS[match[1]]}.weight"
    if match[2]:
        shape = (*value.shape[:-1], 2 * value.shape[-1])
        yield GgufTensor(name=name, shape=shape, kind="MXFP4", value=partial(_blocks, name, value, scale_U8))
    elif pack_experts:
        yield GgufTensor(name=name, shape=tuple(value.shape), kind="MXFP4", value=partial(_packed_blocks, name, value))
    else:
        yield _tensor(name, kind, value)


def _packed_blocks(name: str, weight: Tensor) -> Tensor:
    try:
        return torch.stack([mxfp4_blocks(*mxfp4.pack(one)) for one in weight])
    except ValueError as error:  # a width that is no multiple of 32, a weight that is not finite
        raise ValueError(f"{name}: {error}") from error


def _blocks(name: str, packed_U8: Tensor, scale_U8: Tensor) -> Tensor:
    if (scale_U8 == 255).any():
        raise ValueError(f"{name}: a scale byte is 255, which is no number")
    return mxfp4_blocks(packed_U8, scale_U8)


def mxfp4_blocks(packed_U8: Tensor, scale_U8: Tensor) -> Tensor:
    """The released bytes [.., in/2] and [.., in/32] as GGUF's blocks [.., in/32 * 17]; the values stay.

    A block is the scale of 32 columns, then byte j with column j in its low nibble and column j + 16 in its high one.
    Released, byte j holds columns 2j and 2j + 1. Codes and scales mean the same in both.
    """
    pairs = packed_U8.unflatten(-1, (-1, mxfp4.GROUP_SIZE // 2))
    columns = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)
    low, high = columns.chunk(2, dim=-1)
    return torch.cat([scale_U8[..., None], low | high << 4], dim=-1).flatten(-2)


# --- Names: ours -> GGUF's, within a layer ------------------------------------------------------------------------

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    # KDA
    **{f"self_attn.{name}_proj.weight": f"attn_{name}.weight" for name in "qkv"},
    "self_attn.f_a_proj.weight": "ssm_f_a.weight",
    "self_attn.f_b_proj.weight": "ssm_f_b.weight",
    "self_attn.b_proj.weight": "ssm_beta.weight",
    "self_attn.dt_bias": "ssm_dt.bias",
    "self_attn.o_norm.weight": "ssm_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",  # of MLA too
    # Gated MLA
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    # Feed-forward
    **{f"mlp.{name}_proj.weight": f"ffn_{name}.weight" for name in ("gate", "up", "down")},
    **{
        f"block_sparse_moe.shared_experts.{name}_proj.weight": f"ffn_{name}_shexp.weight"
        for name in ("gate", "up", "down")
    },
    "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.routed_expert_down_proj.weight": "ffn_routed_down.weight",
    "block_sparse_moe.routed_expert_norm.weight": "ffn_routed_norm.weight",
    "block_sparse_moe.routed_expert_up_proj.weight": "ffn_routed_up.weight",
}
# llama.cpp rounds what meets a 16-bit matrix to 16 bits as well; a router's score decides which experts run.
FLOAT32 = ("block_sparse_moe.gate.weight",)
SCORES = {
    "self_attention_res_proj.weight": "attn_res_score.weight",
    "mlp_res_proj.weight": "ffn_res_score.weight",
    "model.output_attn_res_proj.weight": "output_res_score.weight",
}
Q_A = "self_attn.q_a_proj.weight"
LATENT_ROWS = {Q_A: "attn_q_a.weight", "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight"}
EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


# --- What stands before the tensors -------------------------------------------------------------------------------


def _context_length(config: K3Config) -> Any:
    return config.to_json()["text_config"].get("max_position_embeddings", 2**20)


def _add_geometry(writer: Any, config: K3Config) -> None:
    kda, mla, moe = config.kda, config.mla, config.moe
    whole = {
        "vocab_size": config.vocab_size,
        "context_length": _context_length(config),
        "block_count": config.num_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "leading_dense_block_count": config.num_dense_layers,
        "attn_res.block_size": config.attn_res_block_size,
        "ssm.conv_kernel": kda.short_conv_kernel_size,
        "kda.head_dim": kda.head_dim,
        "attention.head_count": mla.num_heads,
        # Absorbed, all heads share one key of latent and rest, and the latent is the value.
        "attention.key_length": mla.kv_lora_rank + mla.qk_rope_head_dim,
        "attention.value_length": mla.kv_lora_rank,
        "attention.key_length_mla": mla.qk_head_dim,
        "attention.value_length_mla": mla.v_head_dim,
        "attention.q_lora_rank": mla.q_lora_rank,
        "attention.kv_lora_rank": mla.kv_lora_rank,
        "rope.dimension_count": mla.qk_rope_head_dim,  # the rest; this architecture rotates nothing
        "expert_count": moe.num_experts,
        "expert_used_count": moe.num_experts_per_token,
        "expert_shared_count": moe.num_shared_experts,
        "expert_feed_forward_length": moe.moe_intermediate_size,
        "expert_latent_length": moe.routed_expert_hidden_size,
        "expert_gating_func": 2,  # sigmoid
    }
    real = {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "kda.gate_lower_bound": kda.gate_lower_bound,
        "activation.situ_beta": config.activation_situ_beta,
        "activation.situ_linear_beta": config.activation_situ_linear_beta,
        "expert_weights_scale": moe.routed_scaling_factor,
    }
    for name, number in whole.items():
        writer.add_uint32(f"{ARCHITECTURE}.{name}", number)
    for name, number in real.items():
        writer.add_float32(f"{ARCHITECTURE}.{name}", number)
    writer.add_bool(f"{ARCHITECTURE}.expert_weights_norm", True)
    # A layer without keys and values is KDA.
    key_heads = [int(config.is_mla(layer_idx)) for layer_idx in range(config.num_layers)]
    writer.add_array(f"{ARCHITECTURE}.attention.head_count_kv", key_heads)


def _add_vocabulary(writer: Any, gguf: ModuleType, vocabulary: Vocabulary | None, config: K3Config) -> None:
    field = "tokenizer.ggml."
    if vocabulary is None:
        writer.add_string(f"{field}model", "none")
        return
    char_of = byte_level_chars()
    names = [special.name for special in vocabulary.specials]
    tokens = ["".join(map(char_of.__getitem__, token)) for token in vocabulary.ranks]
    taken = sorted(set(tokens) & set(names))
    if taken:
        raise ValueError(f"vocabulary: {taken[0]} is a rank and a control string, llama.cpp wants every string once")
    writer.add_string(f"{field}model", "gpt2")
    writer.add_string(f"{field}pre", "kimi-k2")  # llama.cpp's name for the released pieces
    writer.add_array(f"{field}tokens", tokens + names)
    # All 256 are control: what is flagged otherwise llama.cpp finds in a user's text too.
    types = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(names)
    writer.add_array(f"{field}token_type", [int(kind) for kind in types])
    merges = merges_of(vocabulary.ranks)
    writer.add_array(
        f"{field}merges", [" ".join("".join(map(char_of.__getitem__, part)) for part in pair) for pair in merges]
    )
    writer.add_uint32(f"{field}bos_token_id", config.bos_token_id)
    writer.add_uint32(f"{field}eos_token_id", config.eos_token_id)
    writer.add_uint32(f"{field}eot_token_id", config.eos_token_id)  # else it takes [EOT], which K3 does not write
    writer.add_uint32(f"{field}padding_token_id", config.pad_token_id)
    writer.add_bool(f"{field}add_bos_token", False)
    writer.add_bool(f"{field}add_eos_token", False)


def merges_of(ranks: tuple[bytes, ...]) -> list[tuple[bytes, bytes]]:
    """The pair that each rank behind the single bytes is merged from, in order.

    It is what tiktoken's rule makes of the rank's bytes with the ranks before it. An entry that this does not leave in
    two parts has no merge: tiktoken reaches it only as a whole piece.
    """
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    pairs = []
    for rank, token in enumerate(ranks):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            joined = [rank_of.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
            first = min(range(len(joined)), key=joined.__getitem__)
            if joined[first] >= rank:
                break
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        if len(parts) == 2:
            pairs.append((parts[0], parts[1]))
    return pairs


def byte_level_chars() -> list[str]:
    """The character that stands for each byte: visible Latin-1 for itself, the 68 others U+0100 to U+0143 in order."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x144))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]
