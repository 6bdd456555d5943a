"""Generated dialogues: what they say is so, what they need is there, and what is held out is not learned."""

import re
import string
from collections import Counter
from functools import cache

import pytest

from trivium.chat.message import Conversation
from trivium.chat.render import render
from trivium.envs.grade import says
from trivium.envs.synth import phrasing
from trivium.envs.synth.dialogue import EFFORTS, KINDS, WEIGHTS, dialogue, drill
from trivium.envs.synth.phrasing import Phrasings
from trivium.envs.synth.tools import FIELDS, TOOLS

NUM_SEEDS = 400


@cache
def dialogues(heldout):
    return [dialogue(seed, heldout=heldout) for seed in range(NUM_SEEDS)]


def every():
    return [*dialogues(False), *dialogues(True), *(drill(seed) for seed in range(NUM_SEEDS))]


def turns_of(conversation):
    """The messages of each question up to the next one."""
    turns = []
    for message in conversation.messages:
        if message.role == "user":
            turns.append([])
        turns[-1].append(message)
    return turns


def calls_of(messages):
    """The calls of each message that has any: names and arguments."""
    return [
        tuple((call.name, call.arguments) for call in message.tool_calls) for message in messages if message.tool_calls
    ]


def text_of(conversation):
    return render(conversation, answer=False).text


# --- What they say


def test_every_call_has_the_result_that_the_tool_gives():
    num_calls = 0
    for made in every():
        results = {
            message.tool_call_id: message.text for message in made.conversation.messages if message.role == "tool"
        }
        calls = [call for message in made.conversation.messages for call in message.tool_calls]
        assert results.keys() == {call.id for call in calls} and len(results) == len(calls)
        for call in calls:
            assert made.toolbox.run(call.name, call.arguments) == results[call.id]
            assert not results[call.id].startswith("error")
            num_calls += 1
    assert num_calls > NUM_SEEDS


def test_the_last_turn_is_what_it_says_it_is():
    for made in every():
        *_, last = turns_of(made.conversation)
        assert made.conversation.messages[: made.asked][-1] == last[0]
        assert last[0].text == made.turn.question
        assert calls_of(last) == list(made.turn.steps)
        assert last[-1].text == made.turn.reply and not last[-1].tool_calls
        assert all(says(made.turn.reply, each) for each in made.turn.answers)


def test_what_a_tool_said_last_stands_in_the_answer():
    """So code that knows nothing of kinds can tell a right answer: of every turn, not only the last."""
    for made in every():
        for messages in turns_of(made.conversation):
            results = [message.text for message in messages if message.role == "tool"]
            assert not results or says(messages[-1].text, results[-1])


def test_what_a_call_says_was_said_before():
    """An argument is copied from the question, from a result or from the answer before: nothing is made up.

    A question may have no spaces around a sign, where a call has.
    """
    for made in every():
        for at, message in enumerate(made.conversation.messages):
            before = " ".join(each.text for each in made.conversation.messages[:at]).lower()
            for call in message.tool_calls:
                for word in " ".join(str(value) for value in call.arguments.values()).lower().split():
                    whole = rf"(?<![\w.]){re.escape(word)}(?!\w|\.\d)"
                    assert word in "+-*/" or re.search(whole, before), (call, before)


def test_one_to_five_questions_and_at_most_seven_messages_of_the_assistant():
    """Those and all tools are 1,853 tokens of the quickstart's at most; the loader refuses more than a row, 2,048."""
    turns = Counter()
    for seed in range(2000):
        made = dialogue(seed)
        turns[sum(message.role == "user" for message in made.conversation.messages)] += 1
        assert sum(message.role == "assistant" for message in made.conversation.messages) <= 7
    assert turns.keys() == {1, 2, 3, 4, 5} and min(turns.values()) > 100


def test_every_question_is_answered_in_turn():
    for made in every():
        for messages in turns_of(made.conversation):
            roles = [message.role for message in messages]
            assert roles[0] == "user" and roles[-1] == "assistant" and "user" not in roles[1:]


# --- Tools


