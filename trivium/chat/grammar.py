"""Grammar: what an answer may be, by its tools and its format, as text that llguidance reads.

The marks of the frame are control ids in it, by name. A mark that is spelled in ordinary ids is text like any other, and
no text has a control id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import product
from re import _constants, _parser  # type: ignore[attr-defined]  # no other way to what Python takes a pattern for
from typing import Any

from trivium.chat import strict_json
from trivium.chat.message import MAX_NAME_CHARS, Conversation, ResponseFormat, Tool
from trivium.chat.render import Channel, escaped, type_of
from trivium.chat.schema import CHARACTERS, Budget, Schema, check_format, check_schema, check_tool, resolve, subschemas

MAX_CALLS = 128  # in one answer: each index is written out
MAX_KEY_CHARS = 64  # of an argument that no schema names
MAX_CASES = 1000  # that the alternatives of a schema come to
MAX_COUNT = 1_000_000  # of characters or items: no answer has more, and larger numbers are none to llguidance
MAX_DEPTH = (
    99  # of lists and objects in one another where nothing is said of them: with the arguments 100, as `parse` has
)
# What all schemas of one answer may take: cases, matches, and ten characters of the grammar are steps.
MAX_STEPS, MAX_GRAMMAR_S = 2_000_000, 10.0
# A number that a bound is said of has no exponent to llguidance, and 64 bits; without the other bound it had no end.
MAX_BOUNDED = 9 * 10**18
# Next to an exclusive bound a number has 9 decimals, or float64 would round 0.9...9 onto the 1 that it must not be: up
# to 10^6 those of float64 are closer.
MAX_DECIMALS, MAX_EXCLUSIVE = 9, 10**6

KINDS = ("string", "number", "boolean", "null", "array", "object")

Case = tuple[dict[str, Any], ...]  # schemas that hold at once, without $ref, allOf, anyOf and oneOf


def answer_grammar(conversation: Conversation) -> str:
    """The grammar of the answer, in llguidance's Lark: the same text for the same conversation, whatever the tokenizer.

        [text C think S O response S]  response  C response S  [O tools S call+ C tools S]  C message S E

    It begins where the prompt's channel does, so what a partial message has said (`begun`) comes first. All text is
    UTF-8. The response is text, or JSON as its format says, and then there are no calls beside it. Where a call is
    required the response is empty: one without end would put the call off for ever.

    A call names a declared tool and counts from 1. Its arguments come in any order (beyond 64, in the schema's), each
    at most once and all that are required, and values are written as `render` writes them. Arguments that are not named
    in `properties` need `additionalProperties` or `patternProperties`, or a schema without `properties`; that their
    names differ is not held. Within an argument all is allowed that its schema allows, in the order it has. A tool that
    says `strict: false` takes arguments of any name and value.

    Raises ValueError for a schema that `check_schema` refuses, that no arguments fit, or that is too much: 2 million
    steps, or 10 s, for them all. What remains is found when the grammar is compiled, as bounds that exclude each other.
    See `unenforced` for what is no part of it.
    """
    options, rules = conversation.options, _Rules(Budget(MAX_STEPS, MAX_GRAMMAR_S))
    given = begun(conversation)
    tools = conversation.tools if options.tool_choice != "none" else ()
    if options.forced_tool is not None:
        tools = tuple(tool for tool in tools if tool.name == options.forced_tool)
    calls = _tools(rules, tools, MAX_CALLS if options.parallel_calls else 1) if tools else ""
    if options.tool_choice == "required":
        answer = f"{_literal(given)} {_close('response')} {calls}"
    elif options.response_format.kind == "text":
        answer = f"TEXT {_close('response')} {calls and f'({calls})?'}"
    else:
        answer = f"{_response(rules, options.response_format)} {_close('response')}"
        if calls and not given:
            answer = f"({answer} | {_close('response')} {calls})"
    if channel(conversation) == "think":
        answer = f"TEXT {_close('think')} {_open('response')} {answer}"
    return rules.text(f"{answer} {_close('message')} <|end_of_msg|>")


def channel(conversation: Conversation) -> Channel:
    """The channel that the prompt opens, in which the grammar begins."""
    return "think" if conversation.options.thinking and not begun(conversation) else "response"


def begun(conversation: Conversation) -> str:
    """The response text of a partial message: the prompt ends with it, and the grammar wants it first."""
    last = conversation.messages[-1] if conversation.messages else None
    return last.text if last is not None and last.partial else ""


def unenforced(schema: dict[str, Any]) -> list[str]:
    """Where a schema says what no grammar holds, so that only a check of the whole value finds what it forbids.

    That is conditions and claims about a whole (not, if, oneOf where it is more than anyOf, uniqueItems, contains,
    minProperties, propertyNames, ...), patterns of more than groups, sets and repeats, an exclusive bound beyond a
    million or of more than 9 decimals, which a literal may be rounded onto, and a bound that leaves nothing of 64 bits.
    Of formats those in FORMATS are held; the others are remarks. Raises ValueError as `check_schema` does.
    """
    check_schema(schema, "schema")
    lost: list[str] = []
    _held(schema, lost)
    return lost


# --- Rules ----------------------------------------------------------------------------------------------------------

SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
SELF = "\0"  # in no literal: JSON escapes it
QUOTE = r'"\""'
KEY = r'"argument key=\""'

_TERMINALS = (
    "TEXT: /(?s:.*)/",
    "INTEGER: /-?(0|[1-9][0-9]{0,99})/",
    r"NUMBER: /-?(0|[1-9][0-9]{0,99})(\.[0-9]{1,99})?([eE][+-]?[0-9]{1,2})?/",  # below 1e200, so float64 has it
    'BOOLEAN: "true" | "false"',
    'NULL: "null"',
    r'JSON_STRING: /"([^"\\\x00-\x1F]|\\(["\\\/bfnrt]|u([0-9abcefABCEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})))*"/',
    # Bounded, or a model could write whitespace for ever. A line's end and 15 levels of four spaces go in.
    rf"SPACE: /{SPACE}/",
)


class _Rules:
    """Rules by what they say: what two tools have in common is written once."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._names: dict[str, str] = {}

    def add(self, name: str, body: str) -> str:
        """The name of the rule with this body, in which SELF is that name."""
        self.budget.spend(1 + len(body) // 10)
        return self._names.setdefault(body, f"{name}_{len(self._names)}")

    def text(self, start: str) -> str:
        rules = [name + body.replace(SELF, name) for body, name in self._names.items()]
        return "\n".join(["%llguidance {}", f"start: {start}", *rules, *_TERMINALS, ""])


def _open(tag: str) -> str:
    return f'<|open|> "{tag}" <|sep|>'


def _close(tag: str) -> str:
    return f'<|close|> "{tag}" <|sep|>'


def _either(alternatives: Iterable[str]) -> str:
    return " | ".join(alternatives)


def _literal(text: str) -> str:
    return json.dumps(text)


def _regex(pattern: str) -> str:
    """Of a pattern as `_whole` gives it."""
    return f"/{pattern.removeprefix('^').removesuffix('$')}/"


# --- Response -------------------------------------------------------------------------------------------------------


def _response(rules: _Rules, response_format: ResponseFormat) -> str:
    check_format(response_format)
    schema = _held(response_format.schema or {"type": "object"}, [])
    if (kind := _free_kind(schema)) is not None:
        return _free(rules, kind, 'SPACE? "," SPACE?', 'SPACE? ":" SPACE?', "SPACE?")
    return _json(rules, schema, schema, {"whitespace_pattern": SPACE})


def _free_kind(schema: dict[str, Any]) -> str | None:
    """The kind, where a schema says nothing but that it is one of lists or objects."""
    said = {key: value for key, value in schema.items() if key != "$defs"}
    return next((kind for kind in ("array", "object") if said == {"type": kind}), None)


def _free(rules: _Rules, kind: str, comma: str, colon: str, space: str) -> str:
    """JSON of which only the kind is known, as `strict_json` reads it: numbers have an end, and so has the depth."""

    def deep(begin: str, item: str, end: str) -> str:
        within = f"%if lt(_, {MAX_DEPTH})"  # the parameter is the depth
        return (
            f'"{begin}" {space} "{end}" {within} | "{begin}" {space} {item} ({comma} {item})* {space} "{end}" {within}'
        )

    def kinds(value: str) -> dict[str, str]:
        item = f"{value}::incr(_)"
        return {"array": deep("[", item, "]"), "object": deep("{", f"JSON_STRING {colon} {item}", "}")}

    value = rules.add("value", f"::_ : JSON_STRING | NUMBER | BOOLEAN | NULL | {_either(kinds(SELF).values())}")
    return rules.add("json", f"::_ : {kinds(value)[kind]}") + "::0"


def _json(rules: _Rules, schema: Schema, root: Schema, style: dict[str, object]) -> str:
    """A rule of JSON text. `root` has the definitions that the schema refers to."""
    whole = {key: value for key, value in schema.items() if key != "$defs"} if isinstance(schema, dict) else {}
    if isinstance(root, dict) and any(isinstance(held, dict) and "$ref" in held for _, held in subschemas(whole)):
        whole["$defs"] = root["$defs"]
    return rules.add("json", f": %json {json.dumps({'x-guidance': {'coerce_one_of': True, **style}, **whole})}")


# --- Tools ----------------------------------------------------------------------------------------------------------


def _tools(rules: _Rules, tools: Sequence[Tool], max_calls: int) -> str:
    """The tools element. The parameter of the rules of a call is its index."""
    indices = [f'"{index}" %if eq(_, {index})' for index in range(1, max_calls + 1)]
    index = rules.add("index", f"::_ : {_either(indices)}")
    call = rules.add("call", f"::_ : {_either(f'{_call(rules, tool, index)}::_' for tool in tools)}")
    if max_calls > 1:
        call = rules.add("calls", f"::_ : {call}::_ | {call}::_ {SELF}::incr(_) %if lt(_, {max_calls})")
    return f"{_open('tools')} {call}::1 {_close('tools')}"


def _call(rules: _Rules, tool: Tool, index: str) -> str:
    head = _literal(f'call tool="{escaped(tool.name)}" index="')
    body = f"{head} {index}::_ {QUOTE} <|sep|> ({_arguments(rules, tool)}) {_close('call')}"
    return rules.add("call", f"::_ : <|open|> {body}")


def _arguments(rules: _Rules, tool: Tool) -> str:
    """The argument elements of a call."""
    if tool.parameters is None:
        return _literal("")
    check_tool(tool)
    try:
        root = {} if tool.strict is False else _held(tool.parameters, [])
        cases = [case for case in _cases(root, root, rules.budget) if "object" in _kinds(case)]
        shapes = [shape for case in cases if (shape := _shape(rules, case, root)) is not None]
    except RecursionError:
        raise ValueError(f"tool {tool.name!r}: parameters: too deep to be followed") from None
    except ValueError as error:
        raise ValueError(f"tool {tool.name!r}: parameters: {error}") from error
    if not shapes:
        raise ValueError(f"tool {tool.name!r}: parameters: no arguments fit")
    return _either(dict.fromkeys(shapes))


def _shape(rules: _Rules, case: Case, root: Schema) -> str | None:
    """The arguments that one case allows; None where one that is required has no value."""
    required = dict.fromkeys(name for schema in case for name in schema.get("required", ()))
    names = required | dict.fromkeys(name for schema in case for name in schema.get("properties", {}))
    elements = []
    for name in names:
        if len(name) > MAX_NAME_CHARS:
            raise ValueError(f"#/properties: a name of more than {MAX_NAME_CHARS} characters: {name[:60]!r}...")
        matching = [pattern for pattern in _patterns(case) if rules.budget.found(pattern, name)]
        element = _argument(rules, _literal(escaped(name)), _said(case, name, matching), root)
        if element is not None:
            elements.append(element)
        elif name in required:
            return None
    others = [_argument(rules, key, said, root) for key, said in _others(rules, case, names)]
    return _any_order(rules, elements, len(required), [other for other in others if other is not None])


def _any_order(rules: _Rules, elements: Sequence[str], num_required: int, others: Sequence[str]) -> str:
    """Each element at most once, the first `num_required` of them for certain, and others as often as may be."""
    if not elements and not others:
        return _literal("")
    if len(elements) > 64:
        parts = [*elements[:num_required], *(f"{element}?" for element in elements[num_required:])]
        return rules.add("arguments", f": {' '.join(parts)}" + (f" ({_either(others)})*" if others else ""))
    # The parameter has a bit for each element, set once it has come.
    ends = [f'"" %if is_ones([0:{num_required}])' if num_required else '""']
    goes = [f"{element} {SELF}::set_bit({bit}) %if bit_clear({bit})" for bit, element in enumerate(elements)]
    goes += [f"{other} {SELF}::_" for other in others]
    return rules.add("arguments", f"::_ : {_either([*ends, *goes])}") + "::0"


def _others(rules: _Rules, case: Case, names: Iterable[str]) -> list[tuple[str, list[Schema]]]:
    """Arguments that the schemas do not name: the terminal of the name, and what is said of one."""
    patterns = _patterns(case)
    groups = [[pattern] for pattern in patterns]  # an argument that two patterns speak of is never made
    if any("additionalProperties" in schema for schema in case) or not any(
        key in schema for schema in case for key in ("properties", "patternProperties")
    ):
        groups.append([])
    found = []
    for group in groups:
        # A name without & and " is written as it is, so the patterns read what is written.
        key = [rf"/[^&\"\x00-\x1F]{{1,{MAX_KEY_CHARS}}}/"]
        key += [_regex(pattern) if pattern in group else f"~{_regex(pattern)}" for pattern in patterns]
        key += [f"~{_literal(name)}" for name in names if name]
        found.append((rules.add("KEY", f": {' & '.join(key)}"), _said(case, None, group)))
    return found


def _patterns(case: Case) -> list[str]:
    return list(dict.fromkeys(pattern for schema in case for pattern in schema.get("patternProperties", ())))


def _said(case: Case, name: str | None, matching: Sequence[str]) -> list[Schema]:
    """What a case says of the argument with this name, which these patterns match."""
    said = []
    for schema in case:
        held = [schema["properties"][name]] if name in schema.get("properties", {}) else []
        held += [wanted for pattern, wanted in schema.get("patternProperties", {}).items() if pattern in matching]
        said += held or ([schema["additionalProperties"]] if "additionalProperties" in schema else [])
    return said


# --- Values ---------------------------------------------------------------------------------------------------------


# What is said of values of one kind, and of no other.
_ABOUT = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "patternProperties", "additionalProperties", "required"),
}


