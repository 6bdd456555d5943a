"""The grammar of an answer: it takes what `render` writes of a valid answer, and nothing else."""

import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from trivium.chat.grammar import MAX_CALLS, answer_grammar, begun, channel, unenforced
from trivium.chat.message import (
    Conversation,
    Options,
    ResponseFormat,
    Tool,
    ToolCall,
    assistant,
    declare,
    user,
)
from trivium.chat.render import Renderer, render
from trivium.chat.schema import problems, validate_arguments
from trivium.chat.tokenizer import train_tokenizer
from trivium.model.mask import Grammars

pytest.importorskip("jsonschema", reason="schemas are checked by jsonschema, of the extra [serve]")
pytest.importorskip("llguidance", reason="grammars are held by llguidance, of the extra [serve]")

TOKENIZER = train_tokenizer([Path(textwrap.__file__).read_text(encoding="utf-8")], 600)
RENDERER = Renderer(TOKENIZER)
GRAMMARS = Grammars(TOKENIZER)
MARKS = {"{O}": "<|open|>", "{C}": "<|close|>", "{S}": "<|sep|>", "{E}": "<|end_of_msg|>"}

NOW = Tool(name="now")
WEATHER = Tool(
    name="weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "at": {"type": ["number", "null"]},
            "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
            "exact": {"type": "boolean"},
        },
        "required": ["city", "days"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "in": {"$ref": "#/$defs/place"}},
                "required": ["name"],
                "additionalProperties": False,
            }
        },
    },
)


def conversation(*tools, messages=(), **options):
    return Conversation(messages=messages or (user("Hi"),), options=Options(tools=tools, **options))


def ids_of(text):
    """Ids of a text in which {O}, {C}, {S} and {E} are the marks."""
    parts = re.split(r"(\{[OCSE]\})", text)
    return [
        i
        for part in parts
        for i in (TOKENIZER.encode_control(MARKS[part]) if part in MARKS else TOKENIZER.encode(part))
    ]


def taken(grammar, ids):
    """How many ids the grammar takes, and whether it is finished by them."""
    constraint = GRAMMARS.compile(grammar)
    for count, token_id in enumerate(ids):
        try:
            constraint.accept(token_id)
        except ValueError:
            return count, False
    return len(ids), constraint.is_finished


def takes(chat, answer, whole=True):
    """Whether the grammar of the conversation takes this text; as a whole, or as a beginning."""
    ids = ids_of(answer)
    count, finished = taken(answer_grammar(chat), ids)
    return count == len(ids) and (finished or not whole)


def written(chat, said):
    """What the assistant writes when it says this: the ids that training has a loss on."""
    prompt = RENDERER.render(replace(chat, messages=(*chat.messages, said)), answer=False)
    return [token_id for token_id, by_assistant in zip(prompt.ids, prompt.written, strict=True) if by_assistant]


def takes_said(chat, said):
    ids = written(chat, said)
    return taken(answer_grammar(chat), ids) == (len(ids), True)


def called(*calls, **said):
    made = [ToolCall(id=str(at), name=name, arguments=arguments) for at, (name, arguments) in enumerate(calls)]
    return assistant(tool_calls=made, **said)


def takes_arguments(schema, arguments, **tool):
    chat = conversation(Tool(name="f", parameters=schema, **tool), tool_choice="required", parallel_calls=False)
    return takes_said(chat, called(("f", arguments)))


def object_of(required=True, **properties):
    return {"type": "object", "properties": properties, "required": list(properties) if required else []}


# --- Frame ----------------------------------------------------------------------------------------------------------

THINK, SAY, END = "hm{C}think{S}{O}response{S}", "Yes.{C}response{S}", "{C}message{S}{E}"
CALL = '{O}tools{S}{O}call tool="now" index="1"{S}{C}call{S}{C}tools{S}'
EMPTY = "{C}response{S}"
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


# --- Arguments ------------------------------------------------------------------------------------------------------


