"""What benchmarks/cpu.py measures of ours and of torch's peers: one measurement a process, its figures as JSON.

    python -m benchmarks.programs train ours 8 512 2 512        # batch, tokens each, steps, tokens to warm up
    python -m benchmarks.programs decode float32 4096 32 3      # weights, context, tokens, repeats

Every function returns `figures` (tokens/s unless it says otherwise) and, where they are known, `flops` and `bytes` a
token, and `read`, the bytes/s of a loop that only reads as many bytes, in turns with the figures.
"""

from __future__ import annotations

import ctypes
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kda_cpu import best_s, kda_inputs
from benchmarks.kda_cpu import run as kda_run
from trivium.config import K3Config, model_preset
from trivium.cost.params import count_params
from trivium.data.batch import Batch
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.model.moe import DenseStack, PackedStack
from trivium.model.step import DecodeState, Stepper
from trivium.ops import cpu, mxfp4
from trivium.ops.backend import use_backend
from trivium.ops.kda import kda
from trivium.ops.linear import linear
from trivium.ops.rows import Rows
from trivium.recipes.quickstart import quickstart
from trivium.train.balance import QuantileBalancer
from trivium.train.groups import build_optimisers, parameter_groups
from trivium.train.loss import cross_entropy
from trivium.train.step import train_step

NUM_THREADS = 2
LENGTHS = (1024, 2048, 4096, 8192, 16384)
KDA_FORWARD, KDA_BOTH = 8, 28  # operations a token and element of the state, of 4 and 14 multiply-adds


# --- Ceilings ---------------------------------------------------------------------------------------------------


def ceilings() -> dict[str, Any]:
    """operations/s of a float32 product in torch and in ours; bytes/s of the reading loop by size; what runs here."""
    a, b = torch.randn(2, 2048, 2048)
    products = {"torch": lambda: a @ b, "ours": lambda: linear(a, b)}
    seconds = best_s(products, 5)
    sizes = {"4 MB": 2**22, "16 MB": 2**24, "bench": 4 * count_params(model_preset("bench")).active, "1 GB": 2**30}
    read = {name: size / statistics.median(_reads_s(size, 15)) for name, size in sizes.items()}
    about = {"torch": torch.__version__, "isa": cpu.isa}
    return {"figures": [2 * 2048**3 / s for s in seconds.values()], "product": seconds, "read": read, "about": about}


def _reads_s(num_bytes: int, repeats: int, block: Tensor | None = None) -> list[float]:
    """Seconds of each reading of a block, behind one to warm up."""
    block, sums = torch.ones(num_bytes // 4) if block is None else block, torch.zeros(64)
    return [_timed(cpu.call, "decode_read", block, block.numel(), sums) for _ in range(repeats + 1)][1:]


# --- KDA alone --------------------------------------------------------------------------------------------------


def kda_ours(backward: int, T: int, repeats: int) -> dict[str, Any]:
    """From raw projections, as the op takes them: norms, gates and all, H=8 D=64."""
    once = kda_run(kda, kda_inputs(T, 8, 64), "native", bool(backward))
    return {"figures": _rates(once, T, repeats), "flops": (KDA_BOTH if backward else KDA_FORWARD) * 8 * 64 * 64}


def kda_transformers(backward: int, T: int, repeats: int) -> dict[str, Any]:
    """transformers' loop over tokens, the fastest of the torch forms; its gates are given. No gradient warms up."""
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

    q, k, v, decay, beta = (x[None] for x in kda_inputs(T, 8, 64)[:5])
    leaves = [x.requires_grad_(bool(backward)) for x in (q, k, v, -5 * decay.sigmoid(), beta.sigmoid())]

    def once() -> None:
        o = recurrent_kimi_delta_attention(*leaves, None, False, use_qk_l2norm_in_kernel=True)[0]
        if backward:
            torch.autograd.grad(o, leaves, torch.ones_like(o))

    return {"figures": _rates(once, T, repeats, warm=not backward)}


def kda_exponent(repeats: int) -> dict[str, Any]:
    """The slope of log time over log T, forward and backward, by least squares over the best of the repeats."""
    seconds = best_s({str(T): kda_run(kda, kda_inputs(T, 8, 64), "native", True) for T in LENGTHS}, repeats)
    x, y = (torch.tensor(z, dtype=torch.float64).log() for z in (LENGTHS, tuple(seconds.values())))
    x, y = x - x.mean(), y - y.mean()
    return {"figures": [float(x @ y / (x @ x))], "rates": {T: int(T) / s for T, s in seconds.items()}}


# --- Training ---------------------------------------------------------------------------------------------------


def train(program: str, batch_size: int, num_tokens: int, repeats: int, warm_tokens: int) -> dict[str, Any]:
    """Forward, backward and fused AdamW on all parameters, behind one step of a batch of `warm_tokens` each.

    `mb_a_token` is the highest resident memory of a step, gradients included, less that before it.
    """
    network, loss_of, flops = _trained(program, num_tokens)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)

    def step(ids_BT: Tensor) -> None:
        loss_of(ids_BT).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step(_ids(batch_size, warm_tokens))
    figures, peaks = [], []
    for _ in range(repeats):
        ids_BT = _ids(batch_size, num_tokens)
        ctypes.CDLL(None).malloc_trim(0)  # what the step before freed is not "before"
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        figures.append(batch_size * num_tokens / _timed(step, ids_BT))
        peaks.append((_memory("VmHWM") - before) / 1e6 / (batch_size * num_tokens))
    return {"figures": figures, "flops": flops and 3 * flops, "mb_a_token": statistics.median(peaks)}


