"""Resume points: whatever a save or a disk does, the newest whole point is found, and is what was saved."""

import errno
import json
import os
import pickle
import random
import resource
import shutil
import signal
import threading
import time
import warnings
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trivium.checkpoint import resume as resume_file
from trivium.checkpoint.resume import ResumeWriter, RunState, load_resume_point

FILES = (".metadata", "__0_0.distcp", "state.json")


def state_of(step):
    """A state unlike that of any other step."""
    tensors = {"model.a": torch.arange(step, step + 5.0), "model.b": torch.tensor([step % 256], dtype=torch.uint8)}
    return RunState(step=step, tensors=tensors, about={"tokens": 10 * step, "loader": {"epoch": 0, "piece": step}})


def save(run, *steps, keep=2):
    writer = ResumeWriter(run, keep=keep)
    for step in steps:
        writer.save(state_of(step))
    writer.finish()


def tensors_of(point):
    targets = {name: torch.full(shape, 77, dtype=dtype) for name, (shape, dtype) in point.names.items()}
    point.read_(targets)
    return targets


def assert_same(point, want):
    assert (point.step, point.about, point.names.keys()) == (want.step, want.about, want.tensors.keys())
    for name, tensor in tensors_of(point).items():
        assert tensor.dtype == want.tensors[name].dtype and torch.equal(tensor, want.tensors[name]), name


