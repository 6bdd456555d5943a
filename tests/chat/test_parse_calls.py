"""Calls in an answer: their arguments, their types, and what is wrong with them."""

import json

import pytest

from tests.answers import (
    BYTES,
    CALL,
    TOOLS,
    argument,
    call_of,
    ids_of,
    is_object,
    marked,
    pushed,
    read,
)
from trivium.chat.events import ArgumentText, CallEnd, Flaw
from trivium.chat.message import ToolCall
from trivium.chat.parse import Parser, parse

# --- Calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["call", 'call index="1"', 'call tool="" index="1"'])
@pytest.mark.parametrize("close", ["{C}call{S}", ""])
def test_a_call_without_a_tool_is_a_flaw_with_all_it_holds(header, close):
    inside = f"{argument('k', 'string', 'v')}x"
    answer = read(f'a{{O}}{header}{{S}}{inside}{close}{{O}}call tool="g" index="2"{{S}}{{C}}call{{S}}{{E}}')
    assert [flaw.kind for flaw in answer.flaws] == ["call"] * len(answer.flaws)
    assert "".join(flaw.text for flaw in answer.flaws) == marked(f"{{O}}{header}{{S}}{inside}{close}")
    assert [(call.name, call.text, call.problem) for call in answer.calls] == [("g", "{}", "")]
    assert answer.reasoning == "a"


def test_behind_a_call_without_a_tool_are_the_tools_again():
    answer = read("{O}call{S}a{C}call{S}b{C}tools{S}")
    assert [(flaw.kind, flaw.text) for flaw in answer.flaws[1::2]] == [("call", "a"), ("text", "b")]


def test_a_call_of_a_tool_that_is_not_declared_is_told_and_not_executable():
    answer = read(f'{{O}}call tool="h" index="1"{{S}}{argument("k", "number", "1")}{{C}}call{{S}}{CALL}{{E}}')
    undeclared, declared = answer.calls
    assert undeclared.name == "h" and json.loads(undeclared.text) == {"k": 1}
    assert undeclared.problem == "undeclared tool 'h'" and undeclared.arguments is None
    assert declared.executable and answer.finish_reason == "tool_calls"
    assert [call.name for call in answer.message().tool_calls] == ["g"]
    assert read('{O}call tool="h"{S}{C}call{S}{E}').finish_reason == "stop"
    assert read('{O}call tool="h"{S}{C}call{S}{E}', tools=()).calls[0].problem
    assert read('{O}call tool="$h"{S}{C}call{S}{E}', tools=None).calls[0].executable
    long = read(f'{{O}}call tool="{"h" * 257}"{{S}}{{C}}call{{S}}{{E}}', tools=None)
    assert "257 characters" in long.calls[0].problem and long.message().tool_calls == ()


