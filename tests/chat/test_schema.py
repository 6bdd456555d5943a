"""The schemas of tools: what is refused when they are given, and what is said of arguments that do not fit."""

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
