"""Responses, read and written: which items make one message, and what each field means."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivium.chat import message as chat
from trivium.chat.message import Conversation, Image, Options, ResponseFormat, Text, Tool, ToolCall
from trivium.chat.responses import read_request, write_items, write_request

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
BODY = {
    "model": "kimi-k3",
    "store": False,
    "instructions": "Be brief.",
    "input": [
        {"role": "developer", "content": "In English."},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Here: "},
                {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"},
            ],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Two calls."}],
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "weather", "arguments": '{"city": "a"}'},
        {"type": "function_call", "call_id": "2", "name": "weather", "arguments": '{"city": half'},
        {"type": "function_call_output", "call_id": "2", "output": "no such city"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "18 C"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Say it."}]},
        {"role": "assistant", "content": "18"},
        {"role": "user", "content": "And b?"},
    ],
    "tools": [
        {"type": "function", "name": "weather", "description": "Of a city.", "parameters": SCHEMA, "strict": False},
    ],
    "tool_choice": {"type": "function", "name": "weather"},
    "parallel_tool_calls": False,
    "text": {"format": {"type": "json_schema", "name": "w", "strict": True, "schema": SCHEMA}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
}


def test_a_request_is_read_whole():
    conversation = read_request(BODY)
    assert conversation.messages == (
        chat.system("Be brief."),
        chat.system("In English."),
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
        chat.assistant("18", reasoning="Say it."),
        chat.user("And b?"),
    )
    assert conversation.options == Options(
        tools=(Tool(name="weather", description="Of a city.", parameters=SCHEMA, strict=False),),
        effort="low",
        tool_choice="required",
        forced_tool="weather",
        parallel_calls=False,
        response_format=ResponseFormat(kind="json_schema", schema=SCHEMA, name="w", strict=True),
    )
    assert read_request({"input": "Hi"}).messages == (chat.user("Hi"),)
    assert read_request({"input": "Hi", "instructions": ""}) == Conversation(messages=(chat.user("Hi"),))


@given(st.data())
def test_a_request_that_is_written_is_read_as_the_same_conversation(foreign_conversations, data):
    conversation = data.draw(foreign_conversations)
    *messages, last = conversation.messages
    messages.append(replace(last, partial=False))
    conversation = Conversation(messages=messages, options=replace(conversation.options, thinking=True))
    assert read_request(write_request(conversation)) == conversation


def test_a_request_is_written_as_clients_know_it():
    conversation = read_request(BODY)
    items = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "In English."},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Here: "},
                {"type": "input_image", "image_url": "data:image/png;base64,AA"},
            ],
        },
        *write_items(conversation.messages[3]),
        {"type": "function_call_output", "call_id": "2", "output": "no such city"},
        {"type": "function_call_output", "call_id": "1", "output": "18 C"},
        *write_items(conversation.messages[6]),
        {"role": "user", "content": "And b?"},
    ]
    options = {name: BODY[name] for name in ("tools", "tool_choice", "parallel_tool_calls")}
    assert write_request(conversation) == options | {
        "input": items,
        "text": {"format": BODY["text"]["format"]},
        "reasoning": {"effort": "low"},
    }
    assert write_request(replace(conversation, options=Options())) == {"input": items}


PICTURE = Image(source="x", width=1, height=1)
ONE = Tool(name="f")


@pytest.mark.parametrize(
    "messages, error",
    [
        ([], "messages: wanted at least one, got none"),
        ([chat.user("x", name="n")], "messages[0]: a name has no place in Responses"),
        ([chat.user("x"), chat.declare([ONE])], "messages[1]: declaring tools has no place in Responses"),
        ([chat.tool_result("x", name="t")], "messages[0]: a name has no place in Responses"),
        (
            [chat.assistant(tool_calls=[ToolCall(id="1", name="f", arguments={})]), chat.tool_result("x")],
            "messages[1]: a result without tool_call_id has no place in Responses",
        ),
        ([chat.user([PICTURE])], "messages[0]: a picture's size has no place in Responses"),
        ([chat.assistant("x")] * 2, "messages[1]: an answer right behind another has no place in Responses"),
        ([chat.user("x"), chat.assistant("x", partial=True)], "messages[1]: partial has no place in Responses"),
    ],
)
def test_what_no_request_holds_is_named(messages, error):
    with pytest.raises(ValueError) as raised:
        write_request(Conversation(messages=messages))
    assert str(raised.value) == error


def test_thinking_cannot_be_turned_off():
    with pytest.raises(ValueError, match=r"^thinking: wanted true, there is no place in Responses to turn it off$"):
        write_request(Conversation(messages=(chat.user("x"),), options=Options(thinking=False)))


@given(st.data())
def test_what_is_written_is_read_as_the_same_message(answers, data):
    answer = data.draw(answers)
    items = write_items(answer)
    assert read_request({"input": [{"role": "user", "content": "x"}, *items]}).messages == (chat.user("x"), answer)


def test_items_stand_in_order_and_reasoning_is_no_summary():
    answer = chat.assistant("t", reasoning="r", tool_calls=[ToolCall(id="1", name="f", arguments={"a": 1})])
    assert write_items(answer) == [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "t", "annotations": []}],
        },
        {"type": "function_call", "status": "completed", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
    ]
    assert [item["type"] for item in write_items(chat.assistant())] == ["message"]
    with pytest.raises(ValueError, match=r"^items: wanted a message of the assistant, got one of the user$"):
        write_items(chat.user("x"))


def test_of_a_wrong_request_comes_nothing_but_an_error_that_names_it(check_wrong_requests):
    ignored = {"model", "store", "detail", "id", "status", "annotations", "logprobs", "verbosity", "summary"}
    check_wrong_requests(read_request, BODY, ignored)


# --- Which items make one message -------------------------------------------------------------------------------

THINKING = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]}
WORDS = {"role": "assistant", "content": "w"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": ""}
CALLED = ToolCall(id="1", name="f", arguments={})
USER = {"role": "user", "content": "u"}


def call(id):
    return CALL | {"call_id": id}


def called(*ids, **said):
    return chat.assistant(tool_calls=[ToolCall(id=id, name="f", arguments={}) for id in ids], **said)


def output(id):
    return {"type": "function_call_output", "call_id": id, "output": f"of {id}"}


def result(id):
    return chat.tool_result(f"of {id}", call_id=id)


@pytest.mark.parametrize(
    "items, messages",
    [
        ([THINKING], [chat.assistant(reasoning="r")]),
        ([THINKING, THINKING, WORDS], [chat.assistant("w", reasoning="rr")]),
        ([THINKING, CALL], [chat.assistant(reasoning="r", tool_calls=[CALLED])]),
        ([THINKING, CALL, WORDS], [chat.assistant("w", reasoning="r", tool_calls=[CALLED])]),
        ([WORDS, WORDS], [chat.assistant("ww")]),
        ([WORDS, THINKING, CALL], [chat.assistant("w", reasoning="r", tool_calls=[CALLED])]),
        ([THINKING, call("1"), THINKING, call("2"), output("1"), output("2"), THINKING, WORDS],
         [called("1", "2", reasoning="rr"), result("1"), result("2"), chat.assistant("w", reasoning="r")]),
        ([THINKING, call("1"), output("1"), THINKING, call("2"), output("2")],
         [called("1", reasoning="r"), result("1"), called("2", reasoning="r"), result("2")]),
        ([THINKING, {"role": "user", "content": "u"}, WORDS],
         [chat.assistant(reasoning="r"), chat.user("u"), chat.assistant("w")]),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": []}],
         [chat.assistant(reasoning="s")]),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": text} for text in ("**Plan**", "**Do**")],
           "content": [{"type": "reasoning_text", "text": ""}], "encrypted_content": "x"}],
         [chat.assistant(reasoning="**Plan**\n\n**Do**")]),
        ([{"type": "reasoning", "content": [{"type": "text", "text": "r"}]}], [chat.assistant(reasoning="r")]),
        ([THINKING | {"encrypted_content": "x"}], [chat.assistant(reasoning="r")]),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "x"}],
         [chat.assistant(reasoning="s")]),
        ([CALL | {"parsed_arguments": {}, "phase": "x", "status": "completed", "id": "fc"}], [called("1")]),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], [chat.assistant("no")]),
        ([THINKING | {"summary": [{"type": "summary_text", "text": "s"}]}], [chat.assistant(reasoning="r")]),
    ],
)  # fmt: skip
def test_items_side_by_side_are_one_message(items, messages):
    assert read_request({"input": items}).messages == tuple(messages)


@pytest.mark.parametrize(
    "items, messages",
    [
        ([call("1"), call("2"), output("1"), call("3"), output("3"), output("2")],
         [called("1", "2"), result("2"), result("1"), called("3"), result("3")]),
        ([call("1"), USER, WORDS, output("1")], [called("1"), result("1"), chat.user("u"), chat.assistant("w")]),
        ([call("1"), USER, output("1")], [called("1"), chat.user("u"), result("1")]),  # it is not late
        ([call("1"), output("1"), call("1"), output("1")], [called("1"), result("1"), called("1"), result("1")]),
    ],
)  # fmt: skip
def test_a_late_output_stands_with_its_call(items, messages):
    assert read_request({"input": items}).messages == tuple(messages)


# --- Options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, wanted",
    [
        ({"tool_choice": "none"}, {"tool_choice": "none"}),
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": ResponseFormat(kind="json_object")}),
        ({"text": {"verbosity": "high"}, "reasoning": {"effort": None}, "truncation": "auto"}, {}),
        *[
            ({"reasoning": {"effort": effort}}, {"effort": wanted})
            for wanted, efforts in {
                "low": ("none", "minimal", "low"),
                "high": ("medium", "high"),
                "max": ("xhigh", "max"),
            }.items()
            for effort in efforts
        ],
    ],
)
def test_options(given, wanted):
    assert read_request({"input": "x"} | given).options == Options(**wanted)


FUNCTION = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    "kind",
    [
        *("web_search", "web_search_2025_08_26", "web_search_preview", "file_search", "code_interpreter", "mcp"),
        *("image_generation", "computer", "computer_use_preview", "local_shell", "custom", "namespace"),
    ],
)
def test_a_tool_that_is_no_function_is_left_out(kind):
    tools = [{"type": kind, "name": "x", "anything": [1]}, FUNCTION]
    assert read_request({"input": "x", "tools": tools}).options.tools == (Tool(name="f"),)
    for choice in ({"type": kind}, {"type": kind, "name": "x"}, {"type": "function", "name": "x"}):
        with pytest.raises(ValueError, match=r"^tool_choice"):
            read_request({"input": "x", "tools": tools, "tool_choice": choice})
    with pytest.raises(ValueError, match=r"^tools\[2\]: 'f' is declared already$"):
        read_request({"input": "x", "tools": [*tools, FUNCTION]})


@pytest.mark.parametrize(
    "body, error",
    [
        ([], "request: wanted an object, got a list"),
        ({}, "input: missing, wanted text or a list"),
        ({"input": []}, "input: wanted at least one, got none"),
        ({"input": ["x"]}, "input[0]: wanted an object, got 'x'"),
        (
            {"input": [{"role": "tool", "content": "x"}]},
            "input[0].role: wanted one of system, developer, user, assistant",
        ),
        ({"input": [{"role": "user"}]}, "input[0].content: missing, wanted text or a list"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type: wanted one of message, reasoning, function_call,"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type: item_reference names what a server has"),
        ({"input": [{"type": "custom_tool_call"}]}, "input[0].type: custom_tool_call calls a tool that is no function"),
        ({"input": [{"type": "local_shell_call"}]}, "input[0].type: local_shell_call calls a tool that is no function"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input[0].encrypted_content: cannot be read, only who wrote it has its text: wanted content or summary",
        ),
        ({"input": [CALL | {"namespace": "n"}]}, "input[0].namespace: unknown here"),
        (
            {"input": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]},
            "input[0].content[0].type: wanted one of input_text, output_text, input_image, got 'refusal'",
        ),
        ({"input": [CALL | {"arguments": "1"}]}, "input[0]: arguments: wanted a JSON object, got '1'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            "input[0].content[0].image_url: missing, wanted text",
        ),
        (
            {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type: wanted one of input_text, output_text, refusal, got 'input_image'",
        ),
        (
            {"input": "x", "reasoning": {"effort": "most"}},
            "reasoning.effort: wanted one of none, minimal, low, medium, high, xhigh, max, got 'most'",
        ),
        (
            {"input": "x", "tools": [{"type": "custom_2", "name": "f"}]},
            "tools[0].type: wanted one of function, got 'custom_2'",
        ),
        ({"input": "x", "tools": [{"name": "f"}]}, "tools[0].type: missing, wanted text"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema: missing, wanted an object"),
        ({"input": "x", "text": {"format": {"type": "text", "name": "n"}}}, "text.format.name: unknown here"),
    ],
)
def test_a_wrong_request_is_named(body, error):
    with pytest.raises(ValueError) as raised:
        read_request(body)
    assert str(raised.value).startswith(error)


@pytest.mark.parametrize(
    "ids, error",
    [
        ([""], "input[2]: tool_call_id is empty, there are: '1'"),
        (["2"], "input[2]: tool_call_id '2' is none of the assistant's last calls"),
        (["1", "1"], "input[3]: tool_call_id '1' has a result already"),
        (["1", None, "1"], "input[4]: tool_call_id '1' is none of the assistant's last calls"),
    ],
)
def test_a_result_of_no_call_is_named_by_its_item(ids, error):
    outputs = [WORDS if id is None else output(id) for id in ids]
    with pytest.raises(ValueError) as raised:
        read_request({"instructions": "i", "input": [THINKING, CALL, *outputs]})
    assert str(raised.value).startswith(error)
