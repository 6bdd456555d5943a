"""The law: what is rendered is read as it was, up to what a prompt does not say; and nothing else is read at all."""

import re
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trivium.chat.message import (
    Conversation,
    Image,
    Options,
    ResponseFormat,
    Text,
    Tool,
    ToolCall,
    assistant,
    declare,
    results_in_order,
    system,
    tool_result,
    user,
)
from trivium.chat.render import DECLARATION, DECLARATION_END, EFFORT, Renderer
from trivium.chat.tokenizer import Tokenizer
from trivium.chat.transcript import Transcript, read_transcript
from trivium.chat.vocabulary import NAMED_OFFSETS, Vocabulary

BYTES = Tokenizer(Vocabulary.of_ranks([bytes([value]) for value in range(256)]))
RENDERER = Renderer(BYTES)

# --- Conversations by chance ------------------------------------------------------------------------------------

ODD = st.sampled_from(
    [*NAMED_OFFSETS.values(), "", " ", "\n", '"', "&", "&quot;", '"&amp;', "image 3x4", "😀漢e\u0301", "{}"]
)
TEXT = st.lists(st.text(max_size=6) | ODD, max_size=3).map("".join)
NAME = st.text(min_size=1, max_size=8) | ODD.filter(bool)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXT, values, max_size=3),
    max_leaves=5,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
NO_JSON = TEXT.map(lambda text: f' {{"{text}": half') | st.sampled_from(
    ["<|sep|>", "{", "NaN", "\u00e9", '{"a": 1} {}']
)
CONTENT = st.lists(
    TEXT.map(Text) | st.builds(Image, source=TEXT, width=st.integers(1, 9999), height=st.integers(1, 9999)), max_size=3
)
TOOL = st.builds(
    Tool,
    name=NAME.filter(lambda name: not name.startswith("$")),
    description=st.none() | TEXT,
    parameters=st.none() | OBJECT,
    strict=st.none() | st.booleans(),
)
FORMAT = st.sampled_from([ResponseFormat(), ResponseFormat(kind="json_object", name="n")]) | OBJECT.map(
    lambda schema: ResponseFormat(kind="json_schema", schema=schema, strict=True)
)


@st.composite
def exchanges(draw):
    """An answer of the assistant with its calls and their results, in one run or two, by call or by name."""
    given_calls = draw(st.lists(st.tuples(NAME, OBJECT | NO_JSON), max_size=3))
    calls = [ToolCall(id=f"id {at}", name=name, arguments=given) for at, (name, given) in enumerate(given_calls)]
    messages = [assistant(draw(TEXT), reasoning=draw(TEXT), tool_calls=calls, name=draw(TEXT))]
    if draw(st.booleans()):
        messages += [tool_result(draw(CONTENT), name=draw(NAME)) for _ in range(draw(st.integers(0, 2)))]
        return messages
    results = [tool_result(draw(CONTENT), call_id=call.id) for call in draw(st.permutations(calls))]
    num_late = draw(st.integers(0, 2)) if results else 0
    late = [user(draw(CONTENT)), *results[:num_late]] if num_late else []
    return messages + results[num_late:] + late


@st.composite
def conversations(draw):
    tools = draw(st.lists(TOOL, max_size=3, unique_by=lambda tool: tool.name))
    given = tools[draw(st.integers(0, 3)) :]
    late = [tool for tool in tools if tool not in given]
    messages = []
    for kind in draw(st.lists(st.sampled_from(["system", "user", "exchange", "declare"]), max_size=4)):
        if kind == "exchange":
            messages += draw(exchanges())
        elif kind == "declare":
            messages += [declare([late.pop()])] if late else []
        else:
            messages.append((system if kind == "system" else user)(draw(CONTENT), name=draw(TEXT)))
    if draw(st.booleans()):
        messages.append(assistant(draw(TEXT), reasoning=draw(TEXT), name=draw(TEXT), partial=True))
    declared = [*given, *(tool for message in messages for tool in message.tools)]
    choice = draw(st.sampled_from(["auto", "none", "required"] if declared else ["auto", "none"]))
    options = Options(
        tools=tuple(given),
        thinking=draw(st.booleans()),
        effort=draw(st.sampled_from([None, "low", "high", "max"])),
        tool_choice=choice,
        forced_tool=declared[0].name if choice == "required" and draw(st.booleans()) else None,
        parallel_calls=draw(st.booleans()),
        response_format=draw(FORMAT),
    )
    return Conversation(messages=tuple(messages), options=options)


