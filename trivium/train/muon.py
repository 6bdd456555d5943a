"""Muon: momentum whose update is made orthogonal, so that every direction of a matrix moves at one rate.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). A parameter may be a stack of matrices,
[..., out, in] such as expert weights [E, F, L]: each of them is a matrix of its own. All matrices of one shape, of all
parameters, go through one batched Newton-Schulz: a small model is bound by the number of calls, not by their size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor

from trivium.ops.newton_schulz import orthogonalise


class Muon(torch.optim.Optimizer):
    """Per matrix: m ← μ·m + (1 − μ)·g; u = (1 − μ)·g + μ·m (Nesterov); w ← (1 − lr·decay)·w − lr·s·NS(u).

    s = sqrt(max(1, out/in)), torch's "original" rule: a learning rate belongs to a rule, and under "match_rms_adamw",
    0.2·sqrt(max(out, in)), the same step needs one 3 times (256 wide) to 17 times (7168 wide) smaller. out and in
    are those of the whole matrix.

    `ns_dtype` is what Newton-Schulz computes in: None is float32 on the CPU and bfloat16 elsewhere. Raises ValueError
    for a parameter that is no matrix with both sides above 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "ns_dtype": ns_dtype})
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.ndim < 2 or min(weight.shape[-2:]) < 2:
                    raise ValueError(
                        f"muon: wanted matrices [..., out, in] with both sides above 1, got {tuple(weight.shape)}"
                    )

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    out, in_ = weight.shape[-2:]
                    shape = (min(out, in_), max(out, in_), weight.device, group["ns_dtype"] or _ns_dtype(weight))
                    alike[shape].append(weight)
            for (short, long, device, dtype), weights in alike.items():
                counts = [weight.numel() // (short * long) for weight in weights]
                stack = torch.empty(sum(counts), short, long, device=device, dtype=dtype)
                for weight, part in zip(weights, stack.split(counts), strict=True):
                    self._nesterov(weight, group["momentum"], _as(weight, part))
                for weight, part in zip(weights, orthogonalise(stack).split(counts), strict=True):
                    if group["weight_decay"]:
                        weight.mul_(1 - group["lr"] * group["weight_decay"])
                    scale = update_scale(*weight.shape[-2:])
                    weight.add_(_as(weight, part).to(weight.dtype), alpha=-group["lr"] * scale)
        return loss

    def _nesterov(self, weight: Tensor, momentum: float, update: Tensor) -> None:
        """Into `update`, in its dtype."""
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
        if update.dtype == weight.dtype:
            torch.lerp(weight.grad, state["momentum_buffer"], momentum, out=update)
        else:
            update.copy_(weight.grad.lerp(state["momentum_buffer"], momentum))


def _as(weight: Tensor, part_NSL: Tensor) -> Tensor:
    """A weight's wide matrices seen in its own shape: Newton-Schulz has NS(u.T) = NS(u).T, and a small Gram matrix."""
    own = part_NSL if weight.shape[-2] == part_NSL.shape[-2] else part_NSL.mT
    return own.unflatten(0, weight.shape[:-2]) if weight.ndim > 2 else own[0]


def update_scale(num_out: int, num_in: int) -> float:
    """sqrt(max(1, out/in)): an orthogonal [out, in] then changes outputs by the same RMS whatever its shape."""
    return math.sqrt(max(1.0, num_out / num_in))


def _ns_dtype(weight: Tensor) -> torch.dtype:
    return torch.float32 if weight.device.type == "cpu" else torch.bfloat16
