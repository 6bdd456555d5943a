"""A config with some of its values replaced: `model.num_layers=8`, as somebody types it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Config = TypeVar("Config")
_Tree = dict[str, Any]  # name -> what was typed for it, or a _Tree of its parts

_SWITCH = {"true": True, "false": False}
_NONE = ("none", "null")


def override(config: Config, assignments: Iterable[str]) -> Config:
    """The frozen dataclass `config` with the assignments made, each `name.name=value`, all of them at once.

    A value is read by the field's annotation: a number, true or false, a text, none; a tuple as `.9,.98`, a tuple of
    dataclasses as `256:.5,512:.5`, their fields in order; or either of them, and any dataclass, as JSON. One item of
    a tuple has its number for a name: `stages.0.share=.4`. A value that was there already is no error, so that all points
    of a grid can be typed alike. Checks of the config's own run as it is built. Raises ValueError for what is no
    assignment, a name that is not there, a value of another type, and two assignments to one name.
    """
    tree: _Tree = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise ValueError(f"override: wanted NAME=VALUE with a name such as model.num_layers, got {assignment!r}")
        *owners, name = key.split(".")
        node = tree
        for owner in owners:
            node = node.setdefault(owner, {})
            if not isinstance(node, dict):
                raise ValueError(f"{key}: {owner} was given already, as a whole")
        if name in node:
            raise ValueError(f"{key}: was given already, wanted it once")
        node[name] = text.strip()
    return _replaced(config, tree, "")


def describe(config: Any) -> list[str]:
    """`name.name=value` for every value of a config, in its order: what `override` reads back as the same config."""
    return list(_lines(config, ""))


def _replaced(config: Any, tree: _Tree, prefix: str) -> Any:
    hints = get_type_hints(type(config))
    values = {}
    for name, change in tree.items():
        _check_name(type(config), name, prefix)
        key = prefix + name
        if isinstance(change, str):
            values[name] = _read(key, change, hints[name])
        else:
            values[name] = _with_parts(getattr(config, name), change, key, hints[name])
    try:
        return replace(config, **values)
    except ValueError as error:
        # A check that begins with the field's name has said which it is.
        said = str(error).startswith(tuple(f"{name}:" for name in tree))
        where = prefix if said else f"{', '.join(prefix + name for name in tree)}: "
        raise ValueError(f"{where}{error}") from error


def _with_parts(value: Any, tree: _Tree, key: str, hint: Any) -> Any:
    """`value` with its parts changed: fields of a dataclass, or items of a tuple."""
    if is_dataclass(value):
        return _replaced(value, tree, f"{key}.")
    if not isinstance(value, tuple):
        raise ValueError(f"{key}.{next(iter(tree))}: {key} is {_text(value)}, which has no parts")
    items = list(value)
    (item_hints,) = [_item_hints(kind, len(items)) for kind in _members(hint) if get_origin(kind) is tuple]
    for name, change in tree.items():
        if not name.isdecimal() or int(name) >= len(items):
            raise ValueError(f"{key}.{name}: wanted an item's number below {len(items)}, got {name!r}")
        idx = int(name)
        if isinstance(change, str):
            items[idx] = _read(f"{key}.{name}", change, item_hints[idx])
        else:
            items[idx] = _with_parts(items[idx], change, f"{key}.{name}", item_hints[idx])
    return tuple(items)


def _check_name(cls: type, name: str, prefix: str) -> None:
    names = [field.name for field in fields(cls) if field.init and field.repr]
    if name in names:
        return
    if isinstance(getattr(cls, name, None), property):
        raise ValueError(
            f"{prefix}{name}: follows from other values and cannot be set; wanted one of {', '.join(names)}"
        )
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {prefix}{near[0]}? " if near else ""
    raise ValueError(f"{prefix}{name}: {cls.__name__} has no such field; {hint}It has {', '.join(names)}")


def _read(key: str, text: str, hint: Any) -> Any:
    """What was typed, as a value of the annotation. Raises ValueError, naming both, where it is none."""
    for kind in _members(hint):
        try:
            return _read_one(key, text, kind)
        except _Unread:
            continue
    raise ValueError(f"{key}: wanted {' or '.join(map(_wanted, _members(hint)))}, got {text!r}")


class _Unread(Exception):
    """The text is nothing of this kind; another kind of the annotation may have it."""


def _read_one(key: str, text: str, kind: Any) -> Any:
    if kind is NoneType and text.lower() in _NONE:
        return None
    if kind is bool and text.lower() in _SWITCH:
        return _SWITCH[text.lower()]
    if kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            raise _Unread from None
        if not math.isnan(number):
            return number
    if kind is str:
        return json.loads(text) if _is_json_text(text) else text
    if get_origin(kind) is Literal:
        plain = json.loads(text) if _is_json_text(text) else text
        for choice in get_args(kind):
            if plain == str(choice):
                return choice
    if get_origin(kind) is tuple:
        parts = _parts(text, ",")
        if not isinstance(parts, list):
            raise _Unread
        hints = _item_hints(kind, len(parts))
        if len(hints) != len(parts):
            raise ValueError(f"{key}: wanted {_wanted(kind)}, got {len(parts)} in {text!r}")
        return tuple(_read(f"{key}.{idx}", *item) for idx, item in enumerate(zip(parts, hints, strict=True)))
    if is_dataclass(kind):
        return _read_dataclass(key, text, kind)
    raise _Unread


def _read_dataclass(key: str, text: str, cls: Any) -> Any:
    if not text.startswith(("[", "{")) and not _has_short_form(cls):
        raise _Unread
    parts = _parts(text, ":")
    names = [field.name for field in fields(cls) if field.init and field.repr]
    if isinstance(parts, list):
        if len(parts) > len(names):
            raise ValueError(f"{key}: wanted at most {len(names)} values, {':'.join(names)}, got {text!r}")
        parts = dict(zip(names, parts, strict=False))
    hints = get_type_hints(cls)
    for name in parts:
        _check_name(cls, name, f"{key}.")
    values = {name: _read(f"{key}.{name}", part, hints[name]) for name, part in parts.items()}
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:  # a TypeError where one is missing that has no default
        raise ValueError(f"{key}: {str(error).removeprefix(f'{cls.__name__}.__init__() ')}") from error


def _parts(text: str, separator: str) -> list[str] | dict[str, str]:
    """The parts of a value as texts: of JSON, or of the short form."""
    if not text.startswith(("[", "{")):
        return [part.strip() for part in text.split(separator)]
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise _Unread from None
    if isinstance(content, dict):
        return {name: json.dumps(value) for name, value in content.items()}
    return [json.dumps(value) for value in content]


def _has_short_form(cls: Any) -> bool:
    """Whether every field is one plain value."""
    kinds = [kind for hint in get_type_hints(cls).values() for kind in _members(hint)]
    return all(kind in (NoneType, bool, int, float, str) or get_origin(kind) is Literal for kind in kinds)


def _is_json_text(text: str) -> bool:
    try:
        return text.startswith('"') and isinstance(json.loads(text), str)
    except ValueError:
        return False


def _members(hint: Any) -> tuple[Any, ...]:
    """The kinds that a union allows, none first, since a text may be anything; another annotation is the only one."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(sorted(kinds, key=lambda kind: (kind is not NoneType, kind is str)))


