"""Muon: momentum whose update is made orthogonal, so that every direction of a matrix moves at one rate.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), head by head: what is made orthogonal is
a block of `trivium.model.heads`, and a head whose gradient is large takes nothing from its neighbours.

A parameter may be a stack of matrices, [..., out, in] such as expert weights [E, F, L]: each of them is a matrix of its
own. All blocks of one shape, of all parameters, go through one batched Newton-Schulz: a small model is bound by the
number of calls, not by their size.

Parameters may be DTensors. Momentum is then sharded as the weight is, and a block whose rows lie with several processes
is made orthogonal whole, by one of them (`trivium.parallel.exchange`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from trivium.model.heads import WHOLE, Blocks, Rectangle
from trivium.ops.newton_schulz import orthogonalise
from trivium.ops.precision import work_dtype
from trivium.parallel.exchange import Exchange, Piece, Place, shard_bounds


class Muon(torch.optim.Optimizer):
    """Per block: m ← μ·m + (1 − μ)·g; u = (1 − μ)·g + μ·m (Nesterov); w ← (1 − lr·decay)·w − lr·s·NS(u).

    `blocks` says how the parameters of these names are cut; any other is one block, or one a matrix of its stack.

    s = sqrt(max(1, out/in)) · sqrt(min(out, in) / Σ min(block out, block in)), out and in those of the whole matrix. The
    first is torch's "original" rule: a learning rate belongs to a rule, and under "match_rms_adamw", 0.2·sqrt(max(out,
    in)), the same step needs one 3 times (256 wide) to 17 times (7168 wide) smaller. The second makes the RMS of the
    update that of the uncut matrix, so that the cut does not change the rate: an orthogonal [out, in] has a squared norm
    of min(out, in), and 96 blocks of 128 rows out of [12288, 7168] have 12,288 and not 7,168.

    How parameters are laid out changes nothing but rounding. A parameter has a gradient on every process or on none.
    `ns_dtype` is what Newton-Schulz computes in: None is float32 on the CPU (float64 of float64) and bfloat16 elsewhere.
    Raises ValueError for a parameter that is no contiguous matrix with both sides above 1, and for blocks of no
    parameter or another shape.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        lr: float = 0.02,
        *,
        blocks: Mapping[str, Blocks] | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_dtype: torch.dtype | None = None,
    ) -> None:
        named, self.blocks = list(named), dict(blocks or {})
        super().__init__(named, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "ns_dtype": ns_dtype})
        for name, weight in named:
            if weight.ndim < 2 or min(weight.shape[-2:]) < 2:
                raise ValueError(
                    f"muon: {name}: wanted matrices [..., out, in] with both sides above 1, got {tuple(weight.shape)}"
                )
            if not weight.is_contiguous():
                raise ValueError(f"muon: {name}: wanted contiguous memory, got strides {weight.stride()}")
            try:
                self.blocks.get(name, WHOLE).rectangles(*weight.shape[-2:])
            except ValueError as error:
                raise ValueError(f"muon: {name}: {error}") from None
        if unknown := self.blocks.keys() - dict(named).keys():
            raise ValueError(f"muon: blocks of {min(unknown)}, which is none of these parameters")
        self._plans: dict[Any, _Plan] = {}

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
            together = defaultdict(list)
            for name, weight in zip(group["param_names"], group["params"], strict=True):
                if weight.grad is not None:
                    dtype = group["ns_dtype"] or _ns_dtype(weight)
                    together[_row_mesh(weight), weight.device, dtype].append((name, weight))
            for (mesh, device, dtype), named in together.items():
                self._move(named, mesh, torch.empty(0, device=device, dtype=dtype), group)
        return loss

    def _move(
        self, named: Sequence[tuple[str, Tensor]], mesh: DeviceMesh | None, like: Tensor, group: dict[str, Any]
    ) -> None:
        plan = self._plan(named, mesh)
        opened = [self._open(weight, group["momentum"]) for _, weight in named]
        stacks = {shape: like.new_empty(count, *shape) for shape, count in plan.counts.items()}

        def update(piece: Piece, into: Tensor) -> None:
            matrix = opened[plan.matrix_idx(piece)]
            _nesterov(plan.held(piece, matrix.grad_RC), plan.held(piece, matrix.momentum_RC), group["momentum"], into)

        for run in plan.runs:
            matrix, into = opened[run.matrix_idx], run.slots(stacks)
            _nesterov(run.blocks(matrix.grad_RC), run.blocks(matrix.momentum_RC), group["momentum"], into)
        if plan.exchange.anything_sent:
            for piece, part in plan.exchange.to_owners(update, like, mesh.get_group()):
                plan.gathered(piece, stacks).copy_(part)

        for shape, stack in stacks.items():  # one by one: each lets go of what it came from
            stacks[shape] = orthogonalise(stack)
        for matrix in opened:
            if group["weight_decay"]:
                matrix.weight_RC.mul_(1 - group["lr"] * group["weight_decay"])
        for run in plan.runs:
            weight = run.blocks(opened[run.matrix_idx].weight_RC)
            weight.add_(run.slots(stacks).to(weight.dtype), alpha=-group["lr"] * plan.scales[run.matrix_idx])
        if plan.exchange.anything_sent:
            answer = plan.exchange.to_holders(
                lambda piece, into: into.copy_(plan.gathered(piece, stacks)), like, mesh.get_group()
            )
            for piece, part in answer:
                weight = plan.held(piece, opened[plan.matrix_idx(piece)].weight_RC)
                weight.add_(part.to(weight.dtype), alpha=-group["lr"] * plan.scales[plan.matrix_idx(piece)])
        for (_, weight), matrix in zip(named, opened, strict=True):
            matrix.close(weight)

    def _plan(self, named: Sequence[tuple[str, Tensor]], mesh: DeviceMesh | None) -> _Plan:
        key = mesh, tuple(name for name, _ in named)
        if key not in self._plans:
            blocks = [self.blocks.get(name, WHOLE) for name, _ in named]
            self._plans[key] = _Plan([weight.shape for _, weight in named], blocks, mesh)
        return self._plans[key]

    def _open(self, weight: Tensor, momentum: float) -> _Matrix:
        """The momentum takes in the gradient; what this process then works on."""
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        grad, average = weight.grad, state["momentum_buffer"]
        if isinstance(weight, DTensor) and grad.placements != weight.placements:
            grad = grad.redistribute(placements=weight.placements)
        _local(average).lerp_(_local(grad), 1 - momentum)
        if _is_cut_otherwise(weight):  # every process does all of it, and keeps what is its own
            return _Matrix(*(x.full_tensor().contiguous().flatten(0, -2) for x in (weight, grad, average)))
        return _Matrix(*(_local(x).contiguous().flatten(0, -2) for x in (weight, grad, average)))


