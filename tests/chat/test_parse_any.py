"""Answers of every wrong form: nothing raises, nothing is dropped in silence, no unclosed call is executable."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.answers import (
    BYTES,
    CONTROLS,
    TOOLS,
    WORDS,
    argument,
    counted,
    ids_of,
    is_object,
    pushed,
)
from trivium.chat.events import CallEnd, CallStart, Finish, Flaw, fold
from trivium.chat.parse import Parser, parse

# --- Answers of every wrong form -------------------------------------------------------------------------------------

WORD = None  # stands for an id of text, each its own, so that it can be found again


def items(*parts: str) -> list[int | None]:
    """Ids, where each % of the parts is a word."""
    flat: list[int | None] = []
    for at, part in enumerate("".join(parts).split("%")):
        flat += ([WORD] if at else []) + ids_of(part)
    return flat


ARGUMENT = st.sampled_from(
    [
        *(argument("a", "string", "%%"), argument("b", "object", '{"%": ["%"]}'), argument("c", "array", '["%"]')),
        *(argument("d", "number", "12"), argument("e", "null", "null"), argument("f", "object", "%")),
        *('{O}argument key="g"{S}%{C}argument{S}', argument("h", "number", "%")),
    ]
)
ELEMENTS = st.lists(ARGUMENT, max_size=3, unique=True).map("".join) | st.just(
    '{O}json type="object"{S}{"%": 1}{C}json{S}'
)
WRITTEN_CALL = st.builds(
    lambda name, elements: f'{{O}}call tool="{name}" index="1"{{S}}{elements}{{C}}call{{S}}',
    st.sampled_from("fgh"),
    ELEMENTS,
)
WRITTEN = st.builds(
    lambda calls: "%%{C}think{S}{O}response{S}%%{C}response{S}" + calls + "{C}message{S}{E}",
    st.lists(WRITTEN_CALL, max_size=2).map(
        lambda calls: f"{{O}}tools{{S}}{''.join(calls)}{{C}}tools{{S}}" if calls else ""
    ),
)
STRAY = st.sampled_from(
    [
        *(
            [BYTES.special_ids[name]]
            for name in ("<|open|>", "<|close|>", "<|sep|>", "[PAD]", "<|end_of_msg|>", "[EOS]")
        ),
        *([BYTES.special_ids[name]] for name in ("<|media_pad|>", "<|reserved_token_900|>")),
        *(items(text) for text in ("%", " ", '"', "\\", "{", "}", "=", "{O}foo{S}", "{C}argument{S}", "{C}call{S}")),
        *(items(text) for text in ("{O}think{S}", "{O}response{S}", "{O}tools{S}", "{C}tools{S}", "{O}call{S}")),
        *(items(text) for text in ('{O}call tool="f"{S}', '{O}argument key="z" type="string"{S}', "{O}json{S}")),
        *([0xF0, 0x9F], [0x80]),
    ]
)
CHANGE = st.tuples(
    st.sampled_from(["drop", "double", "swap", "insert", "cut"]), st.integers(0, 10**6), st.integers(0, 10**6), STRAY
)


def changed(stream: list[int | None], changes) -> list[int | None]:
    stream = list(stream)
    for kind, one, other, stray in changes:
        at, to = one % max(1, len(stream)), other % max(1, len(stream))
        if kind == "insert" or not stream:
            stream[at:at] = stray
        elif kind == "drop":
            del stream[at : at + 1 + other % 3]
        elif kind == "double":
            stream[at:at] = stream[at : at + 1 + other % 3]
        elif kind == "swap":
            stream[at], stream[to] = stream[to], stream[at]
        elif other % 3 == 0:
            del stream[at:]
    return stream


WHOLE_CALL = re.compile(
    r"<\|open\|>call [^<]*<\|sep\|>\s*((<\|open\|>(argument|json)[^<]*<\|sep\|>[^<]*<\|close\|>\3<\|sep\|>)\s*)*<\|close\|>call<\|sep\|>"
)


def check_any(stream: list[int | None], channel: str = "think") -> None:
    """What holds for every answer there is."""
    words = iter(range(len(WORDS)))
    ids = [256 + next(words) if item is WORD else item for item in stream]
    parser = Parser(BYTES, channel=channel, tools=TOOLS, new_id=counted())
    got = pushed(parser, ids)
    got += parser.finish("length")
    end = next(at for at, event in enumerate(got) if isinstance(event, Finish))
    assert all(isinstance(event, Flaw) and event.kind == "end" for event in got[end + 1 :])

    # Streamed and whole are the same.
    answer = fold(got[: end + 1])
    assert parse(ids, BYTES, channel=channel, tools=TOOLS, new_id=counted()) == answer
    num_ids = len(ids) - len(got[end + 1 :])
    assert answer.usage.num_completion == num_ids and answer.usage.num_reasoning <= num_ids

    # No control id is content.
    for text in (answer.reasoning, answer.text):
        assert not any(name in text for name in CONTROLS)

    # Calls begin and end one after another, and one that is not whole in the text cannot be executed.
    marks = [event for event in got if isinstance(event, CallStart | CallEnd)]
    assert [(type(mark), mark.index) for mark in marks] == [
        (kind, index) for index in range(len(marks) // 2) for kind in (CallStart, CallEnd)
    ]
    whole = [match[0] for match in WHOLE_CALL.finditer(BYTES.decode(ids))]
    assert sum(call.executable for call in answer.calls) <= len(whole)
    for call in answer.calls:
        if call.executable:
            assert json.loads(call.text) == call.arguments and call.name in ("f", "g")
        elif "undeclared" not in call.problem:
            assert not is_object(call.text)
    assert len(answer.message().tool_calls) == sum(call.executable for call in answer.calls)

    # Every word is said once, in its order. In a header it is said if the header is a flaw.
    in_header, outside, inside = False, [], set()
    for token_id in ids[:num_ids]:
        if token_id >= BYTES.num_ranks:
            name = BYTES.decode([token_id])
            in_header = name in ("<|open|>", "<|close|>") or (in_header and name not in ("<|sep|>", "<|end_of_msg|>"))
        elif token_id >= 256:
            if in_header:
                inside.add(token_id)
            else:
                outside.append(token_id)
    text = "".join(event.text for event in got if not isinstance(event, CallStart | CallEnd | Finish))
    said = [256 + int(number) for number in re.findall("~([0-9]{3})~", text)]
    behind = [token_id for token_id in ids[num_ids:] if 256 <= token_id < BYTES.num_ranks]
    assert [token_id for token_id in said if token_id not in inside] == outside + behind


@settings(max_examples=400)
@given(WRITTEN, st.lists(CHANGE, max_size=6), st.sampled_from(["think", "response"]))
def test_any_ids_are_read_and_nothing_is_dropped_in_silence(text, changes, channel):
    check_any(changed(items(text), changes), channel)


@pytest.mark.parametrize("closed", [True, False])
def test_a_bracket_too_many_is_no_end_of_the_arguments(closed):
    text = EVERYTHING.replace('["%"]}', '["%"]}}')
    check_any(items(text if closed else text[: text.index("}}") + 2]))


@settings(max_examples=150)
@given(
    st.lists(STRAY, max_size=30).map(lambda parts: [item for part in parts for item in part]),
    st.sampled_from(["think", "response"]),
)
def test_ids_without_any_form_are_read_and_nothing_is_dropped_in_silence(stream, channel):
    check_any(stream, channel)


@settings(max_examples=150)
@given(st.lists(st.integers(0, BYTES.vocab_size - 1) | st.integers(BYTES.num_ranks, BYTES.num_ranks + 20), max_size=40))
def test_no_ids_raise(ids):
    answer = parse(ids, BYTES, channel="think", tools=TOOLS, stop=["a"])
    assert answer.usage.num_completion <= len(ids)


EVERYTHING = (
    '%%{C}think{S}{O}response{S}%{C}response{S}{O}tools{S}{O}call tool="f" index="1"{S}'
    + argument("a", "string", '%"')
    + argument("b", "object", '{"%": ["%"]}')
    + argument("c", "number", "12")
    + '{C}call{S}{O}call tool="g" index="2"{S}{O}json type="object"{S}{"%": 1}{C}json{S}{C}call{S}{C}tools{S}{C}message{S}{E}'
)


def test_an_answer_cut_at_any_id_is_read_and_has_no_unclosed_call_that_is_executable():
    stream = items(EVERYTHING)
    for cut in range(len(stream) + 1):
        check_any(stream[:cut])
        ids = [256 if item is WORD else item for item in stream[:cut]]
        calls = parse(ids, BYTES, channel="think", tools=TOOLS).calls
        num_closed = BYTES.decode(ids).count("<|close|>call<|sep|>")
        assert [call.executable for call in calls] == [index < num_closed for index in range(len(calls))]
