"""Newton-Schulz matrix by matrix."""

from __future__ import annotations

from torch import Tensor

from trivium.ops.precision import work_dtype

# Five quintics a·x + b·x³ + c·x⁵, (a, b, c) each, every one the best for what the one before left (Amsel et al., "The
# Polar Express", arXiv 2505.16932, algorithm 1): with singular values in [l, u], begun at [0.002, 1], it is the quintic
# whose largest distance from 1 on [max(l, 0.02·u), 1.01·u] is smallest, times the number that puts what it makes of
# [l, u] evenly about 1. A singular value of 0.002 of the norm or more ends in [0.9725, 1.0275], a smaller one at no more
# than 690 times itself.
#
# 1.01·u: a quintic runs away beyond its interval. The one singular value of a matrix of rank 1 is its norm, so exactly
# u, and bfloat16 rounds a product by up to 0.4%: made for u itself these steps gave 4·10⁹ and inf there, so they give 1.03.
COEFFICIENTS = (
    (8.20541128172907, -23.07611415116343, 16.62350179419697),
    (4.032879485993071, -2.882531272642122, 0.5277525283894217),
    (3.7045859769414724, -2.7170836516603027, 0.5194455530976145),
    (2.808644195510992, -2.061150867400317, 0.4480655190117124),
    (2.0021299679749394, -1.3708386858632549, 0.37730473229558525),
)
EPS = 1e-7


def newton_schulz_reference(stack_NOI: Tensor) -> Tensor:
    out_NOI = stack_NOI.to(work_dtype(stack_NOI), copy=True)
    for x_OI in out_NOI:
        x_OI /= x_OI.norm().clamp(min=EPS)
        for a, b, c in COEFFICIENTS:
            gram_OO = x_OI @ x_OI.T
            x_OI.copy_(a * x_OI + (b * gram_OO + c * gram_OO @ gram_OO) @ x_OI)
    return out_NOI.to(stack_NOI.dtype)
