"""How far KDA in float32 is from the float64 recurrence: the table of docs/ops.md.

python benchmarks/kda_error.py
"""

import torch

from trivium.ops.backend import use_backend
from trivium.ops.kda import kda
from trivium.ops.rows import Rows

T, H, K, V = 257, 2, 32, 24
NAMES = ("output", "state", "q", "k", "v", "decay input", "beta", "A_log", "dt_bias", "state in")


def run(inputs, dtype, backend):
    """Outputs and the gradients of a fixed random sum of them."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    with use_backend(backend):
        outputs = kda(*leaves[:7], Rows.one(T), leaves[7])
    generator = torch.Generator().manual_seed(1)
    loss = sum((x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in outputs)
    return (*outputs, *torch.autograd.grad(loss, leaves))


def main() -> None:
    for what, gate_at in (("half-lives of tens", -4.0), ("gate 99.97% of its bound", 8.0), ("gate at its bound", 40.0)):
        generator = torch.Generator().manual_seed(T)

        def normal(*shape, generator=generator):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        tokens = [normal(T, H, K), normal(T, H, K), normal(T, H, V), normal(T, H, K), normal(T, H)]
        inputs = [*tokens, 0.3 * normal(H), normal(H, K) + gate_at, normal(1, H, K, V)]
        want = run(inputs, torch.float64, "reference")
        errors = [
            float((got.detach().double() - exact.detach()).norm() / exact.detach().norm())
            for got, exact in zip(run(inputs, torch.float32, "torch"), want, strict=True)
        ]
        print(f"{what:25}", "  ".join(f"{name} {error:.1e}" for name, error in zip(NAMES, errors, strict=True)))


if __name__ == "__main__":
    main()
