"""A function on several gloo processes of this machine, as torchrun would start them."""

from __future__ import annotations

import io
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp

from trivium.parallel.world import open_world

# torch._dynamo is what FSDP2 loads when it is first used: a second of each process.
_LOADED = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "trivium.train.pretrain"]
_TIMEOUT_S = 300.0


def on_processes(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(world, *arguments)` returns on each of `size` processes, by rank; one thread each.

    Raises RuntimeError with the traceback of the first that failed.
    """
    context = mp.get_context("forkserver")  # what it has loaded once, no process loads again
    context.set_forkserver_preload(_LOADED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(theirs, rank, size, port, function, arguments), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    answers = [_answer(pipe) for pipe in pipes]
    for process in processes:
        process.join(10)
        process.kill()
    for rank, (done, value) in enumerate(answers):
        if not done:
            raise RuntimeError(f"process {rank} of {size}: {value}")
    return [value for _, value in answers]


def _answer(pipe: Connection) -> tuple[bool, Any]:
    if not pipe.poll(_TIMEOUT_S):
        return False, "no answer in time"
    return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)


def _tell(pipe: Connection, done: bool, value: Any) -> None:
    """As bytes: a tensor in a pipe is a piece of memory that its sender must live to share."""
    content = io.BytesIO()
    torch.save((done, value), content)
    pipe.send_bytes(content.getvalue())


def _run(
    pipe: Connection, rank: int, size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    try:
        with open_world("cpu") as world:
            _tell(pipe, True, function(world, *arguments))
    except Exception:
        _tell(pipe, False, traceback.format_exc())
        raise
