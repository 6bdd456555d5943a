"""Batch: what a training step is given, whatever the data was."""

from __future__ import annotations

from dataclasses import dataclass, replace

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

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        if self.ids_T.device == torch.device(device):
            return self

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        pixels = self.pixels
        return replace(
            self,
            ids_T=self.ids_T.to(device),
            targets_T=self.targets_T.to(device),
            weight_T=self.weight_T.to(device),
            rows=replace(self.rows, starts_S1=self.rows.starts_S1.to(device), slots_S=moved(self.rows.slots_S)),
            pixels=None if pixels is None else replace(pixels, values_P3HW=pixels.values_P3HW.to(device)),
            logprobs_T=moved(self.logprobs_T),
            advantage_T=moved(self.advantage_T),
        )