class _Matrix(NamedTuple):
    """A parameter, its gradient and momentum as rows [R, C]: a stack's matrices lie one below the other."""

    weight_RC: Tensor
    grad_RC: Tensor
    momentum_RC: Tensor

    def close(self, weight: Tensor) -> None:
        """Where the rows are not the parameter's own memory, its part of them goes there."""
        if _is_cut_otherwise(weight):
            full = DTensor.from_local(self.weight_RC.view(weight.shape), weight.device_mesh, run_check=False)
            weight.to_local().copy_(full.redistribute(placements=weight.placements).to_local())


class _Plan:
    """Where every block of these parameters goes, found once."""

    def __init__(self, shapes: Sequence[torch.Size], blocks: Sequence[Blocks], mesh: DeviceMesh | None) -> None:
        self.scales = [update_scale(*shape[-2:], cut) for shape, cut in zip(shapes, blocks, strict=True)]
        places = [
            Place(matrix_idx, rectangle)
            for matrix_idx, (shape, cut) in enumerate(zip(shapes, blocks, strict=True))
            for rectangle in _stacked(shape, cut)
        ]
        rank, size = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        bounds = [shard_bounds(shape[0], size, math.prod(shape[1:-1])) for shape in shapes]
        self.exchange = Exchange(places, bounds, rank, size)
        self._first_rows = [of[rank] for of in bounds]
        self._widths = [shape[-1] for shape in shapes]
        self.counts: dict[tuple[int, int], int] = defaultdict(int)
        self.runs = self._find_runs()
        self._slots = {}
        for place_idx in self.exchange.gathered:
            shape = _shape(places[place_idx].rectangle)
            self._slots[place_idx] = shape, self.counts[shape]
            self.counts[shape] += 1

    def matrix_idx(self, piece: Piece) -> int:
        return self.exchange.places[piece.place_idx].matrix_idx

    def held(self, piece: Piece, own_RC: Tensor) -> Tensor:
        """The piece in the rows this process has."""
        matrix_idx, rectangle = self.exchange.places[piece.place_idx]
        first = self._first_rows[matrix_idx]
        return own_RC[piece.top - first : piece.bottom - first, rectangle.left : rectangle.right]

    def gathered(self, piece: Piece, stacks: Mapping[tuple[int, int], Tensor]) -> Tensor:
        """The piece in the stack where its rectangle becomes whole."""
        rectangle = self.exchange.places[piece.place_idx].rectangle
        shape, slot = self._slots[piece.place_idx]
        whole = _turned(stacks[shape][slot], rectangle.height > rectangle.width)
        return whole[piece.top - rectangle.top : piece.bottom - rectangle.top]

    def _find_runs(self) -> list[_Run]:
        alike = defaultdict(list)
        for place_idx in self.exchange.whole:
            matrix_idx, rectangle = self.exchange.places[place_idx]
            row = rectangle.top - self._first_rows[matrix_idx]
            offset = row * self._widths[matrix_idx] + rectangle.left
            alike[matrix_idx, rectangle.height, rectangle.width].append(offset)
        runs = []
        for (matrix_idx, height, width), offsets in alike.items():
            shape = min(height, width), max(height, width)
            for first, step, count in _progressions(offsets):
                runs.append(_Run(matrix_idx, first, step, count, height, width, self.counts[shape]))
                self.counts[shape] += count
        return runs


