"""Gradients that have no gradient of their own, and say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward of an autograd.Function: it runs without a graph, and a second derivative raises RuntimeError.

    torch's own of this name raises only where the gradient that came in has a graph. The penalty |d loss / d x|² has
    none on its way in: its share of the gradient would be left out without a word.
    """

    @wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        name = type(ctx).__name__.removesuffix("Backward").strip("_")
        if isinstance(found, tuple):
            return tuple(None if x is None else _end(x, name) for x in found)
        return _end(found, name)

    return once


def _end(x: Tensor, name: str) -> Tensor:
    return _End.apply(x.detach().requires_grad_(), name)


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        raise RuntimeError(f"{ctx.name}: its gradient has no gradient, a second derivative was asked for")
