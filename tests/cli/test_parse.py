"""`trivium parse`: ids back to what was said, by way of files and of pipes."""

import io
import json
import sys

import pytest

from tests.talks import ADD, plain, tokenizer_of, with_tool
from trivium import cli
from trivium.chat.completions import read_request, write_message

TOKENIZER = tokenizer_of(300)
ANSWER = (
    "think<|close|>think<|sep|><|open|>response<|sep|>Well.<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>2<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
)


def main(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main([str(argument) for argument in arguments])
    return exit_.value.code, *capsys.readouterr()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TOKENIZER.save(tmp_path / "run")
    return tmp_path / "run"


def write(content, name="ids.json"):
    with open(name, "w") as file:
        json.dump(content, file)
    return name


@pytest.mark.parametrize(
    "body", [plain(7), with_tool(2, 3), {**plain(7), "thinking": False}, {**with_tool(9, 1), "reasoning_effort": "max"}]
)
@pytest.mark.parametrize("piped", [True, False])
def test_what_was_rendered_is_read_back(run, capsys, monkeypatch, body, piped):
    _, rendered, _ = main(capsys, "render", write(body, "messages.json"), "--run", run, "--json")
    if piped:
        monkeypatch.setattr(sys, "stdin", io.StringIO(rendered))
    else:
        (run.parent / "ids.json").write_text(rendered)
    code, out, err = main(capsys, "parse", "-" if piped else "ids.json", "--run", run, "--as", "prompt")
    assert (code, err) == (0, "")
    content = json.loads(out)
    conversation = read_request(body)
    want = [write_message(message) for message in conversation.messages]
    if not conversation.options.thinking:
        for message in want:
            message.pop("reasoning_content", None)  # which was not rendered
    for message in [*content["messages"], *want]:  # an id stands in no prompt
        for call in message.get("tool_calls", ()):
            call["id"] = ""
        message.pop("tool_call_id", None)
    assert content["messages"] == want
    assert content.get("tools") == body.get("tools")
    assert content["channel"] == ("think" if conversation.options.thinking else "response")


SCHEMA = {"type": "object", "properties": {"sum": {"type": "number"}}}
ASKED = {
    **with_tool(2, 3),
    "reasoning_effort": "low",
    "tool_choice": "required",
    "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
}
PICTURE = {"type": "image_url", "image_url": {"url": "x", "width": 640, "height": 480}}


@pytest.mark.parametrize(
    "body",
    [
        ASKED,
        {**ASKED, "messages": ASKED["messages"][:-1]},
        {**plain(7), "thinking": False, "tool_choice": "none", "response_format": {"type": "json_object"}},
        {**plain(7), "add_generation_prompt": False, "reasoning_effort": "max"},
        {"messages": [{"role": "user", "content": [PICTURE]}, {"role": "system", "tools": [ADD]}]},
        {"messages": [*plain(7)["messages"], {"role": "assistant", "content": "Be", "partial": True}]},
    ],
)
def test_a_prompt_that_is_read_back_renders_to_the_same_ids(run, capsys, body):
    rendered = main(capsys, "render", write(body, "messages.json"), "--run", run, "--json")[1]
    parsed = main(capsys, "parse", write(json.loads(rendered)), "--run", run, "--as", "prompt")[1]
    again = main(capsys, "render", write(json.loads(parsed), "again.json"), "--run", run, "--json")
    assert json.loads(again[1])["ids"] == json.loads(rendered)["ids"] and (again[0], again[2]) == (0, "")
    assert json.loads(parsed)["channel"] == json.loads(rendered)["channel"]


def test_an_answer_by_hand(run, capsys):
    content = json.loads(main(capsys, "parse", write(TOKENIZER.encode_control(ANSWER)), "--run", run)[1])
    (call,) = content["calls"]
    assert (content["reasoning"], content["text"], content["finish_reason"]) == ("think", "Well.", "tool_calls")
    assert (call["name"], call["arguments"], call["text"], call["problem"]) == ("add", {"a": 2}, '{"a": 2}', "")
    assert content["flaws"] == []
    assert content["usage"] == {
        "num_completion": len(TOKENIZER.encode_control(ANSWER)),
        "num_reasoning": len(TOKENIZER.encode("think")),
    }


def test_where_an_answer_began_is_to_be_said(run, capsys):
    ids = write(TOKENIZER.encode_control("Well.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"))
    as_response = json.loads(main(capsys, "parse", ids, "--run", run, "--as", "response")[1])
    assert (as_response["reasoning"], as_response["text"], as_response["flaws"]) == ("", "Well.", [])
    as_think = json.loads(main(capsys, "parse", ids, "--run", run)[1])
    assert (as_think["reasoning"], as_think["text"]) == ("Well.", "") and as_think["flaws"]


def test_an_answer_that_is_cut_is_read_as_far_as_it_goes(run, capsys):
    ids = TOKENIZER.encode_control(ANSWER.partition("<|close|>argument")[0])
    content = json.loads(main(capsys, "parse", write({"ids": ids}), "--run", run)[1])
    assert content["finish_reason"] == "length" and "unclosed" in content["calls"][0]["problem"]
    assert json.loads(main(capsys, "parse", write([]), "--run", run)[1])["finish_reason"] == "length"


def test_a_call_of_a_tool_that_is_not_declared_is_not_to_be_made(run, capsys):
    ids = write(TOKENIZER.encode_control(ANSWER))
    other = {**ADD, "function": {**ADD["function"], "name": "multiply"}}
    for tools, problem in (
        ([ADD], ""),
        ([other, ADD], ""),
        ([other], "undeclared tool 'add'"),
        ([], "undeclared tool 'add'"),
    ):
        code, out, err = main(capsys, "parse", ids, "--run", run, "--tools", write(tools, "tools.json"))
        assert (code, err) == (0, "")
        (call,) = json.loads(out)["calls"]
        assert call["problem"] == problem and (call["arguments"] is None) == bool(problem)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x", "ids.json: wanted a list of token ids, or an object with ids"),
        ({}, "ids.json: wanted a list of token ids, or an object with ids"),
        ({"ids": "x"}, "ids.json: wanted a list of token ids, or an object with ids"),
        ([1, True], "ids.json: wanted a list of token ids, or an object with ids"),
        ([1, 2.0], "ids.json: wanted a list of token ids, or an object with ids"),
        ([[1]], "ids.json: wanted a list of token ids, or an object with ids"),
        ([1, 556], ""),
        ([-1], ""),
        ([10**30], ""),
    ],
)
def test_what_are_no_ids_are_one_line(run, capsys, content, message):
    code, out, err = main(capsys, "parse", write(content), "--run", run)
    assert (code, out) == (1, "") and err.startswith(f"error: {message}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"tools": []}, "tools: wanted a list"),
        ([{"type": "function", "function": {}}], "tools[0].function.name: missing"),
        ([{"type": "magic"}], "tools[0].type: wanted one of function"),
    ],
)
def test_tools_that_are_none_are_one_line(run, capsys, tools, message):
    code, _, err = main(capsys, "parse", write([1]), "--run", run, "--tools", write(tools, "tools.json"))
    assert code == 1 and err.startswith(f"error: {message}") and err.count("\n") == 1


def test_ids_that_no_prompt_has_are_one_line_with_the_place(run, capsys):
    ids = TOKENIZER.encode_control("<|open|>message<|sep|>x<|close|>message<|sep|><|end_of_msg|>")
    code, _, err = main(capsys, "parse", write(ids), "--run", run, "--as", "prompt")
    assert code == 1 and err.startswith("error: transcript: message 0: no role") and err.count("\n") == 1


def test_another_channel_is_wrong_usage(run, capsys):
    assert main(capsys, "parse", write([1]), "--run", run, "--as", "tools")[0] == 2
