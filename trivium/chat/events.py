"""Events: what a model's answer says, piece by piece as it is generated, and the answer that the pieces make."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from trivium.chat import strict_json
from trivium.chat.message import MAX_NAME_CHARS, Message, Tool, ToolCall, assistant
from trivium.chat.render import type_of

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
# header: no marker, since malformed, cut or too long · marker: unknown, or not allowed where it stands · control: a
# control id that no answer has · text: outside all that holds text · call: one without a tool, and what is in it ·
# type: an argument without a type that we know, or whose text is none of its type and is kept as a string, where the
# flaw's text is the argument's marker · end: behind the end.
FlawKind = Literal["header", "marker", "control", "text", "call", "type", "end"]


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ResponseText:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins: its id and its whole name, before all else of it. Indices are 0, 1, ... without a gap."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentText:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is over; each that started has its end. It may be executed only where there is no problem.

    Who sees only the text is not misled: of arguments with a fault the last brace is never sent, and no value closes
    more brackets than it opens, so that they are no JSON object. Of a call of an undeclared tool they may be whole.
    `unsent` is that brace where the model wrote it, in a json element, with what followed it.
    """

    index: int
    problem: str = ""
    unsent: str = ""


@dataclass(frozen=True, slots=True)
class Flaw:
    """What the answer has and should not have: it is no content, and not lost either."""

    kind: FlawKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Ids that were generated, the end id among them, and how many of them are text within think."""

    num_completion: int
    num_reasoning: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer is over. Behind it come only flaws, for ids that were pushed all the same."""

    reason: FinishReason
    usage: Usage


Event = ReasoningText | ResponseText | CallStart | ArgumentText | CallEnd | Flaw | Finish


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call as the model wrote it. `text` is the JSON text of `arguments`, or as much as there is of it.

    `arguments` is None where there is a `problem`; `unsent` is as in `CallEnd`.
    """

    id: str
    name: str
    text: str
    arguments: dict[str, Any] | None
    problem: str = ""
    unsent: str = ""

    @property
    def executable(self) -> bool:
        return not self.problem


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A whole answer. `calls` has those too that must not be executed."""

    reasoning: str = field(repr=False)
    text: str
    calls: tuple[Call, ...]
    flaws: tuple[Flaw, ...]
    finish_reason: FinishReason
    usage: Usage

    def message(self) -> Message:
        """The assistant's message with the executable calls, to be sent back in the next turn."""
        calls = [
            ToolCall(id=call.id, name=call.name, arguments=call.arguments)
            for call in self.calls
            if call.arguments is not None
        ]
        return assistant(self.text, reasoning=self.reasoning, tool_calls=calls)


def fold(events: Iterable[Event]) -> Answer:
    """The answer that the events make. Raises ValueError where they have no `Finish`."""
    reasoning: list[str] = []
    response: list[str] = []
    flaws: list[Flaw] = []
    starts: list[CallStart] = []
    arguments: list[list[str]] = []
    ends: list[CallEnd] = []
    finish: Finish | None = None
    for event in events:
        match event:
            case ReasoningText(text):
                reasoning.append(text)
            case ResponseText(text):
                response.append(text)
            case CallStart():
                starts.append(event)
                arguments.append([])
            case ArgumentText(index, text):
                arguments[index].append(text)
            case CallEnd():
                ends.append(event)
            case Flaw():
                flaws.append(event)
            case Finish():
                finish = event
    if finish is None:
        raise ValueError("fold: the events have no finish, so the answer is not whole")
    return Answer(
        reasoning="".join(reasoning),
        text="".join(response),
        calls=tuple(_call(start, "".join(arguments[start.index]), ends[start.index]) for start in starts),
        flaws=tuple(flaws),
        finish_reason=finish.reason,
        usage=finish.usage,
    )


def _call(start: CallStart, text: str, end: CallEnd) -> Call:
    return Call(
        id=start.id,
        name=start.name,
        text=text,
        arguments=None if end.problem else strict_json.loads(text),
        problem=end.problem,
        unsent=end.unsent,
    )


# --- The events of one call's arguments -----------------------------------------------------------------------------

