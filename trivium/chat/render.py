"""Render: a conversation to segments, and segments to token ids, in K3's chat format (XTML).

A segment is a mark, a picture or content. Only a mark and a picture's frame have control ids, and neither holds a
client's text; content is encoded as text, whatever it says. Each segment is encoded on its own, as the model was trained:
joined first, they would give other ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Literal

from trivium.chat import image as pictures
from trivium.chat import strict_json
from trivium.chat.message import Conversation, Message, Options, Part, Text, Tool, ToolCall, results_in_order
from trivium.chat.tokenizer import Tokenizer

Channel = Literal["think", "response"]


class Mark(Enum):
    """The four marks that make the frame of a message."""

    OPEN = "<|open|>"
    CLOSE = "<|close|>"
    SEP = "<|sep|>"
    END = "<|end_of_msg|>"


@dataclass(frozen=True)
class Content:
    """Text that is encoded as text: names, attributes, words. `kept`: it will come again, so its ids are kept."""

    text: str
    kept: bool = False


@dataclass(frozen=True)
class Media:
    """A picture's frame with its original size in pixels, and one place for the picture."""

    width: int
    height: int

    @property
    def num_tokens(self) -> int:
        """Places that the picture takes in the model's input."""
        return pictures.num_tokens(self.width, self.height)


Segment = Mark | Content | Media


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """Segments in order. `written` says which the assistant writes itself: those that training has a loss on.

    The last `num_stub` segments open the channel that the answer begins in, `channel`; a server does not count them as
    prompt. `channel` None: no answer is asked for.
    """

    segments: tuple[Segment, ...]
    written: tuple[bool, ...]
    num_stub: int
    channel: Channel | None

    @property
    def text(self) -> str:
        """All segments as one string, for people to read: a mark in the words looks like one in the frame."""
        return "".join(text for text, _ in map(shown, self.segments))


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids of a rendering, with one <|media_pad|> for each picture.

    `num_stub` of them, at the end, open the answer's channel. `written` as in `Rendering`, for each id.
    """

    ids: tuple[int, ...]
    written: tuple[bool, ...]
    num_stub: int
    channel: Channel | None
    image_tokens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt as they are counted: every place of a picture, and without the stub."""
        return len(self.ids) - self.num_stub + sum(self.image_tokens) - len(self.image_tokens)

    def expanded(self, media_pad_id: int) -> tuple[int, ...]:
        """Ids with as many <|media_pad|> for a picture as it has places in the model's input."""
        counts = iter(self.image_tokens)
        return tuple(
            id_ for token in self.ids for id_ in ([token] * next(counts) if token == media_pad_id else [token])
        )


def shown(segment: Segment) -> tuple[str, bool]:
    """The segment's text, and whether it stands for control ids."""
    if isinstance(segment, Content):
        return segment.text, False
    if isinstance(segment, Mark):
        return segment.value, True
    return f"<|media_begin|>{_media_text(segment)}<|media_content|><|media_pad|><|media_end|>", True


def render(conversation: Conversation, *, answer: bool = True) -> Rendering:
    """The segments of a conversation, up to where the answer begins where one is asked for.

    Raises ValueError for a picture whose size is not known, and a partial message where no answer is asked for.
    """
    writer = _Writer()
    options, messages = conversation.options, conversation.messages
    if options.tools:
        _write_declaration(writer, DECLARATION, options.tools)
    if options.thinking and options.effort is not None:
        _write_option(writer, "thinking-effort", EFFORT.format(effort=options.effort))
    images = [image for message in messages for image in message.images]
    for number, image in enumerate(images, start=1):
        if image.width is None:
            raise ValueError(
                f"picture {number} of {len(images)}: its width and height are not known, and the prompt says them"
            )
    for message, result in results_in_order(messages):
        if result is not None:
            _write_result(writer, message, *result)
        elif message.tools:
            _write_declaration(writer, EXTENSION, message.tools)
        elif message.role != "assistant":
            writer.open("message", ("role", message.role), *_named(message))
            writer.content(message.content)
            writer.close_message()
        elif not message.partial:
            _write_answer(writer, message, thinking=options.thinking)
    partial = messages[-1] if messages and messages[-1].partial else None
    if partial is not None and not answer:
        raise ValueError("messages: the last one is partial, but no answer is asked for")
    # The answer begins behind its message's opening, and what is asked once stands before that.
    if options.tool_choice != "auto":
        _write_option(writer, "tool-choice", CHOICE[options.tool_choice])
    if options.response_format.kind != "text":
        _write_option(writer, "response-format", _format_text(options))
    if not answer:
        return writer.rendering(num_stub=0, channel=None)
    return _write_start(writer, partial or Message(role="assistant"), thinking=options.thinking)


