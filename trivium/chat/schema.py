"""Schema: the JSON schemas of tools and response formats, checked when given, and values checked against them.

The dialect is the vendor's: Draft 2020-12 in which every `$ref` begins with #/$defs/, so that a schema stands alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from trivium.chat import strict_json
from trivium.chat.message import ResponseFormat, Tool

if TYPE_CHECKING:
    import jsonschema

Schema = dict[str, Any] | bool

REF = "#/$defs/"
MAX_PROBLEMS = 20
MAX_PROBLEM_CHARS = 300
# Schemas that one value meets at one place: definitions that use each other twice over double with every step.
MAX_GROWTH = 1000

# Where a schema holds others. At the same place of the value: the keywords of the first row; further in: the others.
IN_PLACE_LISTS, IN_PLACE_ONES, IN_PLACE_MAPS = (
    ("allOf", "anyOf", "oneOf"),
    ("not", "if", "then", "else"),
    ("dependentSchemas",),
)
LISTS = (*IN_PLACE_LISTS, "prefixItems")
ONES = (
    *IN_PLACE_ONES,
    *("additionalProperties", "propertyNames", "unevaluatedProperties"),
    *("items", "contains", "unevaluatedItems", "contentSchema"),
)
MAPS = (*IN_PLACE_MAPS, "$defs", "properties", "patternProperties")


def check_tool(tool: Tool) -> None:
    """Raise ValueError that says where, unless the parameters are a schema of our dialect and one of objects."""
    if tool.parameters is not None:
        check_schema(tool.parameters, f"tool {tool.name!r}: parameters")
        wanted = tool.parameters.get("type", "object")
        if "object" not in ([wanted] if isinstance(wanted, str) else wanted):
            raise ValueError(f"tool {tool.name!r}: parameters: #/type: wanted 'object', got {wanted!r}")


def check_format(response_format: ResponseFormat) -> None:
    """Raise ValueError that says where, unless the schema, where there is one, is of our dialect."""
    if response_format.schema is not None:
        check_schema(response_format.schema, "response format: schema")


def check_schema(schema: dict[str, Any], what: str) -> None:
    """Raise ValueError with the place of the keyword that is wrong, as in `#/properties/days/type`.

    Refused beyond what Draft 2020-12 refuses: a `$ref` elsewhere than to a schema under #/$defs/, an `$id` or a dynamic
    reference that would change what it means, a schema that refers to itself and never gets to a part of the value,
    and a pattern that Python's `re` does not read.
    """
    try:
        _checked(strict_json.compact(schema))
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def validate_arguments(tool: Tool, arguments: dict[str, Any] | str) -> list[str]:
    """What is wrong with a call's arguments, a line each, as in "days: 3.5 is not of type 'integer'"; [] if nothing is.

    A tool without parameters takes no arguments; arguments that are a text are no JSON object. At most 20 lines.
    """
    if isinstance(arguments, str):
        return [_cut(f"wanted a JSON object, got {arguments!r}")]
    if tool.parameters is None:
        return [_cut(f"{name}: {tool.name} takes no arguments") for name in islice(arguments, MAX_PROBLEMS)]
    return problems(tool.parameters, arguments)


def problems(schema: dict[str, Any], value: Any) -> list[str]:
    """What is wrong with a value, a line each that begins with the path to it, if any; [] if nothing is.

    As Draft 2020-12 has it, a `format` is a remark. Raises ValueError as `check_schema` does.
    """
    validator = _checked(strict_json.compact(schema))
    try:
        errors = list(islice(validator.iter_errors(value), MAX_PROBLEMS))
    except RecursionError:
        return ["too deep to be checked"]
    found = [(_path(error.absolute_path), error.message) for error in errors]
    return [_cut(f"{path}: {message}" if path else message) for path, message in sorted(found)]


def resolve(root: Schema, ref: str) -> Schema:
    """The schema that a reference names. Raises ValueError where there is none."""
    found: Any = root
    for part in _parts(ref):
        try:
            found = found[int(part)] if isinstance(found, list) else found[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise ValueError(f"$ref: nothing is at {ref!r}") from None
    if not isinstance(found, dict | bool):
        raise ValueError(f"$ref: no schema is at {ref!r}")
    return found


def subschemas(schema: Schema, pointer: str = "#") -> Iterator[tuple[str, Schema]]:
    """This schema and all within it, each behind its pointer."""
    yield pointer, schema
    if isinstance(schema, bool):
        return
    for at, held in _held(schema, pointer, LISTS, ONES, MAPS):
        yield from subschemas(held, at)


# --- Checks ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _checked(text: str) -> jsonschema.Draft202012Validator:
    """The validator of a schema. Kept by the schema's text: a check takes 0.2 ms a keyword, and tools come every turn."""
    try:
        import jsonschema
        from referencing import Registry
    except ImportError as error:
        raise ImportError("schemas are checked by jsonschema: pip install 'trivium[serve]'") from error
    schema = strict_json.loads(text)
    validator = jsonschema.Draft202012Validator
    try:
        validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(_cut(f"{_pointer(error.absolute_path)}: {error.message}")) from error
    except (RecursionError, OverflowError) as error:  # the latter from a pattern that repeats too often
        raise ValueError(f"#: too much to be checked: {error}") from error
    _check_dialect(schema)
    for _, held in subschemas(schema):
        if isinstance(held, dict):
            held.pop("$schema", None)  # or jsonschema would go on by another draft there
    return validator(schema, registry=Registry())  # an empty one: nothing is ever fetched


