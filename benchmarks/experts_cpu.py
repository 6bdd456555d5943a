"""The routed experts on one thread: compiled kernels beside the torch path, and beside the rate of a large product.

    python benchmarks/experts_cpu.py [ROUNDS]

Every round runs every candidate once, and the least CPU time of all rounds counts: other work on the machine then
disturbs all alike. Rates count the multiply-adds of the matrix products alone, two operations each.
"""

import sys
import time

import torch
from torch import Tensor

from trivium.ops.backend import use_backend
from trivium.ops.experts import experts
from trivium.ops.linear import linear
from trivium.ops.mxfp4 import PackedWeight, pack
from trivium.ops.situ import situ

# tokens, active experts, experts, latent, feed-forward
SHAPES = {"nano": (2048, 4, 48, 96, 64), "bench": (4096, 2, 16, 256, 128)}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    square = torch.randn(2, 768, 768)
    for name, (T, A, E, L, F) in SHAPES.items():
        z_TL, weights_TA, dy_TL = torch.randn(T, L), torch.rand(T, A), torch.randn(T, L)
        dense = [torch.randn(E, *shape) / 8 for shape in ((F, L), (F, L), (L, F))]
        packed = [PackedWeight(packed=p, scale=s, dtype=torch.float32) for p, s in map(pack, dense)]
        inputs = [x.requires_grad_() for x in (z_TL, weights_TA, *dense)]
        experts_TA = torch.rand(T, E).topk(A).indices.sort(1).values
        pair_MF = torch.randn(2, T * A, F)

        def forward(matrices, z_TL=z_TL, experts_TA=experts_TA, weights_TA=weights_TA) -> Tensor:
            return experts(z_TL, experts_TA, weights_TA, *matrices)

        def run(backend, what, dense=dense, packed=packed, inputs=inputs, dy_TL=dy_TL, pair_MF=pair_MF) -> None:
            with use_backend(backend), torch.set_grad_enabled(what == "forward + backward"):
                if what == "forward + backward":
                    torch.autograd.grad(forward(dense), inputs, dy_TL)
                elif what == "situ alone":
                    situ(*pair_MF)
                else:
                    forward(packed if what == "forward, packed" else dense)

        whats = {"forward": 3, "forward + backward": 9, "forward, packed": 3, "situ alone": 0}
        least_s = {}
        for _ in range(num_rounds + 1):
            timed(least_s, "product", lambda: linear(*square))
            for what in whats:
                for backend in ("native", "torch"):
                    timed(least_s, (what, backend), lambda w=what, b=backend: run(b, w))
        ceiling = 2 * 768**3 / least_s["product"] / 1e9
        print(f"{name}: T {T}, A {A}, E {E}, L {L}, F {F}; a product of 768 x 768 x 768 runs at {ceiling:.0f} GFLOP/s")
        for what, products in whats.items():
            ours_s, torch_s = least_s[what, "native"], least_s[what, "torch"]
            rate = products * 2 * T * A * L * F / ours_s / 1e9
            share = f"{rate:5.1f} GFLOP/s = {rate / ceiling:.2f} of it, " if products else ""
            print(f"  {what:20s} {1e3 * ours_s:7.2f} ms, {share}{torch_s / ours_s:.2f} x the torch path")


def timed(least_s: dict, key: object, run) -> None:
    start_s = time.thread_time()
    run()
    least_s[key] = min(least_s.get(key, 1e9), time.thread_time() - start_s)


if __name__ == "__main__":
    main()