def _item_hints(kind: Any, num_items: int) -> Sequence[Any]:
    arguments = get_args(kind)
    return [arguments[0]] * num_items if arguments[1:] == (...,) else arguments


def _wanted(kind: Any) -> str:
    names = {NoneType: "none", bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    if kind in names:
        return names[kind]
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        items = get_args(kind)
        form = _form(items[0])
        return (
            f"values such as {form},{form}"
            if items[1:] == (...,)
            else f"{len(items)} values, {','.join(map(_form, items))}"
        )
    if is_dataclass(kind):
        form = _form(kind) if _has_short_form(kind) else "as JSON, or its fields one by one, by their own names"
        return f"a {kind.__name__}, {form}"
    return "what cannot be typed: it is set in a program"


def _form(kind: Any) -> str:
    if is_dataclass(kind):
        return ":".join(field.name for field in fields(kind) if field.init and field.repr)
    return {int: "1", float: "0.5", bool: "true"}.get(kind, "text")


def _lines(value: Any, key: str) -> Iterable[str]:
    for field in fields(value):
        if not (field.init and field.repr):
            continue
        part = getattr(value, field.name)
        if is_dataclass(part):
            yield from _lines(part, f"{key}{field.name}.")
        else:
            yield f"{key}{field.name}={_text(part)}"


def _text(value: Any) -> str:
    """In the short form where that is read back as the same, else as JSON."""
    if value is None or isinstance(value, bool):
        return json.dumps(value).replace("null", "none")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        plain = (
            value == value.strip() and value.isprintable() and not value.startswith('"') and value.lower() not in _NONE
        )
        return value if plain else json.dumps(value)
    items = [asdict(item) if is_dataclass(item) else item for item in value]
    rows = [list(item.values()) if isinstance(item, Mapping) else [item] for item in items]
    if rows and all(isinstance(part, int | float) for row in rows for part in row):
        return ",".join(":".join(map(_text, row)) for row in rows)
    return json.dumps(items)
