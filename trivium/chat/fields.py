"""Fields: the JSON objects of a request, read field by field, and what the dialects read and write alike.

Whatever is wrong with a request is a ValueError that begins with the path of the field: `messages[3].content[1].text`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, TypeVar, get_args

from trivium.chat.message import (
    Choice,
    Conversation,
    Effort,
    Message,
    Options,
    ResponseFormat,
    Text,
    Tool,
    ToolCall,
    check_text,
)

T = TypeVar("T")

EFFORTS: tuple[Effort, ...] = get_args(Effort)
# How long to think, in dialects that have more words for it than the three the model was trained with.
FOREIGN_EFFORTS: Mapping[str, Effort] = {
    "none": "low",  # it is an effort like any other: whether to think is not asked there
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}


class Fields:
    """One JSON object of a request, at its path; "" is the path of the request itself.

    A field that is null is as if it were not there. `close` refuses the fields that nobody asked for, but for the
    `harmless` ones, which clients send and which say nothing to the model.
    """

    def __init__(self, value: Any, path: str = "", harmless: frozenset[str] = frozenset()) -> None:
        self._values = _checked(value, path or "request", dict)
        self._asked: dict[str, None] = {}
        self._harmless = harmless
        self.path = path

    def at(self, name: str) -> str:
        """The path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def lacks(self, name: str) -> bool:
        """Whether not even null is said of it."""
        return name not in self._values

    def get(self, name: str, *kinds: type[T]) -> T | None:
        """The value, of one of these types; None where there is none."""
        self._asked[name] = None
        value = self._values.get(name)
        return None if value is None else _checked(value, self.at(name), *kinds)

    def need(self, name: str, *kinds: type[T]) -> T:
        value = self.get(name, *kinds)
        if value is None:
            raise ValueError(f"{self.at(name)}: missing, wanted {_names(kinds)}")
        return value

    def filled(self, name: str) -> str:
        """A text that is not empty."""
        value = self.need(name, str)
        if not value:
            raise ValueError(f"{self.at(name)}: wanted one that is not empty")
        return value

    def choice(self, name: str, known: Sequence[str]) -> Any:
        """A text that is one of the known ones; None where there is none."""
        value = self.get(name, str)
        if value is not None and value not in known:
            raise ValueError(f"{self.at(name)}: wanted one of {', '.join(known)}, got {shown(value)}")
        return value

    def object(self, name: str) -> Fields:
        """The fields of an object; one that is not there has none."""
        return Fields(self.get(name, dict) or {}, self.at(name), self._harmless)

    def each(self, name: str) -> list[Fields]:
        """The objects of a list; one that is not there has none."""
        values = self.get(name, list) or []
        return [Fields(value, f"{self.at(name)}[{index}]", self._harmless) for index, value in enumerate(values)]

    def some(self, name: str) -> list[Fields]:
        """The objects of a list that has at least one."""
        if not self.need(name, list):
            raise ValueError(f"{self.at(name)}: wanted at least one, got none")
        return self.each(name)

    def refuse(self, name: str, instead: str) -> None:
        """Raise ValueError for a field that would say something to the model but is not read, and say what is.

        One that is empty says nothing.
        """
        self._asked[name] = None
        if self._values.get(name) not in (None, "", [], {}):
            raise ValueError(f"{self.at(name)}: not read, wanted {instead}")

    def close(self, *harmless: str) -> None:
        """Raise ValueError for a field that nobody asked for."""
        for name, value in self._values.items():
            if value is None or name in self._asked or name in self._harmless or name in harmless:
                continue
            plain = name if isinstance(name, str) and re.fullmatch(r"\w{1,64}", name) else shown(name)
            raise ValueError(f"{self.at(plain)}: unknown here, known: {', '.join(self._asked)}")


@contextmanager
def path_of_errors(path: str) -> Iterator[None]:
    """Errors from here begin with the path; those that name a field inside it do already."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(path):
            raise
        raise ValueError(f"{path}: {error}") from error


# --- What the dialects read alike -------------------------------------------------------------------------------------


def read_content(fields: Fields, name: str, readers: Mapping[str, Callable[[Fields], T]]) -> list[T | Text]:
    """A text, or a list of parts, each read as its type says; null is nothing."""
    content = fields.get(name, str, list)
    if isinstance(content, str):
        return [Text(content)]
    return [read_kind(part, readers) for part in fields.each(name)]


def read_kind(fields: Fields, readers: Mapping[str, Callable[[Fields], T]], default: str | None = None) -> T:
    """An object, read as its `type` says."""
    kind = fields.choice("type", tuple(readers)) or default or fields.need("type", str)
    with path_of_errors(fields.path):
        value = readers[kind](fields)
    fields.close()
    return value


def read_text(part: Fields) -> Text:
    return Text(part.need("text", str))


def read_tool(fields: Fields, schema: str = "parameters") -> Tool:
    """A tool, whose arguments are described under that name."""
    with path_of_errors(fields.path):
        tool = Tool(
            name=fields.need("name", str),
            description=fields.get("description", str),
            parameters=fields.get(schema, dict),
            strict=fields.get("strict", bool),
        )
    fields.close()
    return tool


def read_call(fields: Fields, id: str) -> ToolCall:
    """A call, whose arguments are an object or the text of one."""
    name = fields.need("name", str)
    arguments: Any = fields.get("arguments", str, dict)
    with path_of_errors(fields.path):
        if isinstance(arguments, dict):
            return ToolCall(id=id, name=name, arguments=arguments)
        return ToolCall.of_text(id=id, name=name, arguments=arguments or "")


def read_choice(request: Fields) -> tuple[Choice, str | None]:
    """`tool_choice` as OpenAI writes it, and the tool that is forced: {"type": "function"} with its name, or with a
    function that has it."""
    if not isinstance(request.get("tool_choice", str, dict), dict):
        return request.choice("tool_choice", get_args(Choice)) or "auto", None
    fields = request.object("tool_choice")
    fields.need("type", str)
    fields.choice("type", ("function",))
    holder = fields.object("function") if "function" in fields else fields
    name = holder.need("name", str)
    holder.close()
    fields.close()
    return "required", name


def read_foreign_effort(fields: Fields) -> Effort | None:
    """`effort` in another dialect's words, as `FOREIGN_EFFORTS` translates them."""
    effort = fields.choice("effort", tuple(FOREIGN_EFFORTS))
    return None if effort is None else FOREIGN_EFFORTS[effort]


