"""Message: what is said in a chat and by whom, and how an answer is asked for: typed, and checked where it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, get_args

from trivium.chat import strict_json

Role = Literal["system", "user", "assistant", "tool"]
Effort = Literal["low", "high", "max"]
Choice = Literal["auto", "none", "required"]
FormatKind = Literal["text", "json_object", "json_schema"]

MAX_NAME_CHARS = 256
MAX_PIXELS = 1_000_000  # of a side


@dataclass(frozen=True)
class Text:
    """Words, as they are."""

    text: str

    def __post_init__(self) -> None:
        check_text("text", self.text)


@dataclass(frozen=True, kw_only=True)
class Image:
    """A picture by its address or data URI, and its original size in pixels, None as long as nobody looked."""

    source: str = field(repr=False)
    width: int | None = None
    height: int | None = None

    def __post_init__(self) -> None:
        check_text("image: source", self.source)
        size = (self.width, self.height)
        if size != (None, None) and not all(type(side) is int and 0 < side <= MAX_PIXELS for side in size):
            raise ValueError(
                f"image: wanted a width and a height of 1 to {MAX_PIXELS} pixels, got {self.width} x {self.height}"
            )


Part = Text | Image


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call of a tool by the assistant.

    `arguments` are values by name, in order; or a text that is no JSON object, as it came: it is shown to the model in a
    `json` element, and never executed. `id` is what the tool's result refers to.
    """

    id: str
    name: str
    arguments: dict[str, Any] | str

    def __post_init__(self) -> None:
        check_text("tool call: id", self.id)
        if not self.id:
            raise ValueError("tool call: id: wanted one that is not empty: its result refers to it")
        check_name("tool call: name", self.name)
        if isinstance(self.arguments, str):
            check_text("tool call: arguments", self.arguments)
            if arguments_of_text(self.arguments) != self.arguments:
                raise ValueError("tool call: arguments: a text that is blank or a JSON object is wanted as an object")
        else:
            arguments = strict_json.copy_of(self.arguments, "tool call: arguments")
            if not isinstance(arguments, dict):
                raise ValueError(f"tool call: arguments: wanted an object, got {type(self.arguments).__name__}")
            for name in arguments:
                if len(name) > MAX_NAME_CHARS:
                    raise ValueError(
                        f"tool call: arguments: wanted names of at most {MAX_NAME_CHARS} characters, got {len(name)}"
                    )
            object.__setattr__(self, "arguments", arguments)

    @classmethod
    def of_text(cls, *, id: str, name: str, arguments: str) -> ToolCall:
        """With arguments as the APIs write them: the text of a JSON object, or blank for none.

        A text that is no JSON is kept as it is. Raises ValueError for JSON that is no object.
        """
        return cls(id=id, name=name, arguments=arguments_of_text(arguments))


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool that may be called. `parameters` is a JSON schema of an object; None: it takes no arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        check_name("tool: name", self.name)
        if self.name.startswith("$"):
            raise ValueError(f"tool: name: names that begin with $ are reserved, got {self.name!r}")
        if self.description is not None:
            check_text(f"tool {self.name!r}: description", self.description)
        if self.strict is not None and not isinstance(self.strict, bool):
            raise ValueError(f"tool {self.name!r}: strict: wanted true or false, got {self.strict!r}")
        if self.parameters is not None:
            parameters = strict_json.copy_of(self.parameters, f"tool {self.name!r}: parameters")
            if not isinstance(parameters, dict):
                raise ValueError(
                    f"tool {self.name!r}: parameters: wanted a JSON schema, got {type(parameters).__name__}"
                )
            object.__setattr__(self, "parameters", parameters)

    def to_json(self) -> dict[str, Any]:
        """As Chat Completions declares it, which is also what the model is shown."""
        given = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        function = {"name": self.name} | {name: value for name, value in given.items() if value is not None}
        return {"type": "function", "function": function}

    @cached_property
    def declaration(self) -> str:
        """JSON without spaces, keys sorted, as it stands in the prompt."""
        return strict_json.compact(self.to_json())


