"""Answers sampled from random logits under a grammar: whatever the model wants, they are valid."""

import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trivium.chat import strict_json
from trivium.chat.grammar import answer_grammar, channel
from trivium.chat.message import Conversation, Options, ResponseFormat, Tool, user
from trivium.chat.parse import parse
from trivium.chat.schema import problems, validate_arguments
from trivium.chat.tokenizer import train_tokenizer
from trivium.model.mask import Grammars
from trivium.model.sample import sample

pytest.importorskip("jsonschema", reason="schemas are checked by jsonschema, of the extra [serve]")
pytest.importorskip("llguidance", reason="grammars are held by llguidance, of the extra [serve]")

TOKENIZER = train_tokenizer([Path(textwrap.__file__).read_text(encoding="utf-8")], 600)
GRAMMARS = Grammars(TOKENIZER)
IDS = TOKENIZER.special_ids
OPEN, CLOSE, SEP, END = (IDS[name] for name in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"))
SIZE = TOKENIZER.vocab_size
# Ids that end what is begun: marks, and the ends of JSON.
ENDS = [CLOSE, *(i for i in range(TOKENIZER.num_ranks) if TOKENIZER.decode([i]) in ('"', "}", "]", "0", "é"))]

TREE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2},
        "kind": {"enum": ["leaf", "ast", 3, None]},
        "under": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
TOOLS = (
    Tool(name="now"),
    Tool(
        name='天气 "Kiel" & <|close|>',
        parameters={
            "type": "object",
            "properties": {
                "stadt ä": {"type": "string", "pattern": "^[A-Z][a-zäöü ]+$"},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "at": {"type": ["number", "null"]},
                "trees": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "minItems": 1},
                "more": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]},
            },
            "required": ["days", "stadt ä", "trees"],
            "$defs": {"tree": TREE},
        },
    ),
    Tool(name="free", parameters={"type": "object", "additionalProperties": {"type": ["string", "boolean"]}}),
)


def conversation(tools=TOOLS, **options):
    return Conversation(messages=(user("Hi"),), options=Options(tools=tools, **options))


def sampled(chat, generator, *, bias=None, patience=20, max_steps=1500):
    """Ids of an answer from random logits. What ends something is the likelier, the longer nothing has ended."""
    constraint, ids, waited = GRAMMARS.compile(answer_grammar(chat)), [], 0
    while not constraint.is_finished:
        logits_W = 2 * torch.randn(SIZE, generator=generator)
        if bias is not None:
            logits_W = logits_W + bias
        logits_W[ENDS] += 2 * max(0, waited - patience) + len(ids) / 40
        token, logprob = sample(constraint.mask(logits_W)[None], generator=generator)
        constraint.accept(int(token))
        ids.append(int(token))
        waited = 0 if ids[-1] == SEP else waited + 1
        assert len(ids) < max_steps and logprob.isfinite()
    return ids


def read(chat, ids):
    """The answer, whole and without a flaw; each call is one that may be executed."""
    answer = parse(ids, TOKENIZER, channel=channel(chat), tools=chat.tools)
    assert ids[-1] == END and END not in ids[:-1]
    assert answer.flaws == ()
    tools = {tool.name: tool for tool in chat.tools}
    for call in answer.calls:
        assert call.executable and validate_arguments(tools[call.name], call.arguments) == []
    return answer


def bias_of(**by_name):
    bias = torch.zeros(SIZE)
    for name, value in by_name.items():
        bias[{"open": OPEN, "close": CLOSE}[name]] = value
    return bias


def test_a_required_call_comes_however_unlikely_it_is():
    """B027: 200 answers from random logits, the mark that opens tools and calls 60 below the others."""
    generator, chat = torch.Generator().manual_seed(27), conversation(tool_choice="required")
    names = set()
    for _ in range(200):
        answer = read(chat, sampled(chat, generator, bias=bias_of(open=-60.0), patience=2))
        assert answer.calls and answer.text == ""
        assert answer.finish_reason == "tool_calls"
        names |= {call.name for call in answer.calls}
    assert names == {tool.name for tool in TOOLS}