@dataclass(frozen=True)
class _Run:
    """Blocks of one shape at equal distances in one matrix's memory, and their places in the stack of that shape.

    One operation for all heads of a matrix, whether they are rows, columns, or every other row span.
    """

    matrix_idx: int
    offset: int
    step: int
    count: int
    height: int
    width: int
    slot: int

    def blocks(self, own_RC: Tensor) -> Tensor:
        """[count, height, width], in the matrix's memory."""
        shape, strides = (self.count, self.height, self.width), (self.step, own_RC.shape[1], 1)
        return own_RC.as_strided(shape, strides, own_RC.storage_offset() + self.offset)

    def slots(self, stacks: Mapping[tuple[int, int], Tensor]) -> Tensor:
        """The same shape, in the stack's memory."""
        stack = stacks[min(self.height, self.width), max(self.height, self.width)]
        return _turned(stack[self.slot : self.slot + self.count], self.height > self.width)


def update_scale(num_out: int, num_in: int, blocks: Blocks = WHOLE) -> float:
    """sqrt(max(1, out/in)), by which an orthogonal [out, in] changes outputs by the same RMS whatever its shape, times
    what blocks have more of a norm than the whole matrix would.
    """
    rank = sum(min(rectangle.height, rectangle.width) for rectangle in blocks.rectangles(num_out, num_in))
    return math.sqrt(max(1.0, num_out / num_in) * min(num_out, num_in) / rank)


def _nesterov(grad: Tensor, momentum: Tensor, weight: float, update: Tensor) -> None:
    """Into `update`, in its dtype."""
    if update.dtype == grad.dtype:
        torch.lerp(grad, momentum, weight, out=update)
    else:
        update.copy_(grad.lerp(momentum, weight))


def _stacked(shape: torch.Size, cut: Blocks) -> list[Rectangle]:
    """The blocks of every matrix of [..., out, in], in the rows of all of them."""
    num_out, num_in = shape[-2:]
    blocks = cut.rectangles(num_out, num_in)
    tops = range(0, math.prod(shape[:-1]), num_out)
    return [Rectangle(first + top, first + bottom, *sides) for first in tops for top, bottom, *sides in blocks]


def _shape(rectangle: Rectangle) -> tuple[int, int]:
    return min(rectangle.height, rectangle.width), max(rectangle.height, rectangle.width)


def _turned(stack: Tensor, is_tall: bool) -> Tensor:
    """A tall block is worked on as a wide one: Newton-Schulz has NS(u.T) = NS(u).T, and a small Gram matrix."""
    return stack.mT if is_tall else stack


def _progressions(offsets: Sequence[int]) -> list[tuple[int, int, int]]:
    """Rising numbers as runs of equal steps: (first, step, count)."""
    runs: list[tuple[int, int, int]] = []
    for offset in offsets:
        if runs:
            first, step, count = runs[-1]
            if count == 1 or offset == first + step * count:
                runs[-1] = first, (offset - first if count == 1 else step), count + 1
                continue
        runs.append((offset, 0, 1))
    return runs


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _row_mesh(weight: Tensor) -> DeviceMesh | None:
    """The processes among which dim 0 is cut; None where this process works on the whole parameter."""
    if isinstance(weight, DTensor) and weight.device_mesh.ndim == 1 and weight.placements == (Shard(0),):
        return weight.device_mesh
    return None


def _is_cut_otherwise(weight: Tensor) -> bool:
    """By columns, or over two dims of a mesh."""
    return isinstance(weight, DTensor) and _row_mesh(weight) is None and set(weight.placements) != {Replicate()}


def _ns_dtype(weight: Tensor) -> torch.dtype:
    return work_dtype(weight) if weight.device.type == "cpu" else torch.bfloat16
