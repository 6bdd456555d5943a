"""Completions: OpenAI's Chat Completions, with Moonshot's additions and the released encoder's spellings, both ways.

Of a request, these fields are chat's: messages, tools, tool_choice, parallel_tool_calls, response_format,
reasoning_effort, thinking; and of the released encoder thinking as a boolean, thinking_effort, image_prompts. All
others at the top are ignored: sampling and serving are the server's, add_generation_prompt is for who calls `render`.
But functions and function_call, which are now tools and tool_choice, are an error, and so are chat_template_kwargs,
reasoning and system, which other servers read: they would say something to the model.
Inside messages, parts, tools, calls and options an unknown field is an error, unless it is null or one of `HARMLESS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, get_args

from trivium.chat import strict_json
from trivium.chat.fields import (
    EFFORTS,
    Fields,
    check_writable,
    conversation,
    path_of_errors,
    read_call,
    read_choice,
    read_content,
    read_schema,
    read_text,
    read_tool,
    shown,
    write_schema,
    write_tool,
)
from trivium.chat.message import (
    Conversation,
    Effort,
    FormatKind,
    Image,
    Message,
    Options,
    Part,
    ResponseFormat,
    Text,
    Tool,
    ToolCall,
)

HARMLESS = frozenset({"annotations", "cache_control", "detail", "extras", "index", "provider_specific_fields"})
DECLARED_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,255}")
NEEDLE = "<|kimi_image_placeholder|>"


def read_request(body: dict[str, Any]) -> Conversation:
    """Messages and options of a request. Raises ValueError that begins with the path of the field.

    A tool at the top may have any name, since Unicode is rendered and parsed without loss; one that a message declares
    has a name of `DECLARED_NAME`, as Moonshot's own API wants it. `thinking.budget_tokens` says nothing to the model.
    `developer` is the system. Of `reasoning_content`, `reasoning` and `reasoning_details` the first that has words is
    the reasoning. A tool's `tool` comes before its `name`, and `thinking.effort` before `reasoning_effort` and
    `thinking_effort`. An image_url may say width and height, and `image_prompts` say those of all pictures in order:
    then the needle in a text is a picture too, but for the assistant's. A size is the client's word until somebody has
    opened the picture.
    """
    request = Fields(body, harmless=HARMLESS)
    request.refuse("functions", 'tools: [{"type": "function", "function": ...}]')
    request.refuse("function_call", "tool_choice")
    request.refuse("chat_template_kwargs", "thinking and reasoning_effort")
    request.refuse("reasoning", "reasoning_effort, and thinking for none of it")
    request.refuse("system", "a message of the system")
    said = [(fields.path, _read_message(fields)) for fields in request.some("messages")]
    prompts = request.get("image_prompts", list)
    if prompts is not None:
        messages = _with_sizes([message for _, message in said], prompts)
        said = [(path, message) for (path, _), message in zip(said, messages, strict=True)]
    return conversation(said, _read_options(request))


def write_request(conversation: Conversation) -> dict[str, Any]:
    """A request that is read as this conversation, without the options that are as they are by default.

    Raises ValueError where there is no message, and for a tool in a message whose name is no `DECLARED_NAME`.
    """
    check_writable(conversation)
    for index, message in enumerate(conversation.messages):
        for at, tool in enumerate(message.tools):
            _check_declared(tool, f"messages[{index}].tools[{at}].function.name")
    messages = [write_message(message) for message in conversation.messages]
    return {"messages": messages, **_write_options(conversation.options)}


def write_message(message: Message) -> dict[str, Any]:
    """A message as a request has it and an answer gives it: read, it is the same message."""
    written: dict[str, Any] = {"role": message.role}
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    if message.name:
        written["name"] = message.name
    if message.tools:
        return written | {"tools": [_write_function(tool) for tool in message.tools]}
    written["content"] = [_write_part(part) for part in message.content] if message.images else message.text
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["content"] = message.text or None
        written["tool_calls"] = [_write_call(call) for call in message.tool_calls]
    if message.partial:
        written["partial"] = True
    return written


def arguments_text(call: ToolCall) -> str:
    """A call's arguments as OpenAI writes them: JSON as text, or the text that is none."""
    return call.arguments if isinstance(call.arguments, str) else strict_json.spaced(call.arguments)


# --- Messages ---------------------------------------------------------------------------------------------------------


def _read_message(fields: Fields) -> Message:
    fields.need("role", str)
    role = fields.choice("role", ("system", "developer", "user", "assistant", "tool"))
    with path_of_errors(fields.path):
        message = _OF_ROLE[role](fields)
    fields.close()
    return message


