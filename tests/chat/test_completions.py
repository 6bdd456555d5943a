"""Chat Completions, read and written: what each field means, and that of a wrong one comes an error that names it."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivium.chat import message as chat
from trivium.chat.completions import read_request, write_message, write_request
from trivium.chat.message import Conversation, Image, Options, ResponseFormat, Text, Tool, ToolCall

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "enum": ["a", None, 1.5]}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA, "strict": True}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}}
WEATHER = Tool(name="weather", description="Of a city.", parameters=SCHEMA, strict=True)
BODY = {
    "model": "kimi-k3",
    "temperature": 0.5,
    "messages": [
        {"role": "developer", "content": "Be brief.", "name": "rules"},
        {"role": "system", "tools": [{"type": "function", "function": {"name": "clock"}}]},
        {"role": "user", "content": [{"type": "text", "text": "Here: ", "cache_control": {"type": "x"}}, PICTURE]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Let me see."}],
            "reasoning_content": "Two calls.",
            "refusal": None,
            "annotations": [],
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "index": 0,
                    "function": {"name": "weather", "arguments": '{"city":"a"}'},
                },
                {"id": "2", "type": "function", "index": 1, "function": {"name": "clock", "arguments": {"at": [1]}}},
            ],
        },
        {"role": "tool", "tool_call_id": "2", "content": "noon", "name": "clock"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "18 C"}]},
        {
            "role": "assistant",
            "content": "Well.",
            "reasoning_details": [
                {"type": "reasoning.text", "text": "Th", "id": "r", "format": "x", "index": 0, "signature": "s"},
                {"type": "reasoning.text", "text": "ink."},
            ],
        },
        {"role": "assistant", "content": "It", "reasoning": "Say it.", "partial": True},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "parallel_tool_calls": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "w", "strict": True, "schema": SCHEMA}},
    "reasoning_effort": "low",
    "thinking": {"type": "enabled", "keep": "all", "effort": "high"},
}


def of(*messages, **options):
    return {"messages": list(messages) or [{"role": "user", "content": "x"}]} | options


def call(id="1", name="f", arguments="{}"):
    return {"role": "assistant", "tool_calls": [{"id": id, "function": {"name": name, "arguments": arguments}}]}


def test_a_request_is_read_whole():
    conversation = read_request(BODY)
    assert conversation.messages == (
        chat.system("Be brief.", name="rules"),
        chat.declare([Tool(name="clock")]),
        chat.user([Text("Here: "), Image(source="data:image/png;base64,AA")]),
        chat.assistant(
            "Let me see.",
            reasoning="Two calls.",
            tool_calls=[
                ToolCall(id="1", name="weather", arguments={"city": "a"}),
                ToolCall(id="2", name="clock", arguments={"at": [1]}),
            ],
        ),
        chat.tool_result("noon", call_id="2", name="clock"),
        chat.tool_result("18 C", call_id="1"),
        chat.assistant("Well.", reasoning="Think."),
        chat.assistant("It", reasoning="Say it.", partial=True),
    )
    assert conversation.options == Options(
        tools=(WEATHER,),
        effort="high",
        tool_choice="required",
        forced_tool="weather",
        parallel_calls=False,
        response_format=ResponseFormat(kind="json_schema", schema=SCHEMA, name="w", strict=True),
    )
    assert read_request(of()).options == Options()


@given(st.data())
def test_a_request_that_is_written_is_read_as_the_same_conversation(conversations, data):
    conversation = data.draw(conversations)
    body = write_request(conversation)
    assert read_request(body) == conversation == read_request(json.loads(json.dumps(body)))


def test_a_request_is_written_as_clients_know_it():
    conversation = Conversation(
        messages=(chat.user("Hi"),),
        options=Options(
            tools=(WEATHER,),
            thinking=False,
            effort="max",
            tool_choice="required",
            forced_tool="weather",
            parallel_calls=False,
            response_format=ResponseFormat(kind="json_schema", schema=SCHEMA, name="w", strict=True),
        ),
    )
    assert write_request(conversation) == {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "w", "strict": True, "schema": SCHEMA}},
        "reasoning_effort": "max",
        "thinking": {"type": "disabled"},
    }
    assert write_request(replace(conversation, options=Options())) == of({"role": "user", "content": "Hi"})
    write_request(conversation)["tools"][0]["function"]["parameters"]["type"] = "array"
    assert conversation.options.tools == (WEATHER,)  # what is written is a copy


@pytest.mark.parametrize(
    "conversation, error",
    [
        (Conversation(messages=()), "messages: wanted at least one, got none"),
        (
            Conversation(messages=(chat.user("x"), chat.declare([Tool(name="f"), Tool(name="f.g")]))),
            "messages[1].tools[1].function.name: of a tool in a message wanted letters, digits, _ and -",
        ),
        (
            Conversation(
                messages=(chat.user("x"),), options=Options(response_format=ResponseFormat(kind="text", strict=True))
            ),
            "response_format: text has no name and no strict",
        ),
    ],
)
def test_what_no_request_holds_is_named(conversation, error):
    with pytest.raises(ValueError) as raised:
        write_request(conversation)
    assert str(raised.value).startswith(error)


def test_a_tool_of_any_depth_is_written():
    parameters = {}
    for _ in range(99):  # as deep as a schema may be
        parameters = {"a": parameters}
    tool = Tool(name="f", parameters=parameters)
    for said in (
        Conversation(messages=(chat.declare([tool]),)),
        Conversation(messages=(chat.user("x"),), options=Options(tools=(tool,))),
    ):
        assert read_request(write_request(said)) == said


@given(st.data())
def test_what_is_written_is_read_as_the_same_messages(message_lists, data):
    messages = data.draw(message_lists)
    written = [write_message(message) for message in messages]
    assert read_request({"messages": written}).messages == tuple(messages)


def test_an_answer_is_written_as_clients_know_it():
    said = chat.assistant("", reasoning="r", tool_calls=[ToolCall(id="1", name="f", arguments={"a": [1, "é"]})])
    assert write_message(said) == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "r",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}],
    }
    assert write_message(chat.assistant("hi")) == {"role": "assistant", "content": "hi"}


def test_what_is_written_is_nobodys_else():
    declared = chat.declare([WEATHER])
    write_message(declared)["tools"][0]["function"]["parameters"]["type"] = "array"
    assert declared == chat.declare([Tool(name="weather", description="Of a city.", parameters=SCHEMA, strict=True)])


def test_of_a_wrong_request_comes_nothing_but_an_error_that_names_it(check_wrong_requests):
    ignored = {"model", "temperature", "cache_control", "detail", "annotations", "index", "id", "format", "signature"}
    check_wrong_requests(read_request, BODY, ignored)


# --- Options ----------------------------------------------------------------------------------------------------

TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
NESTED = {"type": "json_schema", "json_schema": {"schema": None, "json_schema": {"name": "n", "schema": SCHEMA}}}


@pytest.mark.parametrize(
    "given, wanted",
    [
        ({"tool_choice": "auto"}, {}),
        ({"tool_choice": None, "tools": None, "response_format": None, "thinking": None}, {}),
        ({"chat_template_kwargs": {}, "reasoning": None, "system": ""}, {}),
        ({"tool_choice": "none"}, {"tool_choice": "none"}),
        ({"tool_choice": "required"} | TOOLS, {"tool_choice": "required", "tools": (Tool(name="f"),)}),
        ({"tools": []}, {}),
        ({"parallel_tool_calls": True}, {}),
        ({"response_format": "text"}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": "json_object"}, {"response_format": ResponseFormat(kind="json_object")}),
        ({"response_format": {"type": "json_object"}}, {"response_format": ResponseFormat(kind="json_object")}),
        ({"response_format": NESTED}, {"response_format": ResponseFormat(kind="json_schema", name="n", schema=SCHEMA)}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "json_schema": SCHEMA}}},
            {"response_format": ResponseFormat(kind="json_schema", name="n", schema=SCHEMA)},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "description": "d"}}},
            {"response_format": ResponseFormat(kind="json_schema", schema={})},
        ),
        ({"reasoning_effort": "max"}, {"effort": "max"}),
        ({"thinking_effort": "low"}, {"effort": "low"}),
        ({"thinking": {"effort": "max"}, "reasoning_effort": "low", "thinking_effort": "low"}, {"effort": "max"}),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, {"thinking": False, "effort": "low"}),
        ({"thinking": False}, {"thinking": False}),
        ({"thinking": True, "thinking_effort": "high"}, {"effort": "high"}),
        ({"add_generation_prompt": 7, "stream": True, "stop": ["x"], "functions": None, "function_call": None}, {}),
        ({"thinking": {"type": "adaptive", "budget_tokens": 1024}}, {}),
        ({"tools": [{"function": {"name": "天気 <|open|>"}}]}, {"tools": (Tool(name="天気 <|open|>"),)}),
    ],
)
def test_options(given, wanted):
    assert read_request(of(**given)).options == Options(**wanted)


# --- Messages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, wanted",
    [
        ({"role": "user", "content": None}, chat.user("")),
        ({"role": "user", "content": []}, chat.user("")),
        ({"role": "user", "content": "a", "name": ""}, chat.user("a")),
        ({"role": "assistant"}, chat.assistant()),
        ({"role": "assistant", "content": None, "tool_calls": None, "audio": None}, chat.assistant()),
        ({"role": "assistant", "reasoning_content": "a", "reasoning": "b"}, chat.assistant(reasoning="a")),
        ({"role": "assistant", "reasoning_content": "", "reasoning": "b"}, chat.assistant(reasoning="b")),
        ({"role": "assistant", "reasoning_content": " \n", "reasoning": "b"}, chat.assistant(reasoning="b")),
        ({"role": "system", "content": "", "tools": [{"function": {"name": "f"}}]}, chat.declare([Tool(name="f")])),
        ({"role": "tool", "content": None, "tool": "t", "name": "n"}, chat.tool_result("", name="t")),
        ({"role": "tool", "content": "", "name": "n"}, chat.tool_result("", name="n")),
        ({"role": "tool", "name": "n"}, chat.tool_result("", name="n")),
        ({"role": "assistant", "content": "a", "refusal": ""}, chat.assistant("a")),
        (
            {"role": "assistant", "reasoning": "a", "reasoning_details": [{}], "provider_specific_fields": {"a": 1}},
            chat.assistant(reasoning="a"),
        ),
        (
            {"role": "assistant", "tool_calls": [call()["tool_calls"][0] | {"extras": {"a": 1}}]},
            chat.assistant(tool_calls=[ToolCall(id="1", name="f", arguments={})]),
        ),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, chat.user([Image(source="x")])),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x", "id": "1"}}]},
            chat.user([Image(source="x")]),
        ),
        (call(arguments=" "), chat.assistant(tool_calls=[ToolCall(id="1", name="f", arguments={})])),
        (call(arguments=None), chat.assistant(tool_calls=[ToolCall(id="1", name="f", arguments={})])),
        (call(arguments='{"a":'), chat.assistant(tool_calls=[ToolCall(id="1", name="f", arguments='{"a":')])),
    ],
)
def test_messages(given, wanted):
    assert read_request(of(given)).messages == (wanted,)


def detail(kind, **fields):
    return {"type": f"reasoning.{kind}", "format": "x", "index": 0, "id": None} | fields


HIDDEN = detail("encrypted", data="AA")


@pytest.mark.parametrize(
    "details, reasoning",
    [
        ([detail("text", text="THINK")], "THINK"),
        ([detail("text", text="a", signature=None), detail("text", text="b", signature="s")], "ab"),
        ([detail("text", text="a"), detail("text", text=None, signature="s"), HIDDEN], "a"),
        ([detail("summary", summary="a"), HIDDEN, detail("summary", summary="b")], "a\n\nb"),
        ([detail("summary", summary="a"), detail("text", text="b")], "b"),
        ([detail("summary", summary="a"), detail("text", text=" ")], "a"),
        ([detail("text", text="")], ""),
        ([], ""),
    ],
)
def test_reasoning_that_stands_in_details_alone_is_read(details, reasoning):
    for blank in ({}, {"reasoning_content": None, "reasoning": " "}):
        said = {"role": "assistant", "content": "x", "reasoning_details": details} | blank
        assert read_request(of(said)).messages == (chat.assistant("x", reasoning=reasoning),)
    said = {"role": "assistant", "reasoning_details": [*details, HIDDEN], "reasoning": "r"}
    assert read_request(of(said)).messages == (chat.assistant(reasoning="r"),)


def test_texts_side_by_side_are_one():
    parts = [{"type": "text", "text": text} for text in ("<|op", "", "en|>")]
    assert read_request(of({"role": "user", "content": parts})).messages == (chat.user("<|open|>"),)


@pytest.mark.parametrize(
    "message, error",
    [
        ({"role": "user"}, "messages[0].content: missing, wanted text, a list or null"),
        ({"content": "x"}, "messages[0].role: missing, wanted text"),
        (
            {"role": "function", "content": "x"},
            "messages[0].role: wanted one of system, developer, user, assistant, tool, got 'function'",
        ),
        ({"role": "user", "content": "x", "tool_calls": []}, "messages[0].tool_calls: unknown here, known: role,"),
        ({"role": "user", "content": "x", "refusal": "no"}, "messages[0].refusal: unknown here"),
        (
            {"role": "assistant", "refusal": "no"},
            "messages[0].refusal: wanted none: what the assistant said is content",
        ),
        ({"role": "user", "content": "x", "id": "1"}, "messages[0].id: unknown here"),
        *[
            (
                {"role": "assistant", "content": "x", "reasoning_details": [hidden]},
                "messages[0].reasoning_details: cannot be read, only who wrote it has its text: wanted reasoning.text or",
            )
            for hidden in (HIDDEN, detail("text", text="", signature="s"))
        ],
        (
            {"role": "assistant", "reasoning_details": [detail("other", text="a")]},
            "messages[0].reasoning_details[0].type: wanted one of reasoning.text, reasoning.summary, reasoning.encrypted",
        ),
        (
            {"role": "assistant", "reasoning_details": [detail("text", text="a", summary="b")]},
            "messages[0].reasoning_details[0].summary: unknown here",
        ),
        ({"role": "user", "content": "x", "a b": 1}, "messages[0].'a b': unknown here"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0].type: missing, wanted text"),
        (
            {"role": "user", "content": [{"type": "input_image"}]},
            "messages[0].content[0].type: wanted one of text, image_url, got 'input_image'",
        ),
        (
            {"role": "user", "content": [PICTURE, {"type": "text", "text": "x", "typo": 1}]},
            "messages[0].content[1].typo: unknown here, known: type, text",
        ),
        (
            {"role": "assistant", "content": [PICTURE]},
            "messages[0].content[0].type: wanted one of text, got 'image_url'",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x", "width": 3}}]},
            "messages[0].content[0].image_url: image: wanted a width and a height",
        ),
        (
            {"role": "system", "content": "x", "tools": [{"function": {"name": "f"}}]},
            "messages[0]: message: one that declares tools has no content",
        ),
        *[
            (
                {"role": "system", "tools": [{"function": {"name": "f"}}, {"function": {"name": name}}]},
                "messages[0].tools[1].function.name: of a tool in a message wanted letters, digits, _ and -",
            )
            for name in ("1f", "-f", "f.g", "f g", "f\n", "fé", "é")
        ],
        ({"role": "assistant", "partial": 1}, "messages[0].partial: wanted a boolean, got a whole number"),
        (call(arguments="[1]"), "messages[0].tool_calls[0].function: arguments: wanted a JSON object, got '[1]'"),
        (
            call(arguments=7),
            "messages[0].tool_calls[0].function.arguments: wanted text or an object, got a whole number",
        ),
        (call(id=None), "messages[0].tool_calls[0].id: missing, wanted text"),
        (
            call(name="n" * 257),
            "messages[0].tool_calls[0].function: tool call: name: wanted 1 to 256 characters, got 257",
        ),
        ({"role": "user", "content": "\ud800"}, "messages[0].content: character 0 is the lone surrogate U+D800"),
    ],
)
def test_a_wrong_message_is_named(message, error):
    with pytest.raises(ValueError) as raised:
        read_request(of(message))
    assert str(raised.value).startswith(error)


@pytest.mark.parametrize(
    "options, error",
    [
        ({"messages": []}, "messages: wanted at least one, got none"),
        ({"messages": None}, "messages: missing, wanted a list"),
        ({"tool_choice": "required"}, "tool_choice: required, but no tool is declared"),
        ({"tool_choice": "any"}, "tool_choice: wanted one of auto, none, required, got 'any'"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}} | TOOLS, "tool_choice: 'g' is not declared"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name: missing, wanted text"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type: wanted one of function, got 'allowed_tools'"),
        ({"tools": TOOLS["tools"] * 2}, "tools[1]: 'f' is declared already"),
        (
            {"tools": [{"type": "function", "function": {"name": "$f"}}]},
            "tools[0].function: tool: name: names that begin",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type: wanted one of function, got 'web_search'"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].function.name: missing, wanted text"),
        ({"reasoning_effort": "medium"}, "reasoning_effort: wanted one of low, high, max, got 'medium'"),
        ({"reasoning_effort": "none"}, "reasoning_effort: wanted one of low, high, max, got 'none'"),
        ({"thinking": {"effort": "minimal"}}, "thinking.effort: wanted one of low, high, max, got 'minimal'"),
        ({"thinking": {"keep": "none"}}, "thinking.keep: wanted one of all, got 'none'"),
        ({"functions": [{"name": "f"}]}, 'functions: not read, wanted tools: [{"type": "function", "function":'),
        ({"function_call": "auto"}, "function_call: not read, wanted tool_choice"),
        (
            {"chat_template_kwargs": {"thinking": False}},
            "chat_template_kwargs: not read, wanted thinking and reasoning_effort",
        ),
        ({"reasoning": {"effort": "low"}}, "reasoning: not read, wanted reasoning_effort, and thinking for none of it"),
        ({"system": "Be brief."}, "system: not read, wanted a message of the system"),
        ({"response_format": "json_schema"}, "response_format: response format: json_schema wants a schema"),
        (
            {"response_format": {"type": "grammar"}},
            "response_format.type: wanted one of text, json_object, json_schema",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema: missing, wanted an object"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema: unknown here"),
    ],
)
def test_a_wrong_option_is_named(options, error):
    with pytest.raises(ValueError) as raised:
        read_request(of() | options)
    assert str(raised.value).startswith(error)


# --- The results of tools ---------------------------------------------------------------------------------------

TWO = {"role": "assistant", "tool_calls": [call("1", "f")["tool_calls"][0], call("2", "g")["tool_calls"][0]]}


def results(*ids):
    return [{"role": "tool", "tool_call_id": id, "content": f"of {id}"} for id in ids]


def test_results_may_come_in_any_order():
    ordered = chat.results_in_order(read_request(of(TWO, *results("2", "1"))).messages)
    assert [(message.text, result) for message, result in ordered[1:]] == [("of 1", ("f", 1)), ("of 2", ("g", 2))]


@pytest.mark.parametrize(
    "messages, error",
    [
        ([TWO, *results("")], "messages[1]: tool_call_id is empty, there are: '1', '2'"),
        ([TWO, *results("1", "3")], "messages[2]: tool_call_id '3' is none of the assistant's last calls"),
        ([TWO, *results("1", "2", "1")], "messages[3]: tool_call_id '1' has a result already"),
        ([*results("1"), TWO], "messages[0]: tool_call_id '1' is none of the assistant's last calls, there are: none"),
        ([TWO, {"role": "assistant"}, *results("1")], "messages[2]: tool_call_id '1' is none of"),
        ([{"role": "tool", "content": "x"}], "messages[0]: a tool's result wants tool_call_id or the tool's name"),
        ([TWO, *results(7)], "messages[1].tool_call_id: wanted text, got a whole number"),
    ],
)
def test_a_result_of_no_call_is_named(messages, error):
    with pytest.raises(ValueError) as raised:
        read_request(of(*messages))
    assert str(raised.value).startswith(error)


# --- Sizes of pictures ------------------------------------------------------------------------------------------


def frame(size):
    return f"<|media_begin|>image {size}<|media_content|><|media_pad|><|media_end|>"


def test_image_prompts_give_sizes_in_order_and_make_the_needle_a_picture():
    needle = "<|kimi_image_placeholder|>"
    messages = [
        {"role": "user", "content": [PICTURE, {"type": "text", "text": f"a{needle}{needle}b"}]},
        {"role": "assistant", "content": needle},
        {"role": "user", "content": [PICTURE]},
    ]
    first, said, last = read_request(of(*messages, image_prompts=[frame(f"{n}x9") for n in (1, 2, 3, 4)])).messages
    assert [(image.width, image.height) for image in first.images + last.images] == [(1, 9), (2, 9), (3, 9), (4, 9)]
    assert [type(part) for part in first.content] == [Image, Text, Image, Image, Text]
    assert said.text == needle
    assert read_request(of(messages[0])).messages[0].text == f"a{needle}{needle}b"


@pytest.mark.parametrize(
    "prompts, error",
    [
        ([], "image_prompts: wanted one for each of 1 pictures, got 0"),
        ([frame("1x1")] * 2, "image_prompts: wanted one for each of 1 pictures, got 2"),
        ([frame("0x1")], "image_prompts[0]: wanted a picture's frame with its size, got '<|media_begin|>"),
        ([frame("1x1") + "<|open|>"], "image_prompts[0]: wanted a picture's frame"),
        ([frame("١x1")], "image_prompts[0]: wanted a picture's frame"),
        ([None], "image_prompts[0]: wanted a picture's frame with its size, got null"),
        ("x", "image_prompts: wanted a list, got 'x'"),
    ],
)
def test_wrong_image_prompts_are_named(prompts, error):
    with pytest.raises(ValueError) as raised:
        read_request(of({"role": "user", "content": [PICTURE]}, image_prompts=prompts))
    assert str(raised.value).startswith(error)


# --- Long ones --------------------------------------------------------------------------------------------------


def test_a_megabyte_in_many_parts_takes_no_longer_than_in_one():
    # Joined one by one, 100,000 texts of 20 characters are 100 GB of copies.
    parts = [{"type": "text", "text": "20 characters of it."}] * 100_000
    assert len(read_request(of({"role": "user", "content": parts})).messages[0].text) == 2_000_000


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a":' * 100_000])
def test_arguments_too_deep_to_read_are_no_json(arguments):
    assert read_request(of(call(arguments=arguments))).messages[0].tool_calls[0].arguments == arguments


def deep(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "body, error",
    [
        (of(deep(10_000)), "messages[0]: wanted an object, got a list"),
        (of({"role": deep(10_000), "content": ""}), "messages[0].role: wanted text, got a list"),
        (of({"role": "user", "content": "", "x" * 10**6: deep(10_000)}), f"messages[0].'{'x' * 60}'...: unknown here"),
        (
            of(call(arguments={"a": deep(10_000)})),
            "messages[0].tool_calls[0].function: tool call: arguments: lists and",
        ),
        (
            of(tools=[{"function": {"name": "f", "parameters": {"a": deep(10_000)}}}]),
            "tools[0].function: tool 'f': para",
        ),
        (
            of(
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "", "width": 10**400, "height": 1}}],
                }
            ),
            "messages[0].content[0].image_url: image: wanted a width and a height of 1 to 1000000 pixels",
        ),
    ],
    ids=["message", "role", "unknown", "arguments", "schema", "picture"],
)
def test_what_is_too_long_or_deep_is_named_in_short(body, error):
    with pytest.raises(ValueError) as raised:
        read_request(body)
    assert str(raised.value).startswith(error) and len(str(raised.value)) < 1000
