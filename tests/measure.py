"""How far two tensors are apart."""

from torch import Tensor


def relative_error(got: Tensor, want: Tensor) -> float:
    """norm of the difference over the norm of `want`, in float64."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-300))