def test_what_is_called_is_declared_and_what_is_refused_is_not():
    for made in every():
        declared = [tool.name for tool in made.conversation.tools]
        assert len(set(declared)) == len(declared) and set(declared) <= set(TOOLS)
        assert all(TOOLS[tool.name] == tool for tool in made.conversation.tools)
        assert {call.name for message in made.conversation.messages for call in message.tool_calls} <= set(declared)
        if made.turn.kind == "refused":
            assert made.turn.needs and not set(made.turn.needs) & set(declared)
        else:
            assert set(made.turn.needs) <= set(declared)


def test_also_a_refusal_before_the_last_turn_lacks_its_tool():
    """What was refused is told from what its plan says is not there."""
    num_refused = 0
    for made in dialogues(False) + dialogues(True):
        declared = {tool.name for tool in made.conversation.tools}
        for message in made.conversation.messages:
            _, _, rest = message.reasoning.partition("There is no ")
            if rest:
                num_refused += 1
                assert rest.removesuffix(" here.") in set(TOOLS) - declared
    assert num_refused > 10


def test_some_tools_more_are_declared_than_needed_or_all_in_any_order():
    """`trivium chat` declares all of them: a model that never saw that many would not know what to do."""
    orders, more, num_all = set(), Counter(), 0
    for made in dialogues(False):
        called = {call.name for message in made.conversation.messages for call in message.tool_calls}
        declared = [tool.name for tool in made.conversation.tools]
        orders.add(declared == sorted(declared))
        more[len(set(declared) - called)] += 1
        num_all += len(declared) == len(TOOLS)
    assert orders == {True, False} and min(more[number] for number in range(6)) > 0
    assert 0.1 < num_all / NUM_SEEDS < 0.4  # where anything is refused something lacks
    both = [[tool.name for tool in made.conversation.tools] for made in dialogues(False) if made.turn.kind == "look up"]
    assert {declared.index("find_person") < declared.index("get_field") for declared in both} == {True, False}


# --- Held out


def phrasings():
    return {name: value for name, value in vars(phrasing).items() if isinstance(value, Phrasings)}


def plain(template):
    """A template as a pattern of words: what is filled in is one, whatever its name."""
    parts = string.Formatter().parse(template)
    return " ".join("".join(text.lower() + "#" * (field is not None) for text, field, *_ in parts).split())


def test_no_template_is_learned_and_held_out():
    found = phrasings()
    assert len(found) > 10
    for name, templates in found.items():
        assert templates.learned and templates.heldout
        learned, heldout = (
            {plain(template) for template in side} - {""} for side in (templates.learned, templates.heldout)
        )
        assert not learned & heldout, name


def test_no_question_is_asked_in_words_that_were_learned():
    """With what may stand in front of it, and across all that is asked. A frame is asked with its core alone."""
    found = {name: each for name, each in phrasings().items() if not any("{core}" in text for text in each.learned)}
    openings = found.pop("OPENINGS")

    def questions(heldout):
        templates = [template for each in found.values() for template in each.of(heldout)]
        return {plain(opening + template) for opening in openings.of(heldout) for template in templates}

    assert not questions(True) & questions(False)


def test_of_the_questions_that_are_asked_none_is_in_both_parts():
    def questions(made):
        return {
            message.text.lower() for each in made for message in each.conversation.messages if message.role == "user"
        }

    learned = questions(dialogues(False)) | questions(drill(seed) for seed in range(NUM_SEEDS))
    assert not learned & questions(dialogues(True))


# --- Seeds, kinds and efforts


@pytest.mark.parametrize("heldout", [False, True])
def test_a_seed_is_a_dialogue_and_another_seed_another(heldout):
    texts = [text_of(made.conversation) for made in dialogues(heldout)]
    assert texts == [text_of(dialogue(seed, heldout=heldout).conversation) for seed in range(NUM_SEEDS)]
    assert len(set(texts)) > 0.98 * NUM_SEEDS  # "Hello!" may come twice
    assert text_of(dialogue(-1).conversation) not in texts


def test_the_held_out_dialogue_of_a_seed_is_another_one():
    pairs = zip(dialogues(False), dialogues(True), strict=True)
    assert all(one.conversation != other.conversation and one.toolbox != other.toolbox for one, other in pairs)