@dataclass(frozen=True, kw_only=True)
class ResponseFormat:
    """What the answer's text must be: any text, a JSON object, or JSON that a schema describes."""

    kind: FormatKind = "text"
    schema: dict[str, Any] | None = None
    name: str = ""
    strict: bool | None = None

    def __post_init__(self) -> None:
        check_choice("response format", self.kind, get_args(FormatKind))
        check_text("response format: name", self.name)
        if (self.schema is None) == (self.kind == "json_schema"):
            raise ValueError(
                f"response format: {self.kind} wants {'a' if self.schema is None else 'no'} schema, got {'none' if self.schema is None else 'one'}"
            )
        if self.schema is not None:
            schema = strict_json.copy_of(self.schema, "response format: schema")
            if not isinstance(schema, dict):
                raise ValueError(f"response format: schema: wanted an object, got {type(schema).__name__}")
            object.__setattr__(self, "schema", schema)


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message. What it may hold depends on its role; make one with `system`, `user`, `assistant`, `tool_result`.

    `content` has no empty text and no two texts side by side. `reasoning` is the assistant's, "" where there is none or
    only whitespace, and is not in the repr: what is logged by accident does not have it. A system message with `tools`
    declares them from there on and says nothing else. `partial`: the assistant's last message, to be gone on with.
    """

    role: Role
    content: tuple[Part, ...] = ()
    name: str = ""
    reasoning: str = field(default="", repr=False)
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    tools: tuple[Tool, ...] = ()
    partial: bool = False

    def __post_init__(self) -> None:
        check_choice("message: role", self.role, get_args(Role))
        check_text("message: name", self.name)
        check_text("message: reasoning", self.reasoning)
        object.__setattr__(self, "content", _joined(self.content))
        object.__setattr__(self, "reasoning", self.reasoning if self.reasoning.strip() else "")
        for held, role in (
            ("reasoning", "assistant"),
            ("tool_calls", "assistant"),
            ("partial", "assistant"),
            ("tools", "system"),
        ):
            if getattr(self, held) and self.role != role:
                raise ValueError(
                    f"message: {held}: only a message of the {role} has it, this is one of the {self.role}"
                )
        if self.tool_call_id is not None:
            if self.role != "tool":
                raise ValueError(f"message: tool_call_id: only a tool's message has it, this is one of the {self.role}")
            check_text("message: tool_call_id", self.tool_call_id)
        if self.tools and (self.content or self.name):
            raise ValueError("message: one that declares tools has no content and no name")
        if self.role == "assistant" and any(isinstance(part, Image) for part in self.content):
            raise ValueError("message: content: the assistant writes no pictures")
        if self.partial and self.tool_calls:
            raise ValueError("message: partial: an answer behind its tool calls cannot be gone on with")

    @property
    def text(self) -> str:
        """The words of the content, pictures left out."""
        return "".join(part.text for part in self.content if isinstance(part, Text))

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(part for part in self.content if isinstance(part, Image))


@dataclass(frozen=True, kw_only=True)
class Options:
    """How an answer is asked for.

    `effort` says how long to think, None nothing of it; without `thinking` there is none. `forced_tool` is the one that
    must be called: `tool_choice` is "required" then. `parallel_calls` False: at most one call an answer.
    """

    tools: tuple[Tool, ...] = ()
    thinking: bool = True
    effort: Effort | None = None
    tool_choice: Choice = "auto"
    forced_tool: str | None = None
    parallel_calls: bool = True
    response_format: ResponseFormat = field(default_factory=ResponseFormat)

    def __post_init__(self) -> None:
        if self.effort is not None:
            check_choice("effort", self.effort, get_args(Effort))
        check_choice("tool_choice", self.tool_choice, get_args(Choice))
        if self.forced_tool is not None and self.tool_choice != "required":
            raise ValueError(
                f"tool_choice: one tool is forced, {cut(self.forced_tool)}: wanted required, got {self.tool_choice}"
            )


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in order and the options of the answer to come, checked against each other.

    Raises ValueError that names the message: for a tool's result that belongs to no call, or to one that has a result;
    for a tool declared twice; for a choice of tools where none is declared; for a partial message that is not the last.
    """

    messages: tuple[Message, ...]
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", tuple(self.messages))
        _check_results(self.messages)
        for index, message in enumerate(self.messages):
            if message.partial and index + 1 < len(self.messages):
                raise ValueError(f"messages[{index}]: partial: only the last message can be gone on with")
        seen: set[str] = set()
        for where, tool in self._declared():
            if tool.name in seen:
                raise ValueError(f"{where}: {tool.name!r} is declared already")
            seen.add(tool.name)
        options = self.options
        if options.tool_choice == "required" and not seen:
            raise ValueError("tool_choice: required, but no tool is declared")
        if options.forced_tool is not None and options.forced_tool not in seen:
            raise ValueError(
                f"tool_choice: {cut(options.forced_tool)} is not declared, there are: {', '.join(sorted(seen)[:8])}"
            )

    @property
    def tools(self) -> tuple[Tool, ...]:
        """All that are declared, before the messages and among them."""
        return tuple(tool for _, tool in self._declared())

    def _declared(self) -> list[tuple[str, Tool]]:
        declared = [(f"tools[{index}]", tool) for index, tool in enumerate(self.options.tools)]
        for at, message in enumerate(self.messages):
            declared += [(f"messages[{at}].tools[{index}]", tool) for index, tool in enumerate(message.tools)]
        return declared


