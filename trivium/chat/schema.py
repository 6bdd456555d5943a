"""Schema: the JSON schemas of tools and response formats, checked when given, and values checked against them.

The dialect is the vendor's: Draft 2020-12 in which every `$ref` begins with #/$defs/, so that a schema stands alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from functools import cache, lru_cache
from itertools import islice
from re import _constants, _parser  # type: ignore[attr-defined]  # no other way to what Python takes a pattern for
from typing import Any
from urllib.parse import unquote

from trivium.chat import strict_json
from trivium.chat.message import ResponseFormat, Tool

Schema = dict[str, Any] | bool

REF = "#/$defs/"
MAX_PROBLEMS = 20
MAX_PROBLEM_CHARS = 300
# Schemas that one value meets at one place: definitions that use each other twice over double with every step.
MAX_GROWTH = 1000
MAX_SCHEMA_CHARS = 1_000_000
MAX_SCHEMA_KEYWORDS = 20_000
MAX_PATTERN_ITEMS = 20_000  # with what must be repeated multiplied out, as `regex` does: {2} forty times is 2^40 items
# What one check may take: keywords that meet a value, errors, and matches are steps, of 2 us and more.
MAX_STEPS, MAX_CHECK_S = 200_000, 2.0
MAX_SCHEMA_STEPS, MAX_SCHEMA_CHECK_S = 5_000_000, 10.0  # of a schema against that of schemas: 50 steps a keyword

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
    a pattern that Python's `re` does not read, or that must repeat too much, and more than 20,000 keywords or a
    million characters.
    """
    try:
        _checked_schema(schema)
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

    As Draft 2020-12 has it, a `format` is a remark. What takes more than 200,000 steps or 2 s is wrong too: "too much
    to be checked". Numbers are what their JSON says: 1.15 is a multiple of 0.01. Raises ValueError as `check_schema`.
    """
    validator = _checked_schema(schema)
    try:
        with _budget(MAX_STEPS, MAX_CHECK_S):
            errors = list(islice(validator.iter_errors(value), MAX_PROBLEMS))
    except (TooMuchError, RecursionError, OverflowError):
        return ["too much to be checked"]
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


def _checked_schema(schema: dict[str, Any]) -> Any:
    try:
        text = strict_json.compact(schema)
    except RecursionError:
        raise ValueError("#: too deep") from None
    if len(text) > MAX_SCHEMA_CHARS:
        raise ValueError(f"#: wanted at most {MAX_SCHEMA_CHARS} characters, got {len(text)}")
    return _checked(text)


@lru_cache(maxsize=512)
def _checked(text: str) -> Any:
    """The validator of a schema. Kept by the schema's text: a check takes 0.2 ms a keyword, and tools come every turn."""
    from referencing import Registry

    validator, schema = _validator(), strict_json.loads(text)
    if (num_keywords := _num_keywords(schema)) > MAX_SCHEMA_KEYWORDS:
        raise ValueError(f"#: wanted at most {MAX_SCHEMA_KEYWORDS} keywords, got {num_keywords}")
    of_schemas = validator(validator.META_SCHEMA, format_checker=validator.FORMAT_CHECKER)
    try:
        with _budget(MAX_SCHEMA_STEPS, MAX_SCHEMA_CHECK_S):
            wrong = next(of_schemas.iter_errors(schema), None)
    except (TooMuchError, RecursionError, OverflowError) as error:  # the last from a pattern that repeats too often
        raise ValueError(f"#: too much to be checked: {error}") from error
    if wrong is not None:
        raise ValueError(_cut(f"{_pointer(wrong.absolute_path)}: {wrong.message}"))
    _check_dialect(schema)
    _check_patterns(schema)
    return validator(schema, registry=Registry())  # an empty one: nothing is ever fetched


def _num_keywords(value: Any) -> int:
    """Keys of all objects; the schemas and the names of their properties are among them."""
    if isinstance(value, list):
        return sum(map(_num_keywords, value))
    return len(value) + sum(map(_num_keywords, value.values())) if isinstance(value, dict) else 0


def _check_patterns(root: Schema) -> None:
    for pointer, schema in subschemas(root):
        if isinstance(schema, dict):
            for pattern in (
                *([schema["pattern"]] if "pattern" in schema else []),
                *schema.get("patternProperties", ()),
            ):
                try:
                    if _num_items(_parser.parse(pattern)) > MAX_PATTERN_ITEMS:
                        raise ValueError(f"{pointer}: a pattern that must repeat too much: {pattern[:60]!r}")
                    _compiled(pattern)
                except RecursionError:
                    raise ValueError(f"{pointer}: a pattern too deep to be read: {pattern[:60]!r}") from None


def _num_items(tree: Any) -> int:
    """Of a pattern, each as often as it must come."""
    total = 0
    for op, value in tree:
        least, parts = 1, value if isinstance(value, tuple | list) else ()
        if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
            least = max(value[0], 1)
        elif op is _constants.BRANCH:
            parts = value[1]
        elif op is _constants.IN:
            total += len(value)
        elif op is _constants.ATOMIC_GROUP:
            parts = (value,)
        total += 1 + least * sum(_num_items(part) for part in parts if isinstance(part, _parser.SubPattern))
    return total


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


