"""The processes of a run: one by itself, or as many as torchrun started, and what they tell one another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """`size` processes of which this one is `rank`, each with one `device`; `mesh` is None where there is but one.

    Every method but `is_first` is collective: all processes call it, in the same order. Of one process each is the
    identity.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and speaks."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place. Exact for integers; on any device."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """The largest over all processes, element by element, in place; on any device."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def sum(self, numbers: list[float]) -> list[float]:
        """Each number summed over all processes in float64, in the order of their ranks: the same bits everywhere."""
        if self.size == 1:
            return numbers
        own_X = torch.tensor(numbers, dtype=torch.float64)
        all_RX = [torch.empty_like(own_X) for _ in range(self.size)]
        dist.all_gather(all_RX, own_X)
        return [sum(column) for column in torch.stack(all_RX).T.tolist()]

    def gather(self, tensor_NX: Tensor) -> list[Tensor]:
        """The tensors [N, ...] of all processes by rank; N may differ from one to the next."""
        if self.size == 1:
            return [tensor_NX]
        counts = [torch.zeros(1, dtype=torch.int64, device=tensor_NX.device) for _ in range(self.size)]
        dist.all_gather(counts, counts[0].new_tensor([len(tensor_NX)]))
        most = max(int(count) for count in counts)
        padded = tensor_NX.new_zeros(most, *tensor_NX.shape[1:])
        padded[: len(tensor_NX)] = tensor_NX
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [part[: int(count)] for part, count in zip(parts, counts, strict=True)]

    def from_first(self, value: T) -> T:
        """What the first process says; the value of the others is not looked at. Anything that can be pickled."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def lost_one(self, error: BaseException) -> bool:
        """Whether this error is what a process sees when another one has gone."""
        if self.size == 1:
            return False
        said = str(error).lower()
        if isinstance(error, OSError):  # of a file, or of a save that another process had a part in
            return "another process does not answer" in said
        words = ("/gloo/", "connection closed by peer", "connection reset by peer", "connection refused")
        return isinstance(error, dist.DistError) or any(word in said for word in words)

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()


ALONE = World()
_TIMEOUT = timedelta(minutes=30)  # the first process reads and tokenizes the text while the others wait


@contextmanager
def open_world(device: str = "cpu") -> Iterator[World]:
    """The world that torchrun's environment describes, or one process without it; closed when the block ends.

    `device` "cuda" is, of several processes, the GPU of the local rank; gloo carries what is on the CPU, NCCL what is
    on a GPU. Raises ValueError for a single GPU asked of several processes, and for a
    device that is not there.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    asked = _checked(device)
    if size > 1 and asked.index is not None:
        raise ValueError(f"device: {size} processes cannot share {device}; wanted cpu or cuda")
    if asked.type == "cuda":
        asked = torch.device("cuda", asked.index or int(os.environ.get("LOCAL_RANK", "0")))
        if asked.index >= torch.cuda.device_count():
            raise ValueError(f"device: {asked}: torch sees {torch.cuda.device_count()} GPUs")
        torch.cuda.set_device(asked)  # what names no device means this one
    if size == 1:
        yield World(device=asked)
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if asked.type == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        mesh = init_device_mesh(asked.type, (size,), mesh_dim_names=("data",))
        yield World(rank=dist.get_rank(), size=size, device=asked, mesh=mesh)
    finally:
        dist.destroy_process_group()


def _checked(device: str) -> torch.device:
    try:
        asked = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: {device!r} is not one that torch knows") from error
    if asked.type not in ("cpu", "cuda"):
        raise ValueError(f"device: wanted cpu or cuda, got {device!r}")
    return asked