@dataclass(frozen=True, kw_only=True)
class ReasoningPolicy:
    """What becomes of the assistant's reasoning: `returned` to who asked, `kept` in the history that is rendered,
    `logged` in full."""

    returned: bool = True
    kept: bool = True
    logged: bool = False

    def history(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages as they are to be rendered."""
        return tuple(message if self.kept else without_reasoning(message) for message in messages)

    def answer(self, message: Message) -> Message:
        """The answer as it is to be returned."""
        return message if self.returned else without_reasoning(message)

    def log_line(self, message: Message) -> str:
        """The message for a log: of reasoning its length alone, unless it is to be logged."""
        if not message.reasoning:
            return repr(message)
        shown = repr(message.reasoning) if self.logged else f"<{len(message.reasoning)} characters>"
        return f"{message!r} reasoning={shown}"


def system(content: str | Sequence[Part], name: str = "") -> Message:
    return Message(role="system", content=_parts(content), name=name)


def declare(tools: Sequence[Tool]) -> Message:
    """A system message that declares tools from here on."""
    return Message(role="system", tools=tuple(tools))


def user(content: str | Sequence[Part], name: str = "") -> Message:
    return Message(role="user", content=_parts(content), name=name)


def assistant(
    content: str = "",
    *,
    reasoning: str = "",
    tool_calls: Sequence[ToolCall] = (),
    name: str = "",
    partial: bool = False,
) -> Message:
    return Message(
        role="assistant",
        content=_parts(content),
        name=name,
        reasoning=reasoning,
        tool_calls=tuple(tool_calls),
        partial=partial,
    )


def tool_result(content: str | Sequence[Part], *, call_id: str | None = None, name: str = "") -> Message:
    """The answer of a tool to the call of that id; `name` is the tool's, where no id says it."""
    return Message(role="tool", content=_parts(content), name=name, tool_call_id=call_id)


def without_reasoning(message: Message) -> Message:
    return replace(message, reasoning="") if message.reasoning else message


def arguments_of_text(text: str) -> dict[str, Any] | str:
    """A call's arguments from the text of a JSON object: blank is none, a text that is no JSON stays as it is.

    Raises ValueError for JSON that is no object.
    """
    if not text.strip():
        return {}
    try:
        value = strict_json.loads(text)
    except ValueError:
        return text
    if not isinstance(value, dict):
        raise ValueError(f"arguments: wanted a JSON object, got {cut(text)}")
    return value


# --- The results of tools -------------------------------------------------------------------------------------------


def results_in_order(messages: Sequence[Message]) -> list[tuple[Message, tuple[str, int] | None]]:
    """Messages as they are rendered: beside a tool's result its tool's name and its index behind the calls, from 1.

    A run of results is sorted by the calls they belong to. Where any of a run says no call, the run stays as it is, and
    a result that says no tool either belongs to the call at its place. Raises ValueError that names the message, for a
    second result of a call too.
    """
    ordered: list[tuple[Message, tuple[str, int] | None]] = []
    calls: tuple[ToolCall, ...] = ()
    place_of: dict[str, int] = {}  # by the ids of the calls
    answered: set[int] = set()  # places of calls that have their result
    count = 0
    for are_results, run in groupby(enumerate(messages), key=lambda entry: entry[1].role == "tool"):
        if not are_results:
            for _, message in run:
                if message.role == "assistant":
                    calls, answered, count = message.tool_calls, set(), 0
                    # Of a call's id that stands twice, the first counts.
                    place_of = {calls[place].id: place for place in reversed(range(len(calls)))}
                ordered.append((message, None))
            continue
        named: list[tuple[int, Message, str]] = []
        for index, result in run:
            call_id = result.tool_call_id
            place = count + len(named) if call_id is None else place_of[call_id]
            if call_id is None and result.name:
                named.append((place, result, result.name))
                continue
            if place in answered or place >= len(calls):
                wrong = "a tool's result wants tool_call_id or the tool's name, got neither"
                if call_id is not None:
                    wrong = f"tool_call_id {cut(call_id)} has a result already"
                raise ValueError(f"messages[{index}]: {wrong}")
            answered.add(place)
            named.append((place, result, calls[place].name))
        if all(result.tool_call_id is not None for _, result, _ in named):
            named.sort(key=lambda item: item[0])
        for _, result, name in named:
            count += 1
            ordered.append((result, (name, count)))
    return ordered


def _check_results(messages: Sequence[Message]) -> None:
    open_ids: set[str] = set()
    for index, message in enumerate(messages):
        if message.role == "assistant":
            open_ids = {call.id for call in message.tool_calls}
        call_id = message.tool_call_id
        if call_id is not None and call_id not in open_ids:
            what = "is empty" if not call_id else f"{cut(call_id)} is none of the assistant's last calls"
            known = ", ".join(cut(known) for known in sorted(open_ids)[:8]) or "none"
            raise ValueError(f"messages[{index}]: tool_call_id {what}, there are: {known}")
    results_in_order(messages)  # raises where a result has no tool, and where a call has two


# --- Checks ---------------------------------------------------------------------------------------------------------


def check_text(what: str, text: Any) -> None:
    """Raise ValueError unless it is a str that has a UTF-8."""
    if not isinstance(text, str):
        raise ValueError(f"{what}: wanted text, got {type(text).__name__}")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{what}: character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
            ) from error


def cut(text: str, most: int = 80) -> str:
    """What a client wrote, for an error: quoted, and no longer than a line has room for."""
    return repr(text if len(text) <= most else f"{text[:most]}...")


def check_name(what: str, name: Any) -> None:
    """Raise ValueError unless it is a text of 1 to 256 characters."""
    check_text(what, name)
    if not 0 < len(name) <= MAX_NAME_CHARS:
        raise ValueError(f"{what}: wanted 1 to {MAX_NAME_CHARS} characters, got {len(name)}")


def check_choice(what: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{what}: wanted one of {', '.join(known)}, got {cut(str(value))}")


def _parts(content: str | Sequence[Part]) -> tuple[Part, ...]:
    return (Text(content),) if isinstance(content, str) else tuple(content)


def _joined(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Texts side by side as one, which is how they are encoded; no empty ones."""
    joined: list[Part] = []
    for kind, run in groupby(parts, key=type):
        if kind is Text:
            text = "".join(part.text for part in run if isinstance(part, Text))
            joined += [Text(text)] if text else []
        elif kind is Image:
            joined += run
        else:
            raise ValueError(f"message: content: wanted texts and images, got {kind.__name__}")
    return tuple(joined)
