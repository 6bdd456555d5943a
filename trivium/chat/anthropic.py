"""Anthropic: Anthropic's Messages, read and written.

Of a request, these fields are chat's: system, messages, tools, tool_choice, thinking, output_config. All others at the
top are ignored: sampling and serving are the server's. But output_format, which is now output_config.format, is an
error: it would say something to the model, and so would a tool's input_examples. Inside messages, blocks, tools and
options an unknown field is an error, unless it is null or one of `HARMLESS`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from trivium.chat import strict_json
from trivium.chat.fields import (
    Fields,
    check_foreign,
    conversation,
    folded,
    path_of_errors,
    read_content,
    read_foreign_effort,
    read_schema,
    read_text,
    read_tool,
    write_schema,
    write_tool,
)
from trivium.chat.message import (
    Choice,
    Conversation,
    Image,
    Message,
    Options,
    Part,
    ResponseFormat,
    Text,
    Tool,
    ToolCall,
    system,
    tool_result,
    user,
)

HARMLESS = frozenset({"cache_control", "caller", "citations", "defer_loading", "eager_input_streaming"})
NO_JSON = "INVALID_JSON"  # Anthropic's own name for what a call's input holds when it is no JSON object


def read_request(body: dict[str, Any]) -> Conversation:
    """Messages and options of a request. Raises ValueError that begins with the path of the field.

    A user's message becomes its tool results first, then what else it says; a system's message stays where it is. The
    text of a result with `is_error` is kept as it is, and is "error" where there is none. Of the assistant's blocks, and
    of its messages side by side, all thinking is one reasoning, in front of its words, in front of its calls: the format
    has one place for each.
    A last message of the assistant that has words and no calls is the answer's beginning, to be gone on with, as
    Anthropic has it; with thinking on too, which Anthropic refuses: the thinking is then what the message has of it,
    be it none, and nothing more is thought before the answer goes on.
    `budget_tokens` says nothing to the model, `output_config.effort` does, as `FOREIGN_EFFORTS` translates it.
    """
    request = Fields(body, harmless=HARMLESS)
    request.refuse("output_format", "output_config.format")
    said: list[tuple[str, Message]] = []
    rules = system(read_content(request, "system", {"text": read_text}))
    if rules.content:
        said.append(("system", rules))
    for fields in request.some("messages"):
        said += _read_messages(fields)
    said = folded(said)
    path, last = said[-1]
    if last.role == "assistant" and _is_begun(last):
        said[-1] = path, replace(last, partial=True)
    return conversation(said, _read_options(request))


def write_request(conversation: Conversation) -> dict[str, Any]:
    """A request that is read as this conversation, without the options that are as they are by default.

    Results side by side are one message. Raises ValueError that names the message, or the option, for what has no place
    there: names, tools that a message declares, results without tool_call_id, sizes of pictures, pictures of the system,
    answers side by side; a last answer whose `partial` is not what `read_request` would take it for; json_object.
    """
    check_foreign(conversation, "Anthropic's Messages")
    messages, options = conversation.messages, conversation.options
    if options.response_format.kind == "json_object":
        raise ValueError(
            "response_format: json_object has no place in Anthropic's Messages, wanted text or json_schema"
        )
    for index, message in enumerate(messages):
        if message.role == "system" and message.images:
            raise ValueError(f"messages[{index}]: a picture of the system has no place in Anthropic's Messages")
    last = messages[-1]
    if last.role == "assistant" and last.partial != _is_begun(last):
        wanted = "words" if last.partial else "calls, no words, or partial: it would be gone on with"
        raise ValueError(f"messages[{len(messages) - 1}]: of the last answer wanted {wanted}")
    body: dict[str, Any] = {}
    if len(messages) > 1 and messages[0].role == "system" and messages[0].content:
        body["system"] = messages[0].text
        messages = messages[1:]
    body["messages"] = []
    for role, run in groupby(messages, key=lambda message: message.role):
        if role == "tool":
            body["messages"].append({"role": "user", "content": [_write_result(message) for message in run]})
        else:
            body["messages"] += [_write_message(message) for message in run]
    return body | _write_options(options)


def write_content(message: Message) -> list[dict[str, Any]]:
    """The blocks of the assistant's message: read, they are the same one. A name and `partial` have no place there."""
    if message.role != "assistant":
        raise ValueError(f"content: wanted a message of the assistant, got one of the {message.role}")
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        signature = signature_of(message.reasoning)
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": signature})
    if message.text:
        blocks.append({"type": "text", "text": message.text})
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input_of(call)})
    return blocks