def carried(conversation: Conversation, *, answer: bool):
    """What a prompt says of it, in the words of the conversation: no ids, no sources, results in order by tool."""
    options, messages = conversation.options, conversation.messages
    thinking = options.thinking
    effort = options.effort if thinking else None
    said = []
    for message, result in results_in_order(messages):
        content = [part if isinstance(part, Text) else (part.width, part.height) for part in message.content]
        reasoning = message.reasoning if thinking else ""
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        name = message.name if result is None else result
        if not message.partial or content or reasoning or name:
            said.append((message.role, content, name, reasoning, calls, message.tools, message.partial))
    shows = answer or any(message.role == "assistant" for message in messages)
    kind, schema = options.response_format.kind, options.response_format.schema
    return options.tools, thinking if shows else None, effort, options.tool_choice, kind, schema, said


@settings(max_examples=150)
@given(conversations(), st.booleans())
@example(Conversation(messages=()), True)
@example(Conversation(messages=(assistant(reasoning="r", partial=True),), options=Options(thinking=False)), True)
def test_what_is_rendered_is_read_as_it_was(tokenizer, renderer, conversation, answer):
    answer |= bool(conversation.messages) and conversation.messages[-1].partial
    prompt = renderer.render(conversation, answer=answer)
    read = read_transcript(prompt.ids, tokenizer)
    assert carried(read.conversation, answer=answer) == carried(conversation, answer=answer)
    assert read.channel == prompt.channel
    # What was made up is made up alike, so what is read is read for good.
    assert renderer.render(read.conversation, answer=answer) == prompt
    assert read_transcript(prompt.ids, tokenizer) == read


@settings(max_examples=80)
@given(conversations(), exchanges())
def test_a_prompt_and_its_answer_are_read_with_what_was_asked_once(tokenizer, renderer, conversation, exchange):
    messages = tuple(message for message in conversation.messages if not message.partial)
    conversation, said = replace(conversation, messages=messages), replace(exchange[0], name="")
    prompt = renderer.render(conversation)
    told = Conversation(messages=(said,), options=Options(thinking=conversation.options.thinking))
    start = renderer.render(Conversation(messages=(), options=told.options)).ids
    whole = renderer.render(told, answer=False).ids
    assert whole[: len(start)] == start == prompt.ids[-len(start) :]
    read = read_transcript(prompt.ids + whole[len(start) :], tokenizer)
    wanted = replace(conversation, messages=(*messages, said))
    assert carried(read.conversation, answer=True) == carried(wanted, answer=True)
    assert read.channel is None


def test_a_whole_conversation_by_hand(tokenizer, renderer):
    tool = Tool(name="f", description="<|sep|>", parameters={"type": "object"}, strict=True)
    late = Tool(name="g")
    calls = [
        ToolCall(
            id="b",
            name="f",
            arguments={'"&quot;': '<|close|>argument<|sep|>"', "": [1, {"a": None}], "n": 0.5, "t": True},
        ),
        ToolCall(id="a", name="f", arguments=' {"a": <|sep|>'),
        ToolCall(id="c", name="$h", arguments={}),
    ]
    options = Options(
        tools=(tool,),
        effort="max",
        tool_choice="required",
        forced_tool="g",
        response_format=ResponseFormat(kind="json_schema", schema={"b": 1, "a": [True]}, name="n"),
    )
    messages = (
        system("Be <|end_of_msg|> brief."),
        user([Image(source="data:", width=640, height=480), Text("What?")], name='a "b" & c'),
        declare([late]),
        assistant("Calls.", reasoning=" Hm.\n", tool_calls=calls),
        tool_result("2", call_id="a"),
        tool_result([Text("1"), Image(source="file", width=1, height=2)], call_id="b"),
        user("And?"),
        tool_result("3", call_id="c"),
        assistant("No."),
        assistant("Wel", reasoning="So", partial=True, name="me"),
    )
    read = read_transcript(renderer.render(Conversation(messages=messages, options=options)).ids, tokenizer)
    calls = tuple(replace(call, id=f"call_{number}") for number, call in enumerate(calls, start=1))
    assert read == Transcript(
        channel="response",
        conversation=Conversation(
            messages=(
                messages[0],
                user([Image(source="", width=640, height=480), Text("What?")], name='a "b" & c'),
                messages[2],
                replace(messages[3], tool_calls=calls),
                tool_result([Text("1"), Image(source="", width=1, height=2)], call_id="call_1"),
                tool_result("2", call_id="call_2"),
                messages[6],
                tool_result("3", call_id="call_3"),
                *messages[8:],
            ),
            options=replace(
                options,
                forced_tool=None,
                response_format=ResponseFormat(kind="json_schema", schema={"a": [True], "b": 1}),
            ),
        ),
    )


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_that_is_asked_for_is_no_message(thinking):
    conversation = Conversation(messages=(user("?"),), options=Options(thinking=thinking))
    read = read_transcript(RENDERER.render(conversation).ids, BYTES)
    assert read == Transcript(conversation=conversation, channel="think" if thinking else "response")


