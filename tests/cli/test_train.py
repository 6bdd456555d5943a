"""`trivium train`: its options reach the run, and a kill at any moment costs nothing but time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import assert_same_run, metrics_of
from tests.tiny import tiny_config, write_tiny_text
from trivium import cli
from trivium.cli import pretraining as show_file
from trivium.recipes import pretraining as recipe_file

NUM_RANKS = 300

# Every run of the command line is a process of its own: a child of one that has loaded all it needs, which takes 3 s,
# and has computed nothing. It is killed from outside ten times, and then let be: each time with another number of
# workers. It is saved as often as can be, so that most kills come while a save is being written.
KILLED = """
import os, random, signal, sys, time
from dataclasses import replace
from functools import partial
from pathlib import Path
import torch
from tests.tiny import tiny_config
from trivium import cli
from trivium.cli import pretraining as show_file
from trivium.recipes import pretraining as recipe_file

torch.optim.SGD([torch.zeros(1)])  # what the first optimiser and the first search for duplicates load
recipe_file.gather_text(Path("text"))
recipe = recipe_file.pretraining
recipe_file.model_preset = lambda name: tiny_config(300)
recipe_file.pretraining = lambda *a, **k: replace(recipe(*a, **k), save_every_s=1e-9)
recipe_file.plot_runs = lambda folders, out: None
recipe_file.report = partial(recipe_file.report, num_samples=2, sample_tokens=4)
show_file.SAMPLE_TOKENS = 2
rng = random.Random(int(sys.argv[1]))
points = Path("runs/killed/resume")


def newest():
    return os.readlink(points / "latest") if (points / "latest").is_symlink() else None


def run(name, workers, kill=None):
    # Its exit code, and whether it was killed in a save. `kill`: behind how many saves, and how many seconds more.
    child = os.fork()
    if not child:
        changes = ["batch_tokens=64", "stages=32:1", f"workers={workers}"]
        try:
            cli.main(["train", "nano", *changes, "--data", "text", "--steps", "24", "--name", name])
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code)
        os._exit(99)
    if kill:
        num_saves, seconds = kill
        for _ in range(num_saves):
            before = newest()
            while newest() == before and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                time.sleep(0.002)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, code == -signal.SIGKILL and points.is_dir() and any(points.glob("step-*.saving"))


whole, _ = run("whole", 1)
kills = []
for number in range(10):
    num_saves = rng.choice((0, 1, 1, 2))
    kills.append(run("killed", (1, 3, 0, 2)[number % 4], (num_saves, rng.uniform(0, 0.15 if num_saves else 0.6))))
last, _ = run("killed", 2)
print("codes", whole, *(code for code, _ in kills), last, sum(in_save for _, in_save in kills), flush=True)
"""


def main(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(arguments))
    return exit_.value.code, *capsys.readouterr()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with text of 40 names to stand in, and every preset drawn small."""
    write_tiny_text(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipe_file, "model_preset", lambda name: tiny_config(NUM_RANKS))
    monkeypatch.setattr(show_file, "SAMPLE_TOKENS", 6)
    return tmp_path


def test_killed_at_ten_random_moments_it_ends_as_if_it_had_not_been(tmp_path):
    """Also during a save, and with another number of workers each time."""
    write_tiny_text(tmp_path / "text")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, "3"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *codes, in_save = done.stdout.splitlines()[-1].split()
    assert codes == ["codes", "0", *["-9"] * 10, "0"], (codes, done.stderr)
    assert int(in_save) >= 1
    assert "layout differ" in done.stdout and "'workers': 0" in done.stdout
    whole, killed = tmp_path / "runs" / "whole", tmp_path / "runs" / "killed"
    assert_same_run(killed, whole)
    assert len(metrics_of(whole)) == 24
    assert len(list((killed / "resume").iterdir())) == 3
    files, others = (
        {str(path.relative_to(run)): path for path in run.rglob("*") if path.is_file() and "resume" not in path.parts}
        for run in (killed, whole)
    )
    assert files.keys() == others.keys()
    for name in files.keys() - {"metrics.jsonl", "run.json"}:  # which have the time in them
        assert files[name].read_bytes() == others[name].read_bytes(), name
    assert json.loads((killed / "run.json").read_text())["finished"] is True