def test_arguments_come_in_any_order_each_once_and_those_required():
    chat = conversation(WEATHER, tool_choice="required")
    values = {"city": "Kiel", "days": 2, "unit": "celsius", "at": None}
    for count in range(5):
        for names in itertools.permutations(values, count):
            arguments = {name: values[name] for name in names}
            assert takes_said(chat, called(("weather", arguments))) == ({"city", "days"} <= set(names))
    twice = '{O}argument key="days" type="number"{S}2{C}argument{S}' * 2
    head = '{C}think{S}{O}response{S}{C}response{S}{O}tools{S}{O}call tool="weather" index="1"{S}'
    assert takes(chat, head + twice[: len(twice) // 2], whole=False) and not takes(chat, head + twice, whole=False)


def test_many_arguments_come_in_the_order_of_the_schema():
    schema = object_of(required=False, **{f"a{at}": {"type": "integer"} for at in range(70)}) | {"required": ["a3"]}
    assert takes_arguments(schema, {"a3": 1, "a5": 1, "a69": 2})
    assert not takes_arguments(schema, {"a3": 1, "a69": 1, "a5": 2})
    assert not takes_arguments(schema, {"a5": 1})
    assert takes_arguments(object_of(required=False, **{f"a{at}": True for at in range(64)}), {"a63": 1, "a0": []})


def test_every_argument_of_the_schema_is_taken():
    near = {"name": "a", "in": {"name": '"b"\n é 😀', "in": {"name": ""}}}
    arguments = {"city": "", "days": -3, "unit": "celsius", "at": 1.5e-7, "places": [near, near], "exact": False}
    assert validate_arguments(WEATHER, arguments) == []
    assert takes_said(conversation(WEATHER), called(("weather", arguments), content="So:", reasoning="Hm."))


# A schema of one argument, values that fit, and values that do not.
SCHEMAS = {
    "string": ({"type": "string"}, ["", 'a\n"b"', "null", "<|close|>"], [1, None, ["a"], {}]),
    "integer": ({"type": "integer"}, [0, -7, 10**60], [1.5, "1", True]),
    "number": ({"type": "number"}, [0, -1.5, 6.02e23, 1e-7, 10**40], ["1", None]),
    "boolean": ({"type": "boolean"}, [True, False], [0, "true"]),
    "null": ({"type": "null"}, [None], ["null", 0]),
    "any": (True, ["", 1, 1.5, True, None, [1, {}], {"a": [None]}], []),
    "bounds": ({"type": "integer", "minimum": 3, "exclusiveMaximum": 12}, [3, 11], [2, 12, 100, -5]),
    "types": ({"type": ["integer", "null"], "minimum": 3}, [3, None], [2, "3", 3.5]),
    "enum": ({"enum": ["a", "b", 1, None, [1], {"k": "v"}]}, ["a", 1, None, [1], {"k": "v"}], ["c", 2, [2], True, {}]),
    "enum of few": ({"enum": ["aaa", "a", ""], "type": ["string", "null"], "maxLength": 1}, ["a", ""], ["aaa", None]),
    "const": ({"const": "a\n"}, ["a\n"], ["a", 1]),
    "anyOf": ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]}, ["ab", 1], ["abc", 1.5, None]),
    "anyOf beside": ({"anyOf": [{"minimum": 3}, {"maximum": 1}], "type": "integer"}, [3, 1], [2, "a"]),
    "anyOf numbers": ({"anyOf": [{"type": "integer"}, {"type": "number", "maximum": 1}]}, [5, 0.5], [1.5, "a"]),
    "enums": ({"allOf": [{"enum": ["a", "b", 1, 2]}, {"enum": ["b", "c", 2, 3]}]}, ["b", 2], ["a", "c", 1, 3]),
    "allOf": ({"allOf": [{"type": ["string", "integer"]}, {"minimum": 3, "minLength": 2}]}, ["ab", 3], ["a", 2, None]),
    "oneOf": ({"oneOf": [{"type": "string"}, {"type": "boolean"}]}, ["a", True], [1]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3.0}, ["ab", "é漢😀"], ["a", "abcd"]),
    "date": ({"type": "string", "format": "date"}, ["2024-02-29", "1999-12-31"], ["2024-02-30", "24-01-01", "today"]),
    "date-time": ({"format": "date-time"}, ["2024-02-29T23:59:59.5Z", 3], ["2024-02-29 23:59:59Z", "x"]),
    "uuid": ({"type": "string", "format": "uuid"}, ["01234567-89ab-cdef-0123-456789ABCDEF"], ["0123"]),
    "ipv4": ({"type": "string", "format": "ipv4"}, ["192.168.0.255"], ["1.2.3", "1.2.3.256"]),
    "email": ({"type": "string", "format": "email"}, ["a.b+c@d-e.org"], ["a", "a@b", "@b.c"]),
    "other format": ({"type": "string", "format": "uri"}, ["anything"], [1]),
    "items": ({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1}, [["a"], ["b", "a"]], [[], ["c"], "a"]),
    "tuple": ({"type": "array", "prefixItems": [{"type": "null"}], "items": False}, [[None], []], [[None, 1], [1]]),
    "object": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
        [{"a": 1}],
        [{}, {"a": "1"}, {"a": 1, "b": 1}],
    ),
    "map": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [{}, {"é": 1, "b": 2}],
        [{"a": "1"}],
    ),
    "objects": (
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"k": {"const": "a"}, "v": {"type": "integer"}},
                    "required": ["k", "v"],
                },
                {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
            ]
        },
        [{"k": "a", "v": 1}, {"k": "b"}],
        [{"k": "a"}, {"k": "c"}, {"k": "a", "v": "1"}],
    ),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_argument_is_taken_where_its_schema_takes_it(name):
    schema, fit, misfit = SCHEMAS[name]
    tool = Tool(name="f", parameters=object_of(a=schema))
    for value in fit:
        assert validate_arguments(tool, {"a": value}) == []
        assert takes_arguments(tool.parameters, {"a": value}), value
    for value in misfit:
        assert not takes_arguments(tool.parameters, {"a": value}), value
    # The same one floor deeper, in JSON.
    deep = {"type": "array", "items": schema}
    assert takes_arguments(object_of(a=deep), {"a": fit})
    for value in misfit:
        assert not takes_arguments(object_of(a=deep), {"a": [value]}), value


