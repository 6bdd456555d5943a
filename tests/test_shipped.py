"""The shipped model: it is what it says it is, answers, and does what its run.json says it does."""

import io
import json
import re
import sys

import pytest
from safetensors import safe_open

from trivium import cli
from trivium.api import load
from trivium.chat.message import Conversation, Options, user
from trivium.chat.render import Renderer
from trivium.cli.chat import ABOUT_SHIPPED
from trivium.cli.command import SHIPPED
from trivium.envs.synth.dialogue import dialogue
from trivium.evals.chat import WITH_TOOLS, play

ABOUT = json.loads((SHIPPED / "run.json").read_text())


def main(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main([str(argument) for argument in arguments])
    return exit_.value.code, *capsys.readouterr()


@pytest.fixture(scope="module")
def model():
    return load(SHIPPED, dtype="float32")


def test_it_is_small_and_its_experts_are_packed():
    names = {path.name for path in SHIPPED.iterdir()}
    assert names >= {"model.safetensors", "config.json", "tiktoken.model", "tokenizer_config.json", "run.json"}
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 10_000_000
    with safe_open(SHIPPED / "model.safetensors", framework="pt") as file:
        weights = [name for name in list(file.keys()) if ".block_sparse_moe.experts." in name]
    assert weights and all(name.endswith(("_packed", "_scale")) for name in weights)


def test_how_it_was_made_and_how_good_it_is_stand_beside_it():
    assert ABOUT["recipe"] == "nano-chat" and ABOUT["finished"] is True and ABOUT["chat_format"] == "xtml"
    assert ABOUT["data"]["generated"].keys() == {"dialogues", "drills", "seed"} and "arguments" in ABOUT
    assert len(ABOUT["base"]["sha256"]) == 64 and ABOUT["command"][0] == "sft"
    scores = ABOUT["report"]["chat"]["scores"]
    assert scores["all"]["num"] == 400 and scores["all"]["well_formed"] >= 0.95
    assert scores["with tools"]["calls_right"] >= 0.9 and scores["with tools"]["answer_right"] >= 0.8
    assert ABOUT["report"]["untuned"]["scores"]["all"]["answer_right"] == 0
    tokens = ABOUT["report"]["chat"]["effort_tokens"]
    assert tokens["low"] < tokens["high"] < tokens["max"]
    assert not re.search(r"/(home|root|work|tmp)/", json.dumps(ABOUT))  # no machine of ours


def test_it_calls_the_right_tools_of_dialogues_that_nobody_chose(model):
    """Of other seeds than those of its scores: fewer than fifteen of twenty would be another model than was scored."""
    asked = [dialogue(5_000_000 + number, heldout=True, kinds=WITH_TOOLS) for number in range(20)]
    played = play(model.network, model.tokenizer, asked)
    assert sum(outcome.well_formed for outcome in played) >= 18
    assert sum(outcome.calls_right and outcome.answer_right for outcome in played) >= 15


def test_without_a_run_it_is_the_one_that_answers(capsys, monkeypatch):
    lines = ["What is 372 times 48?", "How many feet are 12 meters?", "Which room has Ada Baker?"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    code, out, err = main(capsys, "chat")
    assert (code, err) == (0, "")
    calls = [
        'calculate{"expression": "372 * 48"} -> 17856',
        "-> 39.3701",
        'find_person{"name": "Ada Baker"} -> 1207',
        "-> A12",
    ]
    said = ["372 * 48 = 17856\n", "12 meters are 39.3701 feet.\n", "The room of Ada Baker is A12.\n"]
    for words in calls + said:
        assert words in out, out


def test_at_a_terminal_it_says_what_it_is_and_is_not(capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("/quit\n"))
    code, out, _ = main(capsys, "chat")
    assert code == 0 and out.startswith("nano-chat, ") and ABOUT_SHIPPED in out


def test_render_and_parse_take_its_tokenizer(capsys, tmp_path, model):
    (tmp_path / "messages.json").write_text(json.dumps([{"role": "user", "content": "Hello."}]))
    content = json.loads(main(capsys, "render", tmp_path / "messages.json", "--json")[1])
    want = Renderer(model.tokenizer).render(Conversation(messages=(user("Hello."),), options=Options()))
    assert content["ids"] == list(want.ids)
    (tmp_path / "ids.json").write_text(json.dumps(content["ids"]))
    code, out, _ = main(capsys, "parse", tmp_path / "ids.json", "--as", "prompt")
    assert code == 0 and json.loads(out)["messages"] == [{"role": "user", "content": "Hello."}]


def test_one_command_scores_it_again(capsys):
    content = json.loads(main(capsys, "eval", "chat", "--dialogues", "3", "--json")[1])
    assert content["scores"]["all"]["num"] == 3 and content["seed"] == ABOUT["seed"]
    assert content["effort_tokens"].keys() == {"low", "high", "max"}
