"""The schemas of tools: what is refused when they are given, and what is said of arguments that do not fit."""

import re
import time

import pytest

from trivium.chat.message import ResponseFormat, Tool
from trivium.chat.schema import (
    MAX_PROBLEMS,
    check_format,
    check_schema,
    check_tool,
    problems,
    resolve,
    subschemas,
    validate_arguments,
)

pytest.importorskip("jsonschema", reason="schemas are checked by jsonschema, of the extra [serve]")

TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "under": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["name"],
        }
    },
}
TRIP = Tool(
    name="trip",
    parameters={
        "type": "object",
        "properties": {
            "days": {"type": "integer"},
            "stops": {"type": "array", "items": {"type": "object", "properties": {"to": {"type": "string"}}}},
        },
        "required": ["days"],
    },
)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"days": {"type": "int"}}}, "#/properties/days/type: 'int' is not valid"),
        ({"properties": {"a/b": {"minLength": -1}}}, "#/properties/a~1b/minLength: -1 is less than"),
        ({"required": "a"}, "#/required: 'a' is not of type 'array'"),
        ({"items": [{"type": "string"}]}, "#/items: "),  # a row of schemas, as in drafts before
        ({"$ref": "#/definitions/a", "definitions": {"a": {}}}, "#/$ref: wanted one that begins with #/$defs/"),
        ({"items": {"$ref": "https://example.com/a.json"}}, "#/items/$ref: wanted one that begins with #/$defs/"),
        ({"items": {"$ref": "#"}}, "#/items/$ref: wanted one that begins with #/$defs/"),
        ({"items": {"$ref": "#/$defs/a"}, "$defs": {"b": {}}}, "#/items/$ref: no schema is at '#/$defs/a'"),
        ({"$ref": "#/$defs/a/enum/0", "$defs": {"a": {"enum": [{}]}}}, "no schema is at '#/$defs/a/enum/0'"),
        ({"items": {"$dynamicRef": "#a"}}, "#/items/$dynamicRef: wanted a"),
        ({"$defs": {"a": {"$id": "https://example.com/"}}}, "#/$defs/a/$id: only the whole schema may have one"),
        ({"items": {"pattern": "a("}}, "#/items/pattern: 'a(' is not a 'regex'"),
        ({"patternProperties": {"*": {}}}, "#/patternProperties: '*' is not a 'regex'"),
        ({"pattern": "a{99999999999}"}, "#: too much to be checked: "),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}}, "#/$defs/a: refers to itself without end"),
        (
            {"$defs": {"a": {"anyOf": [{}, {"$ref": "#/$defs/b"}]}, "b": {"not": {"$ref": "#/$defs/a"}}}},
            "#/$defs/a: refers to itself without end",
        ),
    ],
)
def test_a_schema_is_refused_with_the_place_that_is_wrong(schema, said):
    with pytest.raises(ValueError, match="^tool: ") as error:
        check_schema(schema, "tool")
    assert said in str(error.value)


def test_definitions_that_double_with_each_step_are_refused():
    defs = {f"a{at}": {"allOf": [{"$ref": f"#/$defs/a{at + 1}"}] * 2} for at in range(40)}
    with pytest.raises(ValueError, match="leads to more than 1000 schemas at one place"):
        check_schema({"$ref": "#/$defs/a0", "$defs": {**defs, "a40": {}}}, "tool")


def test_a_long_chain_of_definitions_is_refused_or_read_and_never_an_overflow():
    defs = {f"a{at}": {"$ref": f"#/$defs/a{at + 1}"} for at in range(900)}
    with pytest.raises(ValueError, match="too deep|more than 1000"):
        check_schema({"$ref": "#/$defs/a0", "$defs": {**{f"b{at}": {} for at in range(900)}, **defs, "a900": {}}}, "x")


def test_the_parameters_of_a_tool_are_those_of_an_object():
    with pytest.raises(ValueError, match="tool 'f': parameters: #/type: wanted 'object', got 'string'"):
        check_tool(Tool(name="f", parameters={"type": "string"}))
    check_tool(Tool(name="f", parameters={"type": ["object", "null"]}))
    check_tool(Tool(name="f", parameters={}))
    check_tool(Tool(name="f"))
    check_format(ResponseFormat())
    check_format(ResponseFormat(kind="json_schema", schema={"type": "string"}))
    with pytest.raises(ValueError, match="response format: schema: #/type"):
        check_format(ResponseFormat(kind="json_schema", schema={"type": "text"}))


