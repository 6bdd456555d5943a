"""Laws of answers: read id by id, on rendered answers, on answers of every wrong form, and on the faults others met."""

import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trivium.chat import strict_json
from trivium.chat.events import ArgumentText, CallEnd, CallStart, Finish, Flaw, ReasoningText, ResponseText, Usage, fold
from trivium.chat.message import Conversation, Options, Tool, ToolCall, assistant, user
from trivium.chat.parse import MAX_HEADER_BYTES, Parser, events, header_of, new_call_id, parse
from trivium.chat.render import Renderer, escaped
from trivium.chat.tokenizer import Tokenizer
from trivium.chat.vocabulary import NAMED_OFFSETS, Vocabulary

# One id a byte, and 600 words of one id each that stand for text of which we ask where it went.
WORDS = [f"~{index:03}~" for index in range(600)]
BYTES = Tokenizer(Vocabulary.of_ranks([bytes([value]) for value in range(256)] + [word.encode() for word in WORDS]))
CONTROLS = list(BYTES.special_ids)

TOOLS = (
    Tool(
        name="f",
        parameters={
            "type": "object",
            "properties": {
                **{name: {"type": name} for name in ("string", "integer", "number", "boolean", "object", "array")},
                "either": {"type": ["string", "null"]},
                "strange": "string",
            },
        },
    ),
    Tool(name="g"),
    Tool(name="bare", parameters={"properties": [1]}),
)


def marked(text: str) -> str:
    for short, mark in (("{O}", "<|open|>"), ("{C}", "<|close|>"), ("{S}", "<|sep|>"), ("{E}", "<|end_of_msg|>")):
        text = text.replace(short, mark)
    return text


def ids_of(text: str, tokenizer: Tokenizer = BYTES) -> list[int]:
    return tokenizer.encode_control(marked(text))


def read(text: str, channel: str = "think", **given):
    """The answer of a text in which {O}, {C}, {S} and {E} stand for marks."""
    return parse(ids_of(text), BYTES, channel=channel, **({"tools": TOOLS} | given))


def call_of(elements: str):
    """The one call that holds these elements, and the flaws of the answer."""
    answer = read(f'{{C}}think{{S}}{{O}}tools{{S}}{{O}}call tool="f" index="1"{{S}}{elements}{{C}}call{{S}}{{E}}')
    (call,) = answer.calls
    return call, answer.flaws


def argument(key: str, type_: str, text: str) -> str:
    return f'{{O}}argument key="{escaped(key)}" type="{type_}"{{S}}{text}{{C}}argument{{S}}'


def counted():
    """Ids of calls that are the same in every run."""
    numbers = iter(range(10**6))
    return lambda: f"call_{next(numbers)}"


def pushed(parser: Parser, ids) -> list:
    return [event for token_id in ids for event in parser.push(token_id)]


def written(message, renderer: Renderer, thinking: bool = True, **options) -> list[int]:
    """The ids of an answer as they would be generated: what is rendered behind the stub."""
    asked = Conversation(messages=(user("?"),), options=Options(thinking=thinking, **options))
    told = Conversation(messages=(user("?"), message), options=asked.options)
    start = len(renderer.render(asked).ids)
    return list(renderer.render(told, answer=False).ids[start:])


# --- Answers as they should be -----------------------------------------------------------------------------------

TEXT = st.text(max_size=10) | st.sampled_from(
    [*NAMED_OFFSETS.values(), '"&quot;', "\\", "}", "\n", "</", "🇫🇷👩\u200d👧"]
)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXT, values, max_size=3),
    max_leaves=5,
)
CALLS = st.lists(st.tuples(st.text(min_size=1, max_size=9), st.dictionaries(TEXT, VALUE, max_size=3)), max_size=3)


@settings(max_examples=60)
@given(reasoning=TEXT, text=TEXT, calls=CALLS, thinking=st.booleans())
def test_a_rendered_answer_is_read_as_it_was(tokenizer, renderer, reasoning, text, calls, thinking):
    calls = [ToolCall(id=f"call_{at}", name=name, arguments=given) for at, (name, given) in enumerate(calls)]
    said = assistant(text, reasoning=reasoning if thinking else "", tool_calls=calls)
    ids = written(said, renderer, thinking)
    answer = parse(ids, tokenizer, channel="think" if thinking else "response", tools=None, new_id=counted())
    assert answer.message() == said
    assert [call.text for call in answer.calls] == [strict_json.spaced(call.arguments) for call in calls]
    assert [type(value) for call in answer.calls for value in call.arguments.values()] == [
        type(value) for call in calls for value in call.arguments.values()
    ]
    assert answer.flaws == () and all(call.executable for call in answer.calls)
    assert answer.finish_reason == ("tool_calls" if calls else "stop")
    assert answer.usage == Usage(num_completion=len(ids), num_reasoning=len(tokenizer.encode(said.reasoning)))