def test_calls_with_all_they_may_have():
    generator = torch.Generator().manual_seed(1)
    chat = conversation(tool_choice="required", forced_tool=TOOLS[1].name)
    seen = set()
    for _ in range(30):
        answer = read(chat, sampled(chat, generator, bias=bias_of(open=2.0), patience=10))
        seen |= {name for call in answer.calls for name in call.arguments}
        assert {call.name for call in answer.calls} == {TOOLS[1].name}
    assert seen == set(TOOLS[1].parameters["properties"])


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("choice", ["auto", "none"])
def test_an_answer_is_whole_under_every_choice(choice, thinking):
    generator = torch.Generator().manual_seed(2)
    numbers = set()
    for at in range(12):
        chat = conversation(tool_choice=choice, thinking=thinking, parallel_calls=at % 2 == 0)
        answer = read(chat, sampled(chat, generator, bias=bias_of(open=3.0 * (-1) ** at), patience=5))
        assert not answer.reasoning or thinking
        assert len(answer.calls) <= 1 or at % 2 == 0
        numbers.add(len(answer.calls))
    assert numbers == {0} if choice == "none" else max(numbers) > 1


def test_responses_are_the_json_that_was_asked_for():
    generator = torch.Generator().manual_seed(3)
    schema = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "minItems": 1, "$defs": {"tree": TREE}}
    for _ in range(15):
        for wanted in (ResponseFormat(kind="json_object"), ResponseFormat(kind="json_schema", schema=schema)):
            chat = conversation(tools=(), response_format=wanted)
            answer = read(chat, sampled(chat, generator, patience=4))
            value = strict_json.loads(answer.text)
            assert problems(wanted.schema or {"type": "object"}, value) == []
    chat = replace(chat, options=replace(chat.options, tools=TOOLS))
    for _ in range(15):
        answer = read(chat, sampled(chat, generator, bias=bias_of(close=2.0), patience=4))
        assert bool(answer.calls) != bool(answer.text)


@pytest.mark.parametrize("text", ["9", "[", '{"":'])
def test_free_json_has_an_end_however_the_model_wants_to_go_on(text):
    """As a model that repeats itself: 100 digits, 98 lists within the object; then something else must come."""
    chat = conversation(tools=(), thinking=False, response_format=ResponseFormat(kind="json_object"))
    constraint = GRAMMARS.compile(answer_grammar(chat))
    for token_id in TOKENIZER.encode('{"a":'):
        constraint.accept(token_id)
    for count in range(100 if text == "9" else 98):
        try:
            for token_id in TOKENIZER.encode(text):
                constraint.accept(token_id)
        except ValueError as error:
            raise AssertionError(f"ended behind {count}") from error
    first, *_ = TOKENIZER.encode(text)
    allowed_W = constraint.mask(torch.zeros(SIZE)).isfinite()
    assert allowed_W.any() and not allowed_W[first]


def test_only_one_control_id_ends_a_text_and_none_is_in_one():
    constraint = GRAMMARS.compile(answer_grammar(conversation()))
    logits_W = torch.zeros(SIZE)
    for token_id in TOKENIZER.encode("so <|close|>think<|sep|>"):
        allowed_W = constraint.mask(logits_W).isfinite()
        assert allowed_W[TOKENIZER.num_ranks :].nonzero().flatten().tolist() == [CLOSE - TOKENIZER.num_ranks]
        constraint.accept(token_id)
    json_only = Conversation(
        messages=(user("Hi"),), options=Options(response_format=ResponseFormat(kind="json_object"))
    )
    constraint = GRAMMARS.compile(
        answer_grammar(replace(json_only, options=replace(json_only.options, thinking=False)))
    )
    for token_id in TOKENIZER.encode(json.dumps({"<|close|>": "<|end_of_msg|>"})):
        assert not constraint.mask(logits_W).isfinite()[TOKENIZER.num_ranks :].any()
        constraint.accept(token_id)


def test_what_must_come_is_all_there_is_to_sample():
    constraint = GRAMMARS.compile(answer_grammar(conversation(tools=TOOLS[:1], tool_choice="required")))
    ids = [CLOSE]
    constraint.accept(CLOSE)
    while ids[-1] != END and len(ids) < 100:
        allowed_W = constraint.mask(torch.zeros(SIZE)).isfinite()
        # The call ends, or another one begins: nothing else is left open.
        ids.append(CLOSE if allowed_W[CLOSE] else int(allowed_W.nonzero()[0]))
        assert allowed_W.sum() == 1 or allowed_W.nonzero().flatten().tolist() == [OPEN, CLOSE]
        constraint.accept(ids[-1])
    answer = parse(ids, TOKENIZER, channel="think", tools=TOOLS)
    assert [call.name for call in answer.calls] == ["now"] and constraint.is_finished


