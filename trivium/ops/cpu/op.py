"""Operations of the CPU's kernels: registered with torch.library, and short where nobody looks on.

A registered operation is what torch.compile, fake tensors, functorch and tensor subclasses can see through; its layers
of Python cost 40 to 100 µs a call, as much as the kernels of a small model. Called eagerly with plain tensors the same
functions run under a torch.autograd.Function, or by themselves where no gradient is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)


def cpu_op(name: str) -> Callable[[Callable[..., Any]], CpuOp]:
    """Registers a function on CPU tensors as `trivium::<name>`; its arguments are positional, and none is changed."""

    def wrap(run: Callable[..., Any]) -> CpuOp:
        registered = torch.library.custom_op(f"trivium::{name}", run, mutates_args=(), device_types="cpu")
        return CpuOp(name, run, registered)

    return wrap


class CpuOp:
    """`registered` is the torch.library operation."""

    def __init__(self, name: str, run: Callable[..., Any], registered: Any) -> None:
        self.name, self.run, self.registered = name, run, registered
        self.register_fake = registered.register_fake
        parameters = inspect.signature(run).parameters.values()
        self._floats = [i for i, x in enumerate(parameters) if x.annotation in (float, "float")]
        self._function: type[torch.autograd.Function] | None = None

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """`backward(ctx, needs, *gradients)` gives one gradient an argument; `needs` says who asks for one.

        Both are shaped as the arguments: of a list of tensors a list. `setup_context(ctx, inputs, output)` as torch's.
        """
        self.registered.register_autograd(
            lambda ctx, *gradients: backward(ctx, ctx.needs_input_grad, *gradients), setup_context=setup_context
        )

        def forward(ctx: Any, lengths: Sequence[int | None], *flat: Any) -> Any:
            args = _nested(lengths, flat)
            output = self.run(*args)
            setup_context(ctx, args, output)
            ctx.lengths = lengths
            return output

        def backward_flat(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            found = backward(ctx, _nested(ctx.lengths, ctx.needs_input_grad[1:]), *gradients)
            return None, *_flat(found if isinstance(found, tuple) else (found,), ctx.lengths)

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward_flat)}
        self._function = type(f"trivium::{self.name}", (torch.autograd.Function,), methods)

    def __call__(self, *given: Any) -> Any:
        args = list(given)
        for i in self._floats:  # a kernel takes 5 for another number than 5.0
            args[i] = float(args[i])
        if torch.compiler.is_compiling():  # Dynamo, which must not trace the questions below
            return self.registered(*args)
        lengths = [len(x) if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor) else None for x in args]
        flat = _flat(args, lengths)
        tensors = [x for x in flat if isinstance(x, Tensor)]
        if _asks_forward(tensors):
            raise RuntimeError(f"{self.name}: has no forward-mode derivative; use_backend('torch') may have one")
        if _is_watched() or not all(_is_plain(x) for x in tensors):
            return self.registered(*args)
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            return self.run(*args)
        if self._function is None:  # its result must not pass for a constant: torch.library's raises in a backward
            return self.registered(*args)
        return self._function.apply(lengths, *flat)


def _is_plain(x: Tensor) -> bool:
    """Numbers in memory as they are: torch resolves negated views and tensors that are zero by definition."""
    return type(x) in _PLAIN and not (x.is_neg() or x._is_zerotensor())


def _is_watched() -> bool:
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()
        or torch.autograd._profiler_enabled()  # which names what goes through torch
    )


def _asks_forward(tensors: Sequence[Tensor]) -> bool:
    """Whether a tangent would be dropped without a word, as torch.library does."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        return True
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    return any(transform.key() == torch._C._functorch.TransformType.Jvp for transform in transforms)


def _flat(args: Sequence[Any], lengths: Sequence[int | None]) -> list[Any]:
    flat: list[Any] = []
    for arg, length in zip(args, lengths, strict=True):
        if length is None:
            flat.append(arg)
        else:
            flat.extend(arg)
    return flat


def _nested(lengths: Sequence[int | None], flat: Sequence[Any]) -> tuple[Any, ...]:
    args: list[Any] = []
    at = 0
    for length in lengths:
        args.append(flat[at] if length is None else list(flat[at : at + length]))
        at += 1 if length is None else length
    return tuple(args)