def test_events_of_an_answer_in_their_order():
    ids = ids_of(
        "hm{C}think{S}{O}response{S}ok{C}response{S}{O}tools{S}"
        '{O}call index="7" tool="f"{S}{O}argument type="string" key="k"{S}"v{C}argument{S}{C}call{S}{C}tools{S}{E}'
    )
    assert list(events(ids, BYTES, channel="think", tools=TOOLS, new_id=lambda: "call_x")) == [
        *(ReasoningText("h"), ReasoningText("m"), ResponseText("o"), ResponseText("k")),
        CallStart(0, "call_x", "f"),
        *(ArgumentText(0, '{"k": '), ArgumentText(0, '"'), ArgumentText(0, '\\"'), ArgumentText(0, "v")),
        *(ArgumentText(0, '"'), ArgumentText(0, "}"), CallEnd(0)),
        Finish("tool_calls", Usage(num_completion=len(ids), num_reasoning=2)),
    ]


def test_no_id_is_pulled_before_its_events_are_wanted_and_none_behind_the_end():
    pulled = []

    def generate():
        for token_id in ids_of("ab{C}think{S}{O}response{S}c{C}response{S}{C}message{S}{E}never"):
            pulled.append(token_id)
            yield token_id

    stream = events(generate(), BYTES, channel="think")
    assert next(stream) == ReasoningText("a") and BYTES.decode(pulled) == "a"
    assert isinstance(list(stream)[-1], Finish)
    assert pulled[-1] == BYTES.end_of_msg_id


def test_an_id_out_of_range_is_refused_and_changes_nothing():
    parser = Parser(BYTES, channel="think")
    for token_id in (-1, BYTES.vocab_size, 10**12):
        with pytest.raises(ValueError, match=f"id {token_id}"):
            parser.push(token_id)
    finish = Finish("length", Usage(num_completion=0, num_reasoning=0))
    assert parser.finish("length") == [finish]
    with pytest.raises(ValueError, match="out of range|wanted one of"):
        parser.push(-1)


def test_fold_wants_an_end():
    with pytest.raises(ValueError, match="no finish"):
        fold([ReasoningText("a")])
    with pytest.raises(ValueError, match="wanted stop, length or abort"):
        Parser(BYTES, channel="think").finish("tool_calls")


def test_reasoning_is_not_in_the_repr():
    assert "secret" not in repr(read("secret{C}think{S}{E}")) + repr(ReasoningText("secret"))


# --- Channels ----------------------------------------------------------------------------------------------------

CALL = '{O}call tool="g" index="1"{S}{C}call{S}'