def test_arguments_of_100_kb_are_read(tokenizer, renderer):
    arguments = {
        "text": '<|close|>argument<|sep|> é\\" ' * 4000,
        "k" * 256: {str(index): [index, "}"] for index in range(5000)},
    }
    said = assistant(tool_calls=[ToolCall(id="1", name="f", arguments=arguments)])
    read = read_transcript(renderer.render(Conversation(messages=(said,)), answer=False).ids, tokenizer)
    assert read.conversation.messages[0].tool_calls[0].arguments == arguments


def test_a_result_belongs_to_the_call_at_its_index_where_that_is_of_its_tool():
    calls = [ToolCall(id=name, name=name, arguments={}) for name in "fgf"]
    messages = (
        assistant(tool_calls=calls),
        tool_result("1", name="f"),
        tool_result("2", name="x"),
        tool_result("3", name="f"),
    )
    read = read_transcript(RENDERER.render(Conversation(messages=messages), answer=False).ids, BYTES)
    results = read.conversation.messages[1:]
    assert [(result.tool_call_id, result.name) for result in results] == [("call_1", ""), (None, "x"), ("call_3", "")]


def test_how_text_falls_into_ids_is_free(tokenizer, renderer):
    conversation = Conversation(messages=(user("What is it?"), assistant("This is it.", reasoning="Hm, it is.")))
    ids = renderer.render(conversation, answer=False).ids
    single = {token: token_id for token_id, token in enumerate(tokenizer.vocabulary.ranks[:256])}
    by_bytes = [
        one
        for token_id in ids
        for one in (
            [token_id]
            if token_id >= tokenizer.num_ranks
            else [single[bytes([b])] for b in tokenizer.decode_bytes([token_id])]
        )
    ]
    assert len(by_bytes) > len(ids)
    assert read_transcript(by_bytes, tokenizer).conversation == conversation


# --- What render does not write -----------------------------------------------------------------------------------

USER = '{O}message role="user"{S}?{C}message{S}{E}'
SAID = '{O}message role="assistant"{S}{O}think{S}{C}think{S}{O}response{S}a{C}response{S}{C}message{S}{E}'
CHOICE = (
    '{O}message role="system" type="tool-choice"{S}The system is invoked with `tool_choice=none`.\n'
    "You MUST NOT call any tools in the next message.{C}message{S}{E}"
)
LOW = f'{{O}}message role="system" type="thinking-effort"{{S}}{EFFORT.format(effort="low")}{{C}}message{{S}}{{E}}'


DECLARED = (
    f'{{O}}message role="system" type="tool-declare"{{S}}{DECLARATION}[{Tool(name="f").declaration}]{DECLARATION_END}'
    "{C}message{S}{E}"
)


def ids_of(text: str) -> list[int]:
    for short, mark in (("{O}", "<|open|>"), ("{C}", "<|close|>"), ("{S}", "<|sep|>"), ("{E}", "<|end_of_msg|>")):
        text = text.replace(short, mark)
    return BYTES.encode_control(text)


def calling(*calls: str) -> str:
    return SAID.replace("{C}message", f"{{O}}tools{{S}}{''.join(calls)}{{C}}tools{{S}}{{C}}message")


def called(elements: str, index: int = 1) -> str:
    return f'{{O}}call tool="f" index="{index}"{{S}}{elements}{{C}}call{{S}}'


def given_argument(type_: str, text: str) -> str:
    return f'{{O}}argument key="k" type="{type_}"{{S}}{text}{{C}}argument{{S}}'


