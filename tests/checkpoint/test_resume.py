"""Resume points: whatever a save or a disk does, the newest whole point is found, and is what was saved."""

import json
import os
import resource
import shutil
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trivium.checkpoint import resume as resume_file
from trivium.checkpoint.resume import ResumePoint, load_resume_point, save_resume_point


def point_of(step):
    """A point unlike that of any other step."""
    tensors = {"model.a": torch.arange(step, step + 5.0), "model.b": torch.tensor([step % 256], dtype=torch.uint8)}
    return ResumePoint(step=step, tensors=tensors, about={"tokens": 10 * step, "loader": {"epoch": 0, "piece": step}})


def assert_same(got, want):
    assert (got.step, got.about, got.tensors.keys()) == (want.step, want.about, want.tensors.keys())
    for name, tensor in want.tensors.items():
        assert got.tensors[name].dtype == tensor.dtype and torch.equal(got.tensors[name], tensor), name


def bytes_of(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def names(run):
    return sorted(path.name for path in (run / "resume").iterdir())


class Killed(BaseException):
    """As good as a kill: no handler of ours knows it."""


@contextmanager
def dying(kind, nth):
    """All that changes the disk counts as one; the `nth` call raises instead. Yields how many calls there were."""
    calls = []

    def counted(function):
        def call(*arguments, **options):
            calls.append(function.__name__)
            if len(calls) == nth:
                raise kind
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (os, "fsync"),
            (Path, "mkdir"),
            (Path, "rename"),
            (Path, "replace"),
            (Path, "symlink_to"),
            (shutil, "rmtree"),
        ):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        yield calls