# --- Work -----------------------------------------------------------------------------------------------------------


class TooMuchError(ValueError):
    """A check or a grammar takes more than it may."""


class Budget:
    """What is left of the steps and the CPU time of one call.

    Of its thread, so that a busy machine makes nothing too much; within a pattern of all threads of the process.
    """

    def __init__(self, num_steps: int, limit_s: float) -> None:
        self._num_steps = num_steps
        self._end_s = time.thread_time() + limit_s

    def spend(self, num_steps: int = 1) -> float:
        """The seconds that are left. Raises TooMuchError where none are, or no steps."""
        self._num_steps -= num_steps
        left_s = self._end_s - time.thread_time()
        if self._num_steps < 0 or left_s <= 0:
            raise TooMuchError("too many steps" if self._num_steps < 0 else "it takes too long")
        return left_s

    def found(self, pattern: str, text: str) -> bool:
        """Whether a text has a pattern. Some patterns take for ever where they do not match."""
        left_s = self.spend()
        try:
            return _compiled(pattern).search(text, timeout=left_s) is not None
        except TimeoutError:
            raise TooMuchError(f"a pattern that takes too long to be read: {pattern[:60]!r}") from None


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> Any:
    """By `regex`, which can be told when to stop."""
    import regex

    plain = _parser.parse(pattern).state.flags == re.UNICODE  # else comments have brackets, or \w is of ASCII alone
    try:
        return regex.compile(_as_python(pattern) if plain else pattern, regex.VERSION0)
    except regex.error as error:
        raise ValueError(f"a pattern that is not read: {pattern[:60]!r}: {error}") from None


# Python's sets of characters, within brackets. `regex` and Rust have marks and joiners in \w, and others in \s.
CHARACTERS = {
    r"\d": r"\p{Nd}",
    r"\D": r"\P{Nd}",
    r"\w": r"\p{L}\p{N}_",
    r"\W": r"\p{C}\p{M}\p{S}\p{Z}\p{Pd}\p{Ps}\p{Pe}\p{Pi}\p{Pf}\p{Po}\u203f\u2040\u2054\ufe33\ufe34\ufe4d-\ufe4f\uff3f",
    r"\s": r"\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
    r"\S": r"\x00-\x08\x0e-\x1b\x21-\x84\x86-\x9f\xa1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e\u2030-\u205e"
    r"\u2060-\u2fff\u3001-\U0010ffff",
}
_PIECE = re.compile(r"(?s)\\.|\[\^?\]?|\{(?:\d+\}|\d*,\d*\})|.")


def _as_python(pattern: str) -> str:
    """For `regex`, so that it is read as by `re`: a brace that is no repeat is a brace, not a number of errors; [:alpha:]
    within a set are those characters; and sets are Python's."""
    pieces, within = [], False
    for piece in _PIECE.findall(pattern):
        if piece in CHARACTERS:
            piece = CHARACTERS[piece] if within else f"[{CHARACTERS[piece]}]"
        elif within:
            within = piece != "]" and not (piece[0] == "[" and piece[-1] == "]")
            piece = f"\\{piece}" if piece[0] == "[" else piece
        elif piece[0] == "[":
            within = True
        elif piece == "{":
            piece = r"\{"
        pieces.append(piece)
    return "".join(pieces)


# Of the check that runs: jsonschema hands a keyword nothing of ours.
_spent: ContextVar[Budget] = ContextVar("_spent")


@contextmanager
def _budget(num_steps: int, limit_s: float) -> Iterator[None]:
    token = _spent.set(Budget(num_steps, limit_s))
    try:
        yield
    finally:
        _spent.reset(token)


# --- Keywords -------------------------------------------------------------------------------------------------------

# From jsonschema: the validator at this place, the keyword's value, the value that is checked, the whole schema.
Keyword = Callable[[Any, Any, Any, Any], Iterable[Any] | None]


@cache
def _validator() -> Any:
    """Draft 2020-12 of jsonschema in bounded work: every keyword spends of the budget, and messages are short."""
    try:
        import jsonschema
        from jsonschema import validators
    except ImportError as error:
        raise ImportError("schemas are checked by jsonschema: pip install 'trivium[serve]'") from error
    base = jsonschema.Draft202012Validator
    keywords = {**base.VALIDATORS, **_KEYWORDS}
    made = validators.extend(base, {name: _counted(keyword) for name, keyword in keywords.items()})

    def evolve(self: Any, **changes: Any) -> Any:  # jsonschema's goes on by the draft that a `$schema` names
        for name, at in (("schema", "schema"), ("registry", "_registry"), ("_resolver", "_resolver")):
            changes.setdefault(name, getattr(self, at))
        return made(format_checker=self.format_checker, **changes)

    descend = made.descend

    def descend_in_time(self: Any, instance: Any, schema: Schema, path: Any = None, **more: Any) -> Iterator[Any]:
        _spent.get().spend(0)
        if schema is False:
            at = () if path is None else (path,)
            yield jsonschema.ValidationError(_cut(f"False schema does not allow {instance!r}"), path=at)
        else:
            yield from descend(self, instance, schema, path=path, **more)

    made.evolve, made.descend = evolve, descend_in_time
    return made


