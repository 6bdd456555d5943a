"""A run of several processes as people start it: one is killed, the run stops and says so, and the same command goes on."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.parallel.processes import on_processes
from tests.runs import metrics_of
from tests.tiny import tiny_config, write_tiny_text
from tests.train.test_pretrain import SHORT, trained
from trivium import cli
from trivium.api import load
from trivium.checkpoint.resume import load_resume_point
from trivium.cli import pretraining as show_file
from trivium.config import model_preset
from trivium.ops.rows import Rows
from trivium.parallel.world import ALONE, World
from trivium.recipes import pretraining as recipe_file
from trivium.train.run_folder import read_run
from trivium.train.stages import Stage

NUM_STEPS = 8


def changes_of(config, preset, prefix="model."):
    """The dotted arguments that make the preset that config."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from changes_of(value, preset[name], f"{prefix}{name}.")
        elif value != preset[name]:
            yield f"{prefix}{name}={value}"


TINY = list(changes_of(asdict(tiny_config(300)), asdict(model_preset("nano"))))
COMMAND = ["train", "nano", *TINY, "batch_tokens=128", "micro_tokens=32", "stages=32:1", "--data", "text"]
COMMAND += ["--steps", str(NUM_STEPS), "--name", "k", "--save-every", "1e-6"]