@contextmanager
def files_no_larger_than(num_bytes):
    """A write behind that fails as on a full disk: what still fits is written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path):
    bits = torch.randint(0, 256, (240,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors = {
        f"{dtype} {shape}": bits[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).reshape(shape)  # NaNs, too
        for dtype in resume_file._STORED
        for shape in ((), (0,), (5,), (2, 3), (3, 0, 2))
    }
    tensors["transposed"] = torch.arange(6.0).reshape(2, 3).T
    tensors["parameter"] = torch.nn.Parameter(torch.tensor([-0.0, 1e-45]))
    save_resume_point(
        tmp_path, ResumePoint(step=3, tensors=tensors, about={"time_s": 0.1 + 0.2, "loader": {"piece": 7}})
    )
    got = load_resume_point(tmp_path)
    assert (got.step, got.about) == (3, {"time_s": 0.1 + 0.2, "loader": {"piece": 7}})
    assert got.tensors.keys() == tensors.keys()
    for name, want in tensors.items():
        assert (got.tensors[name].dtype, got.tensors[name].shape) == (want.dtype, want.shape), name
        assert torch.equal(bytes_of(got.tensors[name]), bytes_of(want)), name


def test_the_two_newest_are_kept_by_number_and_latest_is_the_newest(tmp_path):
    for step in (99_999_998, 99_999_999, 100_000_000):  # as text, the last comes first
        assert save_resume_point(tmp_path, point_of(step)) == tmp_path / "resume" / f"step-{step}"
    assert names(tmp_path) == ["latest", "step-100000000", "step-99999999"]
    assert os.readlink(tmp_path / "resume" / "latest") == "step-100000000"
    assert_same(load_resume_point(tmp_path), point_of(100_000_000))


def test_where_nothing_was_saved_there_is_nothing(tmp_path):
    assert load_resume_point(tmp_path) is None
    (tmp_path / "resume").mkdir()
    (tmp_path / "resume" / "step-00000003.saving").mkdir()
    assert load_resume_point(tmp_path) is None


@pytest.mark.parametrize("kind", [Killed(), OSError(28, "No space left on device")], ids=["killed", "disk full"])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_save_that_dies_anywhere_loses_nothing(tmp_path, kind, damaged):
    for nth in count(1):
        run = tmp_path / str(nth)
        run.mkdir()
        for step in (4, 6, 8) if damaged else (4, 6):
            save_resume_point(run, point_of(step), keep=3)
        if damaged:  # the new point takes its name
            (run / "resume" / "step-00000008" / "state.json").write_text("{")
        with dying(kind, nth) as calls:
            try:
                save_resume_point(run, point_of(8))
            except type(kind):
                pass
        lived = len(calls) < nth
        found = load_resume_point(run)
        assert_same(found, point_of(8 if lived else found.step))
        assert found.step in (6, 8)
        save_resume_point(run, point_of(9))
        before = {found.step, 8} if damaged else {found.step}
        assert names(run) in [["latest", f"step-{step:08d}", "step-00000009"] for step in before]
        assert_same(load_resume_point(run), point_of(9))
        if lived:
            break
    # mkdir twice, two files and two folders synced, a rename, a link and its rename, an old point renamed and removed;
    # a damaged one is renamed and removed on top.
    assert nth - 1 == (13 if damaged else 11), calls


def test_a_full_disk_is_one_line_and_the_save_before_is_kept(tmp_path):
    save_resume_point(tmp_path, point_of(6))
    with files_no_larger_than(100), pytest.raises(OSError) as raised:
        save_resume_point(tmp_path, point_of(8))
    assert str(raised.value) == (
        f"{tmp_path}/resume/step-00000008: cannot be saved: File too large; what was saved before is kept"
    )
    assert names(tmp_path) == ["latest", "step-00000006"]
    assert_same(load_resume_point(tmp_path), point_of(6))


DAMAGE = {
    "truncated": lambda folder: os.truncate(folder / "tensors.safetensors", 40),
    "no tensors": lambda folder: (folder / "tensors.safetensors").unlink(),
    "no state": lambda folder: (folder / "state.json").unlink(),
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
    **{
        f"state {text[:9]!r}": lambda folder, text=text: (folder / "state.json").write_text(text)
        for text in ("", "{", "{}", "[]", "null", '"a"', "7", "[" * 100_000, "\0")
    },
    "state not UTF-8": lambda folder: (folder / "state.json").write_bytes(b"\xff"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_point_falls_back_to_the_one_before_and_says_so(tmp_path, how):
    for step in (4, 6):
        save_resume_point(tmp_path, point_of(step))
    DAMAGE[how](tmp_path / "resume" / "step-00000006")
    lines = []
    assert_same(load_resume_point(tmp_path, lines.append), point_of(4))
    assert len(lines) == 1
    assert lines[0].startswith(f"{tmp_path}/resume/step-00000006: damaged, not used: ")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    for step in (4, 6):
        save_resume_point(run, point_of(step))
    return run


@given(data=st.data(), name=st.sampled_from(["tensors.safetensors", "state.json"]), bit=st.integers(0, 7))
def test_no_flipped_bit_changes_what_is_read(saved, data, name, bit):
    path = saved / "resume" / "step-00000006" / name
    whole = path.read_bytes()
    broken = bytearray(whole)
    broken[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << bit
    path.write_bytes(broken)
    try:
        lines = []
        found = load_resume_point(saved, lines.append)
    finally:
        path.write_bytes(whole)
    assert_same(found, point_of(4 if lines else 6))  # a space of state.json may become another
    assert lines or name == "state.json"


def test_when_all_are_damaged_it_is_said_what_to_do(tmp_path):
    for step in (4, 6):
        save_resume_point(tmp_path, point_of(step))
        DAMAGE["no state"](tmp_path / "resume" / f"step-{step:08d}")
    message = f"{tmp_path}/resume: all 2 points are damaged; remove that folder to begin the run anew"
    with pytest.raises(ValueError, match=f"^{message}$"):
        load_resume_point(tmp_path)


def test_a_damaged_point_ahead_goes_away_with_the_next_save(tmp_path):
    for step in (4, 6):
        save_resume_point(tmp_path, point_of(step))
    newest = tmp_path / "resume" / "step-00000006" / "state.json"
    content = newest.read_text()
    newest.write_text("")
    assert load_resume_point(tmp_path).step == 4
    newest.write_text(content)  # as after a disk's passing error: of a course that was given up all the same
    save_resume_point(tmp_path, point_of(5))
    assert names(tmp_path) == ["latest", "step-00000004", "step-00000005"]
    assert json.loads((tmp_path / "resume" / "latest" / "state.json").read_text())["step"] == 5
