"""llama.cpp through llama-cpp-python: logits of a GGUF file, and how fast it reads a prompt and writes tokens.

Two settings, neither with a GPU: `float32` has a float32 cache and no flash attention, as what it is compared to;
`default` is what llama.cpp comes with, a float16 cache and flash attention where it sees fit. One process a measurement, as a module and not as a file, whose folder would
hide the package of this name:

    python -m benchmarks.peers.llama_cpp prefill float32 FILE.gguf 2048 2
    python -m benchmarks.peers.llama_cpp decode default FILE.gguf 4096 64 2
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import llama_cpp
import numpy as np

LOG_LEVEL_ERROR = 4  # ggml.h; the binding has no name for it


class LlamaCpp:
    """One sequence of a GGUF model in llama.cpp. It can be cleared, not cut: a KDA state has no past."""

    def __init__(
        self, path: str | Path, *, num_ctx: int, num_threads: int, ubatch: int = 512, setting: str = "float32"
    ) -> None:
        _say_errors_only()
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            raise ValueError(f"{path}: llama.cpp cannot load it")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = num_ctx
        params.n_ubatch = ubatch
        params.n_threads = params.n_threads_batch = num_threads
        if setting == "float32":
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise ValueError(f"{path}: llama.cpp cannot make a context of {num_ctx} tokens")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.length = 0

    def feed(self, ids: Sequence[int], *, all_logits: bool = False) -> np.ndarray:
        """Logits behind the last of these tokens [W], or behind each [T, W]: then all are computed."""
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for t, id_ in enumerate(ids):
            batch.token[t], batch.pos[t], batch.n_seq_id[t], batch.seq_id[t][0] = int(id_), self.length + t, 1, 0
            batch.logits[t] = all_logits or t == len(ids) - 1
        code = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode of {len(ids)} tokens at {self.length}: code {code}")
        self.length += len(ids)
        rows = range(len(ids)) if all_logits else (-1,)
        logits = [llama_cpp.llama_get_logits_ith(self.context, row) for row in rows]
        found = np.stack([np.ctypeslib.as_array(row, (self.vocab_size,)) for row in logits])
        return found if all_logits else found[0]

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        self.length = 0

    def tokenize(self, text: str, *, control: bool = False) -> list[int]:
        """Ids of a text; with `control`, control strings in it are control ids."""
        content = text.encode()
        ids = (ctypes.c_int32 * (len(content) + 8))()
        count = llama_cpp.llama_tokenize(self.vocab, content, len(content), ids, len(ids), False, control)
        if count < 0:
            raise RuntimeError(f"llama_tokenize: code {count}")
        return list(ids[:count])


def prefill_tokens_per_s(
    setting: str, gguf_path: str | Path, num_tokens: int, num_threads: int, repeats: int = 3
) -> list[float]:
    """Prompts of random ids, the last one's logits computed: one figure a repeat, behind one prompt to warm up."""
    model = LlamaCpp(gguf_path, num_ctx=num_tokens, num_threads=num_threads, setting=setting)
    figures = []
    for ids in _random_ids(model.vocab_size, (repeats + 1, num_tokens)):
        model.clear()
        begin = time.perf_counter()
        model.feed(ids)
        figures.append(num_tokens / (time.perf_counter() - begin))
    return figures[1:]


def decode_tokens_per_s(
    setting: str, gguf_path: str | Path, context: int, num_tokens: int, num_threads: int, repeats: int = 3
) -> list[float]:
    """Token by token behind `context` random ids, every one's logits computed.

    One figure for each `num_tokens` in a row; the first tokens of all, up to 8, warm up.
    """
    warm = min(8, num_tokens)
    prompt, rest = max(context - warm, 1), warm + repeats * num_tokens
    model = LlamaCpp(gguf_path, num_ctx=prompt + rest, num_threads=num_threads, setting=setting)
    (ids,) = _random_ids(model.vocab_size, (1, prompt + rest))
    model.feed(ids[:prompt])
    for id_ in ids[prompt : prompt + warm]:
        model.feed([id_])
    figures = []
    for part in ids[prompt + warm :].reshape(repeats, num_tokens):
        begin = time.perf_counter()
        for id_ in part:
            model.feed([id_])
        figures.append(num_tokens / (time.perf_counter() - begin))
    return figures


def quantize(gguf_path: str | Path, out: str | Path, kind: str, num_threads: int) -> None:
    """A file of Q8_0 or Q4_0 matrices from one of float32, by llama.cpp's own quantiser with its defaults."""
    _say_errors_only()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}[kind]
    params.nthread = num_threads
    if llama_cpp.llama_model_quantize(os.fsencode(gguf_path), os.fsencode(out), params):
        raise RuntimeError(f"{gguf_path}: llama.cpp cannot quantise it to {kind}")


def _random_ids(vocab_size: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab_size, shape)


@cache  # holds the callback: the library keeps a bare pointer to it
def _say_errors_only() -> object:
    def log(level: int, text: bytes, _data: object) -> None:
        if level == LOG_LEVEL_ERROR:
            sys.stderr.write(text.decode(errors="replace"))

    callback = llama_cpp.llama_log_callback(log)
    llama_cpp.llama_log_set(callback, None)
    return callback


if __name__ == "__main__":
    what, setting, path, *numbers = sys.argv[1:]
    measure = {"prefill": prefill_tokens_per_s, "decode": decode_tokens_per_s}[what]
    print(json.dumps(measure(setting, path, *map(int, numbers))))
