"""Builds the CPU kernels: trivium/ops/cpu/libtrivium_{avx512,avx2,plain}.so, one library an instruction set.

Every C++ file of trivium/ops is compiled once for each; which library is loaded is decided where it runs, so a wheel does
not need the CPU of the machine that built it. No compiler, or one that fails: the build says so and goes on, and the
torch path serves. TRIVIUM_NATIVE=0 builds nothing; TRIVIUM_NATIVE=1 makes a failure an error.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
OPS = ROOT / "trivium" / "ops"
sys.path.insert(0, str(OPS / "cpu"))
from sources import BUILD_LOG, FLAGS, ISA_FLAGS, fingerprint, source_files


class BuildPython(build_py):
    """Into an empty folder: what an earlier build left there, a library or a removed source, would go into the wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "trivium"), ignore_errors=True)
        super().run()


class BuildKernels(build_ext):
    """The extension's file name is only a mark: what is built are the libraries beside it."""

    def run(self) -> None:
        folder = OPS / "cpu" if self.inplace or self.editable_mode else Path(self.build_lib, "trivium", "ops", "cpu")
        folder.mkdir(parents=True, exist_ok=True)
        if os.environ.get("TRIVIUM_NATIVE") == "0":
            note(folder, "TRIVIUM_NATIVE=0 was set on installation")
            return
        try:
            build(folder, Path(self.build_temp))
        except (OSError, subprocess.CalledProcessError) as error:
            reason, said = complaint(error)
            print(f"trivium: CPU kernels not built: {said or reason}", file=sys.stderr)
            if os.environ.get("TRIVIUM_NATIVE") == "1":
                raise SystemExit(f"trivium: TRIVIUM_NATIVE=1, and the CPU kernels were not built: {reason}") from None
            print("trivium: the torch path will serve", file=sys.stderr)
            note(folder, reason)

    def get_outputs(self) -> list[str]:
        return []


class Wheel(bdist_wheel):
    """For one platform and any Python: the libraries are called through ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def note(folder: Path, reason: str) -> None:
    (folder / BUILD_LOG).write_text(reason + "\n", encoding="utf-8")


def complaint(error: OSError | subprocess.CalledProcessError) -> tuple[str, str]:
    """Why there are no kernels, in a line, and all that the compiler said."""
    if isinstance(error, FileNotFoundError):
        return f"no C++ compiler: {error.filename!r} is not there (wanted g++ 12 or later)", ""
    if not isinstance(error, subprocess.CalledProcessError):
        return f"the C++ compiler could not be run: {error}", ""
    first = next((line for line in error.stderr.splitlines() if "error" in line), None)
    what = first or f"{error.cmd[0]} ended with status {error.returncode} and said nothing of an error"
    return f"the C++ compiler failed (wanted g++ 12 or later): {what}", error.stderr


def compiler() -> list[str]:
    found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "c++")
    return shlex.split(os.environ.get("CXX") or found)


def run(command: list[str]) -> None:
    env = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", env=env)
    sys.stderr.write(done.stderr)


def build(folder: Path, scratch: Path) -> None:
    """Compile and link every library into `folder`; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    isas = ISA_FLAGS if platform.machine() in ("x86_64", "AMD64") else {"plain": []}
    jobs, objects = [], {isa: [] for isa in isas}
    for isa, flags in isas.items():
        (scratch / isa).mkdir(parents=True, exist_ok=True)
        for source in source_files(OPS):
            command = [*compiler(), *FLAGS, *flags, f"-I{OPS / 'cpu'}", "-c", str(source)]
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
        part = target.with_suffix(f".{os.getpid()}.part")
        run([*compiler(), "-shared", *objects[isa], "-o", str(part)])
        part.replace(target)
        for old in {str(path) for path in (scratch / isa).iterdir()} - set(objects[isa]):
            os.unlink(old)
    (folder / BUILD_LOG).unlink(missing_ok=True)


def compile_one(job: tuple[list[str], Path]) -> None:
    command, target = job
    part = target.with_suffix(f".{os.getpid()}.part")
    run([*command, "-o", str(part)])
    part.replace(target)


def digest(command: list[str], source: Path) -> str:
    """Of all that an object file comes from but the compiler's version: times of files do not tell."""
    found = hashlib.sha256(repr(command).encode())
    for path in (source, *sorted((OPS / "cpu").glob("*.h"))):
        found.update(path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


setup(
    ext_modules=[Extension("trivium.ops.cpu._kernels", sources=[])],
    cmdclass={"build_py": BuildPython, "build_ext": BuildKernels, "bdist_wheel": Wheel},
)
