"""Batch: what a training step is given, whatever the data was."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trivium.ops.pixels import Pixels
from trivium.ops.rows import Rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """T packed tokens and what should follow each.

    `targets_T` (int64) is the token after `ids_T` (int64) in the same document: the shift is done. `weight_T` (float32)
    is the weight of each target in the loss, 0 for none. `num_bytes` are the bytes of text that the weighted targets
    stand for. `source` names where the text came from. `logprobs_T` and `advantage_T` are the policy's, `pixels` the
    pictures behind the placeholders, None where there are none.
    """

    ids_T: Tensor
    targets_T: Tensor
    weight_T: Tensor
    rows: Rows
    num_bytes: int
    source: str
    pixels: Pixels | None = None
    logprobs_T: Tensor | None = None
    advantage_T: Tensor | None = None

    def __post_init__(self) -> None:
        shape = (self.rows.num_tokens,)
        for name, dtype in (
            ("ids_T", torch.int64),
            ("targets_T", torch.int64),
            ("weight_T", torch.float32),
            ("logprobs_T", torch.float32),
            ("advantage_T", torch.float32),
        ):
            tensor = getattr(self, name)
            if tensor is None and name in ("logprobs_T", "advantage_T"):
                continue
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"batch: {name} wants {dtype} of shape {shape}, got {tensor.dtype} of {tuple(tensor.shape)}"
                )
        if self.num_bytes < 0:
            raise ValueError(f"batch: num_bytes is never negative, got {self.num_bytes}")
