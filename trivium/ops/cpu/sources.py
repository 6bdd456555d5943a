"""What the CPU kernels are built from: shared by setup.py, which builds them, and by the loader, which checks them."""

from __future__ import annotations

import hashlib
from pathlib import Path

# No -ffast-math: it reorders sums, drops nan, and makes the whole process flush denormals.
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-psabi"),
]
BUILD_LOG = "not_built.txt"  # beside the libraries: why there are none
ISA_FLAGS = {
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512", "-Wno-maybe-uninitialized"],
    "avx2": ["-march=x86-64-v3"],
    "plain": [],
}


def source_files(ops: Path) -> list[Path]:
    """Every C++ file below trivium/ops, in a fixed order."""
    return sorted(ops.glob("*/*.cpp"))


def fingerprint(ops: Path) -> str:
    """Of all sources, headers and flags: a library built from others says so by it."""
    digest = hashlib.sha256(repr((FLAGS, ISA_FLAGS)).encode())
    for path in (*source_files(ops), *sorted((ops / "cpu").glob("*.h"))):
        digest.update(path.relative_to(ops).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


if __name__ == "__main__":  # for make, which asks whether they are those it built
    print(fingerprint(Path(__file__).parents[1]))
