"""`trivium sft`: its options reach the run, and what would do nothing or cannot be done is one line."""

import json
import os
import signal

import pytest

from tests.runs import assert_same_run, metrics_of
from tests.talks import plain, tokenizer_of, with_tool, write_jsonl
from tests.tiny import tiny_config
from trivium import cli
from trivium.api import Model
from trivium.evals.chat import ChatReport, Score
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.recipes import sft as recipe_file
from trivium.train import pretrain as pretrain_file
from trivium.train.step import train_step

NUM_RANKS = 300
SMALL = ("batch_tokens=512", "stages=512:1", "eval_tokens=100")
OWN = ("sft", "base", "--data", "talk.jsonl", *SMALL)


def main(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main([str(argument) for argument in arguments])
    return exit_.value.code, *capsys.readouterr()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A finished run `base` that cannot talk, and conversations."""
    network = KimiK3(tiny_config(NUM_RANKS))
    initialise_(network, seed=1)
    Model(network=network, tokenizer=tokenizer_of(NUM_RANKS)).save(tmp_path / "base")
    (tmp_path / "base" / "run.json").write_text('{"finished": true, "chat_format": null}')
    write_jsonl(tmp_path / "talk.jsonl", [*(plain(number) for number in range(9)), with_tool(2, 3)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipe_file, "plot_runs", lambda folders, out: None)
    return tmp_path


def about(folder):
    return json.loads((folder / "run.json").read_text())


def test_every_option_reaches_the_run(place, capsys):
    arguments = (*OWN, "--steps", "2", "--seed", "5", "--out", "here", "--name", "mine", "muon_lr=.004")
    code, out, err = main(capsys, *arguments)
    assert (code, err) == (0, "")
    there = about(place / "here" / "mine")
    assert (there["recipe"], there["seed"], there["finished"], there["chat_format"]) == ("sft", 5, True, "xtml")
    assert there["command"] == list(arguments) and there["base"]["path"] == "base"
    assert there["data"]["path"] == "talk.jsonl"
    assert there["arguments"] | {"muon_lr": 0.004, "batch_tokens": 512, "whole": True} == there["arguments"]
    assert there["arguments"]["length"] == {"seconds": None, "num_steps": 2}
    assert len(metrics_of(place / "here" / "mine")) == 2
    assert "trivium chat here/mine\n" in out and "--pack-experts" in out


def test_interrupted_it_says_how_to_go_on_and_goes_on(place, capsys, monkeypatch):
    arguments = (*OWN, "--steps", "3")
    made = []

    def step(*step_arguments, **options):
        made.append(1)
        if len(made) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(*step_arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pretrain_file, "train_step", step)
        code, out, _ = main(capsys, *arguments)
    assert code == 130 and "interrupted after step 2 of 3, saved to runs/sft" in out
    assert out.rstrip().endswith(
        "trivium sft base --data talk.jsonl batch_tokens=512 stages=512:1 eval_tokens=100 --steps 3"
    )
    assert about(place / "runs" / "sft")["finished"] is False
    assert main(capsys, *arguments)[0] == 0 and about(place / "runs" / "sft")["finished"] is True
    main(capsys, *arguments, "--name", "whole")
    got, want = (metrics_of(place / "runs" / name) for name in ("sft", "whole"))
    assert got == want


def test_without_data_the_conversations_are_generated_and_scored(place, capsys, monkeypatch):
    def evaluate(model, tokenizer, **options):
        score = Score(num=1, well_formed=1.0, calls_right=0.5, answer_right=0.25, tokens=1.0)
        return ChatReport(scores={"all": score}, effort_tokens={"low": 1.0})

    monkeypatch.setattr(recipe_file, "evaluate", evaluate)
    code, out, err = main(
        capsys, "sft", "base", "--dialogues", "3", "--steps", "2", "--seed", "5", "batch_tokens=3000",
        "stages=250:.5,3000:.5", "eval_tokens=100",
    )  # fmt: skip
    assert (code, err) == (0, "") and "100.0  50.0  25.0" in out
    there = about(place / "runs" / "nano-chat")
    assert there["data"]["generated"] == {"dialogues": 3, "drills": 1, "seed": 5}
    assert there["report"]["chat"]["scores"]["all"]["calls_right"] == 0.5 and there["finished"] is True


def test_a_folder_that_data_chat_wrote_is_taken(place, capsys):
    main(capsys, "data", "chat", "talk.jsonl", "--run", "base", "--out", "ready")
    for data, name in (("ready", "one"), ("talk.jsonl", "two")):
        arguments = ("sft", "base", "--data", data, *SMALL, "--steps", "1", "--name", name)
        assert main(capsys, *arguments)[0] == 0
    assert_same_run(place / "runs" / "one", place / "runs" / "two")


def test_a_recipe_is_shown_field_by_field_and_nothing_is_trained(place, capsys):
    code, out, err = main(capsys, "sft", "base", "--show", "muon_lr=.125")
    assert (code, err) == (0, "") and not (place / "runs").exists()
    assert {"muon_lr=0.125", "recipe=nano-chat", "whole=true"} <= set(out.splitlines())
    assert "recipe=sft" in main(capsys, *OWN, "--show")[1].splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "1", "--seed", "5", "seed=1"), "seed: was given already, as --seed; wanted it once"),
        (("--steps", "5", "length.num_steps=6"), "length.num_steps: was given already, as --steps; wanted it once"),
        (("--steps", "1", "--dialogues", "5"), "dialogues: with --data none are generated"),
        (("--minutes", "1", "--steps", "5"), "minutes: 5 steps are given, and a run of a number of steps goes by no clock"),
        (("--steps", "0"), "steps: wanted at least 1, got 0"),
        (("--minutes", "0"), "minutes: wanted a number above 0, got 0"),
        (("--steps", "1", "muon_rate=1"), "muon_rate: "),
        (("--steps", "1", "stages=100:1"), "stages: the longest document has "),
        (("--steps", "1", "stages=600:1"), "stages: pieces of 600 tokens do not fit into micro-batches of 512"),
        (("--steps", "1", "--device", "toaster"), "device: 'toaster' is not one that torch knows"),
        (("--steps", "1", "--name", "../x"), "name: wanted the name of one folder, got '../x'"),
    ],
)  # fmt: skip
def test_what_does_nothing_or_cannot_be_is_one_line_and_no_folder(place, capsys, arguments, message):
    own = [argument for argument in OWN if not (argument.startswith("stages") and arguments[-1].startswith("stages"))]
    code, _, err = main(capsys, *own, *arguments)
    assert code == 1 and err.startswith(f"error: {message}") and err.count("\n") == 1
    assert not list((place / "runs").glob("*"))


def test_what_cannot_be_begun_with_is_one_line(place, capsys):
    assert main(capsys, "sft", "nowhere", "--data", "talk.jsonl")[2].startswith("error: nowhere")
    code, _, err = main(capsys, "sft", "base", "--data", "none.jsonl", "--steps", "1")
    assert (code, err) == (1, "error: none.jsonl: cannot be read: No such file or directory\n")
    (place / "begun").mkdir()
    (place / "begun" / "run.json").write_text('{"finished": false, "command": ["quickstart"]}')
    code, _, err = main(capsys, "sft", "begun", "--data", "talk.jsonl")
    assert code == 1 and "this run is unfinished; the command that began it" in err and "trivium quickstart" in err
    assert not (place / "runs").exists()
