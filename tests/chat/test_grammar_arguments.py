"""The grammar of arguments: each schema's values are taken, and others are not."""

import itertools
import json
import re
from dataclasses import replace

import pytest

from tests.grammars import (
    EMPTY,
    END,
    GRAMMARS,
    NOW,
    THINK,
    WEATHER,
    called,
    conversation,
    object_of,
    takes,
    takes_arguments,
    takes_said,
)
from trivium.chat.grammar import answer_grammar, unenforced
from trivium.chat.message import ResponseFormat, Tool
from trivium.chat.schema import problems, validate_arguments

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
