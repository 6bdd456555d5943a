"""The faults that others met in reading answers, one test or more for each (docs/faults.md)."""

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.answers import (
    BYTES,
    CALL,
    TOOLS,
    argument,
    counted,
    ids_of,
    pushed,
    read,
    written,
)
from trivium.chat import strict_json
from trivium.chat.events import ArgumentText, CallStart, Usage, fold
from trivium.chat.message import Tool, ToolCall, assistant
from trivium.chat.parse import Parser, events, new_call_id, parse

# --- Faults that others met ----------------------------------------------------------------------------------------


def test_b001_tools_opened_in_think_end_it():
    ids = ids_of('why{O}tools{S}{O}call tool="g" index="1"{S}{C}call{S}{C}tools{S}{C}message{S}{E}')
    for cut in range(len(ids) + 1):  # whole, and delivered in two at every id
        parser = Parser(BYTES, channel="think", tools=TOOLS)
        answer = fold(pushed(parser, ids[:cut]) + pushed(parser, ids[cut:]))
        assert answer.reasoning == "why" and answer.text == "" and answer.flaws == ()
        assert [(call.name, call.arguments) for call in answer.calls] == [("g", {})]
        assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize("type_", ["string", "object"])
def test_b003_an_argument_is_sent_with_the_id_that_completes_a_character(tokenizer, type_):
    body = 'def f():\n\t"""é🇫🇷 漢"""\\ ' * 130
    body = body if type_ == "string" else strict_json.spaced({"a": [body]})
    parser = Parser(tokenizer, channel="response", tools=TOOLS)
    header = pushed(
        parser, ids_of(f'{{O}}call tool="f" index="1"{{S}}{{O}}argument key="k" type="{type_}"{{S}}', tokenizer)
    )
    assert [type(event) for event in header[:2]] == [CallStart, ArgumentText]
    ids = tokenizer.encode(body)
    assert len(body.encode()) > 4096
    sent = generated = ""
    decoder = tokenizer.decoder()
    for token_id in ids:
        sent += "".join(event.text for event in parser.push(token_id))
        generated += decoder.push(token_id)
        assert sent == (json.dumps(generated, ensure_ascii=False)[1:-1] if type_ == "string" else generated)


def test_b003_whitespace_behind_think_that_has_no_end_is_read_in_linear_time():
    # Joined and looked through anew with each id, 400,000 of them took a minute; in turn they take seconds.
    begun_s = time.thread_time()
    answer = read(f"hm{{C}}think{{S}}{' ' * 400_000}so{{E}}")
    assert time.thread_time() - begun_s < 20
    assert answer.text == " " * 400_000 + "so" and answer.flaws == ()


def test_b007_reasoning_that_the_length_cuts_is_no_content():
    answer = read('The JSON is {"a": 1', "think")
    assert answer.reasoning == 'The JSON is {"a": 1' and answer.text == "" and answer.finish_reason == "length"
    assert answer.message().content == ()


def test_b011_a_name_comes_whole_and_with_its_id():
    name = "long_" * 40
    ids = ids_of(f'{{O}}call index="1" tool="{name}"{{S}}{argument("k", "number", "1")}{{C}}call{{S}}{{E}}')
    got = list(events(ids, BYTES, channel="response", tools=[Tool(name=name)]))
    starts = [event for event in got if isinstance(event, CallStart)]
    assert [(start.index, start.name) for start in starts] == [(0, name)] and starts[0].id
    assert got[0] is starts[0]


