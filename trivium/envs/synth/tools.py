"""Tools: small ones whose answers code can check, each a declaration and the function behind it."""

from __future__ import annotations

import ast
import datetime
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from trivium.chat.message import Tool

_PLACES = Decimal("0.0001")
_MAX_CHARS = 200
_MAX_DIGITS = 30
# Before the point: with four decimals behind it as many as Decimal works with, 28.
_MAX_WHOLE = 24


def _tool(name: str, description: str, properties: Mapping[str, str]) -> Tool:
    return Tool(
        name=name,
        description=description,
        parameters={
            "type": "object",
            "properties": {key: {"type": kind} for key, kind in properties.items()},
            "required": list(properties),
        },
    )


CALCULATE = _tool("calculate", "Work out an expression with + - * /.", {"expression": "string"})
CONVERT = _tool("convert", "Convert a value between units.", {"value": "number", "unit": "string", "to": "string"})
DAYS_BETWEEN = _tool("days_between", "Days from one date to another.", {"start": "string", "end": "string"})
WEEKDAY = _tool("weekday", "Day of the week of a date.", {"date": "string"})
FIND_PERSON = _tool("find_person", "The id of a person.", {"name": "string"})
GET_FIELD = _tool("get_field", "A field of a person's record.", {"id": "number", "field": "string"})

TOOLS = {tool.name: tool for tool in (CALCULATE, CONVERT, DAYS_BETWEEN, WEEKDAY, FIND_PERSON, GET_FIELD)}
FIELDS = ("phone", "city", "room")
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclass(frozen=True, kw_only=True)
class Person:
    """An entry of the directory."""

    id: int
    name: str
    record: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Toolbox:
    """The tools, over a directory of people. `run` never raises: what is wrong is the tool's answer."""

    people: tuple[Person, ...] = field(default=())

    def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The tool's answer as text; one that begins with "error:" says what was wrong."""
        tool = _RUN.get(name)
        if tool is None:
            return f"error: there is no tool {name}"
        wanted = list((TOOLS[name].parameters or {})["properties"])
        if sorted(arguments) != sorted(wanted):
            return f"error: wanted {', '.join(wanted)}"
        try:
            return tool(self, **{f"{key}_" if key == "id" else key: value for key, value in arguments.items()})
        except ValueError as error:
            return f"error: {error}"
        except ArithmeticError:  # Decimal's own word for it is the name of a class
            return "error: that cannot be worked out"


def office() -> Toolbox:
    """A toolbox with a small directory, the same each time: for a talk that nobody scores."""
    names = ("Ada Baker", "Ben Olsen", "Grace Novak", "Henry King", "Maria Lopez", "Oscar West")
    cities = ("Oslo", "Rome", "Paris", "Vienna", "Lisbon", "Dublin")
    return Toolbox(
        people=tuple(
            Person(
                id=1207 + 391 * number,
                name=name,
                record={
                    "phone": f"555-{2041 + 817 * number}",
                    "city": city,
                    "room": f"{'ABCDEF'[number]}{12 + 31 * number}",
                },
            )
            for number, (name, city) in enumerate(zip(names, cities, strict=True))
        )
    )


def number_text(value: Decimal) -> str:
    """A number with at most four decimals, no zeros behind them and no exponent. Raises ValueError for one too long."""
    if value and not (value.is_finite() and value.adjusted() < _MAX_WHOLE):  # 1e999999 would be a million digits
        raise ValueError(f"the result has more than {_MAX_WHOLE} digits")
    rounded = value.quantize(_PLACES, rounding=ROUND_HALF_UP) if value != value.to_integral_value() else value
    if not rounded:
        return "0"  # of -0 too
    text = f"{rounded:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


# --- What each does ----------------------------------------------------------------------------------------------

_EXPRESSION = re.compile(r"[0-9\s.()+*/eE_-]*")
_OPERATIONS: dict[type[ast.operator], Callable[[Decimal, Decimal], Decimal]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(expression: str) -> Decimal:
    """The value of an expression of numbers, + - * / and brackets. Raises ValueError and ArithmeticError."""
    if not isinstance(expression, str) or len(expression) > _MAX_CHARS:
        raise ValueError(f"wanted an expression of at most {_MAX_CHARS} characters")
    if not _EXPRESSION.fullmatch(expression):  # Python's own parser warns of some words, and would print that
        raise ValueError(f"{expression!r} has more than numbers and + - * /")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r} is no expression") from error
    return _value(tree, expression)