@pytest.mark.parametrize(
    "channel, text, reasoning, response, num_calls, flaws",
    [
        ("think", "a{C}think{S}{O}response{S}b{C}response{S}{C}message{S}", "a", "b", 0, []),
        ("response", "b{C}response{S}{C}message{S}", "", "b", 0, []),
        ("think", "a", "a", "", 0, []),  # no close ever
        ("think", "{O}think{S}a{C}think{S}{O}response{S}b", "a", "b", 0, []),  # said once more
        ("response", "{O}response{S}b{C}response{S}", "", "b", 0, []),
        ("think", "a{O}think{S}b", "ab", "", 0, ["<|open|>think<|sep|>"]),  # not leading
        ("think", "{O}think{S}{O}think{S}b", "b", "", 0, ["<|open|>think<|sep|>"]),
        ("think", "a{O}response{S}b", "a", "b", 0, []),
        ("think", f"a{{O}}tools{{S}}{CALL}{{C}}tools{{S}}", "a", "", 1, []),
        ("think", f"a{CALL}", "a", "", 1, []),  # neither think closed nor tools opened
        ("response", f"b{CALL}{CALL}{{C}}tools{{S}}", "", "b", 2, []),
        ("response", "b{O}think{S}a{C}think{S}{O}response{S}c", "a", "bc", 0, []),
        ("think", f"a{{C}}think{{S}}{{O}}tools{{S}}{CALL}{{C}}tools{{S}}{{O}}think{{S}}b", "ab", "", 1, []),
        ("think", f"a{{O}}tools{{S}}{CALL}{{O}}response{{S}}b{{C}}response{{S}}", "a", "b", 1, []),
        ("think", f"{{O}}tools{{S}}{CALL}{{C}}tools{{S}}{{O}}tools{{S}}{CALL}{{C}}tools{{S}}", "", "", 2, []),
        ("think", "a{C}think{S}b", "a", "b", 0, []),  # outside of all, and no response yet
        ("think", "a{C}think{S}b{O}response{S}c{C}response{S}d", "a", "bc", 0, ["d"]),
        ("response", "b{C}response{S}d", "", "b", 0, ["d"]),
        ("think", f"a{{C}}think{{S}}{CALL}{{C}}tools{{S}}d", "a", "d", 1, []),
        ("think", "a{O}foo{S}b{C}foo{S}c", "abc", "", 0, ["<|open|>foo<|sep|>", "<|close|>foo<|sep|>"]),
        ("think", "a{C}response{S}b", "ab", "", 0, ["<|close|>response<|sep|>"]),
        (
            "think",
            "a{C}between{S}b{C}call{S}c{C}closed{S}",
            "abc",
            "",
            0,
            [f"<|close|>{tag}<|sep|>" for tag in ("between", "call", "closed")],
        ),
        (
            "response",
            "b{C}argument{S}{C}response{S}{C}think{S}",
            "",
            "b",
            0,
            ["<|close|>argument<|sep|>", "<|close|>think<|sep|>"],
        ),
        ("response", 'b{O}argument key="k"{S}c', "", "bc", 0, ['<|open|>argument key="k"<|sep|>']),
        ("response", "b{S}c{C}tools{S}", "", "bc", 0, ["<|sep|>", "<|close|>tools<|sep|>"]),
        ("response", f"b{{O}}tools{{S}}\n{CALL} x {{C}}tools{{S}}", "", "b", 1, ["\n", " x "]),
        ("response", "b{O}tools{S}x[PAD]y{C}tools{S}", "", "b", 0, ["x", "[PAD]", "y"]),
        ("response", f"b{{O}}tools{{S}}{{O}}tools{{S}}{CALL}", "", "b", 1, ["<|open|>tools<|sep|>"]),
        (
            "response",
            'b{C}message{S}c{O}message role="user"{S}d',
            "",
            "b",
            0,
            ["c", '<|open|>message role="user"<|sep|>', "d"],
        ),
        (
            "response",
            'b{O}message role="user"{S}d{C}message{S}[PAD]',
            "",
            "b",
            0,
            ['<|open|>message role="user"<|sep|>', "d", "<|close|>message<|sep|>", "[PAD]"],
        ),
        (
            "think",
            "a[BOS]b<|media_pad|><|reserved_token_900|>c[PAD]",
            "abc",
            "",
            0,
            ["[BOS]", "<|media_pad|>", "<|reserved_token_900|>", "[PAD]"],
        ),
    ],
)
def test_where_text_goes(channel, text, reasoning, response, num_calls, flaws):
    for end in ("", "{E}"):
        answer = read(text + end, channel)
        assert (answer.reasoning, answer.text, len(answer.calls)) == (reasoning, response, num_calls)
        assert [flaw.text for flaw in answer.flaws] == flaws
        assert all(call.executable for call in answer.calls)
        assert answer.finish_reason == ("length" if not end else "tool_calls" if num_calls else "stop")


def test_ids_behind_the_end_are_flaws_one_by_one():
    parser = Parser(BYTES, channel="response")
    pushed(parser, ids_of("a{E}"))
    assert parser.finished and parser.channel is None
    assert pushed(parser, ids_of("b{E}{O}\u00e9")) == [
        *(Flaw("end", "b"), Flaw("end", "<|end_of_msg|>"), Flaw("end", "<|open|>")),
        *(Flaw("end", "\ufffd"), Flaw("end", "\ufffd")),
    ]
    assert parser.finish("length") == []


@pytest.mark.parametrize("channel", ["think", "response"])
def test_the_open_channel_is_told(channel):
    parser = Parser(BYTES, channel=channel)
    seen = [parser.channel]
    for text in ("a", "{O}response{S}", "b", "{C}response{S}", "{O}think{S}", "{O}tools{S}"):
        pushed(parser, ids_of(text))
        seen.append(parser.channel)
    assert seen == [channel, channel, "response", "response", None, "think", None]