def test_a_recursive_schema_is_read_to_the_depth_of_the_value():
    check_schema(TREE, "tree")
    value = {"name": "leaf"}
    for _ in range(40):
        value = {"name": "x", "under": [value]}
    assert problems(TREE, {"root": value}) == []
    value["under"][0]["under"][0]["name"] = 3
    assert problems(TREE, {"root": value}) == ["root.under[0].under[0].name: 3 is not of type 'string'"]


def test_older_drafts_by_name_are_read_as_ours():
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{"type": "string"}]}
    assert problems(schema, [3]) == ["[0]: 3 is not of type 'string'"]  # draft 7 has no prefixItems
    assert problems({"properties": {"a": schema}}, {"a": [3]}) == ["a[0]: 3 is not of type 'string'"]


def test_what_is_wrong_is_said_with_the_path_to_it():
    assert validate_arguments(TRIP, {"days": 3}) == []
    assert validate_arguments(TRIP, {"days": 3.0}) == []  # 3.0 is a whole number in JSON schema
    assert validate_arguments(TRIP, {"days": 3.5}) == ["days: 3.5 is not of type 'integer'"]
    assert validate_arguments(TRIP, {"days": True}) == ["days: True is not of type 'integer'"]
    assert validate_arguments(TRIP, {"days": 1, "stops": [{}, {"to": None}]}) == [
        "stops[1].to: None is not of type 'string'"
    ]
    assert validate_arguments(TRIP, {"stops": 1}) == [
        "'days' is a required property",
        "stops: 1 is not of type 'array'",
    ]


def test_a_tool_without_parameters_takes_no_arguments():
    assert validate_arguments(Tool(name="now"), {}) == []
    assert validate_arguments(Tool(name="now"), {"zone": "UTC"}) == ["zone: now takes no arguments"]
    assert validate_arguments(Tool(name="any", parameters={}), {"zone": "UTC"}) == []


def test_arguments_that_are_no_object_are_said_to_be_none():
    assert validate_arguments(TRIP, '{"days": half') == ["wanted a JSON object, got '{\"days\": half'"]


def test_few_and_short_lines_whatever_the_arguments():
    found = validate_arguments(TRIP, {"days": "x" * 10_000, "stops": ["y" * 10_000] * 10_000})
    assert len(found) == MAX_PROBLEMS and max(map(len, found)) < 400