def test_b013_parallel_calls_delivered_in_any_pieces_are_the_calls_that_were_written(tokenizer, renderer):
    pieces = [
        '"',
        "\\",
        "{",
        "}",
        "[",
        "🇫🇷",
        "👩\u200d👩\u200d👧",
        "漢字",
        "<|close|>argument<|sep|>",
        "\n",
        " a",
        '\\"',
    ]
    tools = [Tool(name="first"), Tool(name="second")]

    def value(chance: random.Random, depth: int):
        kind = chance.randrange(6 if depth else 4)
        if kind == 4:
            return {value_text(chance): value(chance, depth - 1) for _ in range(chance.randrange(3))}
        if kind == 5:
            return [value(chance, depth - 1) for _ in range(chance.randrange(3))]
        return [value_text(chance), chance.randrange(-999, 999), chance.random(), None][kind]

    def value_text(chance: random.Random) -> str:
        return "".join(chance.choices(pieces, k=chance.randrange(5)))

    for seed in range(1000):
        chance = random.Random(seed)
        calls = [
            ToolCall(
                id=f"call_{at}",
                name=tool.name,
                arguments={"text": value_text(chance), "nested": {"a": value(chance, 2)}, value_text(chance): 0},
            )
            for at, tool in enumerate(tools)
        ]
        said = assistant(value_text(chance), reasoning="why", tool_calls=calls)
        ids = written(said, renderer)
        parser = Parser(tokenizer, channel="think", tools=tools, new_id=counted())
        got, at = [], 0
        while at < len(ids):
            step = chance.randint(1, 8)
            got += pushed(parser, ids[at : at + step])
            at += step
        assert fold(got) == parse(ids, tokenizer, channel="think", tools=tools, new_id=counted())
        assert fold(got).message() == said and fold(got).finish_reason == "tool_calls"
        assert [event.index for event in got if isinstance(event, CallStart)] == [0, 1]
        for index, call in enumerate(calls):
            text = "".join(event.text for event in got if isinstance(event, ArgumentText) and event.index == index)
            assert json.loads(text) == call.arguments


def test_b015_ids_of_calls_are_unique_over_turns_and_workers():
    ids = ids_of(f"{CALL}{CALL}{{E}}")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: parse(ids, BYTES, channel="think", tools=TOOLS), range(200)))
    seen = [call.id for answer in answers for call in answer.calls]
    assert len(set(seen)) == len(seen) == 400
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", call_id) and len(call_id) <= 64 for call_id in [*seen, new_call_id()])


def test_b025_parsers_side_by_side_share_nothing():
    texts = [
        f"é{letter * 3}{{C}}think{{S}}{{O}}response{{S}}{letter}ü{{C}}response{{S}}"
        f'{{O}}call tool="g"{{S}}{argument(letter, "string", letter + "ö")}{{C}}call{{S}}{{E}}'
        for letter in "abc"
    ]
    alone = [read(text, new_id=counted(), stop=["z"]) for text in texts]
    streams = [ids_of(text) for text in texts]
    parsers = [Parser(BYTES, channel="think", tools=TOOLS, new_id=counted(), stop=["z"]) for _ in texts]
    got = [[] for _ in texts]
    for step in range(max(map(len, streams))):
        for parser, stream, out in zip(parsers, streams, got, strict=True):
            out += pushed(parser, stream[step : step + 1])
    aborted = Parser(BYTES, channel="think")
    pushed(aborted, ids_of("zzz\u00e9")[:-1])
    aborted.finish("abort")
    assert [fold(out) for out in got] == alone
    assert read(texts[0], new_id=counted(), stop=["z"]) == alone[0]


@pytest.mark.parametrize("text", ["😀", "漢字", "🇫🇷🇩🇪", "👩\u200d👩\u200d👧\u200d👦 👍🏽", "e\u0301"])
def test_b093_characters_come_whole_and_one_that_is_cut_is_one_replacement(text):
    ids = ids_of(text)
    for channel, end in (("think", ""), ("response", "{E}"), ("response", "{C}response{S}x")):
        for cut in range(len(ids) + 1):
            parser = Parser(BYTES, channel=channel)
            got = pushed(parser, ids[:cut])
            whole = bytes(ids[:cut]).decode("utf-8", errors="ignore")
            assert "".join(event.text for event in got) == whole
            answer = fold(got + pushed(parser, ids_of(end)) + parser.finish("length"))
            is_cut = len(whole.encode()) < cut
            assert (answer.reasoning or answer.text) == whole + "\ufffd" * is_cut