# --- Headers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, header",
    [
        ("think", ("think", {})),
        ('call index="1" tool="a b"', ("call", {"index": "1", "tool": "a b"})),
        ('call tool="&quot;&amp;quot;&amp;amp;&lt;\n"', ("call", {"tool": '"&quot;&amp;&lt;\n'})),
        ('call tool=""', ("call", {"tool": ""})),
        *(
            (text, None)
            for text in ("", " call", "call ", "call tool", "call tool=f", 'call tool="f', 'call tool="f"x')
        ),
        *((text, None) for text in ('call  tool="f"', 'calltool="f"', 'call tool="f" tool="f"', 'call ="f"')),
    ],
)
def test_headers_by_hand(text, header):
    assert header_of(text) == header


@given(st.dictionaries(st.sampled_from(["tool", "index", "key"]), st.text()))
def test_header_of_what_is_escaped(attributes):
    text = "call" + "".join(f' {name}="{escaped(value)}"' for name, value in attributes.items())
    assert header_of(text) == ("call", attributes)


@pytest.mark.parametrize(
    "broken, rest",
    [
        ("{O}{S}", ""),
        ("{O}call tool=f{S}", ""),
        ('{C}response index="1"{S}', ""),  # a close has no attributes
        ("{O}res[PAD]ponse{S}", ""),
        ("{O}call", "{C}response{S}"),
        ("{C}", "{C}response{S}"),
        ("{O}call", "{E}"),
        ("{O}call[PAD]x", "{E}"),
        ("{O}", ""),
    ],
)
def test_what_is_no_header_is_one_flaw_and_no_content(broken, rest):
    answer = read(f"a{broken}{rest}", "response")
    assert answer.text == "a" and answer.flaws == (Flaw("header", marked(broken)),)


@pytest.mark.parametrize("end", ["{S}", "[PAD]{S}", "{C}foo", ""])
@pytest.mark.parametrize("start", ["{O}call ", "{O}call[PAD]", "{C}"])
def test_a_header_that_is_no_utf8_is_a_flaw(start, end):
    parser = Parser(BYTES, channel="response")
    got = pushed(parser, [*ids_of(start), 0xE2, 0x82, *ids_of(end + "{E}")])
    assert all(isinstance(event, Flaw) and event.kind == "header" for event in got[:-1])
    assert "".join(event.text for event in got[:-1]) == marked(f"{start}\ufffd{end}")


