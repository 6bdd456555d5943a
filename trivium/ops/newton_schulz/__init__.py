"""Newton-Schulz: a matrix made orthogonal by products alone, the heart of Muon.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the steps of Amsel et al., "The
Polar Express" (arXiv 2505.16932), whose singular values reach 1: five of Jordan's leave them anywhere in [0.68, 1.21],
more in a square matrix than in a wide one, and so change the rate of a matrix with its cut.
"""

from __future__ import annotations

from torch import Tensor

from trivium.ops import cpu
from trivium.ops.backend import choose
from trivium.ops.newton_schulz.batched import newton_schulz_batched
from trivium.ops.newton_schulz.native import newton_schulz_native
from trivium.ops.newton_schulz.reference import newton_schulz_reference


def orthogonalise(stack_NOI: Tensor) -> Tensor:
    """Each matrix U S V^T of [N, out, in], out ≤ in, → U S' V^T with the singular values S' in [0.9725, 1.0275].

    X ← a·X + (b·G + c·G²)·X with G = X·X^T, five times with coefficients of their own, from X = matrix / its Frobenius
    norm. Singular values under 0.002 of that norm stay short of 0.97; zero stays zero. Not differentiable. Raises
    ValueError for a stack that is not of wide matrices.
    """
    if stack_NOI.dim() != 3 or stack_NOI.shape[1] > stack_NOI.shape[2]:
        raise ValueError(f"newton_schulz: wanted a stack [N, out, in] with out <= in, got {tuple(stack_NOI.shape)}")
    native = newton_schulz_native if cpu.serves(stack_NOI) else None
    run = choose("newton_schulz", reference=newton_schulz_reference, torch=newton_schulz_batched, native=native)
    return run(stack_NOI.detach())
