"""The fused decode step: tokens/s, bytes/s beside a plain reading loop over as many bytes, and where the time goes.

    python -m benchmarks.decode_cpu [nano float32 bfloat16 mxfp4 bench-xl] [--threads 2] [--torch]

`float32`, `bfloat16` and `mxfp4` are the preset `bench`. Weights are random. Contexts are filled with random states: the time of a step does not depend on what they hold. Both
the step and the reading loop take turns, so that a busy machine meets both; medians, and the fastest in brackets. One
thread is timed by its own clock, several by the wall's.
"""

import argparse
import time
from dataclasses import replace

import torch

from benchmarks.programs import bench_model, weight_bytes
from trivium.model.state import KdaState, MlaState, ModelState
from trivium.model.step import DecodeState, Stepper
from trivium.ops import cpu
from trivium.ops.backend import use_backend
from trivium.ops.decode import PHASES
from trivium.ops.rows import Rows

CONTEXTS = (16, 4096, 16384)


def filled_state(network, length):
    """A state of that many tokens nobody fed."""
    layers = []
    for layer in network.empty_state(1).layers:
        if isinstance(layer, KdaState):
            layers.append(replace(layer, state_SHKV=0.1 * torch.randn_like(layer.state_SHKV)))
        else:
            latent = torch.randn(length, layer.latent.shape[1], dtype=layer.latent.dtype)
            layers.append(MlaState(latent=latent, shared_key=torch.randn(length, layer.shared_key.shape[1]).to(latent)))
    return ModelState(layers=tuple(layers), lengths=(length,))


def memory_bytes(state):
    """Of one step at this state: KDA states are read and written, latents read."""
    return sum(
        4 * (own.state[: state.length].numel() if own.ring is None else 2 * own.state.numel()) for own in state.memory
    )


def timed(clock, run, *args):
    start = clock()
    run(*args)
    return clock() - start


def of(seconds):
    return sorted(seconds)[len(seconds) // 2], min(seconds)


def read_once(block, sums):
    cpu.call("decode_read", block, block.numel(), sums)


@torch.no_grad()
def old_step(network, state):
    with use_backend("torch"):
        network.head(network(torch.tensor([1]), Rows.one(1, past=state.lengths[0]), state)[0])


def measure(name, contexts, repeats, beside_torch):
    network = bench_model(name)
    stepper, num_bytes = Stepper(network), weight_bytes(network)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for context in contexts:
        before = filled_state(network, context)
        state = DecodeState.of(network.config, before)
        stepper(1, state)
        all_bytes = num_bytes + memory_bytes(state)
        block, sums = torch.ones(all_bytes // 4), torch.zeros(64)
        steps, reads, old = [], [], []
        for idx in range(repeats):
            steps.append(timed(clock, stepper, 1, state))
            reads.append(timed(clock, read_once, block, sums))
            if beside_torch and idx % 4 == 0:
                old.append(timed(clock, old_step, network, before))
        (step, best_step), (read, best_read) = of(steps), of(reads)
        print(
            f"{name:12} @{context:<6} {1 / step:6.1f} ({1 / best_step:.1f}) tokens/s  {all_bytes / 1e6:6.1f} MB a token"
            f"  {all_bytes / step / 1e9:5.1f} ({all_bytes / best_step / 1e9:.1f}) GB/s"
            f"  reading loop {all_bytes / read / 1e9:5.1f} ({all_bytes / best_read / 1e9:.1f}) GB/s"
            f"  share {read / step:.2f} ({best_read / best_step:.2f})"
        )
        if old:
            print(
                f"{'':12} torch backend {1 / of(old)[0]:6.1f} ({1 / min(old):.1f}) tokens/s: {of(old)[0] / step:.1f} times"
            )
        seconds = torch.zeros(repeats, len(PHASES), dtype=torch.float64)
        for idx in range(repeats):
            stepper(1, state, seconds[idx])
        parts = sorted(zip((seconds.median(0).values * 1e6).tolist(), PHASES, strict=True), reverse=True)
        print(f"{'':12} us a token: " + ", ".join(f"{phase} {us:.0f}" for us, phase in parts if us > 0.5), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=["nano", "float32", "bfloat16", "mxfp4", "bench-xl"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS)
    parser.add_argument("--torch", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    for name in args.names:
        measure(name, args.contexts, args.repeats, args.torch)


if __name__ == "__main__":
    main()
