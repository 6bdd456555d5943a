"""Anthropic's Messages, read and written: which blocks make which messages, and what each field means."""

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivium.chat import message as chat
from trivium.chat.anthropic import read_request, signature_of, write_content, write_request
from trivium.chat.message import Conversation, Image, Options, ResponseFormat, Text, Tool, ToolCall

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA"}
BODY = {
    "model": "kimi-k3",
    "max_tokens": 100,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Here: "}, {"type": "image", "source": SOURCE}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Two calls.", "signature": signature_of("Two calls.")},
                {"type": "text", "text": "Let me see.", "citations": None},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "a"}},
                {"type": "tool_use", "id": "2", "name": "weather", "input": {"INVALID_JSON": '{"city": half'}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "2", "content": "no such city", "is_error": True},
                {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "18 C"}]},
                {"type": "image", "source": {"type": "url", "url": "https://a/b"}},
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "assistant", "content": "18"},
        {"role": "user", "content": "And b?"},
    ],
    "tools": [
        {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA, "type": "custom", "strict": True}
    ],
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
}


def of(*blocks, role="user", **options):
    return {"messages": [{"role": role, "content": list(blocks) or "x"}]} | options


def test_a_request_is_read_whole():
    conversation = read_request(BODY)
    assert conversation.messages == (
        chat.system("Be brief."),
        chat.user([Text("Here: "), Image(source="data:image/png;base64,AA")]),
        chat.assistant(
            "Let me see.",
            reasoning="Two calls.",
            tool_calls=[
                ToolCall(id="1", name="weather", arguments={"city": "a"}),
                ToolCall(id="2", name="weather", arguments='{"city": half'),
            ],
        ),
        chat.tool_result("no such city", call_id="2"),
        chat.tool_result("18 C", call_id="1"),
        chat.user([Image(source="https://a/b"), Text("Go on.")]),
        chat.assistant("18"),
        chat.user("And b?"),
    )
    assert conversation.options == Options(
        tools=(Tool(name="weather", description="Of a city.", parameters=SCHEMA, strict=True),),
        effort="low",
        tool_choice="required",
        forced_tool="weather",
        parallel_calls=False,
        response_format=ResponseFormat(kind="json_schema", schema=SCHEMA),
    )
    assert read_request(of()).options == Options()


@given(st.data())
def test_a_request_that_is_written_is_read_as_the_same_conversation(foreign_conversations, data):
    conversation = data.draw(foreign_conversations)
    *messages, last = [
        chat.system(message.text) if message.role == "system" else message for message in conversation.messages
    ]
    begun = last.role == "assistant" and bool(last.content) and not last.tool_calls
    options = conversation.options
    if options.response_format.kind == "json_object":
        options = replace(options, response_format=ResponseFormat())
    conversation = Conversation(messages=[*messages, replace(last, partial=begun)], options=options)
    assert read_request(write_request(conversation)) == conversation


def test_a_request_is_written_as_clients_know_it():
    conversation = read_request(BODY)
    messages = [
        BODY["messages"][0],
        {"role": "assistant", "content": write_content(conversation.messages[2])},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "2", "content": "no such city"},
                {"type": "tool_result", "tool_use_id": "1", "content": "18 C"},
            ],
        },
        {"role": "user", "content": BODY["messages"][2]["content"][2:]},
        {"role": "assistant", "content": [{"type": "text", "text": "18"}]},
        {"role": "user", "content": "And b?"},
    ]
    tool = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA, "strict": True}
    options = {name: BODY[name] for name in ("tool_choice", "output_config")}
    assert write_request(conversation) == options | {"system": "Be brief.", "messages": messages, "tools": [tool]}
    plain = replace(conversation, options=Options(thinking=False))
    disabled = {"type": "disabled"}
    assert write_request(plain) == {"system": "Be brief.", "messages": messages, "thinking": disabled}


PICTURE = Image(source="x", width=1, height=1)
USED = ToolCall(id="1", name="f", arguments={})


@pytest.mark.parametrize(
    "messages, error",
    [
        ([], "messages: wanted at least one, got none"),
        ([chat.user("x", name="n")], "messages[0]: a name has no place in Anthropic's Messages"),
        ([chat.declare([Tool(name="f")])], "messages[0]: declaring tools has no place in Anthropic's Messages"),
        (
            [chat.assistant(tool_calls=[USED]), chat.tool_result("x")],
            "messages[1]: a result without tool_call_id has no place in Anthropic's Messages",
        ),
        ([chat.user([PICTURE])], "messages[0]: a picture's size has no place in Anthropic's Messages"),
        (
            [chat.user("x"), chat.system([Image(source="x")])],
            "messages[1]: a picture of the system has no place in Anthropic's Messages",
        ),
        (
            [chat.assistant(tool_calls=[USED]), chat.assistant("x")],
            "messages[1]: an answer right behind another has no place in Anthropic's Messages",
        ),
        (
            [chat.user("x"), chat.assistant("y")],
            "messages[1]: of the last answer wanted calls, no words, or partial: it would be gone on with",
        ),
        ([chat.user("x"), chat.assistant(partial=True)], "messages[1]: of the last answer wanted words"),
    ],
)
def test_what_no_request_holds_is_named(messages, error):
    with pytest.raises(ValueError) as raised:
        write_request(Conversation(messages=messages))
    assert str(raised.value) == error