class Renderer:
    """From conversations to ids with one tokenizer. Names and marks are encoded once, and declarations as long as few."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        ids = tokenizer.special_ids
        self._marks = {mark: (ids[mark.value],) for mark in Mark}
        self._media = tuple(
            ids[name] for name in ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
        )
        self._literals = {text: tuple(tokenizer.encode(text)) for text in _LITERALS}
        # Kept by a cache that threads may share: of two that make room at once neither fails.
        self._kept_ids = lru_cache(_MAX_KEPT)(lambda text: tuple(tokenizer.encode(text)))

    def render(self, conversation: Conversation, *, answer: bool = True) -> Prompt:
        """The ids that the model is given. Raises ValueError as `render` does."""
        return self.encode(render(conversation, answer=answer))

    def encode(self, rendering: Rendering) -> Prompt:
        """The ids of a rendering."""
        ids: list[int] = []
        written: list[bool] = []
        stub_from = len(rendering.segments) - rendering.num_stub
        num_before_stub = 0
        for index, segment in enumerate(rendering.segments):
            if index == stub_from:
                num_before_stub = len(ids)
            ids += self.ids_of(segment)
            written += [rendering.written[index]] * (len(ids) - len(written))
        return Prompt(
            ids=tuple(ids),
            written=tuple(written),
            num_stub=len(ids) - num_before_stub if rendering.num_stub else 0,
            channel=rendering.channel,
            image_tokens=tuple(segment.num_tokens for segment in rendering.segments if isinstance(segment, Media)),
        )

    def ids_of(self, segment: Segment) -> Sequence[int]:
        """The ids of one segment; those of content are no control ids."""
        if isinstance(segment, Mark):
            return self._marks[segment]
        if isinstance(segment, Media):
            begin, content, pad, end = self._media
            return (begin, *self.tokenizer.encode(_media_text(segment)), content, pad, end)
        text = segment.text
        known = self._literals.get(text)
        if known is not None:
            return known
        return self._kept_ids(text) if segment.kept else self.tokenizer.encode(text)


# --- What the model is told, word for word ---------------------------------------------------------------------------

DECLARATION = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
EXTENSION = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n"
)
DECLARATION_END = "\n```"
EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
FORMAT = (
    "The system is invoked with `response_format={kind}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
SCHEMA = "\nThe JSON data must match the following schema:\n```json\n"
SCHEMA_END = "\n```"

_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
_LITERALS = (
    *("message", "think", "response", "tools", "call", "argument", "json"),
    *(" role", " name", " type", " tool", " index", " key", '="', '"'),
    *("system", "user", "assistant", "tool", "tool-declare", "thinking-effort", "tool-choice", "response-format"),
    *(*_TYPES.values(), "true", "false"),
    *(str(index) for index in range(1, 33)),
)
_MAX_KEPT = 64


def type_of(value: object) -> str:
    """The type of a JSON value, as an argument says it."""
    return _TYPES[type(value)]


def escaped(value: str) -> str:
    """An attribute's value as it stands between its quotes."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


