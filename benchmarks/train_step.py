"""Seconds of one forward and backward of nano over 2,048 tokens: the table of threads in docs/train.md.

    GOMP_SPINCOUNT=5000 python benchmarks/train_step.py [THREADS] [STEPS]

Run it with each setting on a free machine, and again beside two processes that keep both cores busy.
"""

import sys
import time

import torch

from trivium.config import model_preset
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.ops.rows import Rows


def main() -> None:
    num_threads, num_steps = (int(x) for x in (*sys.argv[1:3], *("2", "4")[len(sys.argv) - 1 :]))
    torch.set_num_threads(num_threads)
    model = KimiK3(model_preset("nano"))
    initialise_(model, seed=0)
    model.train()
    ids_T = torch.randint(0, 4096, (2048,), generator=torch.Generator().manual_seed(0))
    rows = Rows.of([256] * 8)
    for step in range(num_steps):
        model.zero_grad(set_to_none=True)
        start_s = time.monotonic()
        hidden_TD, _ = model(ids_T, rows)
        forward_s = time.monotonic()
        hidden_TD.square().sum().backward()
        end_s = time.monotonic()
        for layer in model.moe_layers():
            layer.take_scores()
        print(f"step {step}: forward {forward_s - start_s:.3f} s, backward {end_s - forward_s:.3f} s")


if __name__ == "__main__":
    main()