def signature_of(reasoning: str) -> str:
    """What a thinking block is signed with: SHA-256 of its text in hex. It tells a changed text, not a forged one."""
    return hashlib.sha256(reasoning.encode("utf-8")).hexdigest()


# --- Messages ---------------------------------------------------------------------------------------------------------


def _is_begun(last: Message) -> bool:
    """Whether a last message of the assistant is to be gone on with."""
    return bool(last.content) and not last.tool_calls


def _read_messages(fields: Fields) -> list[tuple[str, Message]]:
    fields.need("role", str)
    role = fields.choice("role", tuple(_OF_ROLE))
    fields.need("content", str, list)
    with path_of_errors(fields.path):
        said = _OF_ROLE[role](fields)
    fields.close()
    return said


def _read_system(fields: Fields) -> list[tuple[str, Message]]:
    return [(fields.path, system(read_content(fields, "content", {"text": read_text})))]


def _read_user(fields: Fields) -> list[tuple[str, Message]]:
    blocks = read_content(fields, "content", _OF_USER)
    results = [block for block in blocks if isinstance(block, tuple)]
    parts = [block for block in blocks if not isinstance(block, tuple)]
    return [*results, (fields.path, user(parts))] if parts or not results else results


def _read_assistant(fields: Fields) -> list[tuple[str, Message]]:
    blocks = read_content(fields, "content", _OF_ASSISTANT)
    message = Message(
        role="assistant",
        content=tuple(block for block in blocks if isinstance(block, Text)),
        reasoning="".join(block for block in blocks if isinstance(block, str)),
        tool_calls=tuple(block for block in blocks if isinstance(block, ToolCall)),
    )
    return [(fields.path, message)]


def _read_image(block: Fields) -> Image:
    source = block.object("source")
    source.need("type", str)
    if source.choice("type", ("base64", "url")) == "url":
        image = Image(source=source.need("url", str))
    else:
        image = Image(source=f"data:{source.need('media_type', str)};base64,{source.need('data', str)}")
    source.close()
    return image


def _read_result(block: Fields) -> tuple[str, Message]:
    result = tool_result(read_content(block, "content", _PARTS), call_id=block.need("tool_use_id", str))
    if block.get("is_error", bool) and not result.content:
        result = replace(result, content=(Text("error"),))  # empty it would read as a success
    return block.path, result


def _read_thinking(block: Fields) -> str:
    """The text, checked against a signature of ours; another's has another form, and cannot be checked."""
    text, signature = block.need("thinking", str), block.get("signature", str)
    is_ours = signature is not None and re.fullmatch(r"[0-9a-f]{64}", signature)
    if is_ours and signature != signature_of(text):
        raise ValueError(
            f"{block.at('signature')}: is of another text: thinking is sent back as it came, or not at all"
        )
    if signature and not is_ours and not text.strip():
        raise ValueError(f"{block.at('thinking')}: was not shown, only who signed it has its text: wanted its text")
    return text


def _refuse_redacted(block: Fields) -> str:
    raise ValueError(f"{block.path}: redacted_thinking cannot be read, only who wrote it has its text: wanted thinking")


def _write_message(message: Message) -> dict[str, Any]:
    content = write_content(message) if message.role == "assistant" else _write_parts(message)
    return {"role": message.role, "content": content}


def _write_result(message: Message) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": _write_parts(message)}


def _write_parts(message: Message) -> str | list[dict[str, Any]]:
    return [_write_part(part) for part in message.content] if message.images else message.text