def test_definitions_refer_to_each_other_and_to_themselves():
    schema = object_of(tree={"$ref": "#/$defs/tree"}, leaf={"$ref": "#/$defs/a~1b%20c"}) | {
        "$defs": {
            "tree": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/tree"}}, {"$ref": "#/$defs/a~1b%20c"}]},
            "a/b c": {"type": ["integer", "string"], "maxLength": 1},
        }
    }
    for tree in (1, "a", [], [[1, []], "b"]):
        assert takes_arguments(schema, {"tree": tree, "leaf": 1})
    for tree in ("ab", [["ab"]], None, {}):
        assert not takes_arguments(schema, {"tree": tree, "leaf": 1})


def test_arguments_of_several_shapes():
    shapes = {
        "type": "object",
        "properties": {"id": {"type": "integer"}},
        "required": ["id"],
        "oneOf": [
            {"properties": {"kind": {"const": "a"}, "size": {"type": "number"}}, "required": ["kind", "size"]},
            {"$ref": "#/$defs/b"},
        ],
        "$defs": {"b": {"properties": {"kind": {"const": "b"}}, "required": ["kind"]}},
    }
    for arguments, wanted in (
        ({"id": 1, "kind": "a", "size": 2}, True),
        ({"kind": "b", "id": 1}, True),
        ({"id": 1, "kind": "a"}, False),
        ({"id": 1, "kind": "b", "size": 2}, False),  # not of this shape, and not said to be allowed beside it
        ({"kind": "b"}, False),
    ):
        assert takes_arguments(shapes, arguments) == wanted