def _check_dialect(root: dict[str, Any]) -> None:
    places = dict(subschemas(root))
    for pointer, schema in places.items():
        if isinstance(schema, bool):
            continue
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                raise ValueError(f"{pointer}/{keyword}: wanted a $ref that begins with {REF}")
        if "$id" in schema and pointer != "#":
            raise ValueError(f"{pointer}/$id: only the whole schema may have one")
        if "$ref" in schema:
            ref = schema["$ref"]
            if not ref.startswith(REF):
                raise ValueError(f"{pointer}/$ref: wanted one that begins with {REF}, got {ref!r}")
            if _pointer(_parts(ref)) not in places:
                raise ValueError(f"{pointer}/$ref: no schema is at {ref!r}")
    _check_growth(root, places)


def _check_growth(root: Schema, places: dict[str, Schema]) -> None:
    """Raise ValueError where a schema leads to itself, or to very many, at one place of the value."""
    sizes: dict[str, int] = {}

    def size(pointer: str, under: frozenset[str]) -> int:
        if pointer in under:
            raise ValueError(f"{pointer}: refers to itself without end")
        if pointer not in sizes:
            total, schema = 1, places[pointer]
            if isinstance(schema, dict):
                within = [at for at, _ in _held(schema, pointer, IN_PLACE_LISTS, IN_PLACE_ONES, IN_PLACE_MAPS)]
                within += [_pointer(_parts(schema["$ref"]))] if "$ref" in schema else []
                total += sum(size(at, under | {pointer}) for at in within)
            if total > MAX_GROWTH:
                raise ValueError(f"{pointer}: leads to more than {MAX_GROWTH} schemas at one place")
            sizes[pointer] = total
        return sizes[pointer]

    try:
        for pointer in places:
            size(pointer, frozenset())
    except RecursionError:
        raise ValueError("#: references too deep to be followed") from None


def _held(
    schema: dict[str, Any], pointer: str, lists: Iterable[str], ones: Iterable[str], maps: Iterable[str]
) -> Iterator[tuple[str, Schema]]:
    for key in lists:
        for index, held in enumerate(schema.get(key, ())):
            yield f"{pointer}/{key}/{index}", held
    for key in ones:
        if key in schema:
            yield f"{pointer}/{key}", schema[key]
    for key in maps:
        for name, held in schema.get(key, {}).items():
            yield f"{pointer}/{key}/{_escaped(name)}", held


# --- Places ---------------------------------------------------------------------------------------------------------


def _parts(ref: str) -> list[str]:
    return [unquote(part).replace("~1", "/").replace("~0", "~") for part in ref.split("/")[1:]]


def _pointer(path: Iterable[str | int]) -> str:
    return "/".join(["#", *(_escaped(str(part)) for part in path)])


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _path(path: Iterable[str | int]) -> str:
    """As people write it: `route.stops[0].name`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _cut(line: str) -> str:
    return line if len(line) <= MAX_PROBLEM_CHARS else f"{line[:MAX_PROBLEM_CHARS]}..."