def _read_system(fields: Fields) -> Message:
    tools = tuple(_read_declared(tool) for tool in fields.each("tools"))
    content = _read_parts(fields, needed=not tools)
    return Message(role="system", content=content, name=fields.get("name", str) or "", tools=tools)


def _read_declared(fields: Fields) -> Tool:
    tool = _read_function(fields)
    _check_declared(tool, fields.at("function.name"))
    return tool


def _check_declared(tool: Tool, path: str) -> None:
    if not DECLARED_NAME.fullmatch(tool.name):
        raise ValueError(
            f"{path}: of a tool in a message wanted letters, digits, _ and -, the first one a letter or _, all of "
            f"ASCII, got {shown(tool.name)}"
        )


def _read_user(fields: Fields) -> Message:
    return Message(role="user", content=_read_parts(fields), name=fields.get("name", str) or "")


def _read_assistant(fields: Fields) -> Message:
    if fields.get("refusal", str):
        raise ValueError(f"{fields.at('refusal')}: wanted none: what the assistant said is content")
    return Message(
        role="assistant",
        content=tuple(read_content(fields, "content", {"text": read_text})),
        name=fields.get("name", str) or "",
        reasoning=_read_reasoning(fields),
        tool_calls=tuple(_read_call(call) for call in fields.each("tool_calls")),
        partial=fields.get("partial", bool) or False,
    )


def _read_reasoning(fields: Fields) -> str:
    """What has words of reasoning_content and reasoning; where neither has, the details, which else repeat it."""
    said = (fields.get("reasoning_content", str), fields.get("reasoning", str))
    fields.get("reasoning_details", list)
    return next((text for text in said if text and text.strip()), None) or _read_details(fields)


def _read_details(fields: Fields) -> str:
    """OpenRouter's details: their texts, where none has words their summaries."""
    said: dict[str, list[str]] = {kind: [] for kind in _DETAILS}
    is_hidden = False
    for detail in fields.each("reasoning_details"):
        detail.need("type", str)
        kind = detail.choice("type", tuple(_DETAILS))
        text = detail.get(_DETAILS[kind], str)
        if text:
            said[kind].append(text)
        is_hidden |= bool(detail.get("signature", str)) or kind == "reasoning.encrypted"
        detail.close("id", "format")
    reasoning = "".join(said["reasoning.text"])
    if not reasoning.strip():
        reasoning = "\n\n".join(said["reasoning.summary"])
    if is_hidden and not reasoning.strip():
        raise ValueError(
            f"{fields.at('reasoning_details')}: cannot be read, only who wrote it has its text: wanted reasoning.text "
            "or reasoning.summary"
        )
    return reasoning


def _read_tool_result(fields: Fields) -> Message:
    tool, name = fields.get("tool", str), fields.get("name", str)
    return Message(
        role="tool",
        content=_read_parts(fields, needed=False),
        name=tool or name or "",
        tool_call_id=fields.get("tool_call_id", str),
    )


_DETAILS: Mapping[str, str] = {
    "reasoning.text": "text",
    "reasoning.summary": "summary",
    "reasoning.encrypted": "data",
}
_OF_ROLE: Mapping[str, Callable[[Fields], Message]] = {
    "system": _read_system,
    "developer": _read_system,
    "user": _read_user,
    "assistant": _read_assistant,
    "tool": _read_tool_result,
}


def _read_parts(fields: Fields, *, needed: bool = True) -> tuple[Part, ...]:
    if needed and fields.lacks("content"):
        raise ValueError(f"{fields.at('content')}: missing, wanted text, a list or null")
    readers: Mapping[str, Callable[[Fields], Part]] = {"text": read_text, "image_url": _read_image}
    return tuple(read_content(fields, "content", readers))


def _read_image(part: Fields) -> Image:
    """Of an object that has the url, or of the url alone."""
    if isinstance(url := part.get("image_url", str, dict), str):
        return Image(source=url)
    fields = part.object("image_url")
    with path_of_errors(fields.path):
        image = Image(source=fields.need("url", str), width=fields.get("width", int), height=fields.get("height", int))
    fields.close("id")
    return image


def _read_call(fields: Fields) -> ToolCall:
    fields.choice("type", ("function",))
    function = fields.object("function")
    call = read_call(function, fields.filled("id"))
    function.close()
    fields.close()
    return call


def _write_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}