def test_arguments_without_a_name_in_the_schema():
    named = object_of(a={"type": "integer"})
    for more, wanted in (
        ({}, [False, False, False]),
        ({"additionalProperties": False}, [False, False, False]),
        ({"additionalProperties": True}, [True, True, True]),
        ({"additionalProperties": {"type": "integer"}}, [True, False, True]),
        ({"patternProperties": {"^x_": {"type": "string"}}}, [False, True, False]),
        ({"patternProperties": {"^x_": {"type": "string"}}, "additionalProperties": {"type": "integer"}}, [True] * 3),
    ):
        schema = named | more
        for arguments, is_wanted in zip(({"b": 1}, {"x_b": "s"}, {"b": 1, "é": 2}), wanted, strict=True):
            assert takes_arguments(schema, {"a": 1, **arguments}) == is_wanted
            assert takes_arguments(schema, {**arguments, "a": 1}) == is_wanted
        assert not takes_arguments(schema, {"a": "s"})
    # A name of the schema is not one of the others, and one that begins like it is.
    long = object_of(required=False, abc={"type": "integer"}) | {"additionalProperties": True}
    assert not takes_arguments(long, {"abc": "s"})
    for name in ("a", "ab", "abd", "abcd", "b"):
        assert takes_arguments(long, {name: "s", "abc": 1})
    only_x = named | {"patternProperties": {"^x_": {"type": "string"}, "y$": {"type": "null"}}}
    for arguments, wanted in (({"x_": "s", "y": None}, True), ({"b": "s"}, False), ({"x_y": None}, False)):
        assert takes_arguments(only_x, {"a": 1, **arguments}) == wanted
    for free in ({}, {"type": "object"}):
        assert takes_arguments(free, {"b": [1], '&"': "s"}) is False  # of such names only declared ones are written
        assert takes_arguments(free, {"b": [1], "c d": "s"}) and takes_arguments(free, {})
    assert not takes_arguments(object_of(), {"b": 1}) and takes_arguments(object_of(), {})


def test_strict_false_leaves_arguments_to_the_model():
    for strict, wanted in ((None, False), (True, False), (False, True)):
        assert takes_arguments(object_of(a={"type": "integer"}), {"b": "x"}, strict=strict) == wanted
    assert not takes_said(conversation(replace(NOW, strict=False), tool_choice="required"), called(("now", {"a": 1})))


def test_where_no_arguments_fit_the_tool_is_refused():
    with pytest.raises(ValueError, match="tool 'f': parameters: no arguments fit"):
        answer_grammar(conversation(Tool(name="f", parameters=object_of(a=False))))
    assert takes_arguments(object_of(required=False, a=False), {})
    with pytest.raises(ValueError, match="tool 'f': parameters: #/properties/a/type: "):
        answer_grammar(conversation(Tool(name="f", parameters=object_of(a={"type": "int"}))))
    bounds = conversation(Tool(name="f", parameters=object_of(a={"type": "integer", "minimum": 3, "maximum": 1})))
    with pytest.raises(ValueError, match="grammar: .*minimum .3. is greater than maximum"):
        GRAMMARS.compile(answer_grammar(bounds))
    halves = {"anyOf": [{"const": at} for at in range(40)]}
    with pytest.raises(ValueError, match="alternatives that come to more than 1000 cases"):
        answer_grammar(conversation(Tool(name="f", parameters=object_of(a={"allOf": [halves, halves]}))))


def test_schemas_that_would_take_for_ever_are_refused_or_read_in_time(monkeypatch):
    with (
        monkeypatch.context() as patch,
        pytest.raises(ValueError, match="tool 'f': parameters: a pattern that takes too long to be read"),
    ):
        patch.setattr("trivium.chat.grammar.MAX_GRAMMAR_S", 0.2)
        takes_arguments(object_of(a={"enum": ["a" * 60 + "!"], "pattern": "^(a|aa)+$"}), {"a": "a"})
    assert takes_arguments(object_of(a={"type": "string", "pattern": "^(a|aa)+$"}), {"a": "a" * 60})
    assert takes_arguments(object_of(a={"type": "string", "maxLength": 10**12}), {"a": "a"})  # as without a bound
    assert not takes_arguments(object_of(a={"type": "array", "minItems": 10**12}), {"a": [1]})
    assert takes_arguments(object_of(a={"enum": list(map(str, range(5000)))}), {"a": "4999"})


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        # 2^40 ways to read each of 400 values: a second for each was minutes for all.
        ({"enum": [f"{'a' * 60}{at}!" for at in range(400)], "pattern": "^(a|aa)+$"}, "takes too long"),
        (
            {"enum": [f"b{at}" for at in range(300)], "allOf": [{"pattern": f"b|{at}"} for at in range(900)]},
            "too many",
        ),
        ({"allOf": [{"anyOf": [{"minLength": 1}] * 30}] * 2 + [{"minLength": 1}] * 500}, "too many steps"),
        ({"pattern": "(?:" * 200 + "a" + ")" * 200}, "too deep"),
    ],
)
def test_what_would_take_minutes_is_too_much(argument, said, monkeypatch):
    monkeypatch.setattr("trivium.chat.grammar.MAX_GRAMMAR_S", 0.5 if said == "takes too long" else 60.0)
    monkeypatch.setattr("trivium.chat.grammar.MAX_STEPS", 100_000)
    with pytest.raises(ValueError, match=f"tool 'f': parameters: .*{said}"):
        answer_grammar(conversation(Tool(name="f", parameters=object_of(a=argument))))