def _argument(rules: _Rules, key: str, schemas: Sequence[Schema], root: Schema) -> str | None:
    """The element of an argument, None where no value fits."""
    cases = _all_of([_cases(schema, root, rules.budget) for schema in schemas], rules.budget)
    num_said = sum(1 + len(schema.get("enum", ())) for case in cases for schema in case)
    values = []
    for kind in KINDS:
        rules.budget.spend(num_said)
        fitting = [case for case in cases if kind in _kinds(case)]
        value = _string(rules, fitting) if kind == "string" else _value(rules, kind, fitting, root)
        if value is not None:
            type_ = _literal(f' type="{kind}"')
            values.append(f"{type_} <|sep|> {value}")
    # The name stands alone: of two terminals that begin alike the longer is read, and never gone back to the shorter.
    return (
        rules.add("argument", f": <|open|> {KEY} {key} {QUOTE} ({_either(values)}) {_close('argument')}")
        if values
        else None
    )


def _value(rules: _Rules, kind: str, cases: Sequence[Case], root: Schema) -> str | None:
    """JSON of one kind, as `strict_json.spaced` writes it."""
    wanted = [_of_kind(kind, case) for case in cases]
    if not wanted:
        return None
    for plain in ("number", "integer", "boolean", "null"):
        if {"type": plain} in wanted and (plain != "integer" or len(wanted) == 1):
            return plain.upper()
    for free in ("array", "object"):
        if {"type": free} in wanted:
            return _free(rules, free, '", "', '": "', "")
    style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return _json(rules, wanted[0] if len(wanted) == 1 else {"anyOf": wanted}, root, style)


