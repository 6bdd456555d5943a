"""The fixtures as folders to read, and as copies to break."""

import shutil
from pathlib import Path

import pytest

from trivium.checkpoint.safetensors import read_header, write_tensors

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.fixture
def copy_of(tmp_path):
    """A writable copy of a fixture, without its expected numbers."""

    def copy(name):
        folder = tmp_path / name
        shutil.copytree(FIXTURES / f"k3-tiny-{name}", folder, ignore=shutil.ignore_patterns("*.npz", "README.md"))
        return folder

    return copy


@pytest.fixture
def stored():
    """The tensors of a folder: name -> (file, dtype, shape, bytes)."""
    return lambda folder: {
        name: (path.name, entry.dtype, entry.shape, path.read_bytes()[entry.start : entry.end])
        for path in sorted(folder.glob("*.safetensors"))
        for name, entry in read_header(path).items()
    }


@pytest.fixture
def edit():
    """Rewrite a file: `change` gets a dict name -> (dtype, shape, bytes) and changes it in place."""

    def rewrite(path, change):
        content = path.read_bytes()
        tensors = {n: (e.dtype, e.shape, content[e.start : e.end]) for n, e in read_header(path).items()}
        change(tensors)
        with path.open("wb") as file:
            headers = [(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()]
            write_tensors(file, headers, lambda name: tensors[name][2])

    return rewrite
