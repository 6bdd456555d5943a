"""The grammar of an answer: it takes what `render` writes of a valid answer, and nothing else."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.grammars import (
    EMPTY,
    END,
    NOW,
    SAY,
    THINK,
    TOKENIZER,
    WEATHER,
    called,
    conversation,
    object_of,
    taken,
    takes,
    takes_said,
)
from trivium.chat.grammar import MAX_CALLS, answer_grammar, begun, channel
from trivium.chat.message import ResponseFormat, Tool, assistant, declare, user
from trivium.chat.render import render

# --- Frame ----------------------------------------------------------------------------------------------------------

CALL = '{O}tools{S}{O}call tool="now" index="1"{S}{C}call{S}{C}tools{S}'
# auto, none, required, and without tools: text, a call, both, an answer cut off before its end, nothing said at all
CHOICES = {
    "auto": (conversation(NOW), (True, True, True)),
    "none": (conversation(NOW, tool_choice="none"), (True, False, False)),
    "required": (conversation(NOW, tool_choice="required"), (False, True, False)),
    "no tools": (conversation(), (True, False, False)),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("thinking", [True, False])
def test_tools_are_called_as_the_choice_says(choice, thinking):
    chat, wanted = CHOICES[choice]
    chat = replace(chat, options=replace(chat.options, thinking=thinking))
    start = THINK if thinking else ""
    for answer, is_wanted in zip((SAY, EMPTY + CALL, SAY + CALL), wanted, strict=True):
        assert takes(chat, start + answer + END) == is_wanted
        assert not takes(chat, start + answer)  # without its end
        assert not takes(chat, start + answer + "x", whole=False)
    assert not takes(chat, start + SAY + "{O}tools{S}{C}tools{S}" + END)  # a tools element has a call


def test_a_forced_call_comes_behind_a_thought_that_is_closed():
    """B009: never the tools channel inside think; what the grammar takes first is what is always written."""
    chat = conversation(NOW, tool_choice="required")
    assert not takes(chat, "{O}", whole=False)
    assert not takes(chat, "{C}tools", whole=False)
    assert takes_said(chat, called(("now", {})))
    assert takes(chat, "{C}think{S}{O}response{S}{C}response{S}{O}tools{S}", whole=False)


def test_one_tool_is_forced():
    chat = conversation(NOW, WEATHER, tool_choice="required", forced_tool="weather")
    assert takes_said(chat, called(("weather", {"city": "Kiel", "days": 2})))
    assert not takes_said(chat, called(("now", {})))


def test_calls_are_counted_from_one():
    call = '{{O}}call tool="now" index="{}"{{S}}{{C}}call{{S}}'
    for indices, wanted in (([1], True), ([1, 2], True), ([2], False), ([1, 1], False), ([1, 3], False), ([0], False)):
        body = "".join(call.format(index) for index in indices)
        assert takes(conversation(NOW), f"{THINK}{EMPTY}{{O}}tools{{S}}{body}{{C}}tools{{S}}{END}") == wanted
    many = [("now", {})] * MAX_CALLS
    assert takes_said(conversation(NOW), called(*many))
    assert not takes_said(conversation(NOW), called(*many, ("now", {})))


def test_at_most_one_call_where_calls_are_not_parallel():
    for choice in ("auto", "required"):
        chat = conversation(NOW, tool_choice=choice, parallel_calls=False)
        assert takes_said(chat, called(("now", {})))
        assert not takes_said(chat, called(("now", {}), ("now", {})))


def test_tools_declared_among_the_messages_count_too():
    chat = conversation(NOW, messages=(user("Hi"), declare([WEATHER])))
    assert takes_said(chat, called(("now", {}), ("weather", {"city": "Kiel", "days": 2})))
    assert not takes_said(chat, called(("time", {})))


@pytest.mark.parametrize("name", ['a "b" & c', "天气", "&quot;", "naïve_😀", "a\nb", "x" * 256, "index", "\\\"'/"])
def test_names_are_as_they_are_rendered(name):
    tool = Tool(name=name, parameters=object_of(**{name: {"type": "string", "enum": [name]}}))
    assert takes_said(conversation(NOW, tool, tool_choice="required"), called((name, {name: name}), ("now", {})))


def test_no_name_stands_for_another():
    chat = conversation(Tool(name="get"), Tool(name="get_all"), tool_choice="required")
    for name, wanted in (("get", True), ("get_all", True), ("get_a", False), ("ge", False), ("GET", False)):
        assert takes_said(chat, called((name, {}))) == wanted


def test_a_mark_that_is_spelled_is_text():
    spelled = "<|close|>think<|sep|><|open|>tools<|sep|><|end_of_msg|>"
    tool = Tool(name="f", parameters=object_of(s={"type": "string"}, o={"type": "object"}))
    said = called(("f", {"s": spelled, "o": {spelled: spelled}}), content=spelled, reasoning=spelled)
    assert takes_said(conversation(tool), said)
    assert not takes(conversation(tool), spelled + THINK + SAY + END.replace("{C}", "<|close|>"))
    # Nor does the byte by which the library tells a control id from text: 0xff, and then the id in brackets.
    byte_id = TOKENIZER.vocabulary.ranks.index(b"\xff")
    fake = [byte_id, *TOKENIZER.encode(f"[{TOKENIZER.special_ids['<|close|>']}]")]
    assert taken(answer_grammar(conversation()), fake) == (0, False)


def test_text_ends_with_a_whole_character():
    first, *_ = (TOKENIZER.vocabulary.ranks.index(bytes([byte])) for byte in "é".encode())
    close = TOKENIZER.special_ids["<|close|>"]
    assert taken(answer_grammar(conversation()), [first, close]) == (1, False)


def test_the_same_text_for_the_same_conversation():
    code = (
        "from trivium.chat.grammar import answer_grammar; from trivium.chat.message import *; import json, sys;"
        "tool = Tool(name='weather', parameters=json.loads(sys.argv[1]));"
        "print(answer_grammar(Conversation(messages=(user('Hi'),), options=Options(tools=(tool,)))), end='')"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    arguments = [sys.executable, "-c", code, json.dumps(WEATHER.parameters)]
    other = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    assert other.stdout == answer_grammar(conversation(WEATHER)) == answer_grammar(conversation(WEATHER))


# --- Partial messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(("reasoning", "content"), [("", ""), ("Well", ""), ("", '{"a'), ("Well", '{"a')])
def test_the_grammar_begins_in_the_channel_of_the_prompt(thinking, reasoning, content):
    partial = assistant(content, reasoning=reasoning, partial=True)
    chat = conversation(messages=(user("Hi"), partial), thinking=thinking)
    assert channel(chat) == render(chat).channel
    assert begun(chat) == content


def test_a_partial_answer_is_gone_on_with():
    def chat(content, **options):
        return conversation(NOW, messages=(user("Hi"), assistant(content, partial=True)), thinking=False, **options)

    as_json = ResponseFormat(kind="json_object")
    assert takes(chat('{"a": '), begun(chat('{"a": ')) + "[1]}{C}response{S}" + END)
    assert takes(chat('{"a": ', response_format=as_json), '{"a": [1]}{C}response{S}' + END)
    assert not takes(chat('{"a": ', response_format=as_json), EMPTY + CALL + END)
    assert not takes(chat("Well", response_format=as_json), "Well", whole=False)
    assert takes(chat("Well", tool_choice="required"), "Well" + EMPTY + CALL + END)
    assert not takes(chat("Well", tool_choice="required"), EMPTY, whole=False)


# --- Response formats -----------------------------------------------------------------------------------------------


def test_the_response_is_json_where_that_is_asked_for():
    chat = conversation(response_format=ResponseFormat(kind="json_object"))
    for value, wanted in (
        ('{"a": [1, {}]}', True),
        ('{\n    "a":1\n}', True),
        ("[]", False),
        ("{", False),
        ("", False),
    ):
        assert takes(chat, THINK + value + EMPTY + END) == wanted
    assert not takes(chat, THINK + "{" + " " * 65, whole=False)  # whitespace has an end
    assert not takes(chat, '{"a": 1}{C}response', whole=False)  # reasoning is not cut short


def test_the_response_follows_its_schema():
    schema = WEATHER.parameters["$defs"]["place"] | {"$defs": WEATHER.parameters["$defs"]}
    chat = conversation(response_format=ResponseFormat(kind="json_schema", schema=schema))
    assert takes(chat, THINK + '{"name": "a", "in": {"name": "b"}}' + EMPTY + END)
    for value in ('{"in": {"name": "b"}}', '{"name": "a", "in": {}}', '{"name": 1}', '{"name": "a", "b": 1}'):
        assert not takes(chat, THINK + value + EMPTY + END)


def test_json_or_calls():
    chat = conversation(NOW, response_format=ResponseFormat(kind="json_object"))
    assert takes(chat, THINK + "{}" + EMPTY + END)
    assert takes(chat, THINK + EMPTY + CALL + END)
    assert not takes(chat, THINK + "{}" + EMPTY + CALL + END)
    assert not takes(chat, THINK + EMPTY + END)
