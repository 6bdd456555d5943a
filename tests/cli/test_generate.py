"""`trivium generate`: text as it comes, one JSON object, and what is said of a run without a model."""

import json
import os
import shlex
import sys

import pytest

from tests.tiny import tiny_config
from trivium import cli
from trivium.api import Model
from trivium.chat.tokenizer import train_tokenizer
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3

NUM_RANKS = 300
TEXTS = [f"def f{idx}(x):\n    return x + {idx}  # adds {idx} … 日本語\n" * 3 for idx in range(30)]


def main(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main([str(argument) for argument in arguments])
    return exit_.value.code, *capsys.readouterr()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    network = KimiK3(tiny_config(NUM_RANKS))
    initialise_(network, seed=1)
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    Model(network=network, tokenizer=train_tokenizer(TEXTS, NUM_RANKS)).save(folder)
    return folder


def test_a_reader_of_the_pipe_has_every_piece_before_the_next_is_made(run, monkeypatch):
    read, write = os.pipe()
    os.set_blocking(read, False)
    stream, made, arrived = Model.stream, [], []

    def watched(model, prompt, **options):
        for piece in stream(model, prompt, **options):
            yield piece
            made.append(piece.text)
            arrived.append(os.read(read, 1 << 16).decode() if piece.text or len(made) == 1 else "")

    monkeypatch.setattr(Model, "stream", watched)
    with os.fdopen(write, "w", encoding="utf-8") as out:  # a pipe is buffered by blocks
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit):
            cli.main(["generate", str(run), "--prompt", "def f", "--max-tokens", "12", "--seed", "1"])
        monkeypatch.undo()
        assert os.read(read, 1 << 16) == b"\n"
    os.close(read)
    assert len(made) == 12 and sum(map(bool, made)) > 6
    assert arrived == ["def f" + made[0], *made[1:]]


def test_the_object_holds_what_is_printed_and_how_to_get_it_again(run, capsys):
    ask = ("generate", run, "--prompt", "def f", "--max-tokens", "9", "--temperature", "0.8", "--top-p", "0.9")
    drawn = json.loads(main(capsys, *ask, "--json")[1])
    assert list(drawn) == ["prompt", "ids", "text", "logprobs", "finish_reason", "temperature", "top_p", "seed"]
    assert (drawn["prompt"], drawn["temperature"], drawn["top_p"]) == ("def f", 0.8, 0.9)
    assert len(drawn["ids"]) == len(drawn["logprobs"]) == 9 and max(drawn["logprobs"]) <= 0
    assert drawn["finish_reason"] == "length"
    again = (*ask, "--seed", drawn["seed"])
    assert json.loads(main(capsys, *again, "--json")[1]) == drawn
    assert main(capsys, *again)[1] == "def f" + drawn["text"] + "\n"
    assert json.loads(main(capsys, *ask, "--json")[1])["seed"] != drawn["seed"]


def test_the_first_of_several_stops_ends_the_text(run, capsys):
    ask = ("generate", run, "--prompt", "def f", "--max-tokens", "30", "--seed", "1", "--json")
    whole = json.loads(main(capsys, *ask)[1])["text"]
    early, late = whole[4:7], whole[-3:]
    assert whole.find(early) < whole.find(late)
    got = json.loads(main(capsys, *ask, "--stop", late, "--stop", early)[1])
    assert (got["text"], got["finish_reason"]) == (whole[: whole.find(early)], "stop")
    assert json.loads(main(capsys, *ask, "--stop", "never to be seen")[1])["text"] == whole


def test_an_unfinished_run_says_how_to_finish_it(tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    command = ["quickstart", "--data", "my text", "--steps", "300"]
    (folder / "run.json").write_text(json.dumps({"finished": False, "command": command}))
    code, out, err = main(capsys, "generate", folder, "--prompt", "x")
    start = f"error: {folder}: this run is unfinished; the command that began it, run again, finishes it"
    assert (code, out) == (1, "") and err.startswith(f"{start}: ") and err.count("\n") == 1
    assert shlex.split(err)[-len(command) - 1 :] == ["trivium", *command]

    (folder / "run.json").write_text('{"finished": false}')
    assert main(capsys, "generate", folder, "--prompt", "x")[2] == f"{start}\n"


@pytest.mark.parametrize("about", ['{"finished": true}', "[]", "{", '{"finished": null}'])
def test_only_a_run_that_says_so_is_unfinished(tmp_path, capsys, about):
    (tmp_path / "run.json").write_text(about)
    code, _, err = main(capsys, "generate", tmp_path, "--prompt", "x")
    assert code == 1 and "unfinished" not in err and err.count("\n") == 1


def test_an_unfinished_run_that_has_a_model_is_used(run, capsys):
    (run / "run.json").write_text('{"finished": false}')
    assert main(capsys, "generate", run, "--prompt", "def", "--max-tokens", "2")[0] == 0
    (run / "run.json").unlink()
