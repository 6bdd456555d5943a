"""SiTU, the activation of every feed-forward here."""

from __future__ import annotations

from torch import Tensor

from trivium.ops import cpu
from trivium.ops.backend import choose
from trivium.ops.situ.fused import situ_fused
from trivium.ops.situ.native import situ_native
from trivium.ops.situ.reference import situ_reference


def situ(gate_TF: Tensor, up_TF: Tensor, *, bound: float = 4.0, up_bound: float = 25.0) -> Tensor:
    """Gated activation that stays bounded on both sides.

    bound·tanh(gate/bound)·sigmoid(gate) · up_bound·tanh(up/up_bound), in float32 whatever comes in (float64 for
    float64), in the dtype that came. Any leading shape. The cap on the gate is inside the tanh alone: sigmoid sees
    the raw gate. K3 technical report; released modelling code. Raises ValueError for two shapes or dtypes, or a bound
    that is not positive.
    """
    if gate_TF.shape != up_TF.shape:
        raise ValueError(f"situ: gate and up want one shape, got {tuple(gate_TF.shape)} and {tuple(up_TF.shape)}")
    if gate_TF.dtype != up_TF.dtype or not gate_TF.is_floating_point():
        raise ValueError(f"situ: gate and up want one floating dtype, got {gate_TF.dtype} and {up_TF.dtype}")
    if not (bound > 0 and up_bound > 0):
        raise ValueError(f"situ: bounds are positive, got {bound} and {up_bound}")
    native = situ_native if cpu.serves(gate_TF, up_TF) else None
    run = choose("situ", reference=situ_reference, torch=situ_fused, native=native)
    return run(gate_TF, up_TF, bound, up_bound)
