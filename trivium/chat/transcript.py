"""Transcript: the token ids of a rendered prompt, with answers or not, back to the conversation that they render.

What is read is rendered again and compared, byte for byte between the control ids: so nothing passes that `render` does
not write. How the text between them falls into ids is free, since a model may have written it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from typing import get_args

from trivium.chat import strict_json
from trivium.chat.events import Call, Event, fold
from trivium.chat.message import (
    Choice,
    Conversation,
    Effort,
    Image,
    Message,
    Options,
    Part,
    ResponseFormat,
    Text,
    Tool,
    ToolCall,
    assistant,
    declare,
    system,
    tool_result,
    user,
)
from trivium.chat.parse import Parser, header_of
from trivium.chat.render import (
    CHOICE,
    DECLARATION,
    DECLARATION_END,
    EFFORT,
    EXTENSION,
    FORMAT,
    SCHEMA,
    SCHEMA_END,
    Channel,
    Mark,
    Segment,
    render,
    shown,
)
from trivium.chat.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """A conversation, and the channel of the answer that is left open at its end; None: all messages are closed."""

    conversation: Conversation
    channel: Channel | None


def read_transcript(ids: Iterable[int], tokenizer: Tokenizer) -> Transcript:
    """The conversation whose rendering the ids are.

    What a prompt does not say is made up or left as it is by default: ids of calls, in the order of the calls, and that
    a result belongs to the call at its index if that is one of its tool; sources of pictures; a forced tool, parallel
    calls, name and strictness of a response format; thinking, where no answer shows it. What is
    asked once may stand before the last answer: it was that answer's prompt.

    Raises ValueError for all that `render` does not write, with the index of the message: they are counted as they stand
    in the ids, options among them.
    """
    ids = list(ids)
    reader = _Reader(tokenizer)
    for message_ids in _messages_of(ids, tokenizer.end_of_msg_id):
        try:
            reader.read(message_ids)
        except ValueError as error:
            raise ValueError(f"transcript: message {reader.num_read}: {error}") from error
    conversation = Conversation(messages=tuple(reader.messages), options=reader.options)
    wanted = _runs_of_segments(_segments(conversation, reader), tokenizer)
    message_idx = 0
    for want, got in zip_longest(wanted, _runs_of_ids(ids, tokenizer)):
        if want != got:
            raise ValueError(
                f"transcript: message {message_idx}: as it is rendered {_clipped(want, tokenizer)} stands where "
                f"{_clipped(got, tokenizer)} is"
            )
        message_idx += got == tokenizer.end_of_msg_id
    return Transcript(conversation=conversation, channel=reader.channel)


def _segments(conversation: Conversation, reader: _Reader) -> Sequence[Segment]:
    """What `render` writes of it. An answer behind what is asked once stands behind its prompt."""
    messages, options = conversation.messages, conversation.options
    answered = reader.channel is None and bool(messages) and messages[-1].role == "assistant"
    if answered and reader.asked_at == len(messages) - 1:
        prompt = render(replace(conversation, messages=messages[:-1]), answer=False)
        own = Conversation(messages=messages[-1:], options=Options(thinking=options.thinking))
        return prompt.segments + render(own, answer=False).segments
    return render(conversation, answer=reader.channel is not None).segments


# --- Reading --------------------------------------------------------------------------------------------------------


def _messages_of(ids: list[int], end_id: int) -> Iterator[list[int]]:
    """The ids cut behind each end id."""
    start = 0
    for at, token_id in enumerate(ids):
        if token_id == end_id:
            yield ids[start : at + 1]
            start = at + 1
    if start < len(ids):
        yield ids[start:]


def _element(ids: list[int], tokenizer: Tokenizer) -> tuple[str, dict[str, str], list[int]]:
    """Tag and attributes of the element that the ids open, and the ids behind its header."""
    open_id, sep_id = (tokenizer.special_ids[mark.value] for mark in (Mark.OPEN, Mark.SEP))
    if ids[:1] != [open_id] or sep_id not in ids:
        raise ValueError(f"wanted {Mark.OPEN.value} and a header, got {tokenizer.decode(ids)[:60]!r}")
    sep = ids.index(sep_id)
    text = tokenizer.decode(ids[1:sep])
    header = header_of(text)
    if header is None:
        raise ValueError(f"no header: {text[:60]!r}")
    return *header, ids[sep + 1 :]


class _Reader:
    """Messages and options, as they come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.messages: list[Message] = []
        self.options = Options()
        self.channel: Channel | None = None
        self.asked_at: int | None = None  # messages before what is asked once
        self.num_read = 0
        self._tokenizer = tokenizer
        self._declared: set[str] = set()
        self._calls: list[ToolCall | None] = []  # of the last answer, None for one that has its result
        self._num_calls = 0

    def read(self, ids: list[int]) -> None:
        tag, attributes, body = _element(ids, self._tokenizer)
        if tag != "message":
            raise ValueError(f"wanted a message, got {tag[:60]!r}")
        role, kind, name = attributes.get("role"), attributes.get("type"), attributes.get("name", "")
        if role == "assistant":
            self._read_answer(body, name)
        elif role == "system" and kind is not None:
            self._read_option(kind, self._content(body))
        elif role == "system":
            self.messages.append(system(self._content(body), name=name))
        elif role == "user":
            self.messages.append(user(self._content(body), name=name))
        elif role == "tool":
            self._read_result(attributes.get("tool", ""), attributes.get("index", ""), self._content(body))
        else:
            raise ValueError(f"no role: {role!r}")
        self.num_read += 1

    # --- Options ---

    def _read_option(self, kind: str, content: list[Part]) -> None:
        text = system(content).text
        if kind == "tool-declare":
            first = text.startswith(DECLARATION)
            tools = _tools(text, DECLARATION if first else EXTENSION)
            for tool in tools:
                if tool.name in self._declared:
                    raise ValueError(f"{tool.name!r} is declared already")
                self._declared.add(tool.name)
            if first:
                self.options = replace(self.options, tools=tools)
            else:
                self.messages.append(declare(tools))
        elif kind == "thinking-effort":
            self.options = replace(self.options, effort=_effort(text))
        elif kind == "tool-choice":
            choice = _choice(text)
            if choice == "required" and not self._declared:
                raise ValueError("a call is required, and no tool is declared")
            self.options = replace(self.options, tool_choice=choice)
            self.asked_at = len(self.messages)
        elif kind == "response-format":
            self.options = replace(self.options, response_format=_format(text))
            self.asked_at = len(self.messages)
        else:
            raise ValueError(f"no option: {kind[:60]!r}")

    # --- Messages of others ---

    def _read_result(self, tool: str, index: str, content: list[Part]) -> None:
        if not tool:
            raise ValueError("a result without a tool")
        place = int(index) - 1 if index.isdecimal() and len(index) < 10 else -1
        call = self._calls[place] if 0 <= place < len(self._calls) else None
        if call is not None and call.name == tool:
            self.messages.append(tool_result(content, call_id=call.id))
            self._calls[place] = None
        else:
            self.messages.append(tool_result(content, name=tool))

    def _content(self, body: list[int]) -> list[Part]:
        """Texts and pictures up to the close of the message."""
        ids = self._tokenizer.special_ids
        begin, middle, pad, end = (
            ids[name] for name in ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
        )
        close = [ids[Mark.CLOSE.value], b"message", ids[Mark.SEP.value], ids[Mark.END.value]]
        runs = list(_runs_of_ids(body, self._tokenizer))
        if runs[-4:] != close:
            raise ValueError("the message has no close")
        del runs[-4:]
        parts: list[Part] = []
        while runs:
            run = runs[0]
            if isinstance(run, bytes):
                parts.append(Text(run.decode("utf-8", errors="replace")))
                del runs[0]
            elif len(runs) >= 5 and (run, *runs[2:5]) == (begin, middle, pad, end):
                parts.append(_image(runs[1]))
                del runs[:5]
            else:
                raise ValueError(f"{_clipped(run, self._tokenizer)} in the content")
        return parts

    # --- Messages of the assistant ---

    def _read_answer(self, body: list[int], name: str) -> None:
        tag, _, ids = _element(body, self._tokenizer)
        if tag not in ("think", "response"):
            raise ValueError(f"wanted think or response, got {tag[:60]!r}")
        channel: Channel = "think" if tag == "think" else "response"
        if not any(message.role == "assistant" for message in self.messages):
            self.options = replace(self.options, thinking=channel == "think")
        parser = Parser(self._tokenizer, channel=channel, tools=None, new_id=self._call_id)
        events: list[Event] = [event for token_id in ids for event in parser.push(token_id)]
        partial = not parser.finished
        if partial:
            self.channel = parser.channel
            if self.channel is None:
                raise ValueError("an answer is left open outside of think and response")
        answer = fold(events + parser.finish("length"))
        if answer.flaws:
            raise ValueError(f"{answer.flaws[0].kind}: {answer.flaws[0].text[:60]!r}")
        calls = tuple(map(_tool_call, answer.calls))
        message = assistant(answer.text, reasoning=answer.reasoning, tool_calls=calls, name=name, partial=partial)
        if message != assistant(partial=True):  # that one says nothing: an answer is asked for
            self.messages.append(message)
        self._calls = list(calls)

    def _call_id(self) -> str:
        self._num_calls += 1
        return f"call_{self._num_calls}"