def test_kinds_come_as_often_as_they_weigh():
    made = dialogues(False) + dialogues(True)
    total = sum(WEIGHTS.values())
    for kind, weight in WEIGHTS.items():
        share = weight / total
        got = sum(each.turn.kind == kind for each in made)
        deviation = (len(made) * share * (1 - share)) ** 0.5
        assert abs(got - len(made) * share) < 4.5 * deviation, kind
    assert {each.turn.kind for each in made} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_is_asked_for_is_that_of_the_last_turn(kind):
    for seed in range(12):
        assert dialogue(seed, kinds=(kind,)).turn.kind == kind
    assert dialogue(3, kinds=[kind]).conversation == dialogue(3, kinds=(kind,)).conversation


def test_follow_ups_go_on_with_the_number_before():
    for made in (
        dialogue(seed, heldout=heldout, kinds=("follow up",)) for seed in range(50) for heldout in (False, True)
    ):
        *_, before, last = turns_of(made.conversation)
        (((_, arguments),),) = made.turn.steps
        a, _, b = arguments["expression"].split(" ")
        assert says(before[-1].text, a) and says(last[0].text, b) and not says(last[0].text, a)


def test_the_effort_says_how_much_is_thought():
    lengths = {}
    for effort in EFFORTS:
        asked = [dialogue(seed, effort=effort) for seed in range(100)]
        for made in asked:
            assert made.conversation.options.effort == (effort if made.conversation.options.thinking else None)
        lengths[effort] = [
            sum(len(message.reasoning) for message in made.conversation.messages)
            for made in asked
            if made.conversation.options.thinking
        ]
    assert set(lengths["low"]) == {0}
    assert all(0 < high < most for high, most in zip(lengths["high"], lengths["max"], strict=True))
    questions = [[dialogue(seed, effort=effort).prompt.messages[0] for seed in range(20)] for effort in EFFORTS]
    assert questions[0] == questions[1] == questions[2]


def test_some_do_not_think_and_then_say_nothing_of_it():
    silent = [made for made in dialogues(False) if not made.conversation.options.thinking]
    assert 0.03 < len(silent) / NUM_SEEDS < 0.15  # 8 %
    for made in silent:
        assert not any(message.reasoning for message in made.conversation.messages)
        assert made.conversation.options.effort is None


def test_a_drill_is_one_short_turn_without_tools():
    lengths = []
    for seed in range(NUM_SEEDS):
        made = drill(seed)
        assert made.conversation.tools == () and len(made.conversation.messages) == 2 and made.asked == 1
        assert made.conversation.options.effort is None and made.turn.kind in ("echo", "short")
        lengths.append(len(text_of(made.conversation)))
    others = sorted(len(text_of(made.conversation)) for made in dialogues(False))
    assert sorted(lengths)[NUM_SEEDS // 2] < others[NUM_SEEDS // 2] / 3
    assert [drill(seed).conversation for seed in range(9)] == [drill(seed).conversation for seed in range(9)]


def test_what_is_refused_mostly_has_no_tools_at_all_and_else_lacks_its_own():
    """Which tools are declared a small model does not learn to tell: where it was asked to, it refused what it could do."""
    refused = [dialogue(seed, kinds=("refused",)) for seed in range(NUM_SEEDS)]
    bare = [made for made in refused if not made.conversation.tools]
    assert 0.65 < len(bare) / NUM_SEEDS < 0.95
    assert {made.turn.kind for made in refused} == {"refused"}
    for made in bare:
        assert not any(message.tool_calls for message in made.conversation.messages)
    for made in dialogues(False) + dialogues(True):
        if made.turn.kind != "refused":
            assert not any("There is no " in message.reasoning for message in made.conversation.messages)


def test_the_directory_is_the_tool_boxs_own_and_no_two_are_alike():
    for made in dialogues(False)[:50]:
        people = made.toolbox.people
        assert len({person.id for person in people}) == len({person.name for person in people}) == len(people) == 8
        assert all(set(person.record) == set(FIELDS) for person in people)
    assert len({tuple(person.id for person in made.toolbox.people) for made in dialogues(False)[:50]}) == 50


def test_a_prompt_is_the_conversation_up_to_its_last_question():
    for made in dialogues(False)[:50]:
        prompt = made.prompt
        assert isinstance(prompt, Conversation) and prompt.options == made.conversation.options
        assert prompt.messages[-1].role == "user"
        assert text_of(made.conversation).startswith(text_of(prompt))
        behind = made.conversation.messages[len(prompt.messages) :]
        assert not any(message.role == "user" for message in behind)