def bytes_of(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def names(run):
    return sorted(path.name for path in (run / "resume").iterdir())


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def dying(how, nth):
    """All that changes the disk counts as one, DCP's too; the `nth` call does `how` first. Yields the calls."""
    calls = []

    def counted(function):
        def call(*arguments, **options):
            calls.append(function.__name__)
            if len(calls) == nth:
                how()
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


def child(act):
    """A process of its own that does `act`; fork, so that it has torch already."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    return pid


def was_killed(pid):
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@contextmanager
def held_back():
    """Saves that begin in here write nothing before the event is set."""
    go = threading.Event()
    write_data = resume_file._Files.write_data

    def wait(*arguments):
        assert go.wait(60)
        return write_data(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume_file._Files, "write_data", wait)
        yield go
        go.set()


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path):
    bits = torch.randint(0, 256, (240,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors = {
        f"{dtype} {shape}": bits[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).reshape(shape)  # NaNs, too
        for dtype in (
            torch.float64,
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.int64,
            torch.int32,
            torch.uint8,
        )
        for shape in ((), (0,), (5,), (2, 3), (3, 0, 2))
    }
    tensors["transposed"] = torch.arange(6.0).reshape(2, 3).T
    tensors["every other"] = torch.arange(7)[::2]
    tensors["expanded"] = torch.tensor([[3.0]]).expand(4, 2)
    tensors["parameter"] = torch.nn.Parameter(torch.tensor([-0.0, 1e-45]))
    about = {"time_s": 0.1 + 0.2, "loader": {"piece": 7}}
    ResumeWriter(tmp_path).save(RunState(step=3, tensors=tensors, about=about), wait=True)
    point = load_resume_point(tmp_path)
    assert (point.step, point.about) == (3, about)
    assert point.names == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    for name, got in tensors_of(point).items():
        assert torch.equal(bytes_of(got), bytes_of(tensors[name])), name


def test_reading_fills_what_it_is_given_in_place(tmp_path):
    save(tmp_path, 4)
    wide = torch.zeros(5, 2)
    target = torch.nn.Parameter(wide[:, 1])
    load_resume_point(tmp_path).read_({"model.a": target})
    assert torch.equal(wide, torch.stack([torch.zeros(5), torch.arange(4, 9.0)], dim=1))


def test_the_two_newest_are_kept_by_number_and_latest_is_the_newest(tmp_path):
    save(tmp_path, 99_999_998, 99_999_999, 100_000_000)  # as text, the last comes first
    assert names(tmp_path) == ["latest", "step-100000000", "step-99999999"]
    assert os.readlink(tmp_path / "resume" / "latest") == "step-100000000"
    assert_same(load_resume_point(tmp_path), state_of(100_000_000))
    assert {path.name for path in (tmp_path / "resume" / "latest").iterdir()} == set(FILES)


def test_where_nothing_was_saved_there_is_nothing(tmp_path):
    assert load_resume_point(tmp_path) is None
    (tmp_path / "resume").mkdir()
    (tmp_path / "resume" / "step-00000003.saving").mkdir()
    assert load_resume_point(tmp_path) is None


def test_what_is_saved_is_what_was_there_at_the_call_though_training_goes_on(tmp_path):
    state, writer = state_of(4), ResumeWriter(tmp_path)
    with held_back() as go:
        writer.save(state)
        for tensor in state.tensors.values():
            tensor.zero_()
        state.tensors["model.c"] = torch.ones(2)
        state.about["loader"]["piece"] = 99
        assert not list(tmp_path.glob("resume/step-00000004"))  # it returned before anything was there
        go.set()
        writer.finish()
    assert_same(load_resume_point(tmp_path), state_of(4))


@pytest.mark.parametrize("name", ["step-00000001.saving", "x.saving", "step-00000001.gone"])
def test_a_file_where_a_folder_would_be_left_over_is_swept_away_too(tmp_path, name):
    (tmp_path / "resume").mkdir()
    (tmp_path / "resume" / name).touch()
    save(tmp_path, 1)
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_one_save_at_a_time(tmp_path):
    writer = ResumeWriter(tmp_path)
    with held_back() as go:
        writer.save(state_of(4))
        second = threading.Thread(target=lambda: writer.save(state_of(6)))
        second.start()
        second.join(0.05)
        assert second.is_alive()  # it waits for the one before
        go.set()
        second.join()
    writer.finish()
    assert names(tmp_path) == ["latest", "step-00000004", "step-00000006"]


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("how", [kill, fill_disk])
def test_a_save_that_dies_anywhere_loses_nothing(tmp_path, how, damaged):
    for nth in count(1):
        run = tmp_path / str(nth)
        run.mkdir()
        save(run, *((4, 6, 8) if damaged else (4, 6)), keep=3)
        if damaged:  # the new point takes its name
            (run / "resume" / "step-00000008" / "state.json").write_text("{")
        if how is kill:

            def save_and_die(run=run, nth=nth):
                with dying(kill, nth):
                    save(run, 8)

            lived = not was_killed(child(save_and_die))
        else:
            with dying(fill_disk, nth) as calls:
                try:
                    save(run, 8)
                except OSError as error:
                    assert str(error).startswith(
                        f"{run}/resume/step-00000008: cannot be saved: No space left on device;"
                    )
            lived = len(calls) < nth
        found = load_resume_point(run)
        assert_same(found, state_of(8 if lived else found.step))
        assert found.step in (6, 8)
        save(run, 9)
        before = {found.step, 8} if damaged else {found.step}
        assert names(run) in [["latest", f"step-{step:08d}", "step-00000009"] for step in before]
        assert_same(load_resume_point(run), state_of(9))
        if lived:
            break
    # mkdir thrice, .metadata renamed, three files and two folders synced, a rename, a link and its rename, an old point
    # renamed and removed; a damaged one is renamed and removed on top.
    assert nth - 1 == (16 if damaged else 14)


def test_killed_at_random_moments_a_run_goes_on_from_what_it_saved_last(tmp_path):
    def train_from(step, told):
        writer = ResumeWriter(tmp_path)
        for later in count(step + 1):
            writer.save(state_of(later))
            os.write(told, b".")  # the save before is done

    step, moments = 0, random.Random(0)
    for _ in range(10):
        hear, tell = os.pipe()
        pid = child(lambda step=step, tell=tell: train_from(step, tell))
        os.close(tell)
        told = moments.randint(1, 3)
        for _ in range(told):
            os.read(hear, 1)
        time.sleep(moments.uniform(0, 0.03))  # a save takes 0.02 s
        os.kill(pid, signal.SIGKILL)
        assert was_killed(pid)
        while more := len(os.read(hear, 4096)):
            told += more
        os.close(hear)
        point = load_resume_point(tmp_path, pytest.fail)
        assert step + told - 1 <= (0 if point is None else point.step) <= step + told + 1
        if point is not None:
            assert_same(point, state_of(point.step))
            step = point.step
    assert step >= 10


def test_a_full_disk_is_one_line_at_the_next_call_and_the_save_before_is_kept(tmp_path):
    writer = ResumeWriter(tmp_path)
    writer.save(state_of(6), wait=True)
    message = f"{tmp_path}/resume/step-00000008: cannot be saved: File too large; what was saved before is kept"
    large = RunState(step=8, tensors={"a": torch.ones(10_000), "b": torch.ones(10_000)}, about={})
    for num_bytes in (100, 3000, 50_000, 81_000):  # torch.save stumbles in ways of its own over the second
        for ask in (writer.finish, lambda: writer.save(state_of(9))):
            with files_no_larger_than(num_bytes):
                writer.save(large)
                while not writer._saving.done():
                    time.sleep(0.001)
            with pytest.raises(OSError) as raised:
                ask()
            assert str(raised.value) == message
            assert names(tmp_path) == ["latest", "step-00000006"]
            writer.finish()  # said once
    assert_same(load_resume_point(tmp_path), state_of(6))
    writer.save(state_of(8), wait=True)
    assert_same(load_resume_point(tmp_path), state_of(8))


DAMAGE = {
    **{
        f"{name} {what}": lambda folder, act=act, name=name: act(folder / name)
        for name in FILES
        for what, act in {
            "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
            "empty": lambda path: os.truncate(path, 0),
            "missing": lambda path: path.unlink(),
        }.items()
    },
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
    **{
        f"state {text[:9]!r}": lambda folder, text=text: (folder / "state.json").write_text(text)
        for text in ("{", "{}", "[]", "null", '"a"', "7", "[" * 100_000, "\0", '{"files": {}, "sha256": "0"}')
    },
    "state not UTF-8": lambda folder: (folder / "state.json").write_bytes(b"\xff"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_point_falls_back_to_the_one_before_and_says_so(tmp_path, how):
    save(tmp_path, 4, 6)
    DAMAGE[how](tmp_path / "resume" / "step-00000006")
    lines = []
    assert_same(load_resume_point(tmp_path, lines.append), state_of(4))
    assert len(lines) == 1
    assert lines[0].startswith(f"{tmp_path}/resume/step-00000006: damaged, not used: ")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    save(run, 4, 6)
    return run


@given(data=st.data(), name=st.sampled_from(FILES), bit=st.integers(0, 7))
def test_no_flipped_bit_changes_what_is_read(saved, data, name, bit):
    path = saved / "resume" / "step-00000006" / name
    whole = path.read_bytes()
    broken = bytearray(whole)
    broken[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << bit
    path.write_bytes(broken)
    try:
        lines = []
        found = load_resume_point(saved, lines.append)
        assert_same(found, state_of(4 if lines else 6))  # a space of state.json may become another
    finally:
        path.write_bytes(whole)
    assert lines or name == "state.json"


class Bomb:
    """A pickle that makes a folder when it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_pickle_is_opened_that_is_not_what_was_written(tmp_path):
    save(tmp_path, 4, 6)
    (tmp_path / "resume" / "step-00000006" / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "gone off")))
    assert load_resume_point(tmp_path).step == 4
    assert not (tmp_path / "gone off").exists()