def test_an_object_without_a_schema_has_no_place():
    options = Options(response_format=ResponseFormat(kind="json_object"))
    with pytest.raises(ValueError, match=r"^response_format: json_object has no place in Anthropic's Messages"):
        write_request(Conversation(messages=(chat.user("x"),), options=options))


@pytest.mark.parametrize(
    "source", ["data:image/png;base64,AA", "https://a/b", "data:;base64,", "data:,x", "data:a\n;base64,\n"]
)
def test_a_picture_is_written_by_its_data_or_its_address(source):
    conversation = Conversation(messages=(chat.user([Image(source=source)]),))
    body = write_request(conversation)
    (block,) = body["messages"][0]["content"]
    assert block["source"]["type"] == ("base64" if ";base64," in source else "url")
    assert read_request(body) == conversation


@given(st.data())
def test_what_is_written_is_read_as_the_same_message(answers, data):
    answer = data.draw(answers)
    said = {"role": "assistant", "content": write_content(answer)}
    assert read_request({"messages": [said, {"role": "user", "content": "u"}]}).messages == (answer, chat.user("u"))


def test_a_last_answer_that_has_words_is_gone_on_with():
    begun = {"role": "assistant", "content": "The answer is"}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
    assert read_request({"messages": [begun]}).messages[0].partial
    assert not read_request({"messages": [begun, {"role": "user", "content": "u"}]}).messages[0].partial
    assert not read_request({"messages": [called]}).messages[0].partial


def test_blocks_stand_in_order_and_thinking_is_signed():
    answer = chat.assistant("t", reasoning="r", tool_calls=[ToolCall(id="1", name="f", arguments={"a": [1]})])
    assert write_content(answer) == [
        {"type": "thinking", "thinking": "r", "signature": hashlib.sha256(b"r").hexdigest()},
        {"type": "text", "text": "t"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1]}},
    ]
    write_content(answer)[2]["input"]["a"].append(2)
    assert answer.tool_calls[0].arguments == {"a": [1]}  # what is written is a copy
    assert write_content(chat.assistant()) == []
    with pytest.raises(ValueError, match=r"^content: wanted a message of the assistant, got one of the user$"):
        write_content(chat.user("x"))


@pytest.mark.parametrize(
    "arguments",
    ['{"a":', {"INVALID_JSON": '{"a":'}, {"INVALID_JSON": ""}, {"INVALID_JSON": "[1]"}, {"INVALID_JSON": "{", "b": 1}],
)
def test_what_is_no_json_is_told_from_an_argument_of_that_name(arguments):
    answer = chat.assistant(tool_calls=[ToolCall(id="1", name="f", arguments=arguments)])
    assert read_request(of(*write_content(answer), role="assistant")).messages == (answer,)


def test_of_a_wrong_request_comes_nothing_but_an_error_that_names_it(check_wrong_requests):
    ignored = {"model", "max_tokens", "cache_control", "citations", "budget_tokens", "signature"}
    check_wrong_requests(read_request, BODY, ignored)


# --- Messages ---------------------------------------------------------------------------------------------------


def use(id):
    return {"type": "tool_use", "id": id, "name": "f", "input": {}}


CALL = {"role": "assistant", "content": [use("1")]}


def result(id="1", **fields):
    return {"type": "tool_result", "tool_use_id": id} | fields


def test_results_come_before_what_else_a_message_says():
    content = [{"type": "text", "text": "a"}, result(), {"type": "text", "text": "b"}]
    read = read_request({"messages": [CALL, {"role": "user", "content": content}]})
    assert read.messages[1:] == (chat.tool_result("", call_id="1"), chat.user("ab"))
    assert read_request({"messages": [{"role": "user", "content": []}]}).messages == (chat.user(""),)