def _tool_call(call: Call) -> ToolCall:
    """A call with arguments, or with a text that is no JSON, which was in a json element."""
    try:
        arguments = call.text + call.unsent if call.arguments is None else call.arguments
        return ToolCall(id=call.id, name=call.name, arguments=arguments)
    except ValueError as error:
        raise ValueError(f"call of {call.name[:60]!r}: {call.problem or error}") from error


def _image(run: bytes | int) -> Image:
    text = run.decode("utf-8", errors="replace") if isinstance(run, bytes) else ""
    size = re.fullmatch(r"image ([0-9]{1,9})x([0-9]{1,9})", text)
    if size is None:
        raise ValueError(f"wanted a picture with its size, got {text[:60]!r}")
    return Image(source="", width=int(size[1]), height=int(size[2]))


def _tools(text: str, opening: str) -> tuple[Tool, ...]:
    if not (text.startswith(opening) and text.endswith(DECLARATION_END)):
        raise ValueError(f"no declaration of tools: {text[:60]!r}")
    declared = strict_json.loads(text.removeprefix(opening).removesuffix(DECLARATION_END))
    tools: list[Tool] = []
    for tool in declared if isinstance(declared, list) else [declared]:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or "name" not in function:
            raise ValueError(f"a declaration of tools wants functions with names, got {str(tool)[:60]}")
        description, parameters, strict = map(function.get, ("description", "parameters", "strict"))
        tools.append(Tool(name=function["name"], description=description, parameters=parameters, strict=strict))
    return tuple(tools)