def _write_part(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    data = re.fullmatch(r"data:(.*?);base64,(.*)", part.source, re.DOTALL)
    if data is None:
        return {"type": "image", "source": {"type": "url", "url": part.source}}
    return {"type": "image", "source": {"type": "base64", "media_type": data[1], "data": data[2]}}


def _read_use(block: Fields) -> ToolCall:
    id, name, given = block.filled("id"), block.need("name", str), block.need("input", dict)
    text = given.get(NO_JSON)
    if len(given) == 1 and isinstance(text, str):
        return ToolCall.of_text(id=id, name=name, arguments=text)
    return ToolCall(id=id, name=name, arguments=given)


def _input_of(call: ToolCall) -> dict[str, Any]:
    if isinstance(call.arguments, str):
        return {NO_JSON: call.arguments}
    if list(call.arguments) == [NO_JSON]:  # it would be read as what is no JSON
        return {NO_JSON: strict_json.spaced(call.arguments)}
    return dict(strict_json.copy_of(call.arguments, "input"))


_OF_ROLE: Mapping[str, Callable[[Fields], list[tuple[str, Message]]]] = {
    "user": _read_user,
    "assistant": _read_assistant,
    "system": _read_system,
}
_PARTS: Mapping[str, Callable[[Fields], Part]] = {"text": read_text, "image": _read_image}
_OF_USER: Mapping[str, Callable[[Fields], Part | tuple[str, Message]]] = {**_PARTS, "tool_result": _read_result}
_OF_ASSISTANT: Mapping[str, Callable[[Fields], Text | str | ToolCall]] = {
    "text": read_text,
    "thinking": _read_thinking,
    "redacted_thinking": _refuse_redacted,
    "tool_use": _read_use,
}


# --- Options ----------------------------------------------------------------------------------------------------------

_CHOICES: Mapping[str, Choice] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def _read_options(request: Fields) -> Options:
    tool_choice, forced_tool, parallel_calls = _read_choice(request.object("tool_choice"))
    thinking = request.object("thinking")
    kind = thinking.choice("type", ("enabled", "disabled", "adaptive"))
    thinking.get("budget_tokens", int)
    thinking.close("display")  # what is returned of it
    output = request.object("output_config")
    effort = read_foreign_effort(output)
    response_format = _read_format(output.object("format"))
    output.close()
    return Options(
        tools=tuple(_read_custom(tool) for tool in request.each("tools")),
        thinking=kind != "disabled",
        effort=effort,
        tool_choice=tool_choice,
        forced_tool=forced_tool,
        parallel_calls=parallel_calls,
        response_format=response_format,
    )


def _read_custom(fields: Fields) -> Tool:
    fields.choice("type", ("custom",))
    fields.refuse("input_examples", "its examples in description")
    return read_tool(fields, "input_schema")


def _read_choice(fields: Fields) -> tuple[Choice, str | None, bool]:
    kind = fields.choice("type", tuple(_CHOICES)) or "auto"
    name = fields.need("name", str) if kind == "tool" else None
    parallel_calls = fields.get("disable_parallel_tool_use", bool) is not True
    fields.close()
    return _CHOICES[kind], name, parallel_calls


def _read_format(fields: Fields) -> ResponseFormat:
    if fields.choice("type", ("json_schema",)) is None:
        fields.close()
        return ResponseFormat()
    return read_schema(fields)


def _write_options(options: Options) -> dict[str, Any]:
    written: dict[str, Any] = {}
    if options.tools:
        written["tools"] = [write_tool(tool, "input_schema") for tool in options.tools]
    choice = _write_choice(options)
    if choice != {"type": "auto"}:
        written["tool_choice"] = choice
    if not options.thinking:
        written["thinking"] = {"type": "disabled"}
    output: dict[str, Any] = {}
    if options.effort is not None:
        output["effort"] = options.effort
    if options.response_format.schema is not None:
        output["format"] = {"type": "json_schema"} | write_schema(options.response_format)
    return written | {"output_config": output} if output else written


def _write_choice(options: Options) -> dict[str, Any]:
    kind = "any" if options.tool_choice == "required" else options.tool_choice
    choice = {"type": kind} if options.forced_tool is None else {"type": "tool", "name": options.forced_tool}
    return choice if options.parallel_calls else choice | {"disable_parallel_tool_use": True}
