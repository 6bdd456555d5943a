"""Builds the CPU kernels: trivium/ops/cpu/libtrivium_{avx512,avx2,plain}.so, one library an instruction set.

Every C++ file of trivium/ops is compiled once for each; which library is loaded is decided where it runs, so a wheel does
not need the CPU of the machine that built it. No compiler, or one that fails: the build says so and goes on, and the
torch path serves. TRIVIUM_NATIVE=0 builds nothing; TRIVIUM_NATIVE=1 makes a failure an error.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
OPS = ROOT / "trivium" / "ops"
sys.path.insert(0, str(OPS / "cpu"))
from sources import FLAGS, ISA_FLAGS, fingerprint, source_files


class BuildKernels(build_ext):
    """The extension's file name is only a mark: what is built are the libraries beside it."""

    def run(self) -> None:
        if os.environ.get("TRIVIUM_NATIVE") == "0":
            return
        folder = OPS / "cpu" if self.inplace or self.editable_mode else Path(self.build_lib, "trivium", "ops", "cpu")
        try:
            build(folder, Path(self.build_temp))
        except (OSError, subprocess.CalledProcessError) as error:
            if os.environ.get("TRIVIUM_NATIVE") == "1":
                raise
            reason = error.stderr or str(error) if isinstance(error, subprocess.CalledProcessError) else str(error)
            print(f"trivium: CPU kernels not built, the torch path will serve: {reason}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        return []


def build(folder: Path, scratch: Path) -> None:
    """Compile and link every library into `folder`; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    isas = ISA_FLAGS if platform.machine() in ("x86_64", "AMD64") else {"plain": []}
    compiler = os.environ.get("CXX", "c++")
    stamp = f'-DTRIVIUM_FINGERPRINT="{fingerprint(OPS)}"'
    jobs = []
    for isa, flags in isas.items():
        (scratch / isa).mkdir(parents=True, exist_ok=True)
        for source in source_files(OPS):
            target = scratch / isa / f"{source.parent.name}_{source.stem}.o"
            if stale(target, source):
                jobs.append([compiler, *FLAGS, *flags, stamp, f"-I{OPS / 'cpu'}", "-c", str(source), "-o", str(target)])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in pool.map(lambda job: subprocess.run(job, check=True, capture_output=True, text=True), jobs):
            sys.stderr.write(done.stderr)
    for isa in isas:
        target = folder / f"libtrivium_{isa}.so"
        objects = [str(scratch / isa / f"{source.parent.name}_{source.stem}.o") for source in source_files(OPS)]
        # OpenMP stays unresolved: the library takes the runtime that torch brought, and there are not two pools of threads.
        part = target.with_suffix(".part")
        subprocess.run([compiler, "-shared", *objects, "-o", str(part)], check=True, capture_output=True, text=True)
        part.replace(target)


def stale(target: Path, source: Path) -> bool:
    """cpu.cpp holds the fingerprint of all sources: it is never left as it was."""
    needs = [source, *(OPS / "cpu").glob("*.h"), OPS / "cpu" / "sources.py", Path(__file__)]
    made_s = target.stat().st_mtime if target.exists() else 0.0
    return source.name == "cpu.cpp" and source.parent.name == "cpu" or made_s <= max(p.stat().st_mtime for p in needs)


setup(ext_modules=[Extension("trivium.ops.cpu._kernels", sources=[])], cmdclass={"build_ext": BuildKernels})
