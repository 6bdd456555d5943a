"""`trivium render`: a conversation as it is encoded, for people and as ids."""

import io
import json
import sys

import pytest

from tests.talks import plain, tokenizer_of, with_tool
from trivium import cli
from trivium.chat.completions import read_request
from trivium.chat.render import Renderer, render
from trivium.cli import command

TOKENIZER = tokenizer_of(300)
TWO = {"messages": [{"role": "user", "content": "Hi <|open|>!"}, {"role": "assistant", "content": "Yes."}]}


def main(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main([str(argument) for argument in arguments])
    return exit_.value.code, *capsys.readouterr()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A folder with nothing but a tokenizer; it is the current one's neighbour."""
    for name in ("FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    TOKENIZER.save(tmp_path / "run")
    return tmp_path / "run"


def write(body):
    with open("messages.json", "w") as file:
        json.dump(body, file)
    return "messages.json"


def test_a_conversation_by_hand_a_message_a_line(run, capsys):
    code, out, err = main(capsys, "render", write(TWO), "--run", run)
    assert (code, err) == (0, "")
    num_stub = 2 * 2 + len(TOKENIZER.encode("think")) - 1  # <|open|>think<|sep|>
    num_tokens = len(Renderer(TOKENIZER).render(read_request(TWO)).ids) - (num_stub - 1)
    assert out == (
        '<|open|>message role="user"<|sep|>Hi <|open|>!<|close|>message<|sep|><|end_of_msg|>\n'
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|><|close|>think<|sep|>'
        "<|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>\n"
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>\n'
        f"\n{num_tokens} tokens and {num_stub - 1} that open the answer\n"
    )


@pytest.mark.parametrize("body", [TWO, with_tool(2, 3), {**plain(7), "thinking": False}])
def test_ids_and_segments_are_those_of_the_renderer(run, capsys, body):
    content = json.loads(main(capsys, "render", write(body), "--run", run, "--json")[1])
    prompt = Renderer(TOKENIZER).render(read_request(body))
    assert content["ids"] == list(prompt.ids)
    assert (content["num_tokens"], content["num_stub"]) == (prompt.num_tokens, prompt.num_stub)
    assert content["channel"] == prompt.channel == ("response" if "thinking" in body else "think")
    assert "".join(text for text, _ in content["segments"]) == render(read_request(body)).text
    assert ["<|open|>", True] in content["segments"]
    assert (["Hi <|open|>!", False] in content["segments"]) == (body is TWO)


def test_standard_input_a_list_and_no_answer_asked_for(run, capsys, monkeypatch):
    want = main(capsys, "render", write(TWO), "--run", run, "--json")
    for body in (TWO, TWO["messages"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(body)))
        assert main(capsys, "render", "-", "--run", run, "--json") == want
    asked = {**TWO, "add_generation_prompt": True}
    assert main(capsys, "render", write(asked), "--run", run, "--json") == want
    code, out, _ = main(capsys, "render", write({**TWO, "add_generation_prompt": False}), "--run", run)
    num_tokens = len(Renderer(TOKENIZER).render(read_request(TWO), answer=False).ids)
    assert code == 0 and out.endswith(f"<|end_of_msg|>\n\n\n{num_tokens} tokens\n")


def test_what_looks_like_markup_is_words_and_no_line_is_broken(run, capsys):
    said = "[red]x[/red] :smile: [bold " + "long " * 60 + "a\nb"
    _, out, _ = main(capsys, "render", write([{"role": "user", "content": said}]), "--run", run)
    assert said in out


def test_half_a_character_is_shown_as_one_that_is_missing(run, capsys):
    """Every token stands by itself, and of those of a fox none is a whole one."""
    ids = TOKENIZER.encode("🦊")
    _, out, _ = main(capsys, "render", write([{"role": "user", "content": "a🦊b"}]), "--run", run)
    assert len(ids) > 1 and "a" + len(ids) * "\ufffd" + "b" in out


def test_a_control_string_that_somebody_typed_has_another_colour(run, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = main(capsys, "render", write(TWO), "--run", run)
    control = "\x1b[1;35m"
    assert out.count(f"{control}<|open|>") == sum(text == "<|open|>" for text, _ in _marks(TWO))
    assert f"{control}Hi" not in out and "Hi <|open|>!" not in out  # its tokens are apart


def _marks(body):
    return [(segment.value, True) for segment in render(read_request(body)).segments if hasattr(segment, "value")]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x", "messages.json: wanted an object with messages, or a list of them, got str"),
        (3, "messages.json: wanted an object with messages, or a list of them, got int"),
        ({}, "messages: missing"),
        ([], "messages: wanted at least one, got none"),
        ([{"role": "user"}], "messages[0].content: missing"),
        ([{"role": "queen", "content": "x"}], "messages[0].role: wanted one of system, "),
        (
            {**TWO, "add_generation_prompt": "no"},
            "messages.json: add_generation_prompt: wanted true or false, got 'no'",
        ),
        ({**TWO, "tools": {}}, "tools: wanted a list"),
        (
            {"messages": [{"role": "assistant", "content": "x", "partial": True}], "add_generation_prompt": False},
            "messages: the last one is partial, but no answer is asked for",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}],
            "picture 1 of 1: its width and height are not known",
        ),
    ],
)
def test_what_cannot_be_rendered_is_one_line(run, capsys, body, message):
    code, out, err = main(capsys, "render", write(body), "--run", run)
    assert (code, out) == (1, "") and err.startswith(f"error: {message}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is no JSON: "),
        (b"", "is no JSON: "),
        (b"\xff", "is no JSON: "),
        (b"[" * 100_000, "is no JSON: "),
        (b"1" * 5000, "is no JSON: "),
    ],
)
def test_a_file_that_is_no_json_is_named(run, capsys, content, message):
    with open("messages.json", "wb") as file:
        file.write(content)
    code, _, err = main(capsys, "render", "messages.json", "--run", run)
    assert code == 1 and err.startswith(f"error: messages.json: {message}") and err.count("\n") == 1


def test_a_file_or_a_tokenizer_that_is_not_there_is_named(run, capsys):
    assert main(capsys, "render", "none", "--run", run) == (
        1,
        "",
        "error: none: cannot be read: No such file or directory\n",
    )
    code, _, err = main(capsys, "render", write(TWO), "--run", "nowhere")
    assert code == 1 and "nowhere/tiktoken.model" in err and err.count("\n") == 1


def test_where_no_model_is_shipped_one_has_to_be_named(run, capsys, monkeypatch, tmp_path):
    missing = tmp_path / "shipped"
    monkeypatch.setattr(command, "SHIPPED", missing)
    code, out, err = main(capsys, "render", write(TWO), "--run", missing)
    assert (code, out) == (1, "") and err.startswith("error: no model is shipped with this installation: name a run")