_JSON_SPACE = " \t\n\r"
_FIRST = {"object": "{", "array": "["}
_SCALARS = ("number", "boolean", "null")
_STRUCTURE = re.compile(r'[][{}"\\]')
_UNQUOTED = re.compile(r"[-+.\w\s]*")  # as numbers, boolean and null are written, whole or cut
_json_string = json.JSONEncoder(ensure_ascii=False).encode  # of a str; json.dumps makes a new encoder each time


class _Brackets:
    """Follows JSON, piece by piece, to where the bracket that it begins with is closed."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def end_of(self, text: str) -> int | None:
        """Where in this piece the last bracket has come, behind it; None where it has not."""
        at = int(self._escaped and bool(text))
        self._escaped &= not text
        while match := _STRUCTURE.search(text, at):
            at = match.end()
            if self._in_string:
                self._in_string = match[0] != '"'
                if match[0] == "\\":
                    self._escaped = at == len(text)
                    at += 1
            elif match[0] == '"':
                self._in_string = True
            elif match[0] != "\\":
                self._depth += 1 if match[0] in "{[" else -1
                if self._depth == 0:
                    return at
        return None


@dataclass
class Value:
    """An argument or json element that is open.

    mode: string, sent as it comes, escaped · raw, JSON sent as it comes · over, JSON whose last bracket has come ·
    scalar, held until the close · start, held until its first character says which of string and raw it is · lost, no
    part of the arguments.
    """

    tag: str
    key: str
    type: str
    marker: str
    mode: Literal["string", "raw", "over", "scalar", "start", "lost"]
    held: list[str] = field(default_factory=list)
    brackets: _Brackets = field(default_factory=_Brackets)

    @property
    def text(self) -> str:
        return "".join(self.held)


class CallArguments:
    """The JSON text of one call's arguments as it comes, and what is wrong with it: its events are put in `out`."""

    def __init__(self, index: int, tool: Tool | None) -> None:
        self.index = index
        self.undeclared = ""
        self.value: Value | None = None
        self._tool = tool
        self._keys: set[str] = set()
        self._has_json = False
        self._last = ""  # of a json element the last bracket and what follows it: sent at the end of a sound call
        self._problems: dict[str, None] = {}  # in order, each once

    def spoil(self, problem: str) -> None:
        """The call must not be executed."""
        if self.value is not None:
            problem += " in json" if self.value.tag == "json" else f" in argument {self.value.key[:60]!r}"
        self._problems[problem] = None

    def open(self, tag: str, attributes: dict[str, str], marker: str, out: list[Event]) -> None:
        """An argument or json element begins. One that is not closed ends here."""
        if self.value is not None:
            self.spoil("unclosed")
            self.close(out)
        key = attributes.get("key")
        if tag == "json":
            if alone := not self._keys and not self._has_json:
                self._has_json = True
            else:
                self.spoil("json beside other elements")
            self.value = Value(tag, "", "object", marker, "start" if alone else "lost")
        elif key is None or self._has_json:
            self.spoil("an argument without a key" if key is None else "an argument beside json")
            self.value = Value(tag, key or "", "string", marker, "lost")
        else:
            if key in self._keys:
                self.spoil(f"a second argument {key[:60]!r}")
            if len(key) > MAX_NAME_CHARS:
                self.spoil(_too_long(key))
            self._say(f"{', ' if self._keys else '{'}{_json_string(key)}: ", out)
            self._keys.add(key)
            self.value = self._argument(key, attributes.get("type"), marker, out)

    def _argument(self, key: str, declared: str | None, marker: str, out: list[Event]) -> Value:
        type_ = declared if declared is not None else self._type_of_schema(key)
        if declared is None or type_ not in ("string", *_SCALARS, *_FIRST):
            out.append(Flaw("type", marker))
        type_ = "number" if type_ == "integer" else type_  # a schema's word, and the model has seen the schema
        if type_ in _SCALARS:
            return Value("argument", key, type_, marker, "scalar")
        if type_ in _FIRST:
            return Value("argument", key, type_, marker, "start")
        self._say('"', out)
        return Value("argument", key, "string", marker, "string")

    def _type_of_schema(self, key: str) -> str:
        schema = self._tool.parameters if self._tool is not None else None
        properties = schema.get("properties") if schema is not None else None
        types = _types(properties.get(key)) if isinstance(properties, dict) else set()
        others = types - {"null"} or types
        return others.pop() if len(others) == 1 else "string"

    def push(self, text: str, out: list[Event]) -> None:
        """Text of the element that is open."""
        value = self.value
        assert value is not None
        if value.mode == "string":
            self._say(_json_string(text)[1:-1], out)
            return
        if value.mode in ("raw", "over"):
            self._push_json(value, text, out)
            return
        value.held.append(text)
        if value.mode == "scalar" or not text.strip(None if value.tag == "json" else _JSON_SPACE):
            return
        start = value.text.lstrip(_JSON_SPACE)
        if value.tag == "json" or start[0] == _FIRST[value.type]:
            text = value.text
            value.held.clear()
            value.mode = "raw"
            self._push_json(value, text, out)
        else:
            value.mode = "string"
            out.append(Flaw("type", value.marker))
            self._say(_json_string(value.text)[:-1], out)

    def _push_json(self, value: Value, text: str, out: list[Event]) -> None:
        """JSON as it comes, up to its last bracket. What is behind that is no part of an argument, but whitespace."""
        end = value.brackets.end_of(text) if value.mode == "raw" else 0
        if end is None:
            value.held.append(text)
            self._say(text, out)
            return
        value.mode = "over"
        inner, rest = text[:end], text[end:]
        if value.tag == "json":  # the whole of the arguments
            value.held.append(text)
            self._say(inner[:-1], out)
            self._last += inner[-1:] + rest
            if rest.strip(_JSON_SPACE):
                value.mode = "raw"  # and no JSON any more
                self._say(self._last, out)
                self._last = ""
        elif rest.strip(_JSON_SPACE):
            self._say(inner, out)
            self.spoil(f"no JSON {value.type}")
            out.append(Flaw("text", rest))
            value.mode = "lost"
        else:
            value.held.append(text)
            self._say(text, out)

    def close(self, out: list[Event]) -> None:
        """The element that is open is closed: what was held is sent, and JSON is judged."""
        value = self.value
        assert value is not None
        if value.mode == "string":
            self._say('"', out)
        elif value.mode == "start" and value.tag == "json":
            self._last = "{}"
        elif value.mode in ("start", "scalar"):
            if _is_json(value.text, value.type):
                self._say(value.text, out)
            else:
                out.append(Flaw("type", value.marker))
                self._say(_json_string(value.text), out)
        elif value.mode != "lost" and not _is_json(value.text, value.type, inside=value.tag == "argument"):
            self.spoil(f"no JSON {value.type}")
        elif value.mode != "lost" and value.tag == "json":
            for key in strict_json.loads(value.text):
                if len(key) > MAX_NAME_CHARS:
                    self.spoil(_too_long(key))
        self.value = None

    def end(self, out: list[Event], *, closed: bool) -> str:
        """The call is over; returns its problem."""
        if self.value is not None or not closed:
            self.spoil("unclosed")
        if self.value is not None and self.value.mode in ("start", "scalar"):
            text = self.value.text
            self._say(text if _UNQUOTED.fullmatch(text) else _json_string(text)[:-1], out)
        unsent = self._last if self._problems else ""
        if not self._problems:
            self._say(self._last if self._has_json else "}" if self._keys else "{}", out)
        problem = "; ".join([self.undeclared] * bool(self.undeclared) + list(self._problems))
        out.append(CallEnd(self.index, problem, unsent))
        return problem

    def _say(self, text: str, out: list[Event]) -> None:
        if text:
            out.append(ArgumentText(self.index, text))


def _types(said: Any) -> set[str]:
    """The types that a schema names, itself or in its alternatives; nobody may have checked it. One that names none: string."""
    if isinstance(said, dict):
        return _types(said.get("type", said.get("anyOf", said.get("oneOf"))))
    if isinstance(said, list):
        return set().union(*map(_types, said))
    return {said} if isinstance(said, str) else {"string"}


def _too_long(key: str) -> str:
    return f"an argument's name of {len(key)} characters, at most {MAX_NAME_CHARS} are allowed"


def _is_json(text: str, type_: str, *, inside: bool = False) -> bool:
    """Whether the text is strict JSON of that type, and still is as a value `inside` the object of the arguments."""
    try:
        value = strict_json.loads(text, once=True)
        if inside:
            strict_json.copy_of([value], "json")  # one deeper
    except ValueError:
        return False
    return type_of(value) == type_