def _effort(text: str) -> Effort:
    efforts: tuple[Effort, ...] = get_args(Effort)
    for effort in efforts:
        if text == EFFORT.format(effort=effort):
            return effort
    raise ValueError(f"no thinking effort: {text[-60:]!r}")


def _choice(text: str) -> Choice:
    choices: tuple[Choice, ...] = get_args(Choice)
    for choice in choices:
        if text == CHOICE.get(choice):
            return choice
    raise ValueError(f"no tool choice: {text[:60]!r}")


def _format(text: str) -> ResponseFormat:
    if text == FORMAT.format(kind="json_object"):
        return ResponseFormat(kind="json_object")
    start = FORMAT.format(kind="json_schema") + SCHEMA
    if not (text.startswith(start) and text.endswith(SCHEMA_END)):
        raise ValueError(f"no response format: {text[:60]!r}")
    schema = strict_json.loads(text.removeprefix(start).removesuffix(SCHEMA_END))
    return ResponseFormat(kind="json_schema", schema=schema)


# --- Runs: the bytes between control ids, and these ------------------------------------------------------------------


def _runs_of_ids(ids: Iterable[int], tokenizer: Tokenizer) -> Iterator[bytes | int]:
    num_ranks = tokenizer.num_ranks
    for is_control, run in groupby(ids, key=lambda token_id: token_id >= num_ranks):
        if is_control:
            yield from run
        else:
            yield tokenizer.decode_bytes(run)


def _runs_of_segments(segments: Iterable[Segment], tokenizer: Tokenizer) -> Iterator[bytes | int]:
    for is_control, run in groupby(map(shown, segments), key=lambda text_and_control: text_and_control[1]):
        texts = [text for text, _ in run]
        if is_control:
            for text in texts:
                yield from _runs_of_ids(tokenizer.encode_control(text), tokenizer)
        else:
            yield "".join(texts).encode("utf-8")


def _clipped(run: bytes | int | None, tokenizer: Tokenizer) -> str:
    if run is None:
        return "the end"
    return repr(run.decode("utf-8", errors="replace")[:60]) if isinstance(run, bytes) else tokenizer.decode([run])