def test_the_steps_are_those_of_all_tools_together(monkeypatch):
    tools = [Tool(name=f"f{at}", parameters=object_of(**{f"a{at}": {"type": "string"}})) for at in range(20)]
    monkeypatch.setattr("trivium.chat.grammar.MAX_STEPS", 600)
    answer_grammar(conversation(*tools[:5]))
    with pytest.raises(ValueError, match="too many steps"):
        answer_grammar(conversation(*tools))


def test_patterns_too_deep_to_be_followed_are_refused():
    deep = {"type": "string", "pattern": "(?:" * 200 + "a" + ")" * 200}
    with pytest.raises(ValueError, match="too deep"):
        unenforced(deep)
    with pytest.raises(ValueError, match="too deep"):
        answer_grammar(conversation(response_format=ResponseFormat(kind="json_schema", schema=deep)))


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


def test_json_of_which_nothing_is_said_is_what_the_parser_reads():
    """The parser refuses 1e999, integers of 5,000 digits, halves of a character, and what is more than 100 deep."""
    free = object_of(a=True)
    assert takes_arguments(free, {"a": nested(99)})
    assert takes_arguments(free, {"a": {"\x7f": [-1.5e-7, 10**60, True, {}, "\x7f 😀", {"": None, "b": [[]]}]}})
    chat = conversation(response_format=ResponseFormat(kind="json_object"))
    for value, wanted in (
        ("[1e99, -0.5, 12]", True),
        ("[1e999]", False),
        ("[1e-999]", False),
        (f"[{'9' * 5000}]", False),
        (r'["\u00e9\n\/", {"a" :1 , "b":[ ]}]', True),
        (r'["\ud800"]', False),
        (r'["\x41"]', False),
        ("[01]", False),
        ("[1,]", False),
        ("[" * 98 + "]" * 98, True),
        ("[" * 99 + "]" * 99, False),
    ):
        assert takes(chat, THINK + f'{{"a":{value}}}' + EMPTY + END) == wanted, value
        call = f'{{O}}tools{{S}}{{O}}call tool="f" index="1"{{S}}{{O}}argument key="a" type="array"{{S}}{value}'
        if ":1 ," not in value and len(value) != 198:
            tail = "{C}argument{S}{C}call{S}{C}tools{S}"
            assert takes(conversation(Tool(name="f", parameters=free)), THINK + EMPTY + call + tail + END) == wanted


def test_numbers_have_an_end_where_a_bound_is_said():
    for bound in ({"minimum": 3}, {"exclusiveMinimum": 2}, {"minimum": 3, "maximum": 1e300}):
        for kind in ("integer", "number"):
            schema = object_of(a={"type": kind, **bound}, b={"items": {"type": kind, **bound}})
            assert takes_arguments(schema, {"a": 10**18, "b": [10**18]})
            assert not takes_arguments(schema, {"a": 10**20, "b": [3]})
            assert not takes_arguments(schema, {"a": 3, "b": [10**20]})
    assert unenforced({"minimum": 10**19}) == ["#/minimum"]


@pytest.mark.parametrize(
    ("bound", "text"),
    [({"exclusiveMaximum": 1}, f"0.{'9' * 30}"), ({"exclusiveMinimum": 0}, f"0.{'0' * 400}1")],
)
def test_no_literal_is_rounded_onto_an_exclusive_bound(bound, text):
    schema = object_of(a={"type": "number", **bound})
    assert problems(schema, {"a": float(text)}) != []
    chat = conversation(Tool(name="f", parameters=schema), tool_choice="required", parallel_calls=False)
    head = '{O}tools{S}{O}call tool="f" index="1"{S}{O}argument key="a" type="number"{S}'
    tail = "{C}argument{S}{C}call{S}{C}tools{S}"
    for literal, wanted in ((text, False), (text[:11], text[2] == "9"), ("0.000000001", True), ("0.5", True)):
        assert takes(chat, THINK + EMPTY + head + literal + tail + END) == wanted, literal
    assert unenforced(schema) == []
    for many in (0.1234567891, 1e7, -(10**7)):
        assert unenforced({"type": "number", "exclusiveMinimum": many}) == ["#/exclusiveMinimum"]
    assert unenforced({"type": "integer", "exclusiveMinimum": 10**7}) == []