def test_the_parts_of_the_cases_below_are_read():
    for text in (
        LOW + USER,
        SAID + CHOICE,
        USER + CHOICE + SAID,
        calling(called(""), called(given_argument("number", "1"), 2)),
    ):
        assert read_transcript(ids_of(text), BYTES).channel is None
    assert read_transcript([], BYTES) == Transcript(conversation=Conversation(messages=()), channel=None)


@pytest.mark.parametrize(
    "text, index, what",
    [
        (USER + "x", 1, "wanted <|open|>"),
        ("[BOS]" + USER, 0, "wanted <|open|>"),
        (USER + "{O}think{S}a{C}think{S}{E}", 1, "wanted a message, got 'think'"),
        (USER + '{O}message role="user"', 1, "a header"),
        (USER + "{O}message role{S}?{C}message{S}{E}", 1, "no header"),
        (USER + USER.replace("user", "tester"), 1, "no role: 'tester'"),
        (USER + USER.replace(' role="user"', ""), 1, "no role: None"),
        (USER + USER.replace("message role", "message  role"), 1, "no header"),
        (USER + USER.replace('role="user"', 'name="a" role="user"'), 1, "stands where"),
        (USER + USER.replace('role="user"', 'role="user" name=""'), 1, "stands where"),
        (USER + USER.replace('role="user"', 'role="user" x="y"'), 1, "stands where"),
        (USER + USER.replace('"user"', '"[PAD]user"'), 1, "no role"),
        (USER + USER.replace('role="user"', 'role="user" name="[PAD]"'), 1, "stands where"),
        (USER + USER.replace("{C}message{S}", ""), 1, "no close"),
        (USER + USER.replace("{C}message", "{C}think"), 1, "no close"),
        (USER + USER.replace("{E}", ""), 1, "no close"),
        (USER + USER.replace("{E}", "[EOS]"), 1, "no close"),
        *(
            (USER + USER.replace("?", f"a{name}b"), 1, "in the content")
            for name in ("[PAD]", "{O}", "{S}", "<|media_pad|>", "[EOT]")
        ),
        (
            USER.replace("?", "<|media_begin|>image 3x4<|media_content|><|media_pad|><|media_pad|><|media_end|>"),
            0,
            "in the content",
        ),
        (USER.replace("?", "<|media_begin|>image 03x4<|media_content|><|media_pad|><|media_end|>"), 0, "stands where"),
        (USER.replace("?", "<|media_begin|>image 0x4<|media_content|><|media_pad|><|media_end|>"), 0, "wanted a width"),
        (USER.replace("?", "<|media_begin|>3x4<|media_content|><|media_pad|><|media_end|>"), 0, "wanted a picture"),
        (
            USER.replace("?", "<|media_begin|><|media_begin|><|media_content|><|media_pad|><|media_end|>"),
            0,
            "wanted a picture",
        ),
        (USER + LOW, 0, "stands where"),  # an effort stands before all messages
        (LOW.replace("=low", "=medium"), 0, "no thinking effort"),
        (LOW + LOW, 1, "stands where"),
        (LOW.replace("thinking-effort", "volume"), 0, "no option: 'volume'"),
        (LOW.replace("thinking-effort", "tool-declare"), 0, "no declaration"),
        (CHOICE.replace("MUST NOT", "must not"), 0, "no tool choice"),
        (CHOICE.replace("tool-choice", "response-format"), 0, "no response format"),
        (CHOICE + USER, 0, "stands where"),  # asked once is asked behind all messages
        (CHOICE + SAID + SAID, 0, "stands where"),
        (
            CHOICE.replace(
                "The system", "<|media_begin|>image 3x4<|media_content|><|media_pad|><|media_end|>The system"
            ),
            0,
            "stands where",
        ),
        (DECLARED + DECLARED, 1, "'f' is declared already"),
        (DECLARED.replace('"type":"function"', '"type": "function"'), 0, "stands where"),
        (DECLARED.replace('"function":', '"functions":'), 0, "wants functions"),
        (USER + DECLARED, 0, "stands where"),
        (CHOICE.replace("none", "required").replace("MUST NOT call any", "MUST call"), 0, "no tool is declared"),
        ('{O}message role="tool" tool="f" index="2"{S}?{C}message{S}{E}', 0, "stands where"),
        ('{O}message role="tool" index="1"{S}?{C}message{S}{E}', 0, "a result without a tool"),
        (calling(called("")) + '{O}message role="tool" tool="f" index="1"{S}?{C}message{S}{E}' * 2, 2, "stands where"),
        (SAID.replace("{O}think{S}{C}think{S}", "") + SAID, 1, "stands where"),
        (SAID + SAID.replace("{O}think{S}{C}think{S}", ""), 1, "stands where"),
        (SAID.replace("{O}response{S}", ""), 0, "marker"),
        (SAID.replace("{O}think{S}{C}think{S}{O}response{S}a{C}response{S}", ""), 0, "wanted <|open|>"),
        (SAID.replace("{O}think{S}", "{O}think{S} "), 0, "stands where"),  # blank reasoning is none
        (SAID.replace("{O}think{S}", "{O}think{S}{O}think{S}"), 0, "stands where"),
        (SAID.replace("{O}think", "{O}tools"), 0, "wanted think or response"),
        (SAID.replace("{C}message", "{O}foo{S}{C}message"), 0, "marker"),
        (SAID.replace("{C}message", "[PAD]{C}message"), 0, "control"),
        (SAID.replace("{C}message{S}", ""), 0, "stands where"),
        (SAID.replace("{E}", "[EOS]{E}"), 0, "end"),
        (SAID.replace("{C}message{S}{E}", ""), 0, "left open outside"),
        (SAID.replace("{C}response{S}{C}message{S}{E}", "") + USER, 0, "end"),
        (calling(), 0, "stands where"),
        (calling(called("", 2)), 0, "stands where"),
        (calling(called("").replace(' index="1"', "")), 0, "stands where"),
        (calling(called("").replace("{C}call{S}", "")), 0, "unclosed"),
        (calling(called("").replace(' tool="f"', "")), 0, "call"),
        (calling(called("")).replace("{C}tools{S}", ""), 0, "stands where"),
        (calling(called(given_argument("array", '["a",1]'))), 0, "stands where"),
        (calling(called(given_argument("number", "1.50"))), 0, "stands where"),
        (calling(called(given_argument("number", "one"))), 0, "type"),
        (calling(called(given_argument("array", "[1"))), 0, "stands where"),
        (calling(called(given_argument("string", "a") * 2)), 0, "stands where"),
        (calling(called('{O}json type="object"{S}{}{C}json{S}')), 0, "stands where"),
        (calling(called('{O}json type="object"{S}[1]{C}json{S}')), 0, "no JSON object"),
        (calling(called("{O}json{S}{half{C}json{S}")), 0, "stands where"),
        (calling(called("")).split("{C}call")[0], 0, "left open outside"),
    ],
)
def test_what_render_does_not_write_is_refused_by_its_message(text, index, what):
    with pytest.raises(ValueError, match=rf"^transcript: message {index}: .*{re.escape(what)}"):
        read_transcript(ids_of(text), BYTES)