@pytest.mark.parametrize(
    "type_, text, value, num_flaws",
    [
        ("string", "", "", 0),
        ("string", "5", "5", 0),  # a string is never decoded
        ("string", '{"a": 1}', '{"a": 1}', 0),
        ("string", ' "\\\n\u2028\x00\x7f🇫🇷', ' "\\\n\u2028\x00\x7f🇫🇷', 0),
        ("number", "5", 5, 0),
        ("number", " -0.5e3\n", -500.0, 0),
        ("number", "five", "five", 1),
        ("number", "", "", 1),
        ("number", "NaN", "NaN", 1),
        ("number", "1e999", "1e999", 1),
        ("number", "9" * 4301, "9" * 4301, 1),
        ("number", "true", "true", 1),
        ("number", '"5"', '"5"', 1),
        ("number", "5, 6", "5, 6", 1),
        ("boolean", "true", True, 0),
        ("boolean", "True", "True", 1),
        ("boolean", "1", "1", 1),
        ("null", "null", None, 0),
        ("null", "", "", 1),
        ("object", '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}, 0),
        ("object", ' \t\r\n{"a": 1} ', {"a": 1}, 0),
        ("object", "[1]", "[1]", 1),
        ("object", " bare 'word' ", " bare 'word' ", 1),
        ("object", "", "", 1),
        ("object", "\u3000{}", "\u3000{}", 1),  # no whitespace of JSON
        ("object", " \n", " \n", 1),
        ("array", "[]", [], 0),
        ("array", '{"a": 1}', '{"a": 1}', 1),
        ("array", "null", "null", 1),
        ("date", "5", "5", 1),  # no type that we know
        ("integer", "5", 5, 1),  # a schema's word
        ("", "5", "5", 1),
    ],
)
def test_b005_the_declared_type_decides_and_what_is_none_of_it_is_a_string(type_, text, value, num_flaws):
    call, flaws = call_of(argument("k", type_, text))
    assert call.executable and call.arguments == {"k": value} and type(call.arguments["k"]) is type(value)
    assert json.loads(call.text) == {"k": value}
    assert flaws == (Flaw("type", marked(f'{{O}}argument key="k" type="{type_}"{{S}}')),) * num_flaws


@pytest.mark.parametrize(
    "tool, key, text, value",
    [
        ("f", "integer", "5", 5),
        ("f", "number", "0.5", 0.5),
        ("f", "boolean", "true", True),
        ("f", "array", "[5]", [5]),
        ("f", "object", "{}", {}),
        *(("f", key, "5", "5") for key in ("string", "either", "strange", "unknown")),
        *((tool, "number", "5", "5") for tool in ("g", "bare")),
    ],
)
def test_b005_an_argument_without_a_type_has_that_of_the_schema(tool, key, text, value):
    elements = f'{{O}}argument key="{key}"{{S}}{text}{{C}}argument{{S}}'
    answer = read(f'{{O}}call tool="{tool}"{{S}}{elements}{{C}}call{{S}}{{E}}')
    assert answer.calls[0].arguments == {key: value}
    assert [flaw.kind for flaw in answer.flaws] == ["type"]


@pytest.mark.parametrize(
    "text, arguments",
    [
        ('{"a": 1, "b": {"c": "}"}}', {"a": 1, "b": {"c": "}"}}),
        (' \n{"a":1} ', {"a": 1}),
        ("", {}),
        (" \n\u3000", {}),
        *((text, None) for text in ("[1]", "5", "null", '{"a": half', '{"a": 1} {}', "{", '{"a": NaN}', "word")),
        *((text, None) for text in ("\u3000{}", '{"a": "\\ud800"}', "[" * 5000)),
    ],
)
def test_a_json_element_is_the_object_or_the_call_has_a_problem(text, arguments):
    call, flaws = call_of(f'{{O}}json type="string" x="y"{{S}}{text}{{C}}json{{S}}')
    assert call.arguments == arguments and flaws == ()
    assert call.text + call.unsent == (text if text.strip() else "{}")
    assert call.problem == ("" if arguments is not None else "no JSON object in json")


K = argument("k", "number", "1")
JSON = '{O}json type="object"{S}{"a": 1}{C}json{S}'


@pytest.mark.parametrize(
    "elements, problem",
    [
        (argument("k", "object", '{"a": half}'), "no JSON object in argument 'k'"),
        (argument("k", "object", '{}, "x": {}'), "no JSON object in argument 'k'"),  # no way out of the argument
        (argument("k", "array", "[1"), "no JSON array in argument 'k'"),
        (argument("k", "array", "[" * 100 + "]" * 100), "no JSON array in argument 'k'"),  # 101 deep with the arguments
        (K + K, "a second argument 'k'"),
        (JSON + K, "an argument beside json"),
        (K + JSON, "json beside other elements"),
        (JSON + JSON, "json beside other elements"),
        ('{O}argument type="string"{S}v{C}argument{S}', "an argument without a key"),
        (argument("k", "string", "a{O}foo{S}b"), "<|open|>foo<|sep|> has no place in argument 'k'"),
        (argument("k", "string", "a{C}json{S}b"), "<|close|>json<|sep|> has no place in argument 'k'"),
        (argument("k", "string", "a{C}think{S}b"), "<|close|>think<|sep|> has no place in argument 'k'"),
        (argument("k", "string", "a{O}x y{S}b"), "a broken marker in argument 'k'"),
        (argument("k", "string", "a[PAD]b"), "[PAD] has no place in argument 'k'"),
        (argument("k", "number", "1<|media_pad|>2"), "<|media_pad|> has no place in argument 'k'"),
        (argument("k", "string", "a{S}b"), "<|sep|> has no place in argument 'k'"),
        (f'{{O}}argument key="j" type="string"{{S}}a{K}', "unclosed in argument 'j'"),
        ('{O}argument key="j" type="string"{S}a', "unclosed in argument 'j'"),
        ('{O}argument key="j" type="number"{S}1', "unclosed in argument 'j'"),
        ('{O}json{S}{"a": 1}', "unclosed in json"),
        # A string that holds a close is cut there, so what is behind it may be the rest of an argument.
        (argument("k", "string", "rm -r /tmp{C}argument{S}/x"), "text between arguments"),
        (f"{K}{{C}}argument{{S}}", "<|close|>argument<|sep|> has no place"),
        (f"{K}{{O}}foo{{S}}", "<|open|>foo<|sep|> has no place"),
        (f"{K}[PAD]", "[PAD] has no place"),
    ],
)
def test_what_is_wrong_in_a_call_is_its_problem(elements, problem):
    call, _ = call_of(elements)
    assert call.problem.split("; ")[0] == problem
    assert call.arguments is None and not call.executable
    with pytest.raises(ValueError):
        json.loads(call.text)


def test_elements_that_have_no_place_beside_others_are_flaws():
    for elements, text, lost in (
        (K + JSON, '{"k": 1', '{"a": 1}'),
        (JSON + K, '{"a": 1', "1"),
        (JSON * 2, '{"a": 1', '{"a": 1}'),
    ):
        call, flaws = call_of(elements)
        assert call.text == text and flaws == (Flaw("text", lost),)
    call, flaws = call_of('{O}argument type="string"{S}v{C}argument{S}')
    assert call.text == "" and flaws == (Flaw("text", "v"),)


def test_whitespace_between_the_elements_of_a_call_is_a_flaw_and_no_problem():
    call, flaws = call_of(f"\n {K}\n")
    assert call.executable and [flaw.text for flaw in flaws] == ["\n ", "\n"]


def test_arguments_are_as_deep_as_a_call_can_have_them():
    call, _ = call_of(argument("k", "array", "[" * 99 + "]" * 99))
    assert call.executable
    assert ToolCall(id="1", name="f", arguments=call.arguments)
    call, _ = call_of('{O}json{S}{"k": ' + "[" * 99 + "]" * 99 + "}{C}json{S}")
    assert ToolCall(id="1", name="f", arguments=call.arguments)


@pytest.mark.parametrize("close", ["{C}argument{S}{C}call{S}", "{C}argument{S}", "", "{E}", "{O}tools{S}"])
@pytest.mark.parametrize(
    "type_, text",
    [
        *(
            ("object", text)
            for text in ("{}}", '{"a": 1}, "admin": true}', '{"a": "}"}}', '{"a": "\\\\"}}', "{]}", "{}\n}")
        ),
        *(("array", text) for text in ("[1]}", '[1], "x": [2]}', "[[]]}]", "[}")),
        *(("number", text) for text in ("5}", '5, "admin": true}', "}")),
        *(("boolean", "true}"), ("null", 'null, "a": {}}'), ("object", "5}"), ("string", '"}')),
    ],
)
def test_no_value_closes_the_arguments_that_it_is_in(type_, text, close):
    ids = ids_of(f'{{O}}call tool="f" index="1"{{S}}{{O}}argument key="k" type="{type_}"{{S}}{text}{close}')
    for new in range(1, len(ids)):  # whole ids, and pieces of several characters
        parser = Parser(BYTES, channel="response", tools=TOOLS)
        got = pushed(parser, ids[:new])
        sent = "".join(event.text for event in got if isinstance(event, ArgumentText))
        assert not is_object(sent)
    answer = parse(ids, BYTES, channel="response", tools=TOOLS)
    (call,) = answer.calls
    if call.executable:  # what is none of its type is a string
        assert call.arguments == {"k": text}
    else:
        assert not is_object(call.text)


@pytest.mark.parametrize(
    "elements", ['{O}json{S}{"a": 1}', '{O}json{S}{"a": 1}}', '{O}json{S}{"a": 1} {}', "{O}json{S}5"]
)
@pytest.mark.parametrize("close", ["", "{E}", "{C}json{S}", "{C}json{S}{O}foo{S}{C}call{S}"])
def test_a_json_element_with_a_fault_is_never_sent_whole(elements, close):
    answer = read(f'{{O}}call tool="f" index="1"{{S}}{elements}{close}', channel="response")
    (call,) = answer.calls
    assert not call.executable and not is_object(call.text)


OPEN_CALL = '{O}call tool="f" index="1"{S}{O}argument key="k" type="TYPE"{S}'


@pytest.mark.parametrize(
    "next_",
    [
        "",
        "{E}",
        "[EOS]",
        "{C}tools{S}",
        "{C}message{S}",
        "{O}think{S}",
        "{O}response{S}",
        "{O}tools{S}",
        '{O}message role="user"{S}',
        '{O}call tool="g" index="2"{S}',
        "{O}call{S}",
    ],
)
@pytest.mark.parametrize(
    "type_, value, text",
    [
        *(("string", 'a"', '{"k": "a\\"'), ("number", "12", '{"k": 12'), ("object", '{"a"', '{"k": {"a"')),
        *(("object", " ", '{"k":  '), ("null", "", '{"k": ')),
    ],
)
def test_a_call_that_something_else_ends_is_unclosed_and_has_what_came_so_far(next_, type_, value, text):
    answer = read(OPEN_CALL.replace("TYPE", type_) + value + next_)
    assert answer.calls[0].text == text
    assert answer.calls[0].problem == "unclosed in argument 'k'"
    assert answer.message().tool_calls == ()
    bare = read('{O}call tool="f" index="1"{S}' + K + next_)
    assert (bare.calls[0].text, bare.calls[0].problem) == ('{"k": 1', "unclosed")


def test_a_tool_call_cut_by_the_length_is_told_in_finish():
    parser = Parser(BYTES, channel="think", tools=TOOLS)
    pushed(parser, ids_of(CALL + OPEN_CALL.replace("TYPE", "string")))
    *_, end, finish = parser.finish("abort")
    assert end == CallEnd(1, "unclosed in argument 'k'") and finish.reason == "abort"
    assert parser.finish("abort") == []


def test_finish_reasons():
    assert read(f"{CALL}{{C}}tools{{S}}{{E}}").finish_reason == "tool_calls"
    assert read("{C}think{S}{E}").finish_reason == "stop"
    assert read(f"{CALL}{{C}}tools{{S}}").finish_reason == "length"
    assert read(f"{CALL}{{C}}tools{{S}}", reason="stop").finish_reason == "tool_calls"  # an end id that is not pushed
    assert read("a", reason="stop").finish_reason == "stop"
    assert read("a", reason="abort").finish_reason == "abort"
    assert read(f"{CALL}{{O}}response{{S}}a.b{{E}}", stop=["."]).finish_reason == "stop"


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("length", [256, 257])
def test_an_argument_whose_name_no_message_may_have_makes_no_executable_call(tokenizer, as_json, length):
    key = "k" * length
    if as_json:
        inner = f'<|open|>json type="object"<|sep|>{{"{key}": 1}}<|close|>json<|sep|>'
    else:
        inner = f'<|open|>argument key="{key}" type="number"<|sep|>1<|close|>argument<|sep|>'
    call = f'<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{inner}<|close|>call<|sep|><|close|>tools<|sep|>'
    answer = parse(tokenizer.encode_control(f"{call}<|end_of_msg|>"), tokenizer, channel="response", tools=None)
    assert answer.calls[0].executable == (length == 256)
    assert len(answer.message().tool_calls) == (length == 256)