def _of_kind(kind: str, case: Case) -> dict[str, Any]:
    """The values of a kind that a case allows, as one schema."""
    about = [{key: value for key, value in schema.items() if key in _ABOUT.get(kind, ())} for schema in case]
    wanted = [schema for schema in about if schema]
    if (values := _values(case)) is not None:
        wanted.append({"enum": [value for value in values if type_of(value) == kind]})
    whole = kind == "number" and any("integer" in types and "number" not in types for types in map(_types, case))
    held = {"allOf": wanted} if len(wanted) > 1 else dict(*wanted)
    return {"type": "integer" if whole else kind, **held}


def _string(rules: _Rules, cases: Sequence[Case]) -> str | None:
    """A text as it is."""
    terms = []
    for case in cases:
        least = max((schema["minLength"] for schema in case if "minLength" in schema), default=0)
        most = min((schema["maxLength"] for schema in case if "maxLength" in schema), default=None)
        patterns = [schema["pattern"] for schema in case if "pattern" in schema]
        values = _values(case)
        if values is not None:
            long = [value for value in values if isinstance(value, str) and len(value) >= least]
            fits = [value for value in long if most is None or len(value) <= most]
            terms += [
                _literal(value) for value in fits if all(rules.budget.found(pattern, value) for pattern in patterns)
            ]
            continue
        parts = [_regex(pattern) for pattern in patterns]
        if least or most is not None:
            parts.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
        if not parts:
            return "TEXT"
        terms.append(" & ".join(parts))
    return rules.add("STRING", f": {_either(terms)}") if terms else None