def _value(node: ast.expr, expression: str) -> Decimal:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        text = ast.get_source_segment(expression.strip(), node) or ""
        if len(text) <= _MAX_DIGITS:
            return Decimal(text)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, expression)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _value(node.left, expression), _value(node.right, expression)
        if isinstance(node.op, ast.Div) and right == 0:
            raise ValueError("division by zero")
        return _OPERATIONS[type(node.op)](left, right)
    raise ValueError(f"{expression!r} has more than numbers and + - * /")


# Of each kind the size of a unit in one of them; temperatures are apart.
_UNITS: dict[str, dict[str, str]] = {
    "length": {"meters": "1", "kilometers": "1000", "centimeters": "0.01", "miles": "1609.344", "feet": "0.3048",
               "inches": "0.0254", "yards": "0.9144"},
    "mass": {"grams": "1", "kilograms": "1000", "pounds": "453.59237", "ounces": "28.349523125"},
    "volume": {"liters": "1", "milliliters": "0.001", "gallons": "3.785411784"},
    "time": {"seconds": "1", "minutes": "60", "hours": "3600", "days": "86400", "weeks": "604800"},
}  # fmt: skip
UNITS = {kind: tuple(sizes) for kind, sizes in _UNITS.items()} | {"temperature": ("celsius", "fahrenheit")}

SHORT_UNITS = {
    "meters": ("m",), "kilometers": ("km",), "centimeters": ("cm",), "miles": ("mi",), "feet": ("ft",), "inches": ("in",),
    "yards": ("yd",), "grams": ("g",), "kilograms": ("kg",), "pounds": ("lb", "lbs"), "ounces": ("oz",), "liters": ("l",),
    "milliliters": ("ml",), "gallons": ("gal",), "seconds": ("s", "sec"), "minutes": ("min",), "hours": ("h",),
    "celsius": ("C",), "fahrenheit": ("F",),
}  # fmt: skip
_FULL = {name: name for names in UNITS.values() for name in names}
_FULL |= {name.removesuffix("s"): name for sizes in _UNITS.values() for name in sizes} | {
    "foot": "feet",
    "inch": "inches",
}
_FULL |= {short.lower(): name for name, shorts in SHORT_UNITS.items() for short in shorts}


def _calculate(_: Toolbox, expression: Any) -> str:
    return number_text(evaluate(expression))


def _convert(_: Toolbox, value: Any, unit: Any, to: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"value: wanted a number, got {value!r}")
    amount = Decimal(repr(value))
    asked = unit, to
    unit, to = (_FULL.get(name.lower().strip("° ")) if isinstance(name, str) else None for name in asked)
    if unit == to and unit in UNITS["temperature"]:
        return number_text(amount)
    if (unit, to) == ("celsius", "fahrenheit"):
        return number_text(amount * 9 / 5 + 32)
    if (unit, to) == ("fahrenheit", "celsius"):
        return number_text((amount - 32) * 5 / 9)
    for sizes in _UNITS.values():
        if unit in sizes and to in sizes:
            return number_text(amount * Decimal(sizes[unit]) / Decimal(sizes[to]))
    raise ValueError(f"cannot convert {asked[0]!r} to {asked[1]!r}")


def _days_between(_: Toolbox, start: Any, end: Any) -> str:
    return str((_date(end) - _date(start)).days)


def _weekday(_: Toolbox, date: Any) -> str:
    return WEEKDAYS[_date(date).weekday()]


def _date(text: Any) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"wanted a date such as 2024-03-17, got {text!r}") from error


def _find_person(box: Toolbox, name: Any) -> str:
    for person in box.people:
        if isinstance(name, str) and person.name.lower() == name.lower():
            return str(person.id)
    raise ValueError(f"nobody is named {name!r}")


def _get_field(box: Toolbox, id_: Any, field: Any) -> str:
    for person in box.people:
        if person.id == id_ and not isinstance(id_, bool):
            if isinstance(field, str) and field in person.record:
                return person.record[field]
            raise ValueError(f"a record has {', '.join(person.record)}, and no {field!r}")
    raise ValueError(f"nobody has the id {id_!r}")


_RUN: dict[str, Callable[..., str]] = {
    "calculate": _calculate,
    "convert": _convert,
    "days_between": _days_between,
    "weekday": _weekday,
    "find_person": _find_person,
    "get_field": _get_field,
}
