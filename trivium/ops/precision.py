"""The dtype that arithmetic runs in, whatever dtype comes in."""

from __future__ import annotations

import torch
from torch import Tensor


def work_dtype(x: Tensor) -> torch.dtype:
    """float32, or float64 for float64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