def test_a_header_that_is_too_long_is_told_at_once_and_is_no_content_to_its_end():
    parser = Parser(BYTES, channel="response")
    name = "é" * MAX_HEADER_BYTES
    start = pushed(parser, ids_of('{O}call tool="' + name[: MAX_HEADER_BYTES // 2]))
    assert [event.kind for event in start] == ["header"]
    rest = pushed(parser, ids_of(name[MAX_HEADER_BYTES // 2 :] + '"{S}b'))
    assert "".join(event.text for event in start + rest) == marked('{O}call tool="' + name + '"{S}b')
    assert rest[1:] == [ResponseText("b")]


def test_a_name_of_256_characters_is_a_name():
    name = "&" * 256  # 1,280 bytes in the header
    answer = read(f'{{O}}call tool="{escaped(name)}" index="1"{{S}}{{C}}call{{S}}', tools=[Tool(name=name)])
    assert answer.calls[0].name == name and answer.calls[0].executable


# --- Calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["call", 'call index="1"', 'call tool="" index="1"'])
@pytest.mark.parametrize("close", ["{C}call{S}", ""])
def test_a_call_without_a_tool_is_a_flaw_with_all_it_holds(header, close):
    inside = f"{argument('k', 'string', 'v')}x"
    answer = read(f'a{{O}}{header}{{S}}{inside}{close}{{O}}call tool="g" index="2"{{S}}{{C}}call{{S}}{{E}}')
    assert [flaw.kind for flaw in answer.flaws] == ["call"] * len(answer.flaws)
    assert "".join(flaw.text for flaw in answer.flaws) == marked(f"{{O}}{header}{{S}}{inside}{close}")
    assert [(call.name, call.text, call.problem) for call in answer.calls] == [("g", "{}", "")]
    assert answer.reasoning == "a"


def test_behind_a_call_without_a_tool_are_the_tools_again():
    answer = read("{O}call{S}a{C}call{S}b{C}tools{S}")
    assert [(flaw.kind, flaw.text) for flaw in answer.flaws[1::2]] == [("call", "a"), ("text", "b")]


def test_a_call_of_a_tool_that_is_not_declared_is_told_and_not_executable():
    answer = read(f'{{O}}call tool="h" index="1"{{S}}{argument("k", "number", "1")}{{C}}call{{S}}{CALL}{{E}}')
    undeclared, declared = answer.calls
    assert undeclared.name == "h" and json.loads(undeclared.text) == {"k": 1}
    assert undeclared.problem == "undeclared tool 'h'" and undeclared.arguments is None
    assert declared.executable and answer.finish_reason == "tool_calls"
    assert [call.name for call in answer.message().tool_calls] == ["g"]
    assert read('{O}call tool="h"{S}{C}call{S}{E}').finish_reason == "stop"
    assert read('{O}call tool="h"{S}{C}call{S}{E}', tools=()).calls[0].problem
    assert read('{O}call tool="$h"{S}{C}call{S}{E}', tools=None).calls[0].executable
    long = read(f'{{O}}call tool="{"h" * 257}"{{S}}{{C}}call{{S}}{{E}}', tools=None)
    assert "257 characters" in long.calls[0].problem and long.message().tool_calls == ()


@pytest.mark.parametrize(
    "type_, text, value, num_flaws",
    [
        ("string", "", "", 0),
        ("string", "5", "5", 0),  # a string is never decoded
        ("string", '{"a": 1}', '{"a": 1}', 0),
        ("string", ' "\\\n\u2028\x00\x7f🇫🇷', ' "\\\n\u2028\x00\x7f🇫🇷', 0),
        ("number", "5", 5, 0),
        ("number", " -0.5e3\n", -500.0, 0),
        ("number", "five", "five", 1),
        ("number", "", "", 1),
        ("number", "NaN", "NaN", 1),
        ("number", "1e999", "1e999", 1),
        ("number", "9" * 4301, "9" * 4301, 1),
        ("number", "true", "true", 1),
        ("number", '"5"', '"5"', 1),
        ("number", "5, 6", "5, 6", 1),
        ("boolean", "true", True, 0),
        ("boolean", "True", "True", 1),
        ("boolean", "1", "1", 1),
        ("null", "null", None, 0),
        ("null", "", "", 1),
        ("object", '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}, 0),
        ("object", ' \t\r\n{"a": 1} ', {"a": 1}, 0),
        ("object", "[1]", "[1]", 1),
        ("object", " bare 'word' ", " bare 'word' ", 1),
        ("object", "", "", 1),
        ("object", "\u3000{}", "\u3000{}", 1),  # no whitespace of JSON
        ("object", " \n", " \n", 1),
        ("array", "[]", [], 0),
        ("array", '{"a": 1}', '{"a": 1}', 1),
        ("array", "null", "null", 1),
        ("date", "5", "5", 1),  # no type that we know
        ("integer", "5", 5, 1),  # a schema's word
        ("", "5", "5", 1),
    ],
)
def test_b005_the_declared_type_decides_and_what_is_none_of_it_is_a_string(type_, text, value, num_flaws):
    call, flaws = call_of(argument("k", type_, text))
    assert call.executable and call.arguments == {"k": value} and type(call.arguments["k"]) is type(value)
    assert json.loads(call.text) == {"k": value}
    assert flaws == (Flaw("type", marked(f'{{O}}argument key="k" type="{type_}"{{S}}')),) * num_flaws


@pytest.mark.parametrize(
    "tool, key, text, value",
    [
        ("f", "integer", "5", 5),
        ("f", "number", "0.5", 0.5),
        ("f", "boolean", "true", True),
        ("f", "array", "[5]", [5]),
        ("f", "object", "{}", {}),
        *(("f", key, "5", "5") for key in ("string", "either", "strange", "unknown")),
        *((tool, "number", "5", "5") for tool in ("g", "bare")),
    ],
)
def test_b005_an_argument_without_a_type_has_that_of_the_schema(tool, key, text, value):
    elements = f'{{O}}argument key="{key}"{{S}}{text}{{C}}argument{{S}}'
    answer = read(f'{{O}}call tool="{tool}"{{S}}{elements}{{C}}call{{S}}{{E}}')
    assert answer.calls[0].arguments == {key: value}
    assert [flaw.kind for flaw in answer.flaws] == ["type"]


@pytest.mark.parametrize(
    "text, arguments",
    [
        ('{"a": 1, "b": {"c": "}"}}', {"a": 1, "b": {"c": "}"}}),
        (' \n{"a":1} ', {"a": 1}),
        ("", {}),
        (" \n\u3000", {}),
        *((text, None) for text in ("[1]", "5", "null", '{"a": half', '{"a": 1} {}', "{", '{"a": NaN}', "word")),
        *((text, None) for text in ("\u3000{}", '{"a": "\\ud800"}', "[" * 5000)),
    ],
)
def test_a_json_element_is_the_object_or_the_call_has_a_problem(text, arguments):
    call, flaws = call_of(f'{{O}}json type="string" x="y"{{S}}{text}{{C}}json{{S}}')
    assert call.arguments == arguments and flaws == ()
    assert call.text == (text if text.strip() else "{}")
    assert call.problem == ("" if arguments is not None else "no JSON object in json")


K = argument("k", "number", "1")
JSON = '{O}json type="object"{S}{"a": 1}{C}json{S}'


@pytest.mark.parametrize(
    "elements, problem",
    [
        (argument("k", "object", '{"a": half}'), "no JSON object in argument 'k'"),
        (argument("k", "object", '{}, "x": {}'), "no JSON object in argument 'k'"),  # no way out of the argument
        (argument("k", "array", "[1"), "no JSON array in argument 'k'"),
        (argument("k", "array", "[" * 100 + "]" * 100), "no JSON array in argument 'k'"),  # 101 deep with the arguments
        (K + K, "a second argument 'k'"),
        (JSON + K, "an argument beside json"),
        (K + JSON, "json beside other elements"),
        (JSON + JSON, "json beside other elements"),
        ('{O}argument type="string"{S}v{C}argument{S}', "an argument without a key"),
        (argument("k", "string", "a{O}foo{S}b"), "<|open|>foo<|sep|> has no place in argument 'k'"),
        (argument("k", "string", "a{C}json{S}b"), "<|close|>json<|sep|> has no place in argument 'k'"),
        (argument("k", "string", "a{C}think{S}b"), "<|close|>think<|sep|> has no place in argument 'k'"),
        (argument("k", "string", "a{O}x y{S}b"), "a broken marker in argument 'k'"),
        (argument("k", "string", "a[PAD]b"), "[PAD] has no place in argument 'k'"),
        (argument("k", "number", "1<|media_pad|>2"), "<|media_pad|> has no place in argument 'k'"),
        (argument("k", "string", "a{S}b"), "<|sep|> has no place in argument 'k'"),
        (f'{{O}}argument key="j" type="string"{{S}}a{K}', "unclosed in argument 'j'"),
        ('{O}argument key="j" type="string"{S}a', "unclosed in argument 'j'"),
        ('{O}argument key="j" type="number"{S}1', "unclosed in argument 'j'"),
        ('{O}json{S}{"a": 1}', "unclosed in json"),
        # A string that holds a close is cut there, so what is behind it may be the rest of an argument.
        (argument("k", "string", "rm -r /tmp{C}argument{S}/x"), "text between arguments"),
        (f"{K}{{C}}argument{{S}}", "<|close|>argument<|sep|> has no place"),
        (f"{K}{{O}}foo{{S}}", "<|open|>foo<|sep|> has no place"),
        (f"{K}[PAD]", "[PAD] has no place"),
    ],
)
def test_what_is_wrong_in_a_call_is_its_problem(elements, problem):
    call, _ = call_of(elements)
    assert call.problem.split("; ")[0] == problem
    assert call.arguments is None and not call.executable
    if "json" not in elements:  # that is sent as it comes
        with pytest.raises(ValueError):
            json.loads(call.text)


def test_elements_that_have_no_place_beside_others_are_flaws():
    for elements, text, lost in (
        (K + JSON, '{"k": 1', '{"a": 1}'),
        (JSON + K, '{"a": 1}', "1"),
        (JSON * 2, '{"a": 1}', '{"a": 1}'),
    ):
        call, flaws = call_of(elements)
        assert call.text == text and flaws == (Flaw("text", lost),)
    call, flaws = call_of('{O}argument type="string"{S}v{C}argument{S}')
    assert call.text == "" and flaws == (Flaw("text", "v"),)


def test_whitespace_between_the_elements_of_a_call_is_a_flaw_and_no_problem():
    call, flaws = call_of(f"\n {K}\n")
    assert call.executable and [flaw.text for flaw in flaws] == ["\n ", "\n"]


def test_arguments_are_as_deep_as_a_call_can_have_them():
    call, _ = call_of(argument("k", "array", "[" * 99 + "]" * 99))
    assert call.executable
    assert ToolCall(id="1", name="f", arguments=call.arguments)
    call, _ = call_of('{O}json{S}{"k": ' + "[" * 99 + "]" * 99 + "}{C}json{S}")
    assert ToolCall(id="1", name="f", arguments=call.arguments)


OPEN_CALL = '{O}call tool="f" index="1"{S}{O}argument key="k" type="TYPE"{S}'


@pytest.mark.parametrize(
    "next_",
    [
        "",
        "{E}",
        "[EOS]",
        "{C}tools{S}",
        "{C}message{S}",
        "{O}think{S}",
        "{O}response{S}",
        "{O}tools{S}",
        '{O}message role="user"{S}',
        '{O}call tool="g" index="2"{S}',
        "{O}call{S}",
    ],
)
@pytest.mark.parametrize(
    "type_, value, text",
    [
        *(("string", 'a"', '{"k": "a\\"'), ("number", "12", '{"k": 12'), ("object", '{"a"', '{"k": {"a"')),
        *(("object", " ", '{"k":  '), ("null", "", '{"k": ')),
    ],
)
def test_a_call_that_something_else_ends_is_unclosed_and_has_what_came_so_far(next_, type_, value, text):
    answer = read(OPEN_CALL.replace("TYPE", type_) + value + next_)
    assert answer.calls[0].text == text
    assert answer.calls[0].problem == "unclosed in argument 'k'"
    assert answer.message().tool_calls == ()
    bare = read('{O}call tool="f" index="1"{S}' + K + next_)
    assert (bare.calls[0].text, bare.calls[0].problem) == ('{"k": 1', "unclosed")


def test_a_tool_call_cut_by_the_length_is_told_in_finish():
    parser = Parser(BYTES, channel="think", tools=TOOLS)
    pushed(parser, ids_of(CALL + OPEN_CALL.replace("TYPE", "string")))
    *_, end, finish = parser.finish("abort")
    assert end == CallEnd(1, "unclosed in argument 'k'") and finish.reason == "abort"
    assert parser.finish("abort") == []


def test_finish_reasons():
    assert read(f"{CALL}{{C}}tools{{S}}{{E}}").finish_reason == "tool_calls"
    assert read("{C}think{S}{E}").finish_reason == "stop"
    assert read(f"{CALL}{{C}}tools{{S}}").finish_reason == "length"
    assert read(f"{CALL}{{C}}tools{{S}}", reason="stop").finish_reason == "tool_calls"  # an end id that is not pushed
    assert read("a", reason="stop").finish_reason == "stop"
    assert read("a", reason="abort").finish_reason == "abort"
    assert read(f"{CALL}{{O}}response{{S}}a.b{{E}}", stop=["."]).finish_reason == "stop"


# --- Stop strings ------------------------------------------------------------------------------------------------


def plain_stop(text: str, stops: list[str]) -> str:
    """Character by character: at the first one that completes stop strings, cut before the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


LETTERS = st.text("ab\u00e9", max_size=12)
STOPS = st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=4)


@given(LETTERS, STOPS)
@example("aab", ["ab", "b", "aabb"])
@example("aaab", ["aab"])
def test_stop_strings_cut_the_response_as_if_read_by_characters(text, stops):
    parser = Parser(BYTES, channel="response", stop=stops)
    shown, said = "", bytearray()
    for token_id in ids_of(text):
        for event in parser.push(token_id):
            shown += event.text if isinstance(event, ResponseText) else ""
        said += BYTES.decode_bytes([token_id])
        if parser.finished:
            break
        so_far = said.decode("utf-8", errors="ignore")
        kept = [so_far[at:] for at in range(len(so_far)) if any(stop.startswith(so_far[at:]) for stop in stops)]
        assert shown + max(kept, key=len, default="") == so_far  # no more is held back than could begin a stop string
    finished = parser.finished
    shown += "".join(event.text for event in parser.finish("length") if isinstance(event, ResponseText))
    assert shown == plain_stop(text, stops)
    assert finished == any(stop in text for stop in stops)
    whole = read(text, "response", stop=stops)
    assert whole.text == shown and whole.finish_reason == ("stop" if finished else "length")


def test_stop_strings_are_for_response_text_alone():
    text = f"a.b{{C}}think{{S}}{{O}}tools{{S}}{CALL.replace('{C}call', argument('k', 'string', 'a.b') + '{C}call')}"
    answer = read(f"{text}{{C}}tools{{S}}{{O}}response{{S}}a.b", stop=["."])
    assert answer.reasoning == "a.b" and answer.text == "a" and answer.calls[0].arguments == {"k": "a.b"}
    assert answer.flaws == ()


def test_what_is_held_for_a_stop_string_comes_when_the_channel_ends():
    parser = Parser(BYTES, channel="response", stop=["end."])
    assert pushed(parser, ids_of("the end{O}foo{S}")) == [
        *(ResponseText(text) for text in ("t", "h", "e ")),
        Flaw("marker", "<|open|>foo<|sep|>"),
    ]
    assert pushed(parser, ids_of("{C}response{S}")) == [ResponseText("end")]
    again = read("the en{O}think{S}{O}response{S}d.", "response", stop=["end."])
    assert again.text == "the end." and again.finish_reason == "length"


def test_a_stop_string_may_end_with_the_character_that_is_cut():
    ids = [*ids_of("ab"), 0xE2, *ids_of("{C}response{S}")]
    parser = Parser(BYTES, channel="response", stop=["b\ufffd"])
    assert pushed(parser, ids) == [
        ResponseText("a"),
        Finish("stop", Usage(num_completion=3, num_reasoning=0)),
        *(Flaw("end", text) for text in ("<|close|>", *"response", "<|sep|>")),
    ]
    parser = Parser(BYTES, channel="response", stop=["b\ufffd"])
    pushed(parser, ids[:3])
    assert parser.finish("length") == [Finish("stop", Usage(num_completion=3, num_reasoning=0))]


@pytest.mark.parametrize("stop", ["end", [""], ["a", ""]])
def test_stop_strings_are_a_list_of_texts(stop):
    with pytest.raises(ValueError, match="stop: wanted"):
        Parser(BYTES, channel="think", stop=stop)


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
    ids = ids_of(f'{{O}}call index="1" tool="{name}"{{S}}{K}{{C}}call{{S}}{{E}}')
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
        elif "undeclared" not in call.problem and "json" not in BYTES.decode(ids):
            with pytest.raises(ValueError):
                json.loads(call.text)
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


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("length", [256, 257])
def test_an_argument_whose_name_no_message_may_have_makes_no_executable_call(tokenizer, as_json, length):
    key = "k" * length
    if as_json:
        inner = f'<|open|>json type="object"<|sep|>{{"{key}": 1}}<|close|>json<|sep|>'
    else:
        inner = f'<|open|>argument key="{key}" type="number"<|sep|>1<|close|>argument<|sep|>'
    call = f'<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{inner}<|close|>call<|sep|><|close|>tools<|sep|>'
    answer = parse(tokenizer.encode_control(f"{call}<|end_of_msg|>"), tokenizer, channel="response", tools=None)
    assert answer.calls[0].executable == (length == 256)
    assert len(answer.message().tool_calls) == (length == 256)


@pytest.mark.parametrize("stray", ["{O}", "{C}"])
def test_a_stray_mark_hides_no_more_than_a_word(stray):
    said = " world, and what else there is."
    answer = read(f"Hello {stray}{said}{{C}}response{{S}}{{C}}message{{S}}{{E}}", channel="response")
    (flaw,) = answer.flaws
    assert flaw == Flaw("header", marked(stray) + " ")  # an id is a byte here, and no tag begins with a space
    assert (answer.text, answer.finish_reason) == ("Hello " + said[1:], "stop")
    # A tag that nobody knows is one up to where it can be no header; one that is known is no content whatever follows.
    assert read(f"a{stray}b is c{{C}}response{{S}}{{E}}", channel="response").text.endswith("c")
    assert read(f"a{stray}call is c{{S}}b{{C}}response{{S}}{{E}}", channel="response").text == "ab"


def test_whitespace_between_think_and_what_follows_is_no_content():
    for follows, text in (("{O}response{S}hi{C}response{S}", "hi"), ("{O}tools{S}{C}tools{S}", ""), ("", "")):
        answer = read(f"hm{{C}}think{{S}}\n\n{follows}{{C}}message{{S}}{{E}}", channel="think")
        assert (answer.text, answer.flaws) == (text, (Flaw("text", "\n\n"),))
    # Words that follow are the answer, and the whitespace in front of them and in them is theirs.
    assert read("hm{C}think{S}\n\nhi there\n{C}message{S}{E}", channel="think").text == "\n\nhi there\n"


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
