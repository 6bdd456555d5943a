"""The residual stream of Attention Residuals: closed blocks, and the sum of the block that is still open."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trivium.model import trace
from trivium.model.layers import Linear, RMSNorm
from trivium.ops.attnres import attnres, attnres_weights
from trivium.ops.precision import work_dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualStream:
    """`blocks`, each [T, D], oldest first, and `sum_TD`, the running sum; None when the block has just restarted."""

    blocks: tuple[Tensor, ...]
    sum_TD: Tensor | None

    @classmethod
    def start(cls, embed_TD: Tensor) -> ResidualStream:
        return cls(blocks=(), sum_TD=embed_TD)

    def add(self, output_TD: Tensor) -> ResidualStream:
        """A sublayer's output joins the running sum, kept in the hidden dtype."""
        return ResidualStream(blocks=self.blocks, sum_TD=output_TD if self.sum_TD is None else self.sum_TD + output_TD)

    def close_block(self) -> ResidualStream:
        """The running sum becomes a block; the next one starts empty."""
        return ResidualStream(blocks=(*self.blocks, self.sum_TD), sum_TD=None)


def read(stream: ResidualStream, norm: RMSNorm, proj: Linear, name: str) -> Tensor:
    """What a sublayer reads, [T, D]. The norm's weight multiplies the key alone, so the query is norm * proj."""
    work = work_dtype(norm.weight)
    query_D = norm.weight.to(work) * proj.weight[0].to(work)
    trace.record(
        f"{name}.weight",
        lambda: attnres_weights(torch.stack([*stream.blocks, stream.sum_TD]), query_D, norm.eps),
        token_dim=1,
    )
    return attnres(stream.blocks, stream.sum_TD, query_D, norm.eps)
