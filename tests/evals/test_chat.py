"""What a model made of a dialogue: with answers that are told to it, right ones and every kind of wrong one."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.talks import answer_ids, tokenizer_of
from trivium.chat.events import Answer, Usage
from trivium.chat.message import Conversation, ToolCall
from trivium.chat.render import Renderer
from trivium.envs.synth.dialogue import EFFORTS, KINDS, NO_CALLS, dialogue
from trivium.evals import chat
from trivium.evals.chat import WITH_TOOLS, ChatReport, Outcome, Score, evaluate, play, report, table

TOKENIZER = tokenizer_of(300)
RENDERER = Renderer(TOKENIZER)
ONE_OF_EACH = [dialogue(1, heldout=True, kinds=(kind,)) for kind in KINDS]
CALLS = [each for each in ONE_OF_EACH if each.turn.steps]


def one(kind):
    return [played for played in ONE_OF_EACH if played.turn.kind == kind][:1]


def prompts_of(played):
    """Before each message that the assistant wrote behind the last question: the conversation, and the message."""
    whole = played.conversation
    for at, message in enumerate(whole.messages):
        if at >= played.asked and message.role == "assistant":
            yield Conversation(messages=whole.messages[:at], options=whole.options), message


@pytest.fixture
def told(monkeypatch):
    """`answers` gives what `say(conversation, message)` makes of each right message, and `behind` where none is right.

    Returns the batches of prompts that it was given, each with its options.
    """

    def tell(dialogues, say, behind=None):
        script, given = {}, []
        for played in dialogues:
            for conversation, message in prompts_of(played):
                script[RENDERER.render(conversation).ids] = say(conversation, message)

        def answers(model, prompts, **options):
            given.append((prompts, options))
            return [list(script[prompt] if behind is None else script.get(prompt, behind)) for prompt in prompts]

        monkeypatch.setattr(chat, "answers", answers)
        return given

    return tell


def right(conversation, message):
    return answer_ids(RENDERER, conversation, message)


def with_calls(change):
    """The message with every call changed."""

    def say(conversation, message):
        calls = [change(call) for call in message.tool_calls]
        return answer_ids(RENDERER, conversation, replace(message, tool_calls=tuple(calls)))

    return say


def closing(text):
    """A last answer in the response channel, wherever it began."""
    return TOKENIZER.encode_control(f"<|open|>response<|sep|>{text}<|close|>response<|sep|><|end_of_msg|>")


def shares(outcomes):
    found = report(outcomes, {}).scores["all"]
    return found.well_formed, found.calls_right, found.answer_right


# --- Play


def test_who_answers_as_the_generator_does_is_right_in_all(told):
    dialogues = ONE_OF_EACH + [dialogue(seed, heldout=True) for seed in range(12)]
    told(dialogues, right)
    outcomes = play(None, TOKENIZER, dialogues)
    assert [outcome.kind for outcome in outcomes] == [played.turn.kind for played in dialogues]
    assert shares(outcomes) == (1.0, 1.0, 1.0)
    for outcome, played in zip(outcomes, dialogues, strict=True):
        assert outcome.num_tokens == sum(len(right(*each)) for each in prompts_of(played))
        assert [len(answer.calls) for answer in outcome.answers] == [*map(len, played.turn.steps), 0]


def changed(call):
    name = next(iter(call.arguments))
    return replace(call, arguments={**call.arguments, name: "1 + 1" if name == "expression" else "nobody"})


@pytest.mark.parametrize(
    "say",
    [
        with_calls(changed),
        with_calls(lambda call: replace(call, arguments={**call.arguments, "more": 1})),
        with_calls(lambda call: replace(call, arguments=dict(list(call.arguments.items())[1:]))),
    ],
    ids=["another value", "one too many", "one too few"],
)
def test_a_call_with_other_arguments_is_well_formed_and_wrong(told, say):
    told(CALLS, say, behind=closing("I do not know."))
    assert shares(play(None, TOKENIZER, CALLS)) == (1.0, 0.0, 0.0)


def test_calls_in_another_order_are_wrong_and_arguments_in_another_are_right(told):
    both, convert = one("both"), one("convert")

    def backwards(conversation, message):
        return right(conversation, replace(message, tool_calls=message.tool_calls[::-1]))

    told(both, backwards, behind=closing(both[0].turn.reply))
    assert shares(play(None, TOKENIZER, both)) == (1.0, 0.0, 1.0)

    say = with_calls(lambda call: replace(call, arguments=dict(list(call.arguments.items())[::-1])))
    told(convert, say, behind=closing(convert[0].turn.reply))
    assert shares(play(None, TOKENIZER, convert)) == (1.0, 1.0, 1.0)


def test_an_answer_without_the_call_that_it_needs_is_right_at_best_by_chance(told):
    told(CALLS, lambda conversation, message: closing("It is so."))
    assert shares(play(None, TOKENIZER, CALLS)) == (1.0, 0.0, 0.0)
    for played in CALLS:
        told([played], lambda conversation, message, played=played: closing(played.turn.reply))
        assert shares(play(None, TOKENIZER, [played])) == (1.0, 0.0, 1.0)


def test_a_call_where_none_is_wanted_is_wrong(told):
    refused = one("refused")
    call = ToolCall(id="x", name=refused[0].turn.needs[0], arguments={})
    told(refused, lambda conversation, message: right(conversation, replace(message, tool_calls=(call,))))
    (outcome,) = play(None, TOKENIZER, refused)
    assert len(outcome.answers) == 1  # the tool is not declared, so the call cannot be executed
    assert (outcome.well_formed, outcome.calls_right, outcome.answer_right) == (True, False, False)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ids: ids[:-1],  # it does not end
        lambda ids: [*ids[:-1], TOKENIZER.special_ids["<|sep|>"], ids[-1]],
        lambda ids: [*ids[:-1], TOKENIZER.special_ids["[UNK]"], ids[-1]],
        lambda ids: [*TOKENIZER.encode_control("<|open|>nothing<|sep|>"), *ids],
    ],
    ids=["cut", "a stray mark", "another control id", "an unknown element"],
)
def test_what_is_not_well_formed_is_found_in_any_answer(told, spoil):
    told(ONE_OF_EACH, lambda *each: spoil(right(*each)), behind=closing("It is so."))
    assert shares(play(None, TOKENIZER, ONE_OF_EACH))[0] == 0.0


def test_one_answer_that_is_not_well_formed_is_enough(told):
    """A mark too many behind a whole call: the call is made, and all else is right."""

    def say(conversation, message):
        ids = right(conversation, message)
        return [*ids[:-1], TOKENIZER.special_ids["<|sep|>"], ids[-1]] if message.tool_calls else ids

    told(CALLS, say)
    assert shares(play(None, TOKENIZER, CALLS)) == (0.0, 1.0, 1.0)


def test_who_calls_without_an_end_is_stopped_after_four_answers(told):
    arithmetic = one("arithmetic")
    first = right(*next(prompts_of(arithmetic[0])))
    told(arithmetic, lambda *_: first, behind=first)
    (outcome,) = play(None, TOKENIZER, arithmetic)
    assert len(outcome.answers) == chat.MAX_MESSAGES == 4
    assert (outcome.well_formed, outcome.calls_right, outcome.answer_right) == (True, False, False)


def test_the_results_are_those_of_the_tools(told):
    """What is wrong with a call is told to the model, which may then call again."""
    (played,) = one("weekday")
    conversation, message = next(prompts_of(played))
    wrong = replace(message, tool_calls=(ToolCall(id="x", name="weekday", arguments={"date": "soon"}),))
    given = told([played], lambda *_: right(conversation, wrong), behind=closing("I cannot."))
    play(None, TOKENIZER, [played])
    (_, _), ((prompt,), _) = given
    assert "wanted a date such as 2024-03-17, got 'soon'" in TOKENIZER.decode(prompt)


def test_dialogues_are_played_in_batches_that_shrink_and_each_draws_for_itself(told, monkeypatch):
    monkeypatch.setattr(chat, "_BATCH", 5)
    given, said = told(ONE_OF_EACH, right), []
    outcomes = play(None, TOKENIZER, ONE_OF_EACH, temperature=0.5, top_p=0.9, seed=7, say=said.append)
    num, starts = len(KINDS), range(0, len(KINDS), 5)
    assert [outcome.kind for outcome in outcomes] == [played.turn.kind for played in ONE_OF_EACH]
    assert said == [f"{min(start + 5, num)} of {num} dialogues" for start in starts]
    steps = [len(played.turn.steps) for played in ONE_OF_EACH]
    # In each turn those are left that have made as many calls.
    sizes = [sum(count >= turn for count in steps[start : start + 5]) for start in starts for turn in range(4)]
    assert [len(prompts) for prompts, _ in given] == [size for size in sizes if size]
    for _, options in given:
        assert options | {"temperature": 0.5, "top_p": 0.9, "end_id": TOKENIZER.eos_id} == options
    assert len({options["seed"] for _, options in given}) == len(given)


# --- Report


def outcome_of(kind, num_tokens, *right):
    usage = Usage(num_completion=num_tokens, num_reasoning=0)
    answer = Answer(reasoning="", text="", calls=(), flaws=(), finish_reason="stop", usage=usage)
    well_formed, calls_right, answer_right = right
    return Outcome(
        kind=kind,
        answers=(answer, answer),
        well_formed=well_formed,
        calls_right=calls_right,
        answer_right=answer_right,
    )


def test_a_report_by_hand():
    outcomes = [
        outcome_of("days", 10, True, True, True),
        outcome_of("days", 20, True, False, False),
        outcome_of("days", 30, True, True, False),
        outcome_of("days", 40, False, False, False),
        outcome_of("talk", 50, True, True, True),
    ]
    found = report(outcomes, {"low": outcomes[:1], "max": outcomes[1:3]})
    days = Score(num=4, well_formed=0.75, calls_right=0.5, answer_right=0.25, tokens=50.0)  # of two answers each
    talk = Score(num=1, well_formed=1.0, calls_right=1.0, answer_right=1.0, tokens=100.0)
    every = Score(num=5, well_formed=0.8, calls_right=0.6, answer_right=0.4, tokens=60.0)
    assert found.scores == {"days": days, "talk": talk, "with tools": days, "without tools": talk, "all": every}
    assert found.effort_tokens == {"low": 20.0, "max": 50.0}
    content = found.to_json()
    assert content["scores"]["talk"] == {
        "num": 1,
        "well_formed": 1.0,
        "calls_right": 1.0,
        "answer_right": 1.0,
        "tokens": 100.0,
    }
    assert content["effort_tokens"] == {"low": 20.0, "max": 50.0}


def test_every_kind_is_with_tools_or_without():
    assert {*WITH_TOOLS, *NO_CALLS} == set(KINDS) and len(WITH_TOOLS) + len(NO_CALLS) == len(KINDS)
    for played in ONE_OF_EACH:
        assert bool(played.turn.steps) == (played.turn.kind in WITH_TOOLS)


def test_an_evaluation_is_of_held_out_dialogues_and_of_the_same_questions_at_each_effort(told):
    heldout = [dialogue(3 * 1_000_003 + number, heldout=True) for number in range(6)]
    same = {effort: [dialogue(-1 - number, heldout=True, effort=effort) for number in range(3)] for effort in EFFORTS}
    questions = [
        [message.text for played in group for message in played.prompt.messages if message.role == "user"]
        for group in same.values()
    ]
    assert questions[0] == questions[1] == questions[2]
    told([*heldout, *(played for group in same.values() for played in group)], right)
    said = []
    found = evaluate(None, TOKENIZER, num_dialogues=6, num_efforts=3, seed=3, say=said.append)
    assert found.scores["all"] == Score(
        num=6, well_formed=1.0, calls_right=1.0, answer_right=1.0, tokens=found.scores["all"].tokens
    )
    low, high, most = (found.effort_tokens[effort] for effort in EFFORTS)
    assert low < high < most
    assert said == ["6 of 6 dialogues", "effort low", "effort high", "effort max"]


def test_a_table_has_a_column_for_each_model():
    one = Score(num=1, well_formed=1.0, calls_right=0.5, answer_right=0.25, tokens=9.0)
    reports = {
        "before": ChatReport(scores={"talk": one}, effort_tokens={"low": 5.4, "max": 30.6}),
        "now": ChatReport(scores={"talk": one, "days": one}, effort_tokens={}),
    }
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(table(reports))
    rows = [[cell.strip() for cell in line.split("│")] for line in console.export_text().splitlines() if "│" in line]
    assert [row[1:-1] for row in rows] == [
        ["days", "-", "100.0  50.0  25.0"],
        ["talk", "100.0  50.0  25.0", "100.0  50.0  25.0"],
        ["tokens: low, high, max", "5 31", "-"],
    ]


def test_of_nothing_nothing_comes():
    assert play(None, TOKENIZER, []) == [] and report([], {}).scores == {}