class _Writer:
    """Segments one after another, and whether the assistant writes them."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.written: list[bool] = []
        self.by_assistant = False

    def add(self, *segments: Segment) -> None:
        self.segments += segments
        self.written += [self.by_assistant] * len(segments)

    def open(self, tag: str, *attributes: tuple[str, str]) -> None:
        self.add(Mark.OPEN, Content(tag))
        for name, value in attributes:
            self.add(Content(f" {name}"), Content('="'))
            self.text(escaped(value))
            self.add(Content('"'))
        self.add(Mark.SEP)

    def close(self, tag: str) -> None:
        self.add(Mark.CLOSE, Content(tag), Mark.SEP)

    def close_message(self) -> None:
        self.close("message")
        self.add(Mark.END)

    def text(self, text: str) -> None:
        if text:
            self.add(Content(text))

    def content(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if isinstance(part, Text):
                self.text(part.text)
            else:
                assert part.width is not None and part.height is not None, "render looked"
                self.add(Media(part.width, part.height))

    def rendering(self, *, num_stub: int, channel: Channel | None) -> Rendering:
        return Rendering(segments=tuple(self.segments), written=tuple(self.written), num_stub=num_stub, channel=channel)


def _write_declaration(writer: _Writer, opening: str, tools: Sequence[Tool]) -> None:
    declared = ",".join(tool.declaration for tool in tools)
    _write_option(writer, "tool-declare", f"{opening}[{declared}]{DECLARATION_END}")


def _write_option(writer: _Writer, kind: str, text: str) -> None:
    writer.open("message", ("role", "system"), ("type", kind))
    writer.add(Content(text, kept=True))
    writer.close_message()


def _write_result(writer: _Writer, result: Message, tool: str, index: int) -> None:
    writer.open("message", ("role", "tool"), ("tool", tool), ("index", str(index)))
    writer.content(result.content)
    writer.close_message()


def _write_answer(writer: _Writer, message: Message, *, thinking: bool) -> None:
    writer.open("message", ("role", "assistant"), *_named(message))
    writer.open("think" if thinking else "response")
    writer.by_assistant = True
    if thinking:
        writer.text(message.reasoning)
        writer.close("think")
        writer.open("response")
    writer.content(message.content)
    writer.close("response")
    if message.tool_calls:
        writer.open("tools")
        for index, call in enumerate(message.tool_calls, start=1):
            _write_call(writer, call, index)
        writer.close("tools")
    writer.close_message()
    writer.by_assistant = False


def _write_call(writer: _Writer, call: ToolCall, index: int) -> None:
    # The model never writes the json element: a call that fell back to it is read, and not learned.
    writer.by_assistant = not isinstance(call.arguments, str)
    writer.open("call", ("tool", call.name), ("index", str(index)))
    if isinstance(call.arguments, str):
        writer.open("json", ("type", "object"))
        writer.text(call.arguments)
        writer.close("json")
    else:
        for name, value in call.arguments.items():
            writer.open("argument", ("key", name), ("type", type_of(value)))
            writer.text(value if isinstance(value, str) else strict_json.spaced(value))
            writer.close("argument")
    writer.close("call")
    writer.by_assistant = True


def _write_start(writer: _Writer, partial: Message, *, thinking: bool) -> Rendering:
    writer.open("message", ("role", "assistant"), *_named(partial))
    if not thinking:
        writer.open("response")
        channel: Channel = "response"
    elif partial.content:
        writer.open("think")
        writer.text(partial.reasoning)
        writer.close("think")
        writer.open("response")
        channel = "response"
    else:
        writer.open("think")
        writer.text(partial.reasoning)
        channel = "think"
    writer.content(partial.content)
    fresh = not partial.content and not (thinking and partial.reasoning)
    return writer.rendering(num_stub=3 if fresh else 0, channel=channel)


def _format_text(options: Options) -> str:
    wanted = options.response_format
    text = FORMAT.format(kind=wanted.kind)
    return text if wanted.schema is None else f"{text}{SCHEMA}{strict_json.compact(wanted.schema)}{SCHEMA_END}"


def _named(message: Message) -> list[tuple[str, str]]:
    return [("name", message.name)] if message.name else []


def _media_text(media: Media) -> str:
    return f"image {media.width}x{media.height}"