# --- Schemas --------------------------------------------------------------------------------------------------------


def _cases(schema: Schema, root: Schema, budget: Budget) -> list[Case]:
    """What a schema says at one place of the value, its alternatives multiplied out."""
    if isinstance(schema, bool):
        return [()] if schema else []
    own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf", "anyOf", "oneOf", "$defs")}
    more: list[list[Schema]] = [[resolve(root, schema["$ref"])]] if "$ref" in schema else []
    more += [[held] for held in schema.get("allOf", ())]
    more += [schema[key] for key in ("anyOf", "oneOf") if key in schema]
    of_more = [[case for held in some for case in _cases(held, root, budget)] for some in more]
    return _all_of([[(own,) if own else ()], *of_more], budget)


def _all_of(wanted: Iterable[Sequence[Case]], budget: Budget) -> list[Case]:
    found: list[Case] = [()]
    for cases in wanted:
        if len(found) * len(cases) > MAX_CASES:
            raise ValueError(f"alternatives that come to more than {MAX_CASES} cases")
        found = [first + second for first, second in product(found, cases)]
        budget.spend(1 + sum(map(len, found)))
    return found


def _kinds(case: Case) -> set[str]:
    found = set(KINDS)
    for schema in case:
        found &= {"number" if name == "integer" else name for name in _types(schema)}
    values = _values(case)
    return found if values is None else found & {type_of(value) for value in values}