def _write_part(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    size = {} if part.width is None else {"width": part.width, "height": part.height}
    return {"type": "image_url", "image_url": {"url": part.source} | size}


# --- Sizes of pictures ------------------------------------------------------------------------------------------------

_PROMPT = re.compile(
    r"<\|media_begin\|>image ([1-9][0-9]{0,5})x([1-9][0-9]{0,5})<\|media_content\|><\|media_pad\|><\|media_end\|>"
)


def _with_sizes(messages: list[Message], prompts: list[Any]) -> list[Message]:
    sizes = [_size_of(prompt, f"image_prompts[{index}]") for index, prompt in enumerate(prompts)]
    seen = [message if message.role == "assistant" else _without_needle(message) for message in messages]
    num_images = sum(len(message.images) for message in seen)
    if num_images != len(sizes):
        raise ValueError(f"image_prompts: wanted one for each of {num_images} pictures, got {len(sizes)}")
    left = iter(sizes)
    return [replace(message, content=tuple(_sized(part, left) for part in message.content)) for message in seen]


def _size_of(prompt: Any, path: str) -> tuple[int, int]:
    found = _PROMPT.fullmatch(prompt) if isinstance(prompt, str) else None
    if found is None:
        raise ValueError(f"{path}: wanted a picture's frame with its size, got {shown(prompt)}")
    return int(found[1]), int(found[2])


def _sized(part: Part, left: Iterator[tuple[int, int]]) -> Part:
    if isinstance(part, Text):
        return part
    width, height = next(left)
    return replace(part, width=width, height=height)


def _without_needle(message: Message) -> Message:
    content: list[Part] = []
    for part in message.content:
        if isinstance(part, Image):
            content.append(part)
            continue
        first, *others = part.text.split(NEEDLE)
        content.append(Text(first))
        for text in others:
            content += [Image(source=NEEDLE), Text(text)]
    return replace(message, content=tuple(content))


# --- Options ----------------------------------------------------------------------------------------------------------


def _read_options(request: Fields) -> Options:
    thinking, effort = _read_thinking(request)
    tool_choice, forced_tool = read_choice(request)
    return Options(
        tools=tuple(_read_function(tool) for tool in request.each("tools")),
        thinking=thinking,
        effort=effort,
        tool_choice=tool_choice,
        forced_tool=forced_tool,
        parallel_calls=request.get("parallel_tool_calls", bool) is not False,
        response_format=_read_format(request),
    )


def _read_function(fields: Fields) -> Tool:
    fields.choice("type", ("function",))
    tool = read_tool(fields.object("function"))
    fields.close()
    return tool


def _read_thinking(request: Fields) -> tuple[bool, Effort | None]:
    efforts = [request.choice("reasoning_effort", EFFORTS), request.choice("thinking_effort", EFFORTS)]
    thinking = request.get("thinking", bool, dict)
    if not isinstance(thinking, bool):
        fields = request.object("thinking")
        thinking = fields.choice("type", ("enabled", "disabled", "adaptive")) != "disabled"
        fields.choice("keep", ("all",))
        fields.get("budget_tokens", int)
        efforts.insert(0, fields.choice("effort", EFFORTS))
        fields.close()
    return thinking, next((effort for effort in efforts if effort is not None), None)


def _read_format(request: Fields) -> ResponseFormat:
    """`response_format`: an object, or its type alone. A json_schema in the json_schema is the one that is meant."""
    kinds = get_args(FormatKind)
    if not isinstance(request.get("response_format", str, dict), dict):
        with path_of_errors("response_format"):
            return ResponseFormat(kind=request.choice("response_format", kinds) or "text")
    fields = request.object("response_format")
    fields.need("type", str)
    kind = fields.choice("type", kinds)
    if kind != "json_schema":
        fields.close()
        return ResponseFormat(kind=kind)
    wanted = fields.object("json_schema")
    fields.close()
    if "schema" in wanted or "json_schema" not in wanted:
        return read_schema(wanted)
    nested = wanted.object("json_schema")
    if "schema" not in nested:
        return read_schema(wanted, "json_schema")  # the schema itself, which the released encoder takes there too
    wanted.close()
    return read_schema(nested)


def _write_options(options: Options) -> dict[str, Any]:
    written: dict[str, Any] = {}
    if options.tools:
        written["tools"] = [_write_function(tool) for tool in options.tools]
    if options.forced_tool is not None:
        written["tool_choice"] = {"type": "function", "function": {"name": options.forced_tool}}
    elif options.tool_choice != "auto":
        written["tool_choice"] = options.tool_choice
    if not options.parallel_calls:
        written["parallel_tool_calls"] = False
    if options.response_format.schema is not None:
        written["response_format"] = {"type": "json_schema", "json_schema": write_schema(options.response_format)}
    elif options.response_format.kind != "text":
        written["response_format"] = {"type": options.response_format.kind}
    if options.effort is not None:
        written["reasoning_effort"] = options.effort
    if not options.thinking:
        written["thinking"] = {"type": "disabled"}
    return written


def _write_function(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": write_tool(tool)}
