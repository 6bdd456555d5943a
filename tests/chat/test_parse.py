"""Answers read id by id: their form, channels, headers and stop strings."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.answers import BYTES, CALL, TOOLS, argument, counted, ids_of, marked, pushed, read, written
from trivium.chat import strict_json
from trivium.chat.events import ArgumentText, CallEnd, CallStart, Finish, Flaw, ReasoningText, ResponseText, Usage, fold
from trivium.chat.message import Tool, ToolCall, assistant
from trivium.chat.parse import MAX_HEADER_BYTES, Parser, events, header_of, parse
from trivium.chat.render import escaped
from trivium.chat.vocabulary import NAMED_OFFSETS

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


@pytest.mark.parametrize("stray", ["{O}", "{C}"])
def test_a_stray_mark_hides_no_more_than_a_word(stray):
    said = " world, and what else there is."
    answer = read(f"Hello {stray}{said}{{C}}response{{S}}{{C}}message{{S}}{{E}}", channel="response")
    (flaw,) = answer.flaws
    assert flaw == Flaw("header", marked(stray))  # no tag begins with a space
    assert (answer.text, answer.finish_reason) == ("Hello " + said, "stop")
    # A tag is one up to where it can be no header; of one that has attributes nothing that follows is content.
    assert read(f"a{stray}b is c{{C}}response{{S}}{{E}}", channel="response").text.endswith(" c")
    assert read(f"a{stray}call is c{{S}}b{{C}}response{{S}}{{E}}", channel="response").text == "ab"


@pytest.mark.parametrize("tag", ["message", "response", "tools", "think", "responses", "thinking", "calls", "jsonl"])
@pytest.mark.parametrize("stray", ["{O}", "{C}"])
@pytest.mark.parametrize("space", ["\n\n", "\u3000"])
def test_a_mark_whose_sep_is_forgotten_hides_no_more_than_its_tag(stray, tag, space):
    text = f"hm{{C}}think{{S}}{stray}{tag}{space}It is 42 \u00e9.{{C}}response{{S}}{{C}}message{{S}}{{E}}"
    answer = read(text)
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("hm", f"{space}It is 42 \u00e9.", "stop")
    assert answer.flaws[0] == Flaw("header", marked(stray) + tag)
    parser = Parser(BYTES, channel="think")
    assert "".join(event.text for event in pushed(parser, ids_of(f"so{stray}{tag}{space}and"))) == (
        f"so{marked(stray)}{tag}{space}and"  # as it comes, and not at the next mark
    )
    assert parser.finish("stop")[-1].usage.num_reasoning == len(f"so{space}and".encode())


@pytest.mark.parametrize("tag", ['message role="us"er"', 'response x="a"b', "call tool", "argument\nkey", "json\n{}"])
def test_what_may_be_of_an_attribute_is_no_content(tag):
    answer = read(f"a{{O}}{tag} and more{{C}}response{{S}}{{E}}", channel="response")
    assert answer.text == "a" and answer.flaws[0] == Flaw("header", marked("{O}") + f"{tag} and more")


def test_whitespace_between_think_and_what_follows_is_no_content():
    for follows, text in (("{O}response{S}hi{C}response{S}", "hi"), ("{O}tools{S}{C}tools{S}", ""), ("", "")):
        answer = read(f"hm{{C}}think{{S}}\n\n{follows}{{C}}message{{S}}{{E}}", channel="think")
        assert (answer.text, answer.flaws) == (text, (Flaw("text", "\n\n"),))
    # Words that follow are the answer, and the whitespace in front of them and in them is theirs.
    assert read("hm{C}think{S}\n\nhi there\n{C}message{S}{E}", channel="think").text == "\n\nhi there\n"


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
