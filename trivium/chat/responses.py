"""Responses: OpenAI's Responses, read and written.

Of a request, these fields are chat's: instructions, input, tools, tool_choice, parallel_tool_calls, text.format,
reasoning.effort. All others at the top are ignored: sampling, serving and what is stored (previous_response_id) are the
server's. Tools that are no function (`LEFT_OUT`) are left out whole: the model is not shown them and cannot call them,
and to choose one is an error. Inside items, parts, functions and options an unknown field is an error, unless it is
null or one of `HARMLESS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

from trivium.chat.completions import arguments_text
from trivium.chat.fields import (
    Fields,
    check_foreign,
    conversation,
    folded,
    read_call,
    read_choice,
    read_content,
    read_foreign_effort,
    read_kind,
    read_schema,
    read_text,
    read_tool,
    write_schema,
    write_tool,
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

HARMLESS = frozenset({"annotations", "detail", "id", "logprobs", "parsed_arguments", "phase", "status"})
LEFT_OUT = re.compile(
    r"web_search\w*|computer\w*|file_search|code_interpreter|image_generation|mcp|local_shell|custom|namespace"
)


def read_request(body: dict[str, Any]) -> Conversation:
    """Messages and options of a request. Raises ValueError that begins with the path of the field.

    Reasoning, words and calls of the assistant that stand side by side, in whatever order, are one message: the format
    has one place for each. An output whose call is not in the assistant's last message is put behind the one that has it.
    Efforts are translated by `FOREIGN_EFFORTS`.
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
        said += _with_late_outputs(folded([(item.path, _read_item(item)) for item in request.some("input")]))
    return conversation(said, _read_options(request), [tool.path for tool in _functions(request)])


def write_request(conversation: Conversation) -> dict[str, Any]:
    """A request that is read as this conversation, without the options that are as they are by default.

    Raises ValueError that names the message, or the option, for what has no place there: names, tools that a message
    declares, results without tool_call_id, sizes of pictures, answers side by side, a partial one; thinking turned off.
    """
    check_foreign(conversation, "Responses")
    if not conversation.options.thinking:
        raise ValueError("thinking: wanted true, there is no place in Responses to turn it off")
    items: list[dict[str, Any]] = []
    for index, message in enumerate(conversation.messages):
        if message.partial:
            raise ValueError(f"messages[{index}]: partial has no place in Responses")
        items += write_items(message) if message.role == "assistant" else [_write_item(message)]
    return {"input": items, **_write_options(conversation.options)}


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


def _read_item(item: Fields) -> Message:
    kind = item.get("type", str) or ""
    if kind in _REFUSED:
        raise ValueError(f"{item.at('type')}: {kind} {_REFUSED[kind]}")
    return read_kind(item, _OF_TYPE, "message")


def _read_message(item: Fields) -> Message:
    item.need("role", str)
    role = item.choice("role", ("system", "developer", "user", "assistant"))
    item.need("content", str, list)
    if role == "assistant":
        return Message(role="assistant", content=tuple(read_content(item, "content", _OF_ASSISTANT)))
    content = tuple(read_content(item, "content", _PARTS))
    return Message(role="user" if role == "user" else "system", content=content)


def _read_reasoning(item: Fields) -> Message:
    """The reasoning itself, where it has no words its summary. What is encrypted beside them says nothing more."""
    reasoning = read_content(item, "content", {"reasoning_text": read_text, "text": read_text})
    summary = read_content(item, "summary", {"summary_text": read_text})
    text = "".join(part.text for part in reasoning)
    if not text.strip():
        text = "\n\n".join(part.text for part in summary)
    if item.get("encrypted_content", str) and not text.strip():
        raise ValueError(
            f"{item.at('encrypted_content')}: cannot be read, only who wrote it has its text: wanted content or summary"
        )
    return assistant(reasoning=text)


def _read_call(item: Fields) -> Message:
    return assistant(tool_calls=[read_call(item, item.filled("call_id"))])


def _read_output(item: Fields) -> Message:
    item.need("output", str, list)
    return tool_result(read_content(item, "output", _PARTS), call_id=item.need("call_id", str))


