"""Newton-Schulz of all matrices at once."""

from __future__ import annotations

from torch import Tensor

from trivium.ops.newton_schulz.reference import COEFFICIENTS, EPS


def newton_schulz_batched(stack_NOI: Tensor) -> Tensor:
    x_NOI = stack_NOI / stack_NOI.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for a, b, c in COEFFICIENTS:
        gram_NOO = x_NOI @ x_NOI.mT
        poly_NOO = gram_NOO.baddbmm(gram_NOO, gram_NOO, beta=b, alpha=c)
        x_NOI = x_NOI.baddbmm(poly_NOO, x_NOI, beta=a)
    return x_NOI