def test_a_mask_belongs_to_one_answer():
    """B031: two answers step by step beside each other are what they are alone, and one that fails ends alone."""
    chats = [conversation(tool_choice="required"), conversation(tool_choice="none", thinking=False)]
    alone = [sampled(chat, torch.Generator().manual_seed(at), patience=2) for at, chat in enumerate(chats)]
    grammar = answer_grammar(chats[0])
    constraints = [GRAMMARS.compile(answer_grammar(chat)) for chat in chats]
    failing = GRAMMARS.compile(grammar)
    with pytest.raises(ValueError, match=f"id {OPEN} may not come next"):
        failing.accept(OPEN)
    for step in range(max(map(len, alone))):
        masks = [c.mask(torch.zeros(SIZE)) for c, ids in zip(constraints, alone, strict=True) if step < len(ids)]
        fresh = [GRAMMARS.compile(answer_grammar(chat)) for chat in chats] if step < 8 else []
        for constraint, ids in zip(fresh, alone, strict=False):
            for token_id in ids[:step]:
                constraint.accept(token_id)
        for mask, constraint in zip(masks, fresh, strict=False):
            assert torch.equal(mask, constraint.mask(torch.zeros(SIZE)))
        for constraint, ids in zip(constraints, alone, strict=True):
            if step < len(ids):
                constraint.accept(ids[step])
    assert all(constraint.is_finished for constraint in constraints)
    with pytest.raises(ValueError, match="nothing may come next"):
        failing.mask(torch.zeros(SIZE))
    assert not failing.is_finished


def test_logits_keep_their_values_and_are_not_written_to():
    constraint = GRAMMARS.compile('%llguidance {}\nstart: ("a" | "b") <|sep|>')
    logits_W = torch.randn(SIZE, dtype=torch.float64)
    before_W = logits_W.clone()
    masked_W = constraint.mask(logits_W)
    allowed = [i for i in range(SIZE) if TOKENIZER.decode([i]) in ("a", "b")]
    assert torch.equal(logits_W, before_W)
    assert masked_W.isfinite().nonzero().flatten().tolist() == allowed
    assert torch.equal(masked_W[allowed], logits_W[allowed])


def test_nothing_comes_behind_the_end():
    constraint = GRAMMARS.compile("%llguidance {}\nstart: <|sep|>")
    assert not constraint.is_finished
    constraint.accept(SEP)
    assert constraint.is_finished
    with pytest.raises(ValueError, match=r"mask: nothing may come next \(NoExtension\)"):
        constraint.mask(torch.zeros(SIZE))


def test_where_no_id_fits_the_answer_ends_with_an_error():
    constraint = GRAMMARS.compile("%llguidance {}\nstart: <|sep|> NONE\nNONE: /a+/ & /b+/")
    constraint.accept(SEP)
    with pytest.raises(ValueError, match="mask: nothing may come next"):
        constraint.mask(torch.zeros(SIZE))
    assert not constraint.is_finished


def test_where_a_grammar_may_be_over_the_end_of_text_may_come():
    """Ours are over behind <|end_of_msg|> alone."""
    constraint = GRAMMARS.compile('%llguidance {}\nstart: "]"+ <|sep|>*')
    constraint.accept(TOKENIZER.encode("]")[0])
    allowed = constraint.mask(torch.zeros(SIZE)).isfinite().nonzero().flatten().tolist()
    assert [i for i in allowed if i >= TOKENIZER.num_ranks] == [IDS["[EOS]"], SEP]
    constraint.accept(IDS["[EOS]"])
    assert constraint.is_finished


@pytest.mark.parametrize("token_id", [-1, SIZE, 2**40, CLOSE])
def test_an_id_out_of_place_is_refused(token_id):
    constraint = GRAMMARS.compile("%llguidance {}\nstart: <|sep|>")
    with pytest.raises(ValueError, match=f"accept: id {token_id} may not come next"):
        constraint.accept(token_id)
    assert not constraint.is_finished


def test_a_grammar_or_logits_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="grammar: .*unknown_rule"):
        GRAMMARS.compile("%llguidance {}\nstart: unknown_rule")
    with pytest.raises(ValueError, match=rf"mask: wanted logits \[{SIZE}\], got \[{SIZE - 1}\]"):
        GRAMMARS.compile("%llguidance {}\nstart: <|sep|>").mask(torch.zeros(SIZE - 1))


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install 'trivium\[serve\]'"):
        Grammars(TOKENIZER)
