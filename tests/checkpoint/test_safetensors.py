"""The file format: what we write is what the safetensors library writes, and a broken file is refused in one line."""

import io
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trivium.checkpoint.safetensors import Entry, read_header, write_tensors

FIXTURE_A = Path(__file__).parent.parent / "fixtures" / "k3-tiny-a" / "model.safetensors"


def write_raw(path, header, num_data_bytes):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_data_bytes))


def test_a_file_written_by_the_library_is_written_again_byte_for_byte(tmp_path):
    tensors = {
        "b": torch.arange(6, dtype=torch.float32).view(2, 3),
        "a": torch.arange(3, dtype=torch.uint8),
        "c": torch.arange(4, dtype=torch.bfloat16).view(2, 2),
        "d": torch.tensor([1.5], dtype=torch.float64),
    }
    save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
    for path in (tmp_path / "library", FIXTURE_A):
        content = path.read_bytes()
        header = read_header(path)
        file = io.BytesIO()
        specs = [(name, entry.dtype, entry.shape) for name, entry in sorted(header.items())]
        write_tensors(
            file, specs, lambda name, content=content, header=header: content[header[name].start : header[name].end]
        )
        assert file.getvalue() == content


def test_every_tensor_starts_at_a_multiple_of_its_item_and_bytes_are_asked_for_in_file_order(tmp_path):
    asked = []

    def bytes_of(name):
        asked.append(name)
        return bytes({"wide": 8, "one": 1, "two": 2}[name])

    with (tmp_path / "f").open("wb") as file:
        write_tensors(file, [("one", "U8", (1,)), ("two", "BF16", (1,)), ("wide", "F64", (1,))], bytes_of)
    header = read_header(tmp_path / "f")
    assert asked == list(header) == ["wide", "two", "one"]
    for name, entry in header.items():
        assert entry.start % {"wide": 8, "one": 1, "two": 2}[name] == 0
    assert header["wide"] == Entry(dtype="F64", shape=(1,), start=header["wide"].start, end=header["wide"].start + 8)


ONE = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("header", "num_data_bytes", "message"),
    [
        (ONE, 5, "truncated: wanted 77 bytes, got 74"),
        (ONE, 9, "wanted 77 bytes, got 78: 1 behind the last tensor"),
        (b"{", 0, "no safetensors file: the header is no JSON: "),
        (b"[" * 100_000, 0, "no safetensors file: the header is no JSON: "),
        (b'{"__metadata__": "pt"}', 0, "no safetensors file: __metadata__ wants an object of strings"),
        (b"[]", 0, "no safetensors file: the header wants a JSON object, got list"),
        ({"w": {"dtype": "F32"}}, 0, 'w: wanted dtype, shape and data_offsets, got {"dtype": "F32"}'),
        ({"w": {**ONE["w"], "shape": [-2]}}, 8, "w: wanted dtype, shape and data_offsets, got "),
        ({"w": {**ONE["w"], "shape": [3]}}, 8, "w: F32 [3] wants 12 bytes, got 8"),
        ({"w": {**ONE["w"], "data_offsets": [4, 12]}}, 12, "w: wanted to start at byte 0, got 4"),
        ({**ONE, "v": {**ONE["w"], "data_offsets": [4, 12]}}, 12, "v: wanted to start at byte 8, got 4"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, header, num_data_bytes, message):
    path = tmp_path / "model.safetensors"
    write_raw(path, header, num_data_bytes)
    with pytest.raises(ValueError, match="^" + re.escape(f"{path}: {message}")):
        read_header(path)


def test_a_file_too_short_for_its_header_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match=re.escape(f"{path}: truncated: wanted at least 8 bytes, got 3")):
        read_header(path)
    path.write_bytes(FIXTURE_A.read_bytes()[:1000])
    message = f"{path}: truncated, or no safetensors file: wanted a header of 138088 bytes, got 992"
    with pytest.raises(ValueError, match=re.escape(message)):
        read_header(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}: cannot be read: Is a directory")):
        read_header(tmp_path)