@pytest.mark.parametrize(
    "fields, text",
    [
        *[
            ({"is_error": True} | nothing, "error")
            for nothing in ({}, {"content": None}, {"content": ""}, {"content": []})
        ],
        ({"is_error": True, "content": [{"type": "text", "text": ""}]}, "error"),
        ({"is_error": True, "content": "no such city"}, "no such city"),
        ({"is_error": False}, ""),
        ({"is_error": None, "content": ""}, ""),
    ],
)
def test_an_error_that_says_nothing_does_not_read_as_a_success(fields, text):
    read = read_request({"messages": [CALL, {"role": "user", "content": [result(**fields)]}]})
    assert read.messages[1:] == (chat.tool_result(text, call_id="1"),)


def thinking(text, signature=None):
    return {"type": "thinking", "thinking": text, "signature": signature}


@pytest.mark.parametrize(
    "blocks, message",
    [
        ([thinking("a"), thinking("b")], chat.assistant(reasoning="ab")),
        ([thinking("a", "ErUBCkYIBxgCIkA="), {"type": "text", "text": "t"}], chat.assistant("t", reasoning="a")),
        ([{"type": "text", "text": "t"}, thinking("a", "")], chat.assistant("t", reasoning="a")),
        *[
            ([thinking("", signature), {"type": "text", "text": "t"}], chat.assistant("t"))
            for signature in (None, "", signature_of(""))
        ],
        ([{"type": "text", "text": "t"}, {"type": "text", "text": "u"}], chat.assistant("tu")),
    ],
)
def test_blocks_of_the_assistant_are_one_message(blocks, message):
    (read,) = read_request(of(*blocks, role="assistant")).messages
    assert replace(read, partial=False) == message


def test_messages_of_the_assistant_side_by_side_are_one():
    said = [
        [thinking("a"), {"type": "text", "text": "t"}, use("1")],
        "u",
        [thinking("b"), use("2") | {"caller": {"type": "direct"}}],
    ]
    answers = [{"role": "assistant", "content": content} for content in said]
    results = {"role": "user", "content": [result("1"), result("2")]}
    user = {"role": "user", "content": "x"}
    calls = [ToolCall(id=id, name="f", arguments={}) for id in ("1", "2")]
    assert read_request({"messages": [*answers, results, user, user]}).messages == (
        chat.assistant("tu", reasoning="ab", tool_calls=calls),
        chat.tool_result("", call_id="1"),
        chat.tool_result("", call_id="2"),
        chat.user("x"),
        chat.user("x"),
    )
    begun = [{"role": "assistant", "content": word} for word in ("The answer", " is")]
    assert read_request({"messages": begun}).messages == (chat.assistant("The answer is", partial=True),)


@pytest.mark.parametrize("content", ["s", [{"type": "text", "text": "s"}]])
def test_a_message_of_the_system_stays_in_its_place(content):
    said = [{"role": "user", "content": "u"}, {"role": "system", "content": content}, CALL]
    results = [{"role": "system", "content": content}, {"role": "user", "content": [result()]}]
    assert read_request({"system": "first", "messages": said + results}).messages == (
        chat.system("first"),
        chat.user("u"),
        chat.system("s"),
        chat.assistant(tool_calls=[ToolCall(id="1", name="f", arguments={})]),
        chat.system("s"),
        chat.tool_result("", call_id="1"),
    )


@pytest.mark.parametrize("system, text", [("s", "s"), ([{"type": "text", "text": "s"}] * 2, "ss")])
def test_the_system_comes_first(system, text):
    assert read_request(of(system=system)).messages == (chat.system(text), chat.user("x"))


@pytest.mark.parametrize("system", ["", [], None, [{"type": "text", "text": ""}]])
def test_a_system_that_says_nothing_is_none(system):
    assert read_request(of(system=system)).messages == (chat.user("x"),)


# --- Options ----------------------------------------------------------------------------------------------------

TOOLS = {"tools": [{"name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral"}}]}
DECLARED = {"tools": (Tool(name="f", parameters={}),)}


@pytest.mark.parametrize(
    "given, wanted",
    [
        (TOOLS | {"tool_choice": {"type": "any"}}, DECLARED | {"tool_choice": "required"}),
        (TOOLS | {"tool_choice": {"type": "none"}}, DECLARED | {"tool_choice": "none"}),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, {"parallel_calls": False}),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}, {}),
        ({"thinking": {"type": "disabled"}}, {"thinking": False}),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, {}),
        ({"metadata": {"user_id": "x"}, "stop_sequences": ["x"], "output_format": None}, {}),
        *[
            ({"output_config": {"effort": effort}}, {"effort": wanted})
            for wanted, efforts in {
                "low": ("none", "minimal", "low"),
                "high": ("medium", "high"),
                "max": ("xhigh", "max"),
            }.items()
            for effort in efforts
        ],
        (
            {"tools": [TOOLS["tools"][0] | {"defer_loading": True, "input_examples": []}]},
            DECLARED,
        ),
        ({"tools": [TOOLS["tools"][0] | {"input_examples": None}]}, DECLARED),
        ({"tools": [TOOLS["tools"][0] | {"eager_input_streaming": True}]}, DECLARED),
    ],
)
def test_options(given, wanted):
    assert read_request(of(**given)).options == Options(**wanted)


