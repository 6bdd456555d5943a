"""A read of the residual stream on the CPU's compiled kernels; it saves its inputs alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trivium.ops import cpu
from trivium.ops.cpu.op import cpu_op


@cpu_op("attnres")
def _attnres(sources: list[Tensor], query_D: Tensor, eps: float) -> Tensor:
    sources = [source_TD.contiguous() for source_TD in sources]
    x_TD = cpu.empty(sources[0].shape)
    cpu.call("attnres", _addresses(sources), query_D.contiguous(), x_TD, len(sources), *x_TD.shape, eps)
    return x_TD


@cpu_op("attnres_backward")
def _attnres_backward(dx_TD: Tensor, sources: list[Tensor], query_D: Tensor, eps: float) -> list[Tensor]:
    """The gradients of the sources, then that of the query."""
    sources = [source_TD.contiguous() for source_TD in sources]
    gradients, dquery_D = [cpu.empty(source_TD.shape) for source_TD in sources], cpu.empty(query_D.shape)
    args = (dx_TD.contiguous(), _addresses(sources), query_D.contiguous(), _addresses(gradients), dquery_D)
    cpu.call("attnres_backward", *args, len(sources), *dx_TD.shape, eps)
    return [*gradients, dquery_D]


def attnres_native(blocks: tuple[Tensor, ...], sum_TD: Tensor, query_D: Tensor, eps: float) -> Tensor:
    return _attnres([*blocks, sum_TD], query_D, eps)


def _addresses(tensors: list[Tensor]) -> Tensor:
    return cpu.numbers([x.data_ptr() for x in tensors])


@_attnres.register_fake
def _(sources: list[Tensor], query_D: Tensor, eps: float) -> Tensor:
    return sources[0].new_empty(sources[0].shape)


@_attnres_backward.register_fake
def _(dx_TD: Tensor, sources: list[Tensor], query_D: Tensor, eps: float) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*sources, query_D)]


def _keep(ctx: Any, inputs: tuple[list[Tensor], Tensor, float], output: Tensor) -> None:
    sources, query_D, ctx.eps = inputs
    ctx.save_for_backward(*sources, query_D)


def _backward(ctx: Any, needs: Sequence[Any], dx_TD: Tensor) -> tuple[list[Tensor], Tensor, None]:
    *sources, query_D = ctx.saved_tensors
    *gradients, dquery_D = _attnres_backward(dx_TD, sources, query_D, ctx.eps)
    return gradients, dquery_D, None


_attnres.register_autograd(_backward, setup_context=_keep)
