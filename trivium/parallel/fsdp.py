"""Fully sharded data parallelism: each process holds a share of every parameter's rows, and gathers a layer to run it.

torch's FSDP2 (`fully_shard`); Zhao et al., "PyTorch FSDP", arXiv 2304.11277.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import register_dataclass

from trivium.model.kimi_k3 import KimiK3
from trivium.model.residual import ResidualStream
from trivium.parallel.world import World


def shard_(model: KimiK3, world: World) -> None:
    """Every parameter becomes a DTensor, its first dim cut over the processes; of one process nothing changes.

    A model on the meta device allocates its share only: `model.to_empty(device=...)`, then
    `initialise_(model, seed, place=share_of)`. Gradients are sums over the processes: the loss is divided by the weight
    of the whole step already. Each decoder layer is gathered by itself for its forward and again for its backward;
    embedding, head and last norm stay gathered in between, since the loss reads the head's weight outside of a forward.
    Raises ValueError for a model that is not float32.
    """
    if world.mesh is None:
        return
    if model.dtype != torch.float32:
        raise ValueError(f"fsdp: shards are float32, got a model of {model.dtype}; compute_dtype may be another")
    _register_stream()
    # A block that a layer hands on as it came is a view to autograd; nothing is ever written into one.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    for layer in model.language_model.model.layers:
        fully_shard(layer, mesh=world.mesh)
    fully_shard(model, mesh=world.mesh, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


@cache
def _register_stream() -> None:
    """FSDP2 waits for the gradients of what goes into a layer and comes out: it must see the tensors in the stream.

    torch 2.11 looks into pytrees alone, and would have let go of a layer before its backward; later ones see more.
    """
    register_dataclass(ResidualStream)


def reshard_(model: KimiK3) -> None:
    """Let go of what a forward without a backward left gathered, so that parameters are shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def share_of(full: Tensor, parameter: Tensor) -> Tensor:
    """What `parameter` holds of the full tensor, laid out as it is; nothing is sent."""
    if not isinstance(parameter, DTensor):
        return full
    full = full.to(parameter.device)
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    """All of a parameter, gradient or moment, however it is laid out. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather_model(model: KimiK3, world: World) -> KimiK3 | None:
    """The model as one process has it, on the first process's CPU; None on the others. Collective.

    Of one process it is the model itself. The first process needs memory for all of it.
    """
    if world.size == 1:
        return model
    reshard_(model)
    gathered = {}
    for name, tensor in model.state_dict().items():
        full = whole(tensor)
        if world.is_first:
            gathered[name] = full.cpu()
    if not world.is_first:
        return None
    with torch.device("meta"):
        one = KimiK3(model.config, dtype=model.dtype)
    one.load_state_dict(gathered, assign=True)
    return one
