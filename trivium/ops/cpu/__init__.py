"""The compiled kernels of the CPU: which library is loaded, and how a kernel is called.

Three libraries are built from the same sources, for AVX-512, AVX2 and neither; the best that this CPU can run is loaded
with the package, or the one that TRIVIUM_ISA names. Where none is built, `missing` says why and the torch path serves.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trivium.ops.cpu.sources import BUILD_LOG, ISA_FLAGS, fingerprint

_FOLDER = Path(__file__).parent


class _Missing(Exception):
    """Why there is no library."""


def _open(isa: str) -> ctypes.CDLL:
    path = _FOLDER / f"libtrivium_{isa}.so"
    if not path.exists():
        raise _Missing(f"no compiled kernels in this installation: {_why_not_built() or 'they were not built'}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise _Missing(f"{path.name} cannot be loaded: {error}") from None
    library.trivium_best_isa.restype = library.trivium_fingerprint.restype = ctypes.c_char_p
    library.trivium_took_no_memory.restype = ctypes.c_int64
    if (_FOLDER / "cpu.cpp").exists() and library.trivium_fingerprint().decode() != fingerprint(_FOLDER.parent):
        raise _Missing(f"{path.name} is of other sources than these: {_why_not_built() or 'install again'}")
    return library


def _why_not_built() -> str | None:
    log = _FOLDER / BUILD_LOG
    return log.read_text(encoding="utf-8").strip() if log.exists() else None


def _load() -> tuple[ctypes.CDLL, str]:
    """The library for this CPU, and its instruction set."""
    if os.environ.get("TRIVIUM_NATIVE") == "0":
        raise _Missing("TRIVIUM_NATIVE=0 asks for the torch path")
    plain = _open("plain")  # torch, imported above, has brought the OpenMP runtime
    best = plain.trivium_best_isa().decode()
    isa = os.environ.get("TRIVIUM_ISA") or best
    if isa not in ISA_FLAGS:
        raise ValueError(f"TRIVIUM_ISA: wanted one of {', '.join(ISA_FLAGS)}, got {isa!r}")
    if list(ISA_FLAGS).index(isa) < list(ISA_FLAGS).index(best):
        raise ValueError(f"TRIVIUM_ISA: this CPU cannot run {isa}, its best is {best}")
    return (plain if isa == "plain" else _open(isa)), isa


missing: str | None = None
isa: str | None = None
_library: ctypes.CDLL | None = None
try:
    _library, isa = _load()
except _Missing as _reason:
    missing = str(_reason)


def serves(*tensors: Tensor) -> bool:
    """Whether compiled kernels run on these: they are loaded, and all is float32 on the CPU."""
    return _library is not None and all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)


def empty(shape: Sequence[int] | int) -> Tensor:
    """Raw float32 memory on the CPU, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def numbers(values: Sequence[int]) -> Tensor:
    """int64 [len(values)] on the CPU, whatever torch's default device is."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def keep_memory() -> bool:
    """Freed memory stays with the process from now on; whether this C library (glibc) can do that.

    Every step of a training run frees what the next one asks for again: memory given back in between costs a page
    fault for each 4 KB, a tenth of a small model's step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def call(name: str, *args: Tensor | float | None) -> None:
    """Run the kernel `trivium_<name>` on all of torch's threads.

    Tensors go in as pointers; what is an int, a float or a pointer in the first call of a name is one in all. Raises
    ValueError where a tensor is not contiguous memory of the CPU, MemoryError where the kernel finds no room for what
    it computes in between.
    """
    plain = []
    for arg in args:
        if isinstance(arg, Tensor):
            if arg.device.type != "cpu" or not arg.is_contiguous():
                raise ValueError(
                    f"{name}: wanted contiguous memory of the CPU, got {tuple(arg.shape)} on {arg.device} "
                    f"with strides {arg.stride()}"
                )
            pointer = arg.data_ptr()
            if not pointer and arg.numel():
                raise ValueError(f"{name}: wanted memory, got a tensor {tuple(arg.shape)} whose storage is gone")
            plain.append(pointer)
        else:
            plain.append(arg)
    function = _functions.get(name) or _declare(name, args)
    function(torch.get_num_threads(), *plain)
    if _library.trivium_took_no_memory():
        raise MemoryError(f"{name}: no memory for what it computes in between")


_functions: dict[str, Any] = {}


def _declare(name: str, args: Sequence[Tensor | float | None]) -> Any:
    """The function with the types of its arguments: converting them is then ctypes' own work, and quick."""
    function = getattr(_library, f"trivium_{name}")
    function.restype = None
    function.argtypes = [ctypes.c_int64, *map(_kind, args)]
    _functions[name] = function
    return function


def _kind(arg: Tensor | float | None) -> type:
    if arg is None or isinstance(arg, Tensor):
        return ctypes.c_void_p
    return ctypes.c_float if isinstance(arg, float) else ctypes.c_int64
