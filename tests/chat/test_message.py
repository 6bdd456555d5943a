import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivium.chat import strict_json
from trivium.chat.image import num_tokens, resized
from trivium.chat.message import (
    Conversation,
    Image,
    Message,
    Options,
    ReasoningPolicy,
    ResponseFormat,
    Text,
    Tool,
    ToolCall,
    assistant,
    declare,
    results_in_order,
    tool_result,
    user,
)


def call(id, name="f", arguments=None):
    return ToolCall(id=id, name=name, arguments={} if arguments is None else arguments)


def test_texts_side_by_side_are_one_and_empty_ones_none():
    image = Image(source="s")
    parts = [Text(""), Text("a"), Text(""), Text("b"), image, Text(""), image, Text("c")]
    assert user(parts).content == (Text("ab"), image, image, Text("c"))
    assert user("").content == ()


@pytest.mark.parametrize("blank", ["", " ", "\n\t "])
def test_reasoning_of_whitespace_is_none(blank):
    assert assistant("x", reasoning=blank).reasoning == ""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Message(role="robot"), "message: role: wanted one of system, user, assistant, tool, got 'robot'"),
        (lambda: Message(role="user", reasoning="r"), "message: reasoning: only a message of the assistant has it"),
        (lambda: Message(role="user", tool_calls=(call("1"),)), "message: tool_calls: only a message of the assistant"),
        (lambda: Message(role="user", tool_call_id="1"), "message: tool_call_id: only a tool's message has it"),
        (lambda: Message(role="user", tools=(Tool(name="f"),)), "message: tools: only a message of the system has it"),
        (lambda: Message(role="system", content=(Text("x"),), tools=(Tool(name="f"),)), "message: one that declares tools"),
        (lambda: assistant("x", tool_calls=[call("1")], partial=True), "message: partial: an answer behind its tool calls"),
        (lambda: Message(role="assistant", content=(Image(source="s"),)), "message: content: the assistant writes no pic"),
        (lambda: user("\ud800"), r"text: character 0 is the lone surrogate U\+D800"),
        (lambda: user("a", name="\udfff"), r"message: name: character 0 is the lone surrogate U\+DFFF"),
        (lambda: Tool(name=""), "tool: name: wanted 1 to 256 characters, got 0"),
        (lambda: Tool(name="x" * 257), "tool: name: wanted 1 to 256 characters, got 257"),
        (lambda: Tool(name="$web"), r"tool: name: names that begin with \$ are reserved, got '\$web'"),
        (lambda: Tool(name="f", parameters={"a": math.inf}), "tool 'f': parameters: wanted a finite number, got inf"),
        (lambda: call(""), "tool call: id: wanted one that is not empty"),
        (lambda: call("1", arguments={"k" * 257: 1}), "tool call: arguments: wanted names of at most 256 characters"),
        (lambda: call("1", arguments='{"a": 1}'), "tool call: arguments: a text that is blank or a JSON object is wanted"),
        (lambda: call("1", arguments="  "), "tool call: arguments: a text that is blank or a JSON object is wanted"),
        (lambda: call("1", arguments="[1]"), r"arguments: wanted a JSON object, got '\[1\]'"),
        (lambda: Options(effort="medium"), "effort: wanted one of low, high, max, got 'medium'"),
        (lambda: Options(forced_tool="f"), "tool_choice: one tool is forced, 'f': wanted required, got auto"),
        (lambda: ResponseFormat(kind="json_schema"), "response format: json_schema wants a schema, got none"),
        (lambda: ResponseFormat(kind="text", schema={}), "response format: text wants no schema, got one"),
        (lambda: Image(source="s", width=3), "image: wanted a width and a height"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_where_it_is_made(make, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        make()


def test_a_conversation_is_checked_as_a_whole():
    tool = Tool(name="f")
    for messages, options, words in (
        ((assistant("a", partial=True), user("b")), Options(), r"messages\[0\]: partial: only the last message"),
        ((user("a"),), Options(tools=(tool, tool)), r"tools\[1\]: 'f' is declared already"),
        ((declare([tool]), user("a")), Options(tools=(tool,)), r"messages\[0\].tools\[0\]: 'f' is declared already"),
        ((user("a"),), Options(tool_choice="required"), "tool_choice: required, but no tool is declared"),
        (
            (user("a"),),
            Options(tools=(tool,), tool_choice="required", forced_tool="g"),
            "tool_choice: 'g' is not declared, there are: f",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            Conversation(messages=messages, options=options)
    dynamic = Conversation(messages=(declare([tool]), user("a")), options=Options(tool_choice="required"))
    assert dynamic.tools == (tool,)


# --- B023: the results of tools ----------------------------------------------------------------------------------------

TWO = assistant(tool_calls=[call("1", "f"), call("2", "g")])


def places(*messages):
    """(text, tool, index) of the results of a conversation, as they are rendered."""
    ordered = results_in_order(Conversation(messages=messages).messages)
    return [(message.text, *result) for message, result in ordered if result is not None]


def test_b023_results_out_of_order_are_ordered_by_their_calls():
    assert places(TWO, tool_result("b", call_id="2"), tool_result("a", call_id="1")) == [("a", "f", 1), ("b", "g", 2)]
    assert places(TWO, tool_result("b", call_id="2"), user("x"), tool_result("a", call_id="1")) == [
        ("b", "g", 1),
        ("a", "f", 2),
    ]  # a run ends where something else is said


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ((TWO, tool_result("a", call_id="")), r"messages\[1\]: tool_call_id is empty, there are: '1', '2'"),
        ((TWO, tool_result("a", call_id="3")), r"messages\[1\]: tool_call_id '3' is none of the assistant's last calls"),
        ((TWO, assistant("x"), tool_result("a", call_id="1")), r"messages\[2\]: tool_call_id '1' is none .*: none"),
        ((TWO, tool_result("a", call_id="1"), tool_result("b", call_id="1")), r"messages\[2\]: .* has a result already"),
        ((user("x"), tool_result("a")), r"messages\[1\]: a tool's result wants tool_call_id or the tool's name"),
        ((TWO, *[tool_result("a")] * 3), r"messages\[3\]: a tool's result wants tool_call_id or the tool's name"),
        # Of the call at its place another result says that it is its own, in front of it or behind it.
        ((TWO, tool_result("b", call_id="2"), tool_result("a")), r"messages\[2\]: a tool's result wants tool_call_id"),
        ((TWO, tool_result("a"), tool_result("b", call_id="1")), r"messages\[2\]: tool_call_id '1' has a result already"),
        (
            (TWO, tool_result("b", call_id="2"), user("x"), tool_result("a")),
            r"messages\[3\]: a tool's result wants tool_call_id or the tool's name",
        ),
    ],
)  # fmt: skip
def test_b023_a_result_that_belongs_to_no_call_is_named(messages, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        Conversation(messages=messages)


def test_b023_a_result_without_an_id_has_the_tool_it_says_or_that_of_its_place():
    assert places(TWO, tool_result("a"), tool_result("b")) == [("a", "f", 1), ("b", "g", 2)]
    assert places(TWO, tool_result("a", name="h")) == [("a", "h", 1)]
    # One that says no call leaves the run as it is; the others still have the tool of their call.
    assert places(TWO, tool_result("b", call_id="2"), tool_result("a", name="h")) == [("b", "g", 1), ("a", "h", 2)]


def test_b023_many_runs_of_results_are_ordered_in_linear_time():
    # With all calls gone through for each run, 20,000 took minutes; in turn they take a second.
    begun_s = time.thread_time()
    calls = assistant(tool_calls=[call(str(number)) for number in range(20_000)])
    runs = [said for number in range(20_000) for said in (tool_result("a", call_id=str(number)), user("x"))]
    assert len(places(calls, *runs)) == 20_000
    assert time.thread_time() - begun_s < 20


def test_b023_an_error_shows_no_more_of_a_client_than_a_line():
    many = assistant(tool_calls=[call("x" * 500 + str(number)) for number in range(100)])
    with pytest.raises(ValueError) as error:
        Conversation(messages=(many, tool_result("a", call_id="y" * 10**6)))
    assert len(str(error.value)) < 1000


# --- Reasoning ---------------------------------------------------------------------------------------------------------


def test_reasoning_is_returned_kept_and_logged_as_the_policy_says():
    said = assistant("a", reasoning="secret")
    assert "secret" not in repr(said)  # what is logged by accident
    open_, shut = ReasoningPolicy(logged=True), ReasoningPolicy(returned=False, kept=False)
    assert (open_.answer(said), open_.history([said])) == (said, (said,))
    assert (shut.answer(said).reasoning, shut.history([said, user("u")])) == ("", (assistant("a"), user("u")))
    assert "secret" in open_.log_line(said)
    assert "secret" not in shut.log_line(said) and "<6 characters>" in shut.log_line(said)
    assert shut.log_line(user("u")) == repr(user("u"))


# --- JSON ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["NaN", "[Infinity]", '{"a": -Infinity}', "1e999", '"\\ud800"', '{"\\udfff": 1}', "[" * 101 + "]" * 101, "{", "1" * 5000],
)  # fmt: skip
def test_what_not_everybody_reads_as_json_is_refused(text):
    with pytest.raises(ValueError):
        strict_json.loads(text)
    assert ToolCall.of_text(id="1", name="f", arguments=f'{{"a": {text}}}').arguments == f'{{"a": {text}}}'


def test_the_deepest_and_the_longest_are_read():
    for text in ("[" * 100 + "]" * 100, "1" * 4000):
        assert strict_json.spaced(strict_json.loads(text)) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(JSON)
def test_json_is_written_as_what_it_was(value):
    for write in (strict_json.spaced, strict_json.compact):
        assert strict_json.loads(write(value)) == value
    copy = strict_json.copy_of(value, "x")
    assert copy == value and (copy is not value or not isinstance(value, list | dict))


def test_what_is_held_is_a_copy():
    arguments = {"a": [1]}
    held = call("1", arguments=arguments)
    arguments["a"].append(2)
    assert held.arguments == {"a": [1]}


# --- Pictures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [
        (1, 1, 1),
        (13, 29, 2),  # 1 x 2 of 28 by 28
        (28, 28, 1),
        (29, 28, 2),
        (640, 480, 23 * 18),  # 640 / 28 = 22.9, 480 / 28 = 17.1
        (1, 5000, 179),
        (5000, 1, 179),
        (7168, 1, 256),
        (7169, 1, 256),  # not more than 512 patches on a side
        (3584, 3584, 128 * 128),  # 256 x 256 patches: the most there may be
        (7168, 7168, 128 * 128),  # half the size
    ],
)
def test_tokens_of_a_picture(width, height, tokens):
    assert num_tokens(width, height) == tokens


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_picture_is_never_enlarged_and_never_has_too_many_patches(width, height):
    small_width, small_height = resized(width, height)
    assert 1 <= small_width <= min(width, 7168) and 1 <= small_height <= min(height, 7168)
    assert (small_width // 14) * (small_height // 14) <= 65_536
