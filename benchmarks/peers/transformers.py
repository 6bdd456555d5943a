"""transformers on the CPU: a dense Llama and Kimi Linear at the geometry of the speed tables, float32, random weights.

One process a measurement, as a module and not as a file, whose folder would hide the package of this name:

    python -m benchmarks.peers.transformers prefill kimi_linear 2048 2
    python -m benchmarks.peers.transformers decode kimi_linear 4096 32 2     # context, tokens, threads
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import DynamicCache, KimiLinearConfig, KimiLinearForCausalLM, LlamaConfig, LlamaForCausalLM

VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS = 32000, 512, 8, 8
SPECIALS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
PREFILLED = 512  # of a longer context only so much is computed, the rest of the cache is made up


def dense_llama() -> nn.Module:
    """59.7 M parameters, as many as `bench`."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        intermediate_size=1512,
        max_position_embeddings=2**17,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        **SPECIALS,
    )
    return _drawn(LlamaForCausalLM, config)


def kimi_linear() -> nn.Module:
    """The small hybrid, 67.3 M parameters: three KDA layers to one of MLA, one dense layer and seven MoE."""
    config = KimiLinearConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        intermediate_size=1408,
        moe_intermediate_size=128,
        num_experts=16,
        num_experts_per_token=2,
        num_shared_experts=1,
        routed_scaling_factor=1.0,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        linear_head_dim=64,
        linear_num_heads=NUM_HEADS,
        layer_types=["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(NUM_LAYERS)],
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        **SPECIALS,
    )
    return _drawn(KimiLinearForCausalLM, config)


MODELS: dict[str, Callable[[], nn.Module]] = {"dense_llama": dense_llama, "kimi_linear": kimi_linear}


@torch.inference_mode()
def prefill_tokens_per_s(name: str, num_tokens: int, num_threads: int, repeats: int = 3) -> list[float]:
    """Prompts of random ids with a cache, the last one's logits alone: one figure a prompt, behind one to warm up."""
    torch.set_num_threads(num_threads)
    model = MODELS[name]().eval()
    times_s = [_timed(_feed, model, DynamicCache(config=model.config), _ids(1, num_tokens)) for _ in range(repeats + 1)]
    return [num_tokens / time_s for time_s in times_s[1:]]


@torch.inference_mode()
def decode_tokens_per_s(name: str, context: int, num_tokens: int, num_threads: int, repeats: int = 3) -> list[float]:
    """Token by token, every one's logits: one figure for each `num_tokens` in a row, behind 4 tokens to warm up.

    Beyond 512 tokens of context the attention caches are filled up with random positions, which take the same time.
    """
    torch.set_num_threads(num_threads)
    model = MODELS[name]().eval()
    cache = DynamicCache(config=model.config)
    _feed(model, cache, _ids(1, min(context, PREFILLED)))
    for layer in cache.layers:
        missing = context - PREFILLED
        if missing > 0 and getattr(layer, "keys", None) is not None:  # a KDA layer's state does not grow
            layer.keys, layer.values = (_longer(part, missing) for part in (layer.keys, layer.values))
    for _ in range(4):
        _feed(model, cache, _ids(1, 1))
    ids_RT = _ids(repeats, num_tokens)
    times_s = [_timed(_feed_each, model, cache, ids_T) for ids_T in ids_RT]
    return [num_tokens / time_s for time_s in times_s]


def _drawn(kind: type[nn.Module], config: object) -> nn.Module:
    torch.manual_seed(0)
    return kind(config).float()


def _ids(batch_size: int, num_tokens: int) -> Tensor:
    return torch.randint(3, VOCAB_SIZE, (batch_size, num_tokens))


def _feed(model: nn.Module, cache: DynamicCache, ids_BT: Tensor) -> Tensor:
    argument = "cache" if isinstance(model, KimiLinearForCausalLM) else "past_key_values"
    return model(input_ids=ids_BT, use_cache=True, logits_to_keep=1, **{argument: cache}).logits


def _feed_each(model: nn.Module, cache: DynamicCache, ids_T: Tensor) -> None:
    for id_ in ids_T:
        _feed(model, cache, id_.view(1, 1))


def _longer(part_BHTX: Tensor, missing: int) -> Tensor:
    B, H, _, X = part_BHTX.shape
    return torch.cat([torch.randn(B, H, missing, X) * part_BHTX.std(), part_BHTX], dim=2)


def _timed(run: Callable[..., object], *arguments: object) -> float:
    begin = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - begin


if __name__ == "__main__":
    what, name, *numbers = sys.argv[1:]
    measure = {"prefill": prefill_tokens_per_s, "decode": decode_tokens_per_s}[what]
    print(json.dumps(measure(name, *map(int, numbers))))