def test_when_all_are_damaged_it_is_said_what_to_do(tmp_path):
    save(tmp_path, 4, 6)
    for step in (4, 6):
        DAMAGE["state.json missing"](tmp_path / "resume" / f"step-{step:08d}")
    message = f"{tmp_path}/resume: all 2 points are damaged; remove that folder to begin the run anew"
    with pytest.raises(ValueError, match=f"^{message}$"):
        load_resume_point(tmp_path)


def test_a_damaged_point_ahead_goes_away_with_the_next_save(tmp_path):
    save(tmp_path, 4, 6)
    newest = tmp_path / "resume" / "step-00000006" / "state.json"
    content = newest.read_text()
    newest.write_text("")
    assert load_resume_point(tmp_path).step == 4
    newest.write_text(content)  # as after a disk's passing error: of a course that was given up all the same
    save(tmp_path, 5)
    assert names(tmp_path) == ["latest", "step-00000004", "step-00000005"]
    assert json.loads((tmp_path / "resume" / "latest" / "state.json").read_text())["step"] == 5


def test_what_is_not_there_or_of_another_kind_is_refused_by_name_before_anything_is_read(tmp_path):
    save(tmp_path, 4)
    point, target = load_resume_point(tmp_path), torch.zeros(5)
    for name, other, message in (
        ("model.z", torch.zeros(1), "model.z is missing"),
        ("model.b", torch.zeros(1), r"model.b: wanted torch.float32 \[1\], got torch.uint8 \[1\]"),
        ("model.b", torch.zeros((), dtype=torch.uint8), r"model.b: wanted torch.uint8 \[\], got torch.uint8 \[1\]"),
    ):
        with pytest.raises(ValueError, match=f"^resume: {message}$"):
            point.read_({"model.a": target, name: other})
    assert torch.equal(target, torch.zeros(5))


def test_a_file_that_goes_away_before_it_is_read_is_an_error_with_its_reason(tmp_path):
    save(tmp_path, 4)
    point = load_resume_point(tmp_path)
    (point.folder / "__0_0.distcp").unlink()
    with pytest.raises(OSError, match=f"^{point.folder}: cannot be read: No such file or directory$"):
        point.read_({"model.a": torch.zeros(5)})


def test_what_is_no_json_is_refused_at_the_call(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        ResumeWriter(tmp_path).save(RunState(step=1, tensors={}, about={"path": tmp_path}))


def test_no_word_about_one_process_being_one_process(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path, 4)
        save(tmp_path, 4, 5)  # over what is there
        assert_same(load_resume_point(tmp_path), state_of(5))
