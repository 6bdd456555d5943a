"""The compiled kernels of the CPU: which library is loaded, and how a kernel is called.

Three libraries are built from the same sources, for AVX-512, AVX2 and neither; the best that this CPU can run is loaded
with the package, or the one that TRIVIUM_ISA names. Where none is built, `missing` says why and the torch path serves.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trivium.ops.cpu.sources import ISA_FLAGS, fingerprint

_FOLDER = Path(__file__).parent


class _Missing(Exception):
    """Why there is no library."""


def _open(isa: str) -> ctypes.CDLL:
    path = _FOLDER / f"libtrivium_{isa}.so"
    if not path.exists():
        raise _Missing("no compiled kernels in this installation: it was installed without a C++ compiler (c++, g++)")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise _Missing(f"{path.name} cannot be loaded: {error}") from None


def _load() -> tuple[ctypes.CDLL, str]:
    """The library for this CPU, and its instruction set."""
    if os.environ.get("TRIVIUM_NATIVE") == "0":
        raise _Missing("TRIVIUM_NATIVE=0 asks for the torch path")
    plain = _open("plain")  # torch, imported above, has brought the OpenMP runtime
    plain.trivium_best_isa.restype = plain.trivium_fingerprint.restype = ctypes.c_char_p
    if (_FOLDER / "cpu.cpp").exists() and plain.trivium_fingerprint().decode() != fingerprint(_FOLDER.parent):
        raise _Missing("the compiled kernels are of other sources than these: pip install again")
    best = plain.trivium_best_isa().decode()
    isa = os.environ.get("TRIVIUM_ISA", best)
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


def call(name: str, *args: Tensor | float | None) -> None:
    """Run the kernel `trivium_<name>` on all of torch's threads. Tensors go in as pointers and are contiguous."""
    converted = []
    for arg in args:
        if arg is None:
            converted.append(ctypes.c_void_p())
        elif isinstance(arg, Tensor):
            assert arg.is_contiguous() and arg.device.type == "cpu", f"{name}: {tuple(arg.shape)}, {arg.stride()}"
            converted.append(ctypes.c_void_p(arg.data_ptr()))
        else:
            converted.append(ctypes.c_float(arg) if isinstance(arg, float) else ctypes.c_int64(arg))
    function = getattr(_library, f"trivium_{name}")
    function.restype = None
    function(ctypes.c_int64(torch.get_num_threads()), *converted)