def test_b093_a_character_that_a_marker_cuts_is_one_replacement_in_an_argument_too():
    parser = Parser(BYTES, channel="think", tools=TOOLS)
    head = '{O}call tool="f"{S}{O}argument key="k" type="string"{S}'
    got = pushed(parser, [*ids_of(head), 0xF0, 0x9F, *ids_of("{C}argument{S}{C}call{S}{E}")])
    assert fold(got).calls[0].arguments == {"k": "\ufffd"}


@pytest.mark.parametrize("end", ["<|end_of_msg|>", "[EOS]", "[EOT]"])
@pytest.mark.parametrize("before", ["", "{C}response{S}{C}message{S}", "{C}response"])
def test_b095_an_end_id_is_never_text(end, before):
    answer = read(f"a{before}{end}", "response")
    assert answer.text == "a" and answer.finish_reason == "stop"
    assert all(end not in flaw.text for flaw in answer.flaws)


@pytest.mark.parametrize(
    "channel, text, reasoning, response, num_reasoning",
    [
        ("think", "{C}think{S}{O}response{S}b", "", "b", 0),  # empty
        ("think", "{O}response{S}b", "", "b", 0),  # missing
        ("response", "b", "", "b", 0),
        ("think", "aaa{C}think{S}{O}think{S}aa{C}think{S}{O}response{S}b", "aaaaa", "b", 5),  # two
        ("think", f"aaa{{C}}think{{S}}{CALL}{{C}}tools{{S}}{{O}}think{{S}}aa{{C}}think{{S}}b", "aaaaa", "b", 5),
        ("think", "aa{O}foo{S}[PAD]", "aa", "", 2),  # markers are no text
        ("think", "aa{O}foo", "aa", "", 2),
        ("think", "", "", "", 0),
    ],
)
def test_b099_reasoning_is_counted_within_think_and_content_is_clean(channel, text, reasoning, response, num_reasoning):
    ids = ids_of(text + "{E}")
    answer = parse(ids, BYTES, channel=channel, tools=TOOLS)
    assert (answer.reasoning, answer.text) == (reasoning, response)
    assert answer.usage == Usage(num_completion=len(ids), num_reasoning=num_reasoning)


@pytest.mark.parametrize(
    "inner",
    ['{O}json type="object"{S}{"a": 1, "a": 2}{C}json{S}', argument("k", "object", '{"b": [{"a": 1, "a": 2}]}')],
)
def test_b005_a_key_that_stands_twice_in_json_makes_no_executable_call(inner):
    (call,) = read(f'{{O}}call tool="f"{{S}}{inner}{{C}}call{{S}}{{E}}', tools=None).calls
    assert not call.executable and call.arguments is None


@pytest.mark.parametrize(
    "schema, value",
    [
        ({"type": ["integer", "null"]}, 5),
        ({"type": ["null"]}, "5"),
        ({"type": ["integer", "boolean"]}, "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}, 5),  # as most libraries write an option
        ({"oneOf": [{"type": ["number", "null"]}, {"anyOf": [{"type": "number"}]}]}, 5),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5"),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/any"}]}, "5"),  # which may be anything
        *(({"anyOf": wrong}, "5") for wrong in ([], [None], [[]], {"type": {}}, 5)),
    ],
)
def test_b005_of_several_types_in_the_schema_the_one_that_is_not_null_decides(schema, value):
    tool = Tool(name="f", parameters={"properties": {"k": schema}})
    (call,) = read('{O}call tool="f"{S}{O}argument key="k"{S}5{C}argument{S}{C}call{S}{E}', tools=[tool]).calls
    assert call.arguments == {"k": value}