def _types(schema: dict[str, Any]) -> Sequence[str]:
    wanted: str | list[str] | tuple[str, ...] = schema.get("type", KINDS)
    return [wanted] if isinstance(wanted, str) else wanted


def _values(case: Case) -> list[Any] | None:
    """The values that a case lists, None where it lists none."""
    listed = [schema["enum"] for schema in case if "enum" in schema]
    listed += [[schema["const"]] for schema in case if "const" in schema]
    if len(listed) < 2:
        return listed[0] if listed else None
    texts = set.intersection(*({strict_json.compact(value) for value in values} for values in listed))
    return [value for value in listed[0] if strict_json.compact(value) in texts]


# Keywords that hold whatever stands beside them, and that llguidance knows.
_SIMPLE = ("type", "enum", "const", "$ref", "required", "multipleOf")
_LEAST, _MOST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
_LOST = (
    *("not", "if", "then", "else", "oneOf", "dependentRequired", "dependentSchemas", "propertyNames"),
    *("minProperties", "maxProperties", "contains", "minContains", "maxContains", "uniqueItems"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_LISTS, _ONES, _MAPS = (
    ("allOf", "anyOf", "oneOf", "prefixItems"),
    ("items", "additionalProperties"),
    ("properties", "$defs"),
)
_DAY = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|[12][0-9]))"
_DATE = f"[0-9]{{4}}-{_DAY}"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "email": r"[a-zA-Z0-9._%+-]{1,64}@[a-zA-Z0-9-]{1,63}(?:\.[a-zA-Z0-9-]{1,63}){1,4}",
}


def _held(schema: dict[str, Any], lost: list[str]) -> dict[str, Any]:
    try:
        return dict(_enforced(schema, "#", lost))
    except RecursionError:
        raise ValueError("#: too deep to be followed") from None


def _enforced(schema: Schema, pointer: str, lost: list[str]) -> Any:
    """A copy with what a grammar holds, patterns written as `_whole` has them. Where there is more goes to `lost`."""
    if isinstance(schema, bool):
        return schema
    held: dict[str, Any] = {}
    for key, value in schema.items():
        at = f"{pointer}/{key}"
        if key in _SIMPLE:
            held[key] = value
        elif key in _COUNTS:
            if key.startswith("min") or value < MAX_COUNT:
                held[key] = min(int(value), MAX_COUNT)  # 3.0 is a number of items too
        elif key in _LISTS:
            held[key] = [_enforced(item, f"{at}/{index}", lost) for index, item in enumerate(value)]
        elif key in _ONES:
            held[key] = _enforced(value, at, lost)
        elif key in _MAPS:
            held[key] = {name: _enforced(item, f"{at}/{name}", lost) for name, item in value.items()}
        elif key == "pattern" and (whole := _whole(value)) is not None:
            held[key] = whole
        elif key == "patternProperties":
            wholes = {name: _whole(name) for name in value}
            lost += [f"{at}/{name}" for name, whole in wholes.items() if whole is None]
            held[key] = {w: _enforced(value[name], f"{at}/{name}", lost) for name, w in wholes.items() if w is not None}
        if key in _LOST or (key == "pattern" and key not in held):
            lost.append(at)
    held |= _bounds(schema, pointer, lost)
    if schema.get("format") in FORMATS:  # as a pattern, so that JSON and raw text are read alike
        held["allOf"] = [*held.get("allOf", ()), {"pattern": f"^{FORMATS[schema['format']]}$"}]
    return held


