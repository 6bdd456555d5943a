"""JSON as the standard has it, both ways: what Python's json takes beyond it (nan, lone surrogates, any depth) is refused.

A value that was read can be written, as UTF-8, and is then read by everybody else.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 100


def loads(text: str, *, once: bool = False) -> Any:
    """The value of a JSON text; of a key that stands twice in an object the last value.

    Raises ValueError where it is none, and for what could not be written again: numbers beyond float64 or of more than
    4,000 digits, lone surrogates, lists and objects more than 100 deep. `once`: for a key that stands twice, too, since
    somebody else may take the first value.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once if once else None)
    except RecursionError as error:
        raise ValueError("json: too deep") from error
    return copy_of(value, "json")


def spaced(value: Any) -> str:
    """With ", " and ": ", keys in their order, as arguments stand in a prompt."""
    return json.dumps(value, ensure_ascii=False)


def compact(value: Any) -> str:
    """Without spaces, keys sorted at every depth, as declarations stand in a prompt."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def copy_of(value: Any, what: str) -> Any:
    """A copy that nobody else holds, of dict, list, str, int, float, bool and None alone.

    Raises ValueError that says where, for anything else and for what `loads` refuses.
    """
    return _copy(value, what, MAX_DEPTH)


def _copy(value: Any, what: str, depth: int) -> Any:
    if isinstance(value, str):
        if not value.isascii():
            _check_text(value, what)
        return value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > 14_000:  # 4,214 digits; Python writes and reads no more than 4,300
            raise ValueError(f"{what}: an integer of more than 4,000 digits")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{what}: wanted a finite number, got {value}")
        return value
    if depth == 0:
        raise ValueError(f"{what}: lists and objects more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        copied = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{what}: wanted text as keys, got {key!r}")
            _check_text(key, what)
            copied[key] = _copy(item, what, depth - 1)
        return copied
    if isinstance(value, list | tuple):
        return [_copy(item, what, depth - 1) for item in value]
    raise ValueError(f"{what}: wanted what JSON has, got {type(value).__name__}")


def _check_text(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what}: a text with the lone surrogate U+{ord(text[error.start]):04X}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("json: a key stands twice in an object")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"json: {name} is no JSON")
