"""Latent attention on the CPU: training beside torch's scaled_dot_product_attention, decoding beside a plain read.

    python benchmarks/mla_cpu.py [--threads 2] [--heads 8] [--tokens 2048,4096,16384] [--context 4096,16384] [--torch]

The geometry of the `bench` preset. Rates are multiply-adds of the causal pairs alone (320 flop a pair forward, 832
backward), over those of a product of two 1024 x 1024 matrices. The peer finds keys and values written out, which the op
does itself, and has values as wide as the keys. With one thread the time is that of the thread, which other processes
disturb less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from trivium.config import PRESETS
from trivium.ops.attention import latent_attention
from trivium.ops.backend import use_backend
from trivium.ops.rows import Rows

MLA = PRESETS["bench"]().mla
K, J, V, R = MLA.qk_nope_head_dim, MLA.qk_rope_head_dim, MLA.v_head_dim, MLA.kv_lora_rank
FLOP_FORWARD, FLOP_BACKWARD = 2 * (K + J + V), 2 * (3 * (K + J) + 2 * V)  # a pair of query and key, of one head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--heads", type=int, default=MLA.num_heads)
    parser.add_argument("--tokens", default="2048,4096,16384")
    parser.add_argument("--context", default="4096,16384")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--torch", action="store_true", help="the torch backend too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    for T in map(int, filter(None, args.tokens.split(","))):
        train(T, args.heads, args.repeats, ("native", "torch") if args.torch else ("native",))
    for U in map(int, filter(None, args.context.split(","))):
        decode(U, args.heads, 4 * args.repeats, ("native", "torch") if args.torch else ("native",))


def train(T: int, H: int, repeats: int, backends: tuple[str, ...]) -> None:
    shapes = ((T, H, K), (T, H, J), (T, R), (T, J), (H, K + V, R))
    inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
    wide = [torch.randn(1, H, T, K + J).requires_grad_() for _ in range(3)]
    rows, square = Rows.one(T), torch.randn(1024, 1024)
    pairs = H * T * (T + 1) / 2
    runs: dict[str, tuple[Callable, list]] = {
        "sdpa": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), wide)
    }
    for name in backends:
        runs[name] = (on(name, rows), inputs)
    best = {name: [float("inf")] * 2 for name in runs}
    product_s = float("inf")
    for _ in range(repeats):
        product_s = min(product_s, seconds(lambda: square @ square)[0])
        for name, (run, leaves) in runs.items():
            forward_s, o = seconds(run, *leaves)
            backward_s, _ = seconds(torch.autograd.grad, o, leaves, torch.ones_like(o))
            best[name] = [min(best[name][0], forward_s), min(best[name][1], backward_s)]
    peak = 2 * 1024**3 / product_s
    print(f"T {T}, {H} heads; matrix product {peak / 1e9:.1f} GFLOP/s")
    for name, (forward_s, backward_s) in best.items():
        both_s, peer_s = forward_s + backward_s, sum(best["sdpa"])
        print(
            f"  {name:7} forward {1e3 * forward_s:9.1f} ms, {pairs * FLOP_FORWARD / forward_s / peak:4.0%}, "
            f"{best['sdpa'][0] / forward_s:5.2f} x sdpa; with backward {1e3 * both_s:9.1f} ms, "
            f"{pairs * (FLOP_FORWARD + FLOP_BACKWARD) / both_s / peak:4.0%}, {peer_s / both_s:5.2f} x sdpa"
        )


@torch.no_grad()
def decode(U: int, H: int, repeats: int, backends: tuple[str, ...]) -> None:
    caches = [(torch.randn(U, R), torch.randn(U, J)) for _ in range(max(2, 2**26 // (4 * U * (R + J))))]  # 64 MB
    num_bytes, kv_b = 4 * U * (R + J), torch.randn(H, K + V, R)
    read_s = min(seconds(lambda c=c: (c[0].sum(), c[1].sum()))[0] for _ in range(3) for c in caches)
    print(f"context {U}, {H} heads; plain sum {1e6 * read_s:.0f} us, {num_bytes / read_s / 1e9:.1f} GB/s")
    for T in (1, 4, 16):
        q_nope, q_rest, rows = torch.randn(T, H, K), torch.randn(T, H, J), Rows.one(T, past=U - T)
        for name in backends:
            run = on(name, rows)
            step_s = min(seconds(run, q_nope, q_rest, *c, kv_b)[0] for _ in range(repeats) for c in caches)
            print(f"  {name:7} {T:2} new tokens {1e6 * step_s:7.0f} us, {num_bytes / step_s / 1e9:5.1f} GB/s")


def on(name: str, rows: Rows) -> Callable:
    def run(*inputs):
        with use_backend(name):
            return latent_attention(*inputs, rows)

    return run


def seconds(run: Callable, *args):
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    result = run(*args)
    return clock() - start, result


if __name__ == "__main__":
    main()
