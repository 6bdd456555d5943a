"""Responses: OpenAI's Responses, read and written.

Of a request, these fields are chat's: instructions, input, tools, tool_choice, parallel_tool_calls, text.format,
reasoning.effort. All others at the top are ignored: sampling, serving and what is stored (previous_response_id) are the
server's. Inside items, parts, tools and options an unknown field is an error, unless it is null or one of `HARMLESS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from trivium.chat.completions import arguments_text
from trivium.chat.fields import (
    EFFORTS,
    Fields,
    conversation,
    read_call,
    read_choice,
    read_content,
    read_kind,
    read_schema,
    read_text,
    read_tool,
)
from trivium.chat.message import (
    Conversation,
    FormatKind,
    Image,
    Message,
    Options,
    Part,
    ResponseFormat,
    Text,
    Tool,
    assistant,
    system,
    tool_result,
    user,
)

HARMLESS = frozenset({"annotations", "detail", "id", "logprobs", "phase", "status"})


def read_request(body: dict[str, Any]) -> Conversation:
    """Messages and options of a request. Raises ValueError that begins with the path of the field.

    Reasoning, words and calls of the assistant that stand side by side are one message, and its words come before its
    calls: the format has one place for each. Reasoning behind words or calls begins the next message.
    """
    request = Fields(body, harmless=HARMLESS)
    said: list[tuple[str, Message]] = []
    instructions = request.get("instructions", str)
    if instructions:
        said.append(("instructions", system(instructions)))
    given = request.need("input", str, list)
    if isinstance(given, str):
        said.append(("input", user(given)))
    else:
        said += _folded([(item.path, read_kind(item, _OF_TYPE, "message")) for item in request.some("input")])
    return conversation(said, _read_options(request))


def write_items(message: Message) -> list[dict[str, Any]]:
    """The items of the assistant's message, without ids, which the server gives: read, they are the same message.

    A name and `partial` have no place in them.
    """
    if message.role != "assistant":
        raise ValueError(f"items: wanted a message of the assistant, got one of the {message.role}")
    items: list[dict[str, Any]] = []
    if message.reasoning:
        content = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "summary": [], "content": content})
    if message.text or not (message.reasoning or message.tool_calls):
        words = [{"type": "output_text", "text": message.text, "annotations": []}]
        items.append({"type": "message", "role": "assistant", "status": "completed", "content": words})
    for call in message.tool_calls:
        written = {"call_id": call.id, "name": call.name, "arguments": arguments_text(call)}
        items.append({"type": "function_call", "status": "completed"} | written)
    return items


# --- Items ------------------------------------------------------------------------------------------------------------


def _read_message(item: Fields) -> Message:
    item.need("role", str)
    role = item.choice("role", ("system", "developer", "user", "assistant"))
    item.need("content", str, list)
    if role == "assistant":
        return Message(role="assistant", content=tuple(read_content(item, "content", _WORDS)))
    content = tuple(read_content(item, "content", _PARTS))
    return Message(role="user" if role == "user" else "system", content=content)


def _read_reasoning(item: Fields) -> Message:
    """The reasoning itself, where it is not there its summary."""
    reasoning = read_content(item, "content", {"reasoning_text": read_text})
    summary = read_content(item, "summary", {"summary_text": read_text})
    return assistant(reasoning="".join(part.text for part in reasoning or summary))


def _read_call(item: Fields) -> Message:
    return assistant(tool_calls=[read_call(item, item.filled("call_id"))])


def _read_output(item: Fields) -> Message:
    item.need("output", str, list)
    return tool_result(read_content(item, "output", _PARTS), call_id=item.need("call_id", str))


def _read_image(part: Fields) -> Image:
    return Image(source=part.need("image_url", str))


_OF_TYPE: Mapping[str, Callable[[Fields], Message]] = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_call,
    "function_call_output": _read_output,
}
_WORDS: Mapping[str, Callable[[Fields], Text]] = {"input_text": read_text, "output_text": read_text}
_PARTS: Mapping[str, Callable[[Fields], Part]] = {**_WORDS, "input_image": _read_image}


def _folded(said: list[tuple[str, Message]]) -> list[tuple[str, Message]]:
    """Messages with their paths, those of the assistant side by side as one."""
    runs: list[list[tuple[str, Message]]] = []
    for path, message in said:
        if runs and _goes_on(runs[-1][-1][1], message):
            runs[-1].append((path, message))
        else:
            runs.append([(path, message)])
    return [(run[0][0], _as_one([message for _, message in run])) for run in runs]


def _goes_on(last: Message, message: Message) -> bool:
    if not last.role == message.role == "assistant":
        return False
    return not (message.reasoning and (last.content or last.tool_calls))


def _as_one(messages: list[Message]) -> Message:
    if len(messages) == 1:
        return messages[0]
    return Message(
        role="assistant",
        content=tuple(part for message in messages for part in message.content),
        reasoning="".join(message.reasoning for message in messages),
        tool_calls=tuple(call for message in messages for call in message.tool_calls),
    )


# --- Options ----------------------------------------------------------------------------------------------------------


def _read_options(request: Fields) -> Options:
    tool_choice, forced_tool = read_choice(request)
    reasoning = request.object("reasoning")
    effort = reasoning.choice("effort", EFFORTS)
    reasoning.close("summary", "generate_summary")  # what is returned of it
    return Options(
        tools=tuple(_read_function(tool) for tool in request.each("tools")),
        effort=effort,
        tool_choice=tool_choice,
        forced_tool=forced_tool,
        parallel_calls=request.get("parallel_tool_calls", bool) is not False,
        response_format=_read_format(request.object("text")),
    )


def _read_function(fields: Fields) -> Tool:
    fields.need("type", str)
    fields.choice("type", ("function",))
    return read_tool(fields)


def _read_format(text: Fields) -> ResponseFormat:
    fields = text.object("format")
    text.close("verbosity")  # nothing that the model is told
    kind: FormatKind = fields.choice("type", get_args(FormatKind)) or "text"
    if kind == "json_schema":
        return read_schema(fields)
    fields.close()
    return ResponseFormat(kind=kind)