@pytest.mark.parametrize(
    "body, error",
    [
        ({}, "messages: missing, wanted a list"),
        ({"messages": [], "system": "s"}, "messages: wanted at least one, got none"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: missing, wanted text or a list"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].role: wanted one of user, assistant, system, got 'tool'",
        ),
        (
            {"messages": [{"role": "system", "content": [{"type": "image", "source": SOURCE}]}]},
            "messages[0].content[0].type: wanted one of text, got 'image'",
        ),
        (of({"type": "redacted_thinking", "data": "x"}, role="assistant"), "messages[0].content[0]: redacted_thinking"),
        (
            of(thinking("b", signature_of("a")), role="assistant"),
            "messages[0].content[0].signature: is of another text",
        ),
        *[
            (
                of(thinking(text, "ErUBCkYIBxgCIkA="), {"type": "text", "text": "t"}, role="assistant"),
                "messages[0].content[0].thinking: was not shown, only who signed it has its text: wanted its text",
            )
            for text in ("", " \n")
        ],
        (of(thinking("a")), "messages[0].content[0].type: wanted one of text, image, tool_result, got 'thinking'"),
        (
            of(result(), role="assistant"),
            "messages[0].content[0].type: wanted one of text, thinking, redacted_thinking,",
        ),
        (of({"type": "document", "source": {}}), "messages[0].content[0].type: wanted one of text, image, tool_result"),
        (
            of({"type": "image", "source": {"type": "file"}}),
            "messages[0].content[0].source.type: wanted one of base64,",
        ),
        (of({"type": "tool_use", "id": "1", "name": "f"}, role="assistant"), "messages[0].content[0].input: missing"),
        (
            of({"type": "tool_use", "id": "1", "name": "f", "input": {"INVALID_JSON": "1"}}, role="assistant"),
            "messages[0].content[0]: arguments: wanted a JSON object, got '1'",
        ),
        (
            of(tools=[{"type": "bash_20250124", "name": "bash"}]),
            "tools[0].type: wanted one of custom, got 'bash_20250124'",
        ),
        (
            of(tools=[{"name": "f", "input_examples": [{"a": 1}]}]),
            "tools[0].input_examples: not read, wanted its examples in description",
        ),
        (of(tools=[{"name": "f", "typo": True}]), "tools[0].typo: unknown here, known: type, input_examples, name,"),
        (of(output_format={"type": "json_schema"}), "output_format: not read, wanted output_config.format"),
        (of({"type": "tool_reference", "tool_name": "f"}), "messages[0].content[0].type: wanted one of text, image,"),
        (of(tool_choice="auto"), "tool_choice: wanted an object, got 'auto'"),
        (of(tool_choice={"type": "tool"}), "tool_choice.name: missing, wanted text"),
        (of(tool_choice={"type": "any"}), "tool_choice: required, but no tool is declared"),
        (of(tool_choice={"type": "tool", "name": "g"}, **TOOLS), "tool_choice: 'g' is not declared, there are: f"),
        (of(output_config={"effort": "most"}), "output_config.effort: wanted one of none, minimal, low, medium, high,"),
        (of(output_config={"format": {"type": "json_schema"}}), "output_config.format.schema: missing"),
        (
            of(thinking={"type": "enabled", "budget_tokens": True}),
            "thinking.budget_tokens: wanted a whole number, got a",
        ),
        (of(thinking={"type": "on"}), "thinking.type: wanted one of enabled, disabled, adaptive, got 'on'"),
    ],
)
def test_a_wrong_request_is_named(body, error):
    with pytest.raises(ValueError) as raised:
        read_request(body)
    assert str(raised.value).startswith(error)


@pytest.mark.parametrize(
    "ids, error",
    [
        ([""], "messages[1].content[0]: tool_call_id is empty, there are: '1'"),
        (["2"], "messages[1].content[0]: tool_call_id '2' is none of the assistant's last calls"),
        (["1", "1"], "messages[1].content[1]: tool_call_id '1' has a result already"),
    ],
)
def test_a_result_of_no_call_is_named_by_its_block(ids, error):
    content = [result(id) for id in ids]
    with pytest.raises(ValueError) as raised:
        read_request({"system": "s", "messages": [CALL, {"role": "user", "content": content}]})
    assert str(raised.value).startswith(error)