def test_bytes_that_are_no_utf8_and_ids_out_of_range_are_refused():
    ids = ids_of(USER)
    at = ids.index(ord("?"))
    for wrong in (0xE2, BYTES.vocab_size, -1):
        with pytest.raises(ValueError, match="transcript: message 0"):
            read_transcript([*ids[:at], wrong, *ids[at + 1 :]], BYTES)


@settings(max_examples=150)
@given(conversations(), st.data())
def test_what_is_read_of_changed_ids_is_what_they_render(conversation, data):
    answer = bool(conversation.messages) and conversation.messages[-1].partial
    ids = list(RENDERER.render(conversation, answer=answer).ids)
    for _ in range(data.draw(st.integers(1, 3))):
        at, to = (data.draw(st.integers(0, len(ids))) for _ in range(2))
        kind = data.draw(st.sampled_from(["drop", "double", "control", "byte", "cut"]))
        if kind == "cut":
            del ids[at:]
        else:
            added = {"drop": [], "double": ids[min(at, to) : to], "control": [256 + to % 24], "byte": [to % 256]}[kind]
            ids[at : at + (kind == "drop")] = added
    try:
        read = read_transcript(ids, BYTES)
    except ValueError as error:
        assert str(error).startswith("transcript: message")
        return
    messages, options = read.conversation.messages, read.conversation.options
    again = RENDERER.render(read.conversation, answer=read.channel is not None).ids
    asked = options.tool_choice != "auto" or options.response_format.kind != "text"
    assert list(again) == ids or (asked and messages[-1].role == "assistant")
