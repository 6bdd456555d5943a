"""`trivium quickstart`, and all that may happen to it, with a model and a text that take seconds."""

import json
import os
import signal

import pytest
import torch

from tests.runs import assert_same_run, metrics_of
from tests.tiny import tiny_config, write_tiny_text
from trivium import cli
from trivium.cli import pretraining as show_file
from trivium.data.corpus import read_heldout
from trivium.recipes import quickstart as recipe_file
from trivium.train import pretrain as pretrain_file
from trivium.train.step import train_step

NUM_RANKS = 300
START = ("quickstart", "--data", "text")


def main(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(arguments))
    return exit_.value.code, *capsys.readouterr()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with text of 40 names to stand in, and the recipe drawn small."""
    write_tiny_text(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipe_file, "model_preset", lambda name: tiny_config(NUM_RANKS))
    monkeypatch.setattr(recipe_file, "NUM_THREADS", 1)
    monkeypatch.setattr(show_file, "SAMPLE_TOKENS", 6)
    num_threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(num_threads)


def stop_in_step(monkeypatch, number, signal_number=signal.SIGINT):
    """Someone presses Ctrl-C in the step of that number, counted in this process."""
    made = []

    def step(*arguments, **options):
        made.append(1)
        if len(made) == number:
            os.kill(os.getpid(), signal_number)
        return train_step(*arguments, **options)

    monkeypatch.setattr(pretrain_file, "train_step", step)


def about(folder):
    return json.loads((folder / "run.json").read_text())


def test_a_run_is_made_shown_and_never_overwritten(place, capsys):
    code, out, err = main(capsys, *START, "--steps", "2")
    assert (code, err) == (0, "")
    assert "nats a token" in out and "this model" in out and "generate runs/quickstart --prompt" in out
    run = place / "runs" / "quickstart"
    assert {path.name for path in run.iterdir()} == {
        *("run.json", "config.json", "generation_config.json", "model.safetensors", "metrics.jsonl", "heldout.jsonl"),
        *("tiktoken.model", "tokenizer_config.json", "tokens", "layers.jsonl", "plot.png", "layers.png", "samples.md"),
        "resume",
    }
    there = about(run)
    assert (there["planned_steps"], there["finished"], there["recipe"], there["seed"]) == (2, True, "quickstart", 0)
    assert (there["steps"], there["tokens"], there["threads"]) == (2, 4096, recipe_file.NUM_THREADS)
    assert there["command"] == [*START, "--steps", "2"]
    assert there["data"]["what"] == "text" and there["data"]["train_files"] + there["data"]["heldout_files"] == 40
    heldout = read_heldout(run)
    assert sorted(document.source for document in heldout) == there["data"]["heldout_names"] != []
    for document in heldout:
        assert document.text == (place / "text" / document.path).read_text()
    report = there["report"]["heldout"]
    assert report["num_bytes"] == there["data"]["heldout_bytes"] == sum(document.num_bytes for document in heldout)
    assert f"{report['bpb']:.3f}" in out and there["report"]["compressed"]["gzip"] > 0
    samples = (run / "samples.md").read_text()
    assert samples.startswith("At temperature 0.7, seed 0, 6 tokens behind each prompt:\n")
    assert samples.count("````\ndef w") == 3  # how the first three of the held-out files begin

    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, out, err = main(capsys, *START, "--steps", "2", "--name", "quickstart")
    assert (code, err) == (
        1,
        "error: runs/quickstart: holds a finished run, which is never overwritten; choose another name\n",
    )
    assert main(capsys, *START, "--steps", "2")[0] == 0
    assert metrics_of(place / "runs" / "quickstart-2") == metrics_of(run)  # bit for bit
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before

    ask = ("generate", "runs/quickstart", "--prompt", "def f", "--max-tokens", "5", "--seed", "3")
    code, text, _ = main(capsys, *ask)
    assert code == 0 and text.startswith("def f") and text.endswith("\n")
    assert main(capsys, *ask)[1] == text


def test_an_interrupted_run_can_be_used_and_ends_as_if_it_had_not_been(place, capsys, monkeypatch):
    command = (*START, "--steps", "5")
    for number, at in ((2, 2), (1, 3)):
        with monkeypatch.context() as patch:
            stop_in_step(patch, number, signal.SIGINT if at == 2 else signal.SIGTERM)
            code, out, err = main(capsys, *command)
        assert (code, err) == (130, "")
        assert f"interrupted after step {at} of 5, saved to runs/quickstart\n" in out
        assert "quickstart --data text --steps 5\n" in out  # what to type
        assert not about(place / "runs" / "quickstart")["finished"]
        code, text, _ = main(capsys, "generate", "runs/quickstart", "--prompt", "def", "--max-tokens", "3")
        assert code == 0 and text.startswith("def")
    code, out, _ = main(capsys, *command)
    assert code == 0 and "going on from step 3 of 5" in out
    run = place / "runs" / "quickstart"
    assert about(run)["finished"] and (run / "samples.md").exists()

    assert main(capsys, *command, "--out", "whole")[0] == 0
    whole = place / "whole" / "quickstart"
    assert_same_run(run, whole)
    assert about(run)["report"] == about(whole)["report"]
    assert (run / "samples.md").read_bytes() == (whole / "samples.md").read_bytes()


def test_other_arguments_or_other_text_are_another_run_and_it_is_said_why(place, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        stop_in_step(patch, 1)
        assert main(capsys, *START, "--steps", "4")[0] == 130
    before = (place / "runs" / "quickstart" / "run.json").read_bytes()
    why = "runs/quickstart: holds an unfinished run with another seed: 0 there, 1 here"
    code, out, _ = main(capsys, *START, "--steps", "4", "--seed", "1")
    assert code == 0 and f"{why}; left alone\n" in out and "written to runs/quickstart-2:" in out
    code, _, err = main(capsys, *START, "--steps", "4", "--seed", "1", "--name", "quickstart")
    assert (code, err) == (1, f"error: {why}; choose another name\n")
    code, _, err = main(capsys, *START, "--steps", "3", "--name", "quickstart")
    assert code == 1 and "another arguments.length.num_steps: 4 there, 3 here" in err
    (place / "text" / "module1.py").write_text("# something else altogether\n" * 9)
    code, _, err = main(capsys, *START, "--steps", "4", "--name", "quickstart")
    assert code == 1 and "with another data.fingerprint: " in err
    assert (place / "runs" / "quickstart" / "run.json").read_bytes() == before


def test_by_the_clock_the_number_of_steps_is_written_down(place, capsys):
    assert main(capsys, *START, "--minutes", "0.01")[0] == 0
    run = place / "runs" / "quickstart"
    there = about(run)
    assert there["arguments"]["length"] == {"seconds": 0.6, "num_steps": None}
    assert there["planned_steps"] == there["steps"] == len(metrics_of(run)) >= 5


@pytest.mark.parametrize("arguments", [("--minutes", "0"), ("--steps", "0")])
def test_a_run_of_no_length_leaves_no_folder(place, capsys, arguments):
    code, _, err = main(capsys, *START, *arguments)
    assert code == 1 and err.startswith(f"error: {arguments[0][2:]}: wanted ")
    assert not (place / "runs").exists()


def test_too_little_text_is_one_line(place, capsys):
    (place / "little").mkdir()
    (place / "little" / "a.txt").write_text("hello")
    code, _, err = main(capsys, "quickstart", "--data", "little")
    assert code == 1
    assert err == "error: data: 5 bytes of text, wanted at least 10,240, of which a tenth is held out\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--seed", "99999999999999999999"),
        ("--minutes", "inf"),
        ("--data", "little"),
        ("--data", "nowhere"),
        ("--data", "alike"),
        ("--out", "text/module1.py"),
        ("--name", "a/b"),
    ],
)
def test_a_run_that_fails_before_its_first_step_leaves_no_folder(place, capsys, arguments):
    (place / "little").mkdir()
    (place / "little" / "a.txt").write_text("hello")
    (place / "alike").mkdir()
    (place / "alike" / "a.txt").write_text("a" * 20_000)  # bytes enough, but not for 300 ranks
    before = sorted(place.rglob("*"))
    code, _, err = main(capsys, "quickstart", "--data", "text", "--name", "mine", *arguments)
    assert code == 1 and err.startswith("error: ") and err.count("\n") == 1
    assert [path for path in sorted(place.rglob("*")) if path.name != "runs"] == before


def test_a_disk_that_is_full_is_one_line_and_what_was_saved_is_gone_on_with(place, capsys, monkeypatch):
    """The disk fills up behind step 2: the save at the end fails."""
    with monkeypatch.context() as patch:
        stop_in_step(patch, 2)
        assert main(capsys, *START, "--steps", "4")[0] == 130

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("trivium.checkpoint.resume.FileSystemWriter.write_data", full)
        code, _, err = main(capsys, *START, "--steps", "4")
    assert code == 1 and err == (
        "error: runs/quickstart/resume/step-00000004: cannot be saved: No space left on device; "
        "what was saved before is kept\n"
    )
    assert main(capsys, "generate", "runs/quickstart", "--prompt", "def", "--max-tokens", "2")[0] == 0
    code, out, _ = main(capsys, *START, "--steps", "4")
    assert code == 0 and "going on from step 2 of 4" in out and len(metrics_of(place / "runs" / "quickstart")) == 4


def test_a_wrong_option_of_generate_prints_no_prompt(place, capsys):
    assert main(capsys, *START, "--steps", "1")[0] == 0
    code, out, err = main(capsys, "generate", "runs/quickstart", "--prompt", "x", "--top-p", "2")
    assert (code, out) == (1, "") and err == "error: top_p: wanted a number in (0, 1], got 2.0\n"


def test_what_is_no_run_is_one_line(place, capsys):
    code, _, err = main(capsys, "generate", "text", "--prompt", "x")
    assert code == 1 and err.startswith("error: text: ") and err.count("\n") == 1