def _counted(keyword: Keyword) -> Keyword:
    def counted(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[Any]:
        _spent.get().spend()
        for error in keyword(validator, wanted, value, schema) or ():
            _spent.get().spend(5)  # an error takes a kilobyte
            error.message = _cut(error.message)  # or anyOf keeps a text of the whole value for each of its schemas
            yield error

    return counted


def _error(message: str) -> Any:
    import jsonschema

    return jsonschema.ValidationError(message)


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, str) and not _spent.get().found(pattern, value):
        yield _error(f"{value!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: dict[str, Schema], value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for pattern, wanted in patterns.items():
            for name in value:
                if _spent.get().found(pattern, name):
                    yield from validator.descend(value[name], wanted, path=name, schema_path=pattern)


def _additional_properties(validator: Any, wanted: Schema, value: Any, schema: Any) -> Iterator[Any]:
    if not isinstance(value, dict):
        return
    others = [name for name in value if name not in schema.get("properties", {}) and not _is_matched(name, schema)]
    if wanted is False and others:
        more = ", ..." if len(others) > 5 else " was unexpected" if len(others) == 1 else " were unexpected"
        yield _error(f"Additional properties are not allowed ({', '.join(map(repr, others[:5]))}{more})")
    elif wanted is not False:
        for name in others:
            yield from validator.descend(value[name], wanted, path=name)


def _unevaluated_properties(validator: Any, wanted: Schema, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        evaluated = _evaluated(validator, value, {key: held for key, held in schema.items() if key != UNEVALUATED[0]})
        for name in value:
            if name not in evaluated and not _fits(validator, value[name], wanted):
                yield _error(f"Unevaluated properties are not allowed ({name!r} was unexpected)")


def _unevaluated_items(validator: Any, wanted: Schema, value: Any, schema: Any) -> Iterator[Any]:
    if isinstance(value, list):
        evaluated = _evaluated(validator, value, {key: held for key, held in schema.items() if key != UNEVALUATED[1]})
        for at, item in enumerate(value):
            if at not in evaluated and not _fits(validator, item, wanted):
                yield _error(f"Unevaluated items are not allowed (item {at} was unexpected)")


UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")


def _evaluated(validator: Any, value: dict[str, Any] | list[Any], schema: Schema) -> set[Any]:
    """The names or indices of which a schema that fits the value speaks, or one within it, at one place, that fits."""
    _spent.get().spend()
    if isinstance(schema, bool):
        return set()
    # Where one says something of all others it has been kept to.
    if isinstance(value, dict):
        if "additionalProperties" in schema or UNEVALUATED[0] in schema:
            return set(value)
        found: set[Any] = {name for name in value if name in schema.get("properties", {}) or _is_matched(name, schema)}
    else:
        if "items" in schema or UNEVALUATED[1] in schema:
            return set(range(len(value)))
        found = set(range(len(schema.get("prefixItems", ()))))
        if "contains" in schema:
            found |= {at for at, item in enumerate(value) if _fits(validator, item, schema["contains"])}
    within = [held for key in IN_PLACE_LISTS for held in schema.get(key, ()) if _fits(validator, value, held)]
    if isinstance(value, dict):
        within += [held for name, held in schema.get("dependentSchemas", {}).items() if name in value]
    if "if" in schema:
        fits = _fits(validator, value, schema["if"])
        within += [schema["if"]] if fits else []
        within += [schema[key] for key in ("then" if fits else "else",) if key in schema]
    if "$ref" in schema:
        within.append(validator._resolver.lookup(schema["$ref"]).contents)
    return found.union(*(_evaluated(validator, value, held) for held in within))


def _is_matched(name: str, schema: dict[str, Any]) -> bool:
    return any(_spent.get().found(pattern, name) for pattern in schema.get("patternProperties", ()))


def _fits(validator: Any, value: Any, wanted: Schema) -> bool:
    return next(iter(validator.descend(value, wanted)), None) is None


def _multiple_of(validator: Any, step: Any, value: Any, schema: Any) -> Iterator[Any]:
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (_exact(value) / _exact(step)).denominator != 1
    ):
        yield _error(f"{value!r} is not a multiple of {step!r}")


def _exact(number: float) -> Fraction:
    """What the JSON of a number says, and not the binary fraction beside it."""
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))


def _unique_items(validator: Any, wanted: bool, value: Any, schema: Any) -> Iterator[Any]:
    if wanted and isinstance(value, list) and len({strict_json.compact(_plain(item)) for item in value}) < len(value):
        yield _error(f"{value!r} has non-unique elements")


def _plain(value: Any) -> Any:
    """Equal values written alike: 1.0 as 1. True stays itself, which no number equals."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


_KEYWORDS: dict[str, Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    UNEVALUATED[0]: _unevaluated_properties,
    UNEVALUATED[1]: _unevaluated_items,
    "multipleOf": _multiple_of,
    "uniqueItems": _unique_items,
}


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
