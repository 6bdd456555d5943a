"""Resume points of several processes: what is read on any number of them is, bit for bit, what was saved on another."""

import os
import resource
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.parallel.processes import on_processes
from trivium.checkpoint import resume as resume_file
from trivium.checkpoint.resume import ResumeWriter, RunState, load_resume_point
from trivium.parallel.world import ALONE


class Toy(nn.Module):
    """Rows that no number of processes divides, fewer rows than processes, a buffer, and a parameter without gradient."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(6, 7)
        self.narrow = nn.Linear(7, 3, bias=False)
        self.experts = nn.Parameter(torch.empty(5, 3, 4))
        self.idle = nn.Parameter(torch.empty(2, 3))
        self.register_buffer("bias", torch.zeros(9))

    def forward(self, x_T6):
        return torch.einsum("ti,eio->teo", self.narrow(self.wide(x_T6).tanh()), self.experts).square()


class Course:
    """A toy in training, on however many processes; the same numbers of any seed on each."""

    def __init__(self, world, seed):
        self.world, self.toy = world, Toy()
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.toy.parameters():
            nn.init.normal_(parameter, generator=generator)
        if world.mesh is not None:
            fully_shard(self.toy, mesh=world.mesh)
        self.optimiser = torch.optim.AdamW(self.toy.parameters(), 0.1, fused=True)

    def steps(self, count):
        for _ in range(count):
            self.toy(torch.arange(12.0).reshape(2, 6) / 9).sum().backward()
            self.optimiser.step()
            self.optimiser.zero_grad()
            self.toy.bias = self.toy.bias + torch.arange(9.0)  # bound anew

    def tensors(self):
        """Without moments in a fresh course; `room` makes it."""
        moments = {
            f"optimiser.{key}.{name}": value
            for name, parameter in self.toy.named_parameters()
            for key, value in self.optimiser.state.get(parameter, {}).items()
        }
        return {**{f"model.{name}": value for name, value in self.toy.state_dict().items()}, **moments}

    def state(self, step):
        about = {"step": step, "rank": self.world.rank}
        return RunState(step=step, tensors=self.tensors(), about=about)

    def room(self, names):
        for name, parameter in self.toy.named_parameters():
            if f"optimiser.exp_avg.{name}" in names:
                moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                self.optimiser.state[parameter] = {"step": torch.zeros(()), **moments}
        return self.tensors()


def whole(tensors):
    """Every tensor in one piece, apart from what trains; arrays, which outlive the process that made them."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()
        for name, tensor in tensors.items()
    }


def read(world, run):
    """What a fresh course reads, in one piece; the point; and what was said."""
    lines = []
    point = load_resume_point(run, lines.append)
    targets = Course(world, seed=1).room(point.names)
    assert point.names == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in targets.items()}
    point.read_(targets)
    return point.step, point.about, whole(targets), lines


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert np.array_equal(got[name], array), name


def names(run):
    return sorted(path.name for path in (run / "resume").iterdir())


def save_on_two(world, run, full_disk):
    """Saves behind steps 2 and 4 and goes on in between; then one whose second process has no room for its file."""
    course = Course(world, seed=0)
    course.steps(2)
    writer = ResumeWriter(run)
    writer.save(course.state(2))
    for _ in range(20):  # collectives of training, in the midst of those of the save
        course.steps(1)
        world.sum_(torch.ones(3))
    course.steps(2)
    want = whole(course.tensors())
    writer.save(course.state(24))
    course.steps(3)
    writer.finish()

    lone = ResumeWriter(full_disk)
    lone.save(course.state(1), wait=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    lone.save(course.state(3))
    with pytest.raises(OSError) as raised:
        lone.finish()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return want, str(raised.value)


def test_saved_on_two_processes_and_read_on_one_and_on_four(tmp_path):
    run, full_disk = tmp_path / "run", tmp_path / "full disk"
    run.mkdir()
    full_disk.mkdir()
    (want, why), (want_too, why_too) = on_processes(2, save_on_two, run, full_disk)
    assert_same(want, want_too)
    assert names(run) == ["latest", "step-00000002", "step-00000024"]
    assert {path.name for path in (run / "resume" / "latest").iterdir()} == {
        ".metadata", "__0_0.distcp", "__1_0.distcp", "state.json"
    }  # fmt: skip

    step, about, got, lines = read(ALONE, run)
    assert (step, about, lines) == (24, {"step": 24, "rank": 0}, [])
    assert_same(got, want)
    assert not any("idle" in name for name in got if name.startswith("optimiser."))

    reason = f"{full_disk}/resume/step-00000003: cannot be saved: File too large; what was saved before is kept"
    assert why == why_too == reason
    assert names(full_disk) == ["latest", "step-00000001"]
    assert load_resume_point(full_disk).step == 1

    for step, about, got, lines in on_processes(4, read, run):
        assert (step, about, lines) == (24, {"step": 24, "rank": 0}, [])
        assert_same(got, want)


def damage_and_read(world, run):
    before = read(world, run)
    world.wait()
    if world.is_first:
        path = run / "resume" / "step-00000005" / "__0_0.distcp"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    world.wait()
    return before, read(world, run)


def test_saved_on_one_process_and_read_on_two_which_agree_on_what_is_whole(tmp_path):
    course, writer = Course(ALONE, seed=0), ResumeWriter(tmp_path)
    want = {}
    for step in (3, 5):
        course.steps(2)
        want[step] = whole(course.tensors())
        writer.save(course.state(step), wait=True)
    for rank, answers in enumerate(on_processes(2, damage_and_read, tmp_path)):
        for (step, _, got, lines), wanted_step in zip(answers, (5, 3), strict=True):
            assert step == wanted_step
            assert_same(got, want[step])
            assert len(lines) == (rank == 0 and step == 3)
            assert not lines or lines[0].startswith(
                f"{tmp_path}/resume/step-00000005: damaged, not used: __0_0.distcp:"
            )


def die_in_a_save(world, run):
    course, writer = Course(world, seed=0), ResumeWriter(run)
    course.steps(1)
    writer.save(course.state(1), wait=True)
    if world.rank == 1:
        resume_file._Files.write_data = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    course.steps(1)
    writer.save(course.state(2))
    with pytest.raises(OSError) as raised:
        writer.finish()
    (run / "why").write_text(str(raised.value))


def test_one_process_killed_in_a_save_leaves_no_half_of_it_and_the_others_hear(tmp_path):
    with pytest.raises((EOFError, RuntimeError)):
        on_processes(2, die_in_a_save, tmp_path)
    assert names(tmp_path) == ["latest", "step-00000001"]
    assert (tmp_path / "why").read_text() == (
        f"{tmp_path}/resume/step-00000002: cannot be saved: another process does not answer; "
        "what was saved before is kept"
    )
    assert read(ALONE, tmp_path)[0] == 1
