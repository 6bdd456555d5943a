"""A small tokenizer, and conversations by chance."""

import copy
import functools
import re
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from trivium.chat import message as chat
from trivium.chat.message import Conversation, Image, Options, ResponseFormat, Text, Tool, ToolCall
from trivium.chat.render import Renderer
from trivium.chat.tokenizer import Tokenizer, train_tokenizer
from trivium.chat.vocabulary import NAMED_OFFSETS

FRAME = 'message\n role\n="\nsystem\nuser\nassistant\ntool\nthink\nresponse\ntools\ncall\nargument\n'


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Of 900 ranks; what stands in a frame is one token each, as in the released vocabulary."""
    return train_tokenizer([Path(textwrap.__file__).read_text(encoding="utf-8"), FRAME * 200], 900)


@pytest.fixture(scope="session")
def renderer(tokenizer: Tokenizer) -> Renderer:
    return Renderer(tokenizer)


# --- Conversations by chance ------------------------------------------------------------------------------------

TEXT = st.text(max_size=12) | st.sampled_from(
    [*NAMED_OFFSETS.values(), " ", "\n", '"&quot;', "<|kimi_image_placeholder|>"]
)
NAME = st.text(min_size=1, max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXT, values, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
NO_JSON = st.sampled_from(['{"level": half', "<|sep|>", "{", "\u00e9", "NaN"]) | TEXT.map(lambda text: f"{{{text}:")
ARGUMENTS = OBJECT | NO_JSON | st.fixed_dictionaries({"INVALID_JSON": JSON})
SIDE = st.integers(1, 9999)
IMAGE = st.builds(Image, source=TEXT) | st.builds(Image, source=TEXT, width=SIDE, height=SIDE)
CONTENT = st.lists(TEXT.map(Text) | IMAGE, max_size=4)
DECLARED = st.builds(
    Tool,
    name=st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,9}", fullmatch=True),
    description=st.none() | TEXT,
    parameters=st.none() | OBJECT,
    strict=st.none() | st.booleans(),
)
CALLS = st.lists(st.tuples(NAME, NAME, ARGUMENTS), max_size=3, unique_by=lambda call: call[0]).map(
    lambda calls: [ToolCall(id=id, name=name, arguments=arguments) for id, name, arguments in calls]
)


@st.composite
def results_of(draw, calls: list[ToolCall]) -> list[chat.Message]:
    """Results of some of the calls, in any order; or by names alone, where none says its call."""
    if draw(st.booleans()):
        return [chat.tool_result(draw(CONTENT), name=draw(NAME)) for _ in range(draw(st.integers(0, 2)))]
    answered = draw(st.permutations(calls))[draw(st.integers(0, 3)) :]
    return [chat.tool_result(draw(CONTENT), call_id=call.id, name=draw(TEXT)) for call in answered]


@st.composite
def messages_of(draw) -> list[chat.Message]:
    """The messages of a conversation in which every kind of message can stand."""
    messages: list[chat.Message] = []
    tools = draw(st.lists(DECLARED, max_size=3, unique_by=lambda tool: tool.name))
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["system", "user", "assistant", "tools"]))
        if kind == "assistant":
            calls = draw(CALLS)
            said = {"reasoning": draw(TEXT), "tool_calls": calls, "name": draw(TEXT)}
            messages += [chat.assistant(draw(TEXT), **said), *draw(results_of(calls))]
        elif kind == "tools" and tools:
            messages.append(chat.declare([tools.pop()]))
        else:
            say = chat.system if kind == "system" else chat.user
            messages.append(say(draw(CONTENT), name=draw(TEXT)))
    if draw(st.booleans()):
        messages.append(chat.assistant(draw(TEXT), reasoning=draw(TEXT), name=draw(TEXT), partial=True))
    return messages


TOOL = st.builds(
    Tool,
    name=NAME.filter(lambda name: name[0] != "$"),
    description=st.none() | TEXT,
    parameters=st.none() | OBJECT,
    strict=st.none() | st.booleans(),
)
FORMAT = st.sampled_from([ResponseFormat(), ResponseFormat(kind="json_object")]) | st.builds(
    ResponseFormat, kind=st.just("json_schema"), schema=OBJECT, name=TEXT, strict=st.none() | st.booleans()
)


@st.composite
def conversations_of(draw) -> Conversation:
    """Messages of every kind and options of every kind."""
    messages = draw(messages_of())
    names = [tool.name for message in messages for tool in message.tools]
    tools = [
        tool for tool in draw(st.lists(TOOL, max_size=3, unique_by=lambda tool: tool.name)) if tool.name not in names
    ]
    names += [tool.name for tool in tools]
    choice = draw(st.sampled_from(["auto", "none", "required"] if names else ["auto", "none"]))
    return Conversation(
        messages=tuple(messages),
        options=Options(
            tools=tuple(tools),
            thinking=draw(st.booleans()),
            effort=draw(st.sampled_from([None, "low", "high", "max"])),
            tool_choice=choice,
            forced_tool=draw(st.none() | st.sampled_from(names)) if choice == "required" else None,
            parallel_calls=draw(st.booleans()),
            response_format=draw(FORMAT),
        ),
    )


def foreign(conversation: Conversation) -> Conversation:
    """The same without what has a place in Completions alone."""
    messages: list[chat.Message] = []
    for message in conversation.messages:
        if message.tools or (message.role == "tool" and message.tool_call_id is None):
            continue
        if message.role == "assistant" and messages and messages[-1].role == "assistant":
            messages.append(chat.user(""))
        content = [
            replace(part, width=None, height=None) if isinstance(part, Image) else part for part in message.content
        ]
        messages.append(replace(message, name="", content=tuple(content)))
    options = replace(conversation.options, tools=conversation.tools)
    return Conversation(messages=tuple(messages) or (chat.user(""),), options=options)


@pytest.fixture(scope="session")
def conversations() -> st.SearchStrategy[Conversation]:
    return conversations_of()


@pytest.fixture(scope="session")
def foreign_conversations() -> st.SearchStrategy[Conversation]:
    """Conversations without what has a place in Completions alone."""
    return conversations_of().map(foreign)


@pytest.fixture(scope="session")
def message_lists() -> st.SearchStrategy[list[chat.Message]]:
    """Messages of whole conversations, of all roles."""
    return messages_of()


@pytest.fixture(scope="session")
def answers() -> st.SearchStrategy[chat.Message]:
    """Messages of the assistant without a name, as a server gives them."""
    return st.builds(chat.assistant, TEXT, reasoning=TEXT, tool_calls=CALLS)


# --- Wrong requests ---------------------------------------------------------------------------------------------

WRONG = (
    None,
    True,
    0,
    -1,
    10**5000,
    1.5,
    float("nan"),
    "",
    "x",
    "\ud800",
    [],
    [None],
    [["x"]],
    {},
    {"x": 1},
    {1: 2},
    b"x",
)


def nodes_of(value: Any, path: tuple = ()) -> Iterator[tuple]:
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from nodes_of(item, (*path, key))


def node_at(value: Any, path: tuple) -> Any:
    return functools.reduce(lambda value, key: value[key], path, value)


def with_node(value: Any, path: tuple, node: Any) -> Any:
    """A copy of the value with another node at the path."""
    if not path:
        return node
    changed = copy.copy(value)
    changed[path[0]] = with_node(value[path[0]], path[1:], node)
    return changed


def named(path: tuple) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def check_errors(read: Callable[[dict], Any], body: dict, ignored: Collection[str]) -> None:
    """With each node of a request anything that it should not be: it says something else, or there is an error about it.

    What is empty is as if it were not there; of an `ignored` field nothing is read.
    """
    want = read(body)
    for path in nodes_of(body):
        may_say_nothing = (None, "", [], {}, node_at(body, path))
        for node in WRONG:
            try:
                says_nothing = read(with_node(body, path, node)) == want
                assert not says_nothing or node in may_say_nothing or set(path) & set(ignored), (path, node)
            except ValueError as error:
                place = str(error).split(": ")[0]
                about_it = named(path).startswith(place) or place.startswith(named(path))
                # What refers to another field can find it changed or gone.
                assert about_it or re.search(
                    r"tool_call_id|^tool_choice|: missing|is of another text|: unknown here", str(error)
                ), error


def check_unknown(read: Callable[[dict], Any], body: dict) -> None:
    """A field that no object knows is named, in each object of a request but for JSON of the client's own."""
    own = {"parameters", "input_schema", "schema", "arguments", "input", "cache_control"}
    for path in nodes_of(body):
        node = node_at(body, path)
        if not isinstance(node, dict) or not path or own & set(path[1:]):
            continue
        read(with_node(body, path, node | {"surprise": None}))
        with pytest.raises(ValueError, match=rf"^{re.escape(named(path))}\.surprise: unknown here, known: "):
            read(with_node(body, path, node | {"surprise": 1}))


@pytest.fixture(scope="session")
def check_wrong_requests() -> Callable[[Callable[[dict], Any], dict, Collection[str]], None]:
    def check(read: Callable[[dict], Any], body: dict, ignored: Collection[str]) -> None:
        check_errors(read, body, ignored)
        check_unknown(read, body)

    return check