def _read_refusal(part: Fields) -> Text:
    return Text(part.need("refusal", str))


def _read_image(part: Fields) -> Image:
    return Image(source=part.need("image_url", str))


_OF_TYPE: Mapping[str, Callable[[Fields], Message]] = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_call,
    "function_call_output": _read_output,
}
_REFUSED: Mapping[str, str] = {
    "item_reference": "names what a server has stored: wanted the item itself",
    "custom_tool_call": "calls a tool that is no function: wanted function_call",
    "custom_tool_call_output": "is of a tool that is no function: wanted function_call_output",
    "local_shell_call": "calls a tool that is no function: wanted function_call",
    "local_shell_call_output": "is of a tool that is no function: wanted function_call_output",
}
_WORDS: Mapping[str, Callable[[Fields], Text]] = {"input_text": read_text, "output_text": read_text}
_OF_ASSISTANT: Mapping[str, Callable[[Fields], Text]] = {**_WORDS, "refusal": _read_refusal}
_PARTS: Mapping[str, Callable[[Fields], Part]] = {**_WORDS, "input_image": _read_image}


def _write_item(message: Message) -> dict[str, Any]:
    content = [_write_part(part) for part in message.content] if message.images else message.text
    if message.role == "tool":
        return {"type": "function_call_output", "call_id": message.tool_call_id, "output": content}
    return {"role": message.role, "content": content}


def _write_part(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "input_text", "text": part.text}
    return {"type": "input_image", "image_url": part.source}


def _with_late_outputs(said: list[tuple[str, Message]]) -> list[tuple[str, Message]]:
    """Messages with their paths, an output that comes behind a later message of the assistant right behind its call's.

    A turn is a message of the assistant and what follows it. Only the first output of a call is moved: a second one is
    an error, and stands where the client put it.
    """
    placed: list[tuple[tuple[int, bool], tuple[str, Message]]] = []
    turn = 0
    turn_of: dict[str, int] = {}  # by the id of a call that has no output yet
    for path, message in said:
        turn += message.role == "assistant"
        turn_of |= {call.id: turn for call in message.tool_calls}
        own = turn_of.pop(message.tool_call_id or "", turn)
        in_place = own == turn and message.role != "assistant"
        placed.append(((own, in_place), (path, message)))
    return [entry for _, entry in sorted(placed, key=lambda place: place[0])]


# --- Options ----------------------------------------------------------------------------------------------------------


def _read_options(request: Fields) -> Options:
    tool_choice, forced_tool = read_choice(request)
    reasoning = request.object("reasoning")
    effort = read_foreign_effort(reasoning)
    reasoning.close("summary", "generate_summary")  # what is returned of it
    return Options(
        tools=tuple(_read_function(tool) for tool in _functions(request)),
        effort=effort,
        tool_choice=tool_choice,
        forced_tool=forced_tool,
        parallel_calls=request.get("parallel_tool_calls", bool) is not False,
        response_format=_read_format(request.object("text")),
    )


def _functions(request: Fields) -> list[Fields]:
    return [tool for tool in request.each("tools") if not LEFT_OUT.fullmatch(tool.need("type", str))]


def _read_function(fields: Fields) -> Tool:
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


def _write_options(options: Options) -> dict[str, Any]:
    written: dict[str, Any] = {}
    if options.tools:
        written["tools"] = [{"type": "function"} | write_tool(tool) for tool in options.tools]
    if options.forced_tool is not None:
        written["tool_choice"] = {"type": "function", "name": options.forced_tool}
    elif options.tool_choice != "auto":
        written["tool_choice"] = options.tool_choice
    if not options.parallel_calls:
        written["parallel_tool_calls"] = False
    if options.response_format.schema is not None:
        written["text"] = {"format": {"type": "json_schema"} | write_schema(options.response_format)}
    elif options.response_format.kind != "text":
        written["text"] = {"format": {"type": options.response_format.kind}}
    if options.effort is not None:
        written["reasoning"] = {"effort": options.effort}
    return written
