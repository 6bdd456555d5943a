"""Builds the CPU kernels: trivium/ops/cpu/libtrivium_{avx512,avx2,plain}.so, one library an instruction set.

Every C++ file of trivium/ops is compiled once for each; which library is loaded is decided where it runs, so a wheel does
not need the CPU of the machine that built it. No compiler, or one that fails: the build says so and goes on, and the
torch path serves. TRIVIUM_NATIVE=0 builds nothing; TRIVIUM_NATIVE=1 makes a failure an error.
"""

from __future__ import annotations

import hashlib
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
from sources import BUILD_LOG, FLAGS, ISA_FLAGS, fingerprint, source_files


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
            stderr = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
            print(f"trivium: CPU kernels not built, the torch path will serve: {stderr or error}", file=sys.stderr)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / BUILD_LOG).write_text(f"the C++ compiler failed: {first_error(stderr) or error}\n")

    def get_outputs(self) -> list[str]:
        return []


def build(folder: Path, scratch: Path) -> None:
    """Compile and link every library into `folder`; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    isas = ISA_FLAGS if platform.machine() in ("x86_64", "AMD64") else {"plain": []}
    compiler = os.environ.get("CXX", "c++")
    jobs, objects = [], {isa: [] for isa in isas}
    for isa, flags in isas.items():
        (scratch / isa).mkdir(parents=True, exist_ok=True)
        for source in source_files(OPS):
            command = [compiler, *FLAGS, *flags, f"-I{OPS / 'cpu'}", "-c", str(source)]
            if source == OPS / "cpu" / "cpu.cpp":  # it holds the fingerprint of all sources
                command.append(f'-DTRIVIUM_FINGERPRINT="{fingerprint(OPS)}"')
            target = scratch / isa / f"{source.parent.name}_{source.stem}_{digest(command, source)}.o"
            objects[isa].append(str(target))
            if not target.exists():
                jobs.append((command, target))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, jobs))
    for isa in isas:
        target = folder / f"libtrivium_{isa}.so"
        # OpenMP stays unresolved: the library takes the runtime that torch brought, and there are not two pools of threads.
        part = target.with_suffix(".part")
        subprocess.run(
            [compiler, "-shared", *objects[isa], "-o", str(part)], check=True, capture_output=True, text=True
        )
        part.replace(target)
        for old in {str(path) for path in (scratch / isa).iterdir()} - set(objects[isa]):
            os.unlink(old)
    (folder / BUILD_LOG).unlink(missing_ok=True)


def compile_one(job: tuple[list[str], Path]) -> None:
    command, target = job
    part = target.with_suffix(".part")
    done = subprocess.run([*command, "-o", str(part)], check=True, capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    part.replace(target)


def digest(command: list[str], source: Path) -> str:
    """Of all that an object file comes from but the compiler's version: times of files do not tell."""
    found = hashlib.sha256(repr(command).encode())
    for path in (source, *sorted((OPS / "cpu").glob("*.h"))):
        found.update(path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def first_error(stderr: str) -> str | None:
    return next((line for line in stderr.splitlines() if "error" in line), None)


setup(ext_modules=[Extension("trivium.ops.cpu._kernels", sources=[])], cmdclass={"build_ext": BuildKernels})