SLOW = "^(a|aa)+$"  # of 60 letters and a mark it tries 2^40 ways
TWICE = {"type": "array", "items": {"$ref": "#/$defs/n"}}
TOO_MUCH = {
    "a pattern": ({"pattern": SLOW}, "a" * 60 + "!"),
    "a pattern of names": ({"patternProperties": {SLOW: {}}}, {"a" * 60 + "!": 1}),
    "what no pattern names": ({"patternProperties": {SLOW: {}}, "additionalProperties": False}, {"a" * 60 + "!": 1}),
    "what is not evaluated": ({"patternProperties": {SLOW: {}}, "unevaluatedProperties": False}, {"a" * 60 + "!": 1}),
    "doubles": ({"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [TWICE, TWICE | {"minItems": 1}]}}}, "deep"),
    "many values": ({"items": {"type": "integer"}}, [1] * 300_000),
    "no end": ({"items": {"$ref": "#/$defs/n"}, "$defs": {"n": TWICE}}, "deeper"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_would_take_for_ever_is_too_much(name, monkeypatch):
    monkeypatch.setattr("trivium.chat.schema.MAX_CHECK_S", 0.3 if name.startswith(("a ", "what")) else 60.0)
    schema, value = TOO_MUCH[name]
    if isinstance(value, str) and value.startswith("deep"):
        depth, value = (60 if value == "deep" else 3000), 1
        for _ in range(depth):
            value = [value]
    begun_s = time.thread_time()
    assert problems(schema, value) == ["too much to be checked"]
    assert time.thread_time() - begun_s < 20


def test_many_items_are_checked_in_linear_time():
    """Each took n * n steps, of n = 50,000 minutes, and a kept message for each of 900 alternatives 900 MB."""
    rows = [[at] for at in range(50_000)]
    assert problems({"uniqueItems": True}, ["a", *rows]) == []
    assert problems({"contains": {"type": "array"}, "unevaluatedItems": False}, rows) == []
    (line,) = problems({"anyOf": [False] * 900}, "x" * 100_000)
    assert len(line) < 400
    with pytest.raises(ValueError, match="#/required/1: 1 is not of type 'string'"):
        check_schema({"required": ["a", 1] * 25_000}, "x")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {f"a{at}": {"type": "string"} for at in range(10_001)}}, "at most 20000 keywords, got 20003"),
        ({"const": "a" * 1_000_000}, "at most 1000000 characters, got 1000012"),
        ({"items": {"pattern": "(?:" * 40 + "a" + "{2})" * 40}}, "#/items: a pattern that must repeat too much"),
        ({"pattern": "(" * 400 + "a" + ")" * 400}, "#: a pattern too deep to be read"),
        ({"pattern": "(" * 3000 + "a" + ")" * 3000}, "#: too much to be checked"),
    ],
)
def test_a_schema_has_a_size(schema, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check_schema(schema, "x")


@pytest.mark.parametrize(
    ("step", "fit", "misfit"),
    [
        (0.01, [1.15, 19.99, 0.07, 10**4000, 3], [1.155]),
        (0.1, [0.3, 1e300], [0.35]),
        (7, [7.0, 7 * 10**3000], [1e308, 10**4000]),
        (1e-300, [1e308], [1e-301]),
    ],
)
def test_a_multiple_is_one_of_what_the_json_says(step, fit, misfit):
    for value in fit:
        assert problems({"multipleOf": step}, value) == []
    for value in misfit:
        assert len(problems({"multipleOf": step}, value)) == 1


def test_items_are_unique_as_json_schema_has_it():
    for unique in ([1, True, 0, False, "1", [1], [True], None, 1e308, 10**308], [{"a": 1}, {"a": True}]):
        assert problems({"uniqueItems": True}, unique) == []
    for twice in ([1, 1.0], [{"a": 1, "b": [2.0]}, {"b": [2], "a": 1}], [0, -0.0]):
        assert len(problems({"uniqueItems": True}, twice)) == 1


@pytest.mark.filterwarnings("ignore:Possible nested set")
@pytest.mark.parametrize("pattern", ["^(?:ab){e}$", "^[[:alpha:]]+$", r"^\{e}$", "^[{:]{1,2}$", "^a{,2}$", "^a{}$"])
def test_a_pattern_is_what_it_is_to_python(pattern):
    """`regex`, which can be told when to stop, has more: {e} is any number of errors to it, [:alpha:] all letters."""
    for text in ("", "a", "aa", "ab", "ab{e}", "b", ":]", "l]", "{e}", "{:", "a{}", "z"):
        assert (problems({"pattern": pattern}, text) == []) == bool(re.search(pattern, text)), text


def test_what_nothing_else_speaks_of():
    schema = {
        "$ref": "#/$defs/a",
        "anyOf": [{"properties": {"b": {"type": "integer"}}, "required": ["b"]}, {"patternProperties": {"^c": {}}}],
        "if": {"required": ["d"], "properties": {"d": {}}},
        "then": {"dependentSchemas": {"d": {"properties": {"e": {}}}}},
        "unevaluatedProperties": {"type": "null"},
        "$defs": {"a": {"properties": {"a": {}}}},
    }
    assert problems(schema, {"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "z": None}) == []
    assert problems(schema, {"b": "no", "e": 1}) == [
        "Unevaluated properties are not allowed ('b' was unexpected)",
        "Unevaluated properties are not allowed ('e' was unexpected)",
    ]
    row = {"allOf": [{"prefixItems": [True]}], "contains": {"type": "string"}, "unevaluatedItems": False}
    assert problems(row, [1, "a"]) == []
    assert problems(row, [1, "a", 2]) == ["Unevaluated items are not allowed (item 2 was unexpected)"]
    assert problems({"properties": {"a": False}, "additionalProperties": False}, {"a": 1, "b": 2, "c": 3}) == [
        "Additional properties are not allowed ('b', 'c' were unexpected)",
        "a: False schema does not allow 1",
    ]


def test_a_format_is_a_remark():
    assert problems({"type": "string", "format": "date"}, "no day") == []


def test_every_place_has_its_pointer_and_every_reference_its_schema():
    schema = {"$defs": {"a/b ~": {"anyOf": [{"type": "string"}, True]}}, "properties": {"$ref": {"items": False}}}
    assert dict(subschemas(schema)) == {
        "#": schema,
        "#/$defs/a~1b ~0": {"anyOf": [{"type": "string"}, True]},
        "#/$defs/a~1b ~0/anyOf/0": {"type": "string"},
        "#/$defs/a~1b ~0/anyOf/1": True,
        "#/properties/$ref": {"items": False},
        "#/properties/$ref/items": False,
    }
    assert resolve(schema, "#/$defs/a~1b%20~0/anyOf/0") == {"type": "string"}
    check_schema({"$ref": "#/$defs/a~1b%20~0", **schema}, "x")