def read_schema(fields: Fields, schema: str = "schema") -> ResponseFormat:
    """The format of the JSON schema under that name. Its description is left out: the model is not shown it."""
    with path_of_errors(fields.path):
        response_format = ResponseFormat(
            kind="json_schema",
            schema=fields.need(schema, dict),
            name=fields.get("name", str) or "",
            strict=fields.get("strict", bool),
        )
    fields.close("description")
    return response_format


def folded(said: Sequence[tuple[str, Message]]) -> list[tuple[str, Message]]:
    """Messages with their paths, those of the assistant side by side as one: all reasoning, all words, all calls.

    It is for dialects in which the assistant has no name.
    """
    whole: list[tuple[str, Message]] = []
    for is_assistant, run in groupby(said, key=lambda entry: entry[1].role == "assistant"):
        entries = list(run)
        whole += [(entries[0][0], _as_one([message for _, message in entries]))] if is_assistant else entries
    return whole


def _as_one(messages: Sequence[Message]) -> Message:
    return Message(
        role="assistant",
        content=tuple(part for message in messages for part in message.content),
        reasoning="".join(message.reasoning for message in messages),
        tool_calls=tuple(call for message in messages for call in message.tool_calls),
    )


def conversation(said: Sequence[tuple[str, Message]], options: Options, tools: Sequence[str] = ()) -> Conversation:
    """The conversation of messages with their paths, by which errors name them; so they do the options' tools, where
    `tools` has their paths."""
    try:
        return Conversation(messages=tuple(message for _, message in said), options=options)
    except ValueError as error:
        paths = {f"messages[{index}]": path for index, (path, _) in enumerate(said)}
        paths |= {f"tools[{index}]": path for index, path in enumerate(tools)}
        text = re.sub(r"^\w+\[\d+\]", lambda found: paths.get(found[0], found[0]), str(error))
        raise ValueError(text) from error


# --- What the dialects write alike ------------------------------------------------------------------------------------


def check_writable(conversation: Conversation) -> None:
    """Raise ValueError for what a request of no dialect can hold."""
    if not conversation.messages:
        raise ValueError("messages: wanted at least one, got none")
    wanted = conversation.options.response_format
    if wanted.schema is None and (wanted.name or wanted.strict is not None):
        raise ValueError(f"response_format: {wanted.kind} has no name and no strict: a schema has them")


def check_foreign(conversation: Conversation, dialect: str) -> None:
    """Raise ValueError that names the message for what has a place in Completions alone."""
    check_writable(conversation)
    messages = conversation.messages
    for index, message in enumerate(messages):
        for thing, is_there in {
            "a name": bool(message.name),
            "declaring tools": bool(message.tools),
            "a result without tool_call_id": message.role == "tool" and message.tool_call_id is None,
            "a picture's size": any(image.width is not None for image in message.images),
            "an answer right behind another": message.role == "assistant"
            and index > 0
            and messages[index - 1].role == "assistant",
        }.items():
            if is_there:
                raise ValueError(f"messages[{index}]: {thing} has no place in {dialect}")


def write_tool(tool: Tool, schema: str = "parameters") -> dict[str, Any]:
    """A tool, its arguments described under that name."""
    parameters = copy.deepcopy(tool.parameters)
    return _given({"name": tool.name, "description": tool.description, schema: parameters, "strict": tool.strict})


def write_schema(wanted: ResponseFormat) -> dict[str, Any]:
    """A response format's schema, with its name and whether it is strict."""
    return _given({"name": wanted.name or None, "strict": wanted.strict, "schema": copy.deepcopy(wanted.schema)})


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


# --- Values -----------------------------------------------------------------------------------------------------------

_NAMES = {
    str: "text",
    bool: "a boolean",
    int: "a whole number",
    float: "a number",
    type(None): "null",
    dict: "an object",
    list: "a list",
}


def _checked(value: Any, path: str, *kinds: type[T]) -> T:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"{path}: wanted {_names(kinds)}, got {shown(value)}")
    if isinstance(value, str):
        check_text(path, value)
    return value


def _names(kinds: Sequence[type]) -> str:
    return " or ".join(_NAMES[kind] for kind in kinds)


def shown(value: Any) -> str:
    """A value as an error says it: a text's beginning, of anything else its kind."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:60]!r}..."
    return _NAMES.get(type(value), type(value).__name__)