def start(place):
    """torchrun in front of the command, on two processes; what each says goes into a file of its own."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*run, "--redirects", "3", "--log-dir", "logs", "-m", "trivium", *COMMAND],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def said(place, rank, stream):
    """What that process wrote there in the latest run."""
    newest = max((place / "logs").iterdir(), key=lambda path: path.stat().st_mtime)
    (path,) = newest.glob(f"*/{rank}/{stream}.log")
    return path.read_text()


def process_of(torchrun, rank):
    """The id of the process that torchrun gave this rank."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    for child in children:
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"no rank {rank} among {children}")


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
def test_one_process_is_killed_the_run_says_so_and_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    write_tiny_text(tmp_path / "text")
    run = tmp_path / "runs" / "k"
    torchrun = start(tmp_path)
    try:
        while not (run / "resume" / "latest").exists():
            assert torchrun.poll() is None, said(tmp_path, 0, "stderr")
            time.sleep(0.01)
        os.kill(process_of(torchrun, 1), signal.SIGKILL)
        assert torchrun.wait(60) != 0
    finally:
        torchrun.kill()
    error = said(tmp_path, 0, "stderr")
    assert error.startswith("error: process 0 of 2 lost touch with another one, and stops; the same command goes on")
    assert error.count("\n") == 1 and "runs/k/resume/step-" in error
    assert read_run(run)["finished"] is False and not (run / "model.safetensors").exists()
    step = load_resume_point(run).step
    assert 0 < step < NUM_STEPS
    shutil.copytree(run, tmp_path / "alone" / "k", symlinks=True)

    assert start(tmp_path).wait(300) == 0
    out = said(tmp_path, 0, "stdout")
    assert f"going on from step {step} of {NUM_STEPS}" in out and "written to runs/k:" in out
    assert said(tmp_path, 1, "stdout") == said(tmp_path, 0, "stderr") == said(tmp_path, 1, "stderr") == ""
    assert read_run(run)["finished"] is True

    # The same run on one process: another layout of it, which is said.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(show_file, "SAMPLE_TOKENS", 2)
    monkeypatch.setattr(recipe_file, "plot_runs", lambda folders, out: None)
    with pytest.raises(SystemExit) as end:
        cli.main([*COMMAND, "--out", "alone"])
    out, _ = capsys.readouterr()
    assert end.value.code == 0 and f"going on from step {step} of {NUM_STEPS}" in out and "'processes': 2" in out
    alone = tmp_path / "alone" / "k"
    got, want = metrics_of(alone), metrics_of(run)
    assert got[:step] == want[:step]
    losses = [[line["loss"] for line in lines] for lines in (got, want)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and len(losses[0]) == NUM_STEPS
    ids = [[300, *range(40)]]
    torch.testing.assert_close(load(alone).logits(ids), load(run).logits(ids), rtol=0, atol=0.1)


# Four micro-batches a step, which 1, 2 and 4 processes can share.
CONFIG = replace(
    SHORT, batch_tokens=128, micro_tokens=32, stages=(Stage(max_len=32, share=1.0),), balancing="histogram"
)
FOUR, SIX = (replace(CONFIG, length=replace(CONFIG.length, num_steps=num_steps)) for num_steps in (4, 6))
IDS = torch.randint(0, 300, (50,), generator=torch.Generator().manual_seed(0)).tolist()


def on_each(world, folder, configs):
    """The logits behind each run of the folder, of the first process; and what this process wrote there."""
    torch.set_num_threads(1)  # bits of torch's products depend on it
    written = []

    def watch(event, arguments):
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.link"):
            written.append(str(arguments[0]))

    if world.size > 1:
        sys.addaudithook(watch)  # which stays as long as the process
    models = [trained(config, folder, world=world).result.model for config in configs]
    logits = [model and logits_of(model) for model in models]
    return logits, [path for path in written if str(folder) in path]


def logits_of(model):
    with torch.no_grad():
        return model.head(model.eval()(torch.tensor(IDS), Rows.one(len(IDS)))[0])


def test_saved_on_two_processes_it_is_the_same_model_on_one_and_on_four(tmp_path):
    """Behind the last step there is none to make: what comes back is what was saved, put together from its shards."""
    folder = tmp_path / "two"
    folder.mkdir()
    ((want,), _), ((nothing,), others) = on_processes(2, on_each, folder, [FOUR])
    assert nothing is None
    # The second process makes sure of the folder of every point, writes its own file there, and nothing else.
    assert others
    for path in map(Path, others):
        assert path.name == "__1_0.distcp" or path.suffix == ".saving", path
    torch.testing.assert_close(load(folder).logits([IDS])[0], want, rtol=0, atol=0)
    runs = []
    for size in (1, 4):
        copy = tmp_path / f"on {size}"
        shutil.copytree(folder, copy, symlinks=True)
        logits, _ = (
            on_each(ALONE, copy, [FOUR, SIX]) if size == 1 else on_processes(size, on_each, copy, [FOUR, SIX])[0]
        )
        assert torch.equal(logits[0], want), size
        runs.append([line["loss"] for line in metrics_of(copy)])
        assert len(runs[-1]) == 6 and runs[-1] == pytest.approx(runs[0], rel=1e-5), size  # two steps further


def what_it_says_when_the_first_leaves(world, folder):
    if world.is_first:
        return None  # and its connections close
    with pytest.raises(RuntimeError) as error:
        recipe_file.pretrain_on_text(
            CONFIG, data=folder, out=folder, name=None, command=(), console=Console(quiet=True), world=world
        )
    return str(error.value)


def test_a_first_process_that_ends_while_it_reads_the_text_is_told(tmp_path):
    _, said = on_processes(2, what_it_says_when_the_first_leaves, tmp_path)
    then = "goes on from its last save, where it has one"
    assert said == f"process 1 of 2 lost touch with another one, and stops; the same command {then}"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Socket Timeout"), False),
        (torch.distributed.DistNetworkError("The client socket has failed"), True),
        (OSError("step-00000002: could not be saved: another process does not answer"), True),
        (OSError("runs/connection-tests/metrics.jsonl: cannot be written: No space left on device"), False),
        (OSError(28, "No space left on device", "runs/gloo/metrics.jsonl"), False),
        (BrokenPipeError(32, "Broken pipe"), False),
    ],
)  # fmt: skip
def test_what_looks_like_a_lost_process(error, lost):
    assert World(size=2).lost_one(error) is lost and not ALONE.lost_one(error)
