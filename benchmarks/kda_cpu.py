"""KDA and the short convolution on a CPU: native beside the torch backend, and how time grows with T.

python benchmarks/kda_cpu.py [--threads 2] [--repeats 5]

Backends take turns in one process and the best of the repeats counts. A state's element costs 4 multiply-adds a token
forward and 10 backward; their share of a matrix product's rate, measured between the repeats, is the last column.
"""

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.backend import use_backend
from trivium.ops.conv import short_conv
from trivium.ops.kda import kda
from trivium.ops.rows import Rows

BACKENDS = ("native", "torch")


def best_s(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    best = dict.fromkeys(runs, math.inf)
    for _ in range(repeats):
        for name, run in runs.items():
            start_s = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start_s)
    return best


def kda_inputs(T: int, H: int, D: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(T, H, D)] * 4 + [(T, H), (H,), (H, D)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def conv_inputs(T: int, X: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((T, X), (X, 1, 4))]


def run(
    op: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], backend: str, backward: bool
) -> Callable[[], object]:
    rows = Rows.one(len(inputs[0]))
    leaves = [x.detach().requires_grad_(backward) for x in inputs]

    def once() -> object:
        with use_backend(backend):
            output = op(*leaves, rows)[0]
            return torch.autograd.grad(output, leaves, torch.ones_like(output)) if backward else output

    return once


def product_flops(repeats: int) -> float:
    a = torch.randn(1024, 1024)
    return 2 * 1024**3 / best_s({"": lambda: a @ a}, repeats)[""]


def compare(what: str, op: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], repeats: int, numel: int) -> None:
    """One line forward and one with backward; `numel` is the state's elements, 0 where that says nothing."""
    for backward in (False, True):
        seconds = best_s({name: run(op, inputs, name, backward) for name in BACKENDS}, repeats)
        T, flops = len(inputs[0]), product_flops(repeats)
        rates = "  ".join(f"{name} {T / seconds[name]:9,.0f} tokens/s" for name in BACKENDS)
        share = 2 * (14 if backward else 4) * T * numel / seconds["native"] / flops
        ceiling = f"  {share:.2f} of a product's {flops / 1e9:.0f} GFLOP/s" if numel else ""
        label = f"{what} {'forward+backward' if backward else 'forward'}"
        print(f"{label:44} {rates}  {seconds['torch'] / seconds['native']:5.1f}x{ceiling}", flush=True)


def exponent(repeats: int, lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)) -> None:
    """The slope of log time over log T, by least squares."""
    for backward in (False, True):
        runs = {str(T): run(kda, kda_inputs(T, 8, 64), "native", backward) for T in lengths}
        seconds = best_s(runs, repeats)
        x, y = (torch.tensor(z, dtype=torch.float64).log() for z in (lengths, tuple(seconds.values())))
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
        rates = ", ".join(f"T={T} {int(T) / s:,.0f}" for T, s in seconds.items())
        print(
            f"{'forward+backward' if backward else 'forward'}: exponent in T {slope:.3f} ({rates} tokens/s)", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if cpu.missing:
        raise SystemExit(f"no native backend: {cpu.missing}")
    torch.set_num_threads(args.threads)
    print(f"{cpu.isa}, {args.threads} threads, float32, torch {torch.__version__}")
    for T, H, D in ((2048, 8, 64), (512, 3, 64), (256, 96, 128)):
        compare(f"KDA T={T} H={H} D={D}", kda, kda_inputs(T, H, D), args.repeats, H * D * D)
    compare("convolution T=2048 X=1536", short_conv, conv_inputs(2048, 1536), args.repeats, 0)
    exponent(args.repeats)


if __name__ == "__main__":
    main()
