"""`trivium eval chat`: a model's scores beside those it came with."""

import json

import pytest

from tests.talks import tokenizer_of
from tests.tiny import tiny_config
from trivium import cli
from trivium.api import Model
from trivium.evals import chat
from trivium.evals.chat import ChatReport, Score
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3

TOKENIZER = tokenizer_of(300)


def main(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main([str(argument) for argument in arguments])
    return exit_.value.code, *capsys.readouterr()


def report_of(share):
    score = Score(num=2, well_formed=1.0, calls_right=share, answer_right=share, tokens=9.0)
    return ChatReport(scores={"all": score}, effort_tokens={"low": 1.0})


@pytest.fixture
def asked(monkeypatch):
    """What the scoring was asked for; it says a quarter."""
    given = []

    def evaluate(model, tokenizer, *, say, **options):
        given.append({**options, "dtype": next(model.parameters()).dtype})
        say("[half] of them")
        return report_of(0.25)

    monkeypatch.setattr(chat, "evaluate", evaluate)
    return given


@pytest.fixture
def run(tmp_path):
    """A model in bfloat16, in a folder that rich would take for markup."""
    network = KimiK3(tiny_config(300))
    initialise_(network, seed=1)
    folder = tmp_path / "[red]"
    Model(network=network, tokenizer=TOKENIZER).save(folder, dtype="bfloat16")
    return folder


def write(folder, **about):
    (folder / "run.json").write_text(json.dumps({"finished": True, "chat_format": "xtml", **about}))


def test_scores_stand_beside_those_of_the_run_and_are_of_its_seed(run, asked, capsys):
    write(run, seed=7, report={"chat": report_of(0.75).to_json()})
    code, out, err = main(capsys, "eval", "chat", run)
    assert (code, err) == (0, "") and "in run.json" in out
    assert "100.0  25.0  25.0" in out and "100.0  75.0  75.0" in out
    assert f"{run}: 400 held-out dialogues of seed 7\n[half] of them\n" in out
    (given,) = asked
    assert str(given.pop("dtype")) == "torch.float32"  # on a CPU, as `trivium chat` has it
    assert given == {"num_dialogues": 400, "num_efforts": 40, "seed": 7}
    # The file instead of its folder is the same run.
    assert main(capsys, "eval", "chat", run / "model.safetensors")[1].splitlines()[1:] == out.splitlines()[1:]


def test_a_run_without_scores_and_a_folder_that_is_no_run_are_scored_alone(run, asked, capsys):
    for _ in range(2):
        code, out, err = main(capsys, "eval", "chat", run, "--dialogues", "3", "--dtype", "bfloat16")
        assert (code, err) == (0, "") and "in run.json" not in out and "25.0" in out
        write(run)
    assert [(given["num_dialogues"], given["num_efforts"], given["seed"]) for given in asked] == [(3, 3, 0)] * 2
    assert {str(given["dtype"]) for given in asked} == {"torch.bfloat16"}


def test_as_json_it_is_one_object(run, asked, capsys):
    code, out, err = main(capsys, "eval", "chat", run, "--seed", "5", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"run": str(run), "dialogues": 400, "seed": 5, **report_of(0.25).to_json()}


def test_what_cannot_be_scored_is_one_line_before_anything_is_asked(run, asked, capsys, tmp_path):
    Model(network=KimiK3(tiny_config(300))).save(tmp_path / "mute")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").write_text('{"finished": false, "command": ["sft", "base"]}')
    write(run, report={"chat": {"scores": {"all": {"other": 1}}}})
    for folder, message in (
        (tmp_path / "mute", f"{tmp_path}/mute: has no tokenizer, so it cannot be talked to"),
        (tmp_path / "begun", f"{tmp_path}/begun: this run is unfinished"),
        (tmp_path / "nowhere", f"{tmp_path}/nowhere"),
        (run, "a report of talks: wanted scores and effort_tokens, got {'scores'"),
    ):
        code, _, err = main(capsys, "eval", "chat", folder)
        assert code == 1 and err.startswith(f"error: {message}") and err.count("\n") == 1
    assert asked == []