def _trained(program: str, num_tokens: int) -> tuple[torch.nn.Module, Callable[[Tensor], Tensor], int | None]:
    """A model, its loss of a batch, and the operations of its forward a token, None where nobody counted them."""
    if program == "ours":
        network = bench_model("float32").train()
        return network, lambda ids_BT: _our_loss(network, ids_BT), forward_flops(network.config, num_tokens)
    from benchmarks.peers.transformers import HIDDEN_SIZE, MODELS, NUM_LAYERS, VOCAB_SIZE

    peer = MODELS[program]().train()
    multiplied = sum(x.numel() for x in peer.parameters()) - VOCAB_SIZE * HIDDEN_SIZE
    flops = 2 * multiplied + 2 * NUM_LAYERS * HIDDEN_SIZE * (num_tokens + 1) if program == "dense_llama" else None
    return peer, lambda ids_BT: peer(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss, flops


def _our_loss(network: KimiK3, ids_BT: Tensor) -> Tensor:
    """The mean over all tokens but each row's last, whose target is not there: as transformers counts."""
    B, T = ids_BT.shape
    weight_BT = torch.ones(B, T)
    weight_BT[:, -1] = 0
    hidden_TD, _ = network(ids_BT.flatten(), Rows.of([T] * B))
    head_WD = network.language_model.lm_head.weight
    loss = cross_entropy(hidden_TD, head_WD, ids_BT.roll(-1, 1).flatten(), weight_BT.flatten())
    for layer in network.moe_layers():
        layer.take_scores()  # kept for balancing, which is no part of what the peers do
    return loss / (B * (T - 1))


def _memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def nano(backend: str, repeats: int) -> dict[str, Any]:
    """Whole steps of the quickstart: its pieces, optimisers, limits and balancing."""
    config = quickstart()
    network = KimiK3(config.model)
    initialise_(network, seed=0)
    names = ("muon_lr", "adamw_lr", "muon_momentum", "adamw_betas", "weight_decay", "per_head")
    optimisers = build_optimisers(parameter_groups(network, **{name: getattr(config, name) for name in names}))
    balancer = QuantileBalancer(method=config.balancing, ema=config.balance_ema)
    limits = {"clip_norm": config.clip_norm, "logit_limit": config.logit_limit}
    T, max_len = config.batch_tokens, config.stages[0].max_len
    ids_T = torch.randint(0, config.model.vocab_size, (T,))
    rows = Rows.of([max_len] * (T // max_len))
    batch = Batch(
        ids_T=ids_T, targets_T=ids_T.roll(-1), weight_T=torch.ones(T), rows=rows, num_bytes=T, source="random"
    )
    step = partial(train_step, network, [batch], optimisers, balancer=balancer, **limits)
    # The largest logit has no kernel: as the quickstart runs, native is what is there.
    with nullcontext() if backend == "native" else use_backend(backend):
        return {"figures": _rates(step, T, repeats)}


# --- Prefill and decode -----------------------------------------------------------------------------------------


@torch.no_grad()
def prefill(num_tokens: int, repeats: int) -> dict[str, Any]:
    """A prompt into an empty state, the last token's logits alone."""
    network = bench_model("float32")
    ids_T = _ids(1, num_tokens)[0]

    def once() -> None:
        hidden_TD, _ = network(ids_T, Rows.one(num_tokens), network.empty_state(1))
        network.head(hidden_TD[-1:])

    head_flops = 2 * network.config.vocab_size * network.config.hidden_size
    flops = forward_flops(network.config, num_tokens) - head_flops
    return {"figures": _rates(once, num_tokens, repeats), "flops": flops}


@torch.no_grad()
def decode(kind: str, context: int, num_tokens: int, repeats: int) -> dict[str, Any]:
    """The fused step token by token behind a prompt of `context` ids; `share` is its bytes/s over those of `read`.

    Steps and readings take turns by the figure and not by the step, so that either finds the cache as it left it.
    """
    network = bench_model(kind)
    _, state = network(_ids(1, context)[0], Rows.one(context), network.empty_state(1))
    stepper, held = Stepper(network), DecodeState.of(network.config, state)
    state_size = state_bytes(network.config, context)
    num_bytes = weight_bytes(network) + state_size
    block = torch.ones(num_bytes // 4)

    def steps(count: int) -> None:
        for id_ in range(count):
            stepper(id_, held)

    figures, reads = [], []
    for _ in range(repeats):
        steps(4)
        figures.append(num_tokens / _timed(steps, num_tokens))
        reads.append(num_bytes / statistics.median(_reads_s(num_bytes, 7, block)))
    shares = [figure * num_bytes / read for figure, read in zip(figures, reads, strict=True)]
    found = {"figures": shares if kind == "bench-xl" else figures, "bytes": num_bytes, "read": statistics.median(reads)}
    return {
        **found,
        "state": state_size,
        "share": statistics.median(shares),
        "tokens_per_s": statistics.median(figures),
    }


def gguf(folder: str, kind: str) -> dict[str, Any]:
    """Writes FOLDER/KIND.gguf of the `bench` weights, and says the bytes of weights that a token reads of it."""
    from gguf import GGUFReader

    from trivium.checkpoint.gguf import write_gguf

    path = Path(folder) / f"{kind}.gguf"
    if kind in ("float32", "mxfp4"):
        write_gguf(bench_model(kind), path)
    else:
        from benchmarks.peers.llama_cpp import quantize

        quantize(Path(folder) / "float32.gguf", path, kind, NUM_THREADS)
    moe, total = model_preset("bench").moe, 0.0
    for tensor in GGUFReader(path).tensors:
        share = moe.num_experts_per_token / moe.num_experts if "_exps." in tensor.name else 1.0
        total += share * int(tensor.n_bytes) * (tensor.name != "token_embd.weight")
    return {"figures": [], "bytes": int(total)}


# --- Models and clocks ------------------------------------------------------------------------------------------


def bench_model(kind: str) -> KimiK3:
    """The preset `bench` in `float32`, `bfloat16`, or as `mxfp4` with a bfloat16 trunk and packed experts; or a preset."""
    config = model_preset("bench" if kind in ("float32", "bfloat16", "mxfp4") else kind)
    network = KimiK3(config)
    initialise_(network, seed=0)
    if kind == "bfloat16":
        network = network.to(torch.bfloat16)
    if kind == "mxfp4":
        weights = network.state_dict()
        network = KimiK3(config, dtype=torch.bfloat16, experts="packed")
        for key in [key for key in weights if ".experts.w" in key]:
            stem = key.removesuffix("weight")
            weights[f"{stem}weight_packed"], weights[f"{stem}weight_scale"] = mxfp4.pack(weights.pop(key))
        network.load_state_dict(weights)
    return network.eval()


def forward_flops(config: K3Config, num_tokens: int) -> int:
    """Operations a token: two for each active parameter, the KDA states, and the pairs that a causal query has."""
    mla, num_mla = config.mla, len(config.mla_layers)
    pair = 2 * mla.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
    states = KDA_FORWARD * (config.num_layers - num_mla) * config.kda.state_numel
    return 2 * count_params(config).active + states + num_mla * pair * (num_tokens + 1) // 2


def weight_bytes(network: KimiK3) -> int:
    """Bytes of weights that a token reads: of the routed experts those that serve it, of the embedding nothing."""
    moe, text = network.config.moe, network.language_model
    stacks = [stack for stack in text.modules() if isinstance(stack, DenseStack | PackedStack)]
    routed = {x.data_ptr() for stack in stacks for x in (*stack.parameters(), *stack.buffers())}
    total = 0.0
    for name, x in text.state_dict().items():
        if "embed_tokens" not in name:
            share = moe.num_experts_per_token / moe.num_experts if x.data_ptr() in routed else 1.0
            total += x.numel() * x.element_size() * share
    return int(total)


def state_bytes(config: K3Config, context: int) -> int:
    """What a token reads and writes of a float32 state: KDA states both, latents read."""
    num_mla = len(config.mla_layers)
    latent = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    return 4 * (2 * (config.num_layers - num_mla) * config.kda.state_numel + num_mla * context * latent)


def _ids(batch_size: int, num_tokens: int) -> Tensor:
    return torch.randint(3, 31744, (batch_size, num_tokens))


def _rates(once: Callable[[], object], num_tokens: int, repeats: int, warm: bool = True) -> list[float]:
    return [num_tokens / _timed(once) for _ in range(repeats + warm)][int(warm) :]


def _timed(run: Callable[..., object], *arguments: object) -> float:
    begin = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - begin


PROGRAMS: dict[str, Callable[..., dict[str, Any]]] = {
    run.__name__: run
    for run in (ceilings, kda_ours, kda_transformers, kda_exponent, train, nano, prefill, decode, gguf)
}

if __name__ == "__main__":
    if cpu.missing:
        raise SystemExit(f"no native backend: {cpu.missing}")
    torch.set_num_threads(NUM_THREADS)
    torch.manual_seed(0)
    cpu.keep_memory()  # as a training run does; for transformers' models too
    name, *arguments = sys.argv[1:]
    found = PROGRAMS[name](*(int(x) if x.isdigit() else x for x in arguments))
    assert all(math.isfinite(figure) for figure in found["figures"])
    print(json.dumps(found))