@pytest.mark.parametrize("characters", [r"\w", r"\W", r"\s", r"\S", r"\d", r"\D", r"[\W\d]", r"[^\S\d]"])
def test_sets_of_characters_are_those_of_python(characters):
    """Marks and joiners are in Rust's word, U+001C in Python's space; within JSON llguidance's are ASCII."""
    schema = object_of(a={"type": "string", "pattern": f"^{characters}$"}, b={"items": {"pattern": f"^{characters}$"}})
    for char in "a_5 \t\u001c\u0085\u00a0\u0301\u200d\u203f²é漢٣½ⅷ😀":
        found = re.fullmatch(characters, char) is not None
        both = {"a": char, "b": [char]}
        assert (validate_arguments(Tool(name="f", parameters=schema), both) == []) == found
        assert takes_arguments(schema, both) == found, hex(ord(char))


def test_what_no_grammar_holds_is_said():
    schema = object_of(
        a={"type": "array", "items": {"not": {"type": "null"}}, "uniqueItems": True},
        b={"type": "string", "pattern": "(?=a)"},
        c={"oneOf": [{"type": "string"}, {"type": "null"}]},
    ) | {"minProperties": 1}
    assert unenforced(schema) == [
        "#/properties/a/items/not",
        "#/properties/a/uniqueItems",
        "#/properties/b/pattern",
        "#/properties/c/oneOf",
        "#/minProperties",
    ]
    assert takes_arguments(schema, {"a": [1, 1], "b": "b", "c": "x"})
    assert unenforced(WEATHER.parameters) == []


# --- Patterns -------------------------------------------------------------------------------------------------------

PATTERNS = (
    *("^[A-Z]{3}$", "a", "^a", "a$", "^a$|^b", "^(a|b)c?$", "(^a|b)c", "x|", "", "^$", "^a*?b+$", "[^a-c]", "[]a]"),
    *(
        r"^\d{2,}$",
        r"\w\s\w",
        r"^[\d.\-]+$",
        r"\.",
        r"^\$",
        r"^[^\W_]+$",
        "^(?:ab){1,2}$",
        "a{,2}b",
        "{",
        "^.$",
        "^[/]$",
    ),
    *(r"^é+$", "^[α-ω]$", r"^\u00e9$", "^\U0001f600$", r"^\x41$", "^(?P<n>a)b$", r"^\\n$", "^\"&'$", "a^", "$a"),
)
TEXTS = (
    *(
        "",
        "a",
        "b",
        "c",
        "ab",
        "bc",
        "ac",
        "abab",
        "ABC",
        "ABCD",
        "x",
        "12",
        "1",
        "1.2-3",
        "a b",
        "a_b",
        ".",
        "$5",
        "_",
    ),
    *("é", "éé", "β", "😀", "A", "\\n", "\"&'", "/", "{", "aab", "]", "xabcx"),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_takes_the_texts_in_which_python_finds_it(pattern):
    schema = {"type": "string", "pattern": pattern}
    if pattern in ("a^", "$a"):
        assert unenforced(schema) == ["#/pattern"]
        return
    assert unenforced(schema) == []
    for text in TEXTS:
        assert takes_arguments(object_of(s=schema), {"s": text}) == bool(re.search(pattern, text)), text
    found = [text for text in TEXTS if re.search(pattern, text) and (text.isascii() or "\\" not in pattern)]
    assert takes_arguments(object_of(s={"items": schema}), {"s": found})


@pytest.mark.parametrize(
    "pattern", ["(?=a)", "(?!a)b", r"(a)\1", r"\bfoo", "(?i)a", "(?i:a)", "a++", r"\Aa\Z", "\\ud83d"]
)
def test_patterns_that_only_python_knows_are_not_held(pattern):
    assert unenforced({"items": {"pattern": pattern}}) == ["#/items/pattern"]
    assert takes_arguments(object_of(s={"type": "string", "pattern": pattern}), {"s": "anything"})
    assert unenforced({"patternProperties": {pattern: {}}}) == [f"#/patternProperties/{pattern}"]