def _bounds(schema: dict[str, Any], pointer: str, lost: list[str]) -> dict[str, Any]:
    """Bounds on both sides where there is one, and few decimals where it is exclusive."""
    said = {key: schema[key] for key in (*_LEAST, *_MOST) if key in schema}
    held = {}
    for key, bound in said.items():
        sign = 1 if key in _MOST else -1
        if sign * bound < -MAX_BOUNDED:
            lost.append(f"{pointer}/{key}")
        elif sign * bound < MAX_BOUNDED:  # or it is beyond what is written anyhow
            held[key] = bound
            if key.startswith("exclusive") and schema.get("type") != "integer":
                if abs(bound) > MAX_EXCLUSIVE or 10**MAX_DECIMALS * Fraction(repr(bound)) % 1:
                    lost.append(f"{pointer}/{key}")
                elif "multipleOf" not in schema:
                    held["multipleOf"] = 10.0**-MAX_DECIMALS
    if said and not any(key in held for key in _LEAST):
        held["minimum"] = -MAX_BOUNDED
    if said and not any(key in held for key in _MOST):
        held["maximum"] = MAX_BOUNDED
    return held


# --- Patterns -------------------------------------------------------------------------------------------------------

_ANY = "(?s:.*)"
_SETS = {"DIGIT": r"\d", "NOT_DIGIT": r"\D", "SPACE": r"\s", "NOT_SPACE": r"\S", "WORD": r"\w", "NOT_WORD": r"\W"}


def _whole(pattern: str) -> str | None:
    """The pattern of all texts in which this one is found, as Python and Rust read it alike; None for what is not known
    to be such: look-around, references, flags, anchors in the middle."""
    tree = _parser.parse(pattern)
    if tree.state.flags != re.UNICODE:
        return None
    try:
        return f"^(?:{_sequence(list(tree), True, True)})$"
    except _UnknownError:
        return None


class _UnknownError(Exception):
    pass


def _sequence(items: list[Any], first: bool, last: bool) -> str:
    """`first`, `last`: nothing of the pattern is before, or behind, so there may be an anchor, or else any text."""
    if first and items and items[0] == (_constants.AT, _constants.AT_BEGINNING):
        items, first = items[1:], False
    if last and items and items[-1] == (_constants.AT, _constants.AT_END):
        items, last = items[:-1], False
    if not items:
        return _ANY if first or last else ""
    end = len(items) - 1
    return "".join(_item(op, value, first and at == 0, last and at == end) for at, (op, value) in enumerate(items))


def _item(op: Any, value: Any, first: bool, last: bool) -> str:
    name = str(op)
    if name == "BRANCH":
        return f"(?:{'|'.join(_sequence(list(branch), first, last) for branch in value[1])})"
    if name == "SUBPATTERN" and not value[1] and not value[2]:
        return f"(?:{_sequence(list(value[3]), first, last)})"
    if name == "LITERAL":
        text = _char(value)
    elif name == "NOT_LITERAL":
        text = f"[^{_char(value)}]"
    elif name == "ANY":
        text = r"[^\n]"
    elif name == "IN":
        text = f"[{''.join(_member(str(kind), held) for kind, held in value)}]"
    elif name in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, tree = value
        most = "" if most == _constants.MAXREPEAT else most
        text = f"(?:{_sequence(list(tree), False, False)}){{{least},{most}}}"
    else:
        raise _UnknownError
    return f"{_ANY if first else ''}{text}{_ANY if last else ''}"


def _member(kind: str, held: Any) -> str:
    """Of a set of characters."""
    if kind == "NEGATE":
        return "^"
    if kind == "LITERAL":
        return _char(held)
    if kind == "RANGE":
        return f"{_char(held[0])}-{_char(held[1])}"
    return CHARACTERS[_SETS[str(held).removeprefix("CATEGORY_")]]


def _char(code: int) -> str:
    if 0xD800 <= code < 0xE000:
        raise _UnknownError  # a half of a character, in a pattern written for UTF-16
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