def test_in_bfloat16_with_layers_run_again_it_ends_with_the_checkpoints_own_words(place, capsys):
    changes = ("batch_tokens=48", "stages=24:1", "compute_dtype=bfloat16", "checkpoint_layers=true")
    code, out, err = main(capsys, "train", "nano", *changes, "--data", "text", "--steps", "2")
    assert (code, err) == (0, "") and "from the trained model and from its files alike" in out
    assert json.loads((place / "runs" / "train-nano" / "run.json").read_text())["finished"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nano", "--seed", "5", "seed=1"), "seed: was given already, as --seed; wanted it once"),
        (("nano", "--save-every", "5", "save_every_s=1"), "save_every_s: was given already, as --save-every; wanted it once"),
        (("nano", "--steps", "5", "length.num_steps=6"), "length.num_steps: was given already, as --steps; wanted it once"),
        (("nano", "--steps", "0", "--minutes", "1"), "steps: wanted at least 1, got 0"),
        (("nano-long", "--minutes", "1"), "minutes: nano-long has a number of steps, 1000, and goes by no clock; wanted --steps"),
    ],
)  # fmt: skip
def test_an_option_that_would_do_nothing_is_an_error(place, capsys, arguments, message):
    assert main(capsys, "train", *arguments, "--show") == (1, "", f"error: {message}\n")


def test_every_option_reaches_the_run(place, capsys):
    arguments = ("train", "micro", "--data", "text/", "--steps", "1", "--seed", "5", "--out", "here")
    arguments += ("batch_tokens=48", "stages=24:1", "muon_lr=.01", "adamw_lr=2e-3", "schedule.final=.5")
    code, out, err = main(capsys, *arguments, "--save-every", "9")
    assert (code, err) == (0, "") and "trivium generate here/train-micro --prompt 'def w" in out
    run = place / "here" / "train-micro"
    there = json.loads((run / "run.json").read_text())
    assert (there["recipe"], there["seed"], there["finished"]) == ("train-micro", 5, True)
    assert there["command"] == [*arguments, "--save-every", "9"]
    given = {"batch_tokens": 48, "stages": [{"max_len": 24, "share": 1.0}], "muon_lr": 0.01, "adamw_lr": 0.002}
    assert there["arguments"] | given == there["arguments"]
    assert there["arguments"]["schedule"]["final"] == 0.5
    assert there["layout"] | {"save_every_s": 9, "device": "cpu", "processes": 1} == there["layout"]
    assert there["arguments"]["length"] == {"seconds": None, "num_steps": 1}
    assert there["tokens"] == 48 and len(metrics_of(run)) == 1
    assert main(capsys, *arguments)[0] == 0 and (place / "here" / "train-micro-2").exists()


def test_text_that_ends_in_nothing_but_lines_still_has_a_sample(place, capsys):
    """One file, whose last tenth is held out: there is no beginning of it to go on with."""
    text = "".join(path.read_text() for path in sorted((place / "text").iterdir()))
    (place / "one.txt").write_text(text + "\n" * (len(text) // 8))
    code, _, err = main(capsys, "train", "nano", "--data", "one.txt", "--steps", "1", "batch_tokens=48", "stages=24:1")
    assert (code, err) == (0, "")
    assert "````\ndef w" in (place / "runs" / "train-nano" / "samples.md").read_text()  # of what it was trained on


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nano", "--data", "nowhere"), "data: nowhere is neither a folder nor a file, wanted "),
        (("nano", "--data", "text", "stages=0:1"), "stages.0: max_len: wanted at least 1, got 0"),
        (("nano", "--data", "text", "muon_rate=1"), "muon_rate: "),
        (("giant", "--data", "text"), "recipe: wanted one of nano, nano-long, micro, mini, k3, got 'giant'"),
        (("nano",), "data: wanted a folder of text, as in --data DIR"),
        (("nano", "--data", "text", "--device", "toaster"), "device: 'toaster' is not one that torch knows"),
        (("nano", "--data", "text", "--device", "cuda:99"), "device: cuda:99: torch sees "),
        (("nano", "--data", "text", "--name", "../x"), "name: wanted the name of one folder, got '../x'"),
    ],
)
def test_what_cannot_be_trained_is_one_line_and_no_folder(place, capsys, arguments, message):
    code, _, err = main(capsys, "train", *arguments)
    assert code == 1 and err.startswith(f"error: {message}") and err.count("\n") == 1
    assert not list((place / "runs").glob("*"))


def test_a_recipe_is_shown_field_by_field_and_nothing_is_trained(place, capsys):
    code, out, err = main(capsys, "train", "k3", "muon_lr=.125", "--show")
    assert (code, err) == (0, "") and not (place / "runs").exists()
    lines = out.splitlines()
    assert "muon_lr=0.125" in lines and "recipe=train-k3" in lines and "balancing=histogram" in lines
