"""Dialogue: generated conversations with tools, in which code knows what is to be called and what the answer is."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from trivium.chat.message import Conversation, Effort, Message, Options, Tool, ToolCall, assistant, tool_result, user
from trivium.envs.synth import phrasing
from trivium.envs.synth.phrasing import Phrasings
from trivium.envs.synth.tools import FIELDS, SHORT_UNITS, TOOLS, UNITS, WEEKDAYS, Person, Toolbox, number_text

EFFORTS: tuple[Effort, ...] = ("low", "high", "max")
_MAX_WRITTEN = 7  # messages of the assistant
Step = tuple[tuple[str, dict[str, Any]], ...]  # calls of one message: names and arguments


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A question, the calls that answer it, message by message, and the words that must all stand in the answer.

    `needs` are the tools without which it cannot be answered. `plan` says for each step why it is made, for the reasoning.
    """

    kind: str
    question: str
    steps: tuple[Step, ...]
    answers: tuple[str, ...]
    reply: str
    needs: tuple[str, ...] = ()
    plan: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """A conversation whose last turn is `turn`. `asked` of its messages end with that turn's question."""

    conversation: Conversation
    asked: int
    turn: Turn
    toolbox: Toolbox

    @property
    def prompt(self) -> Conversation:
        """Up to the last question."""
        return replace(self.conversation, messages=self.conversation.messages[: self.asked])


def dialogue(seed: int, *, heldout: bool = False, kinds: Sequence[str] = (), effort: Effort | None = None) -> Dialogue:
    """The dialogue of a seed: one to five turns, the last of one of the `kinds`.

    Held-out ones are phrased otherwise, and their seeds give other numbers. The tools declared are those of its turns
    and some others, or all others that there are, in any order. Where the last turn is of kind "refused" mostly none are,
    and all that wants one is refused; else the one that it needs lacks.
    """
    draw = random.Random(f"{'held out' if heldout else 'learned'} {seed}")
    people = _people(draw)
    toolbox = Toolbox(people=people)
    make = _Maker(draw, heldout, toolbox)
    count = draw.choice((1, 1, 1, 2, 2, 3, 4, 5))
    last = draw.choice(kinds) if kinds else make.any_kind(KINDS)
    count = max(count, 2) if last == "follow up" else count
    bare = last == "refused" and draw.random() < 0.75
    before = [kind for kind in KINDS if (kind in NO_CALLS if bare else kind != "refused")]
    turns: list[Turn] = []
    # Drawn again where a tool would be both declared and lacking, or where all would not fit into 2,048 tokens.
    while not turns or _needed(turns) & _lacking(turns) or sum(len(turn.steps) + 1 for turn in turns) > _MAX_WRITTEN:
        turns = []
        for index in reversed(range(count)):
            before_last = "arithmetic" if index == 1 and last == "follow up" else make.any_kind(before)
            turns.append(make.made[before_last if index else last](turns))
    declared = () if bare else _declared(draw, turns)
    said = effort is not None or draw.random() < 0.6  # else nothing is said of it, and it is thought as at high
    effort = effort or (draw.choice(EFFORTS) if said else "high")
    thinking = draw.random() >= 0.08
    messages: list[Message] = []
    asked = 0
    for turn in turns:
        asked = len(messages) + 1
        messages += _messages(turn, toolbox, declared, effort if thinking else None, len(messages))
    conversation = Conversation(
        messages=tuple(messages),
        options=Options(tools=declared, thinking=thinking, effort=effort if thinking and said else None),
    )
    return Dialogue(conversation=conversation, asked=asked, turn=turns[-1], toolbox=toolbox)


def drill(seed: int) -> Dialogue:
    """One turn without tools and efforts, shorter than other dialogues: words to say again, or a question in short.

    What a call needs is copied and told apart in a tenth of the tokens.
    """
    draw = random.Random(f"drill {seed}")
    toolbox = Toolbox(people=_people(draw))
    make = _Maker(draw, False, toolbox)
    turn = make.echo([]) if draw.random() < 0.4 else make.short([])
    messages = _messages(turn, toolbox, (), draw.choice(("low", "low", "high")), 0)
    return Dialogue(conversation=Conversation(messages=tuple(messages)), asked=1, turn=turn, toolbox=toolbox)


class _Maker:
    def __init__(self, draw: random.Random, heldout: bool, toolbox: Toolbox) -> None:
        self.draw, self.heldout, self.toolbox = draw, heldout, toolbox
        self.made: dict[str, Callable[[list[Turn]], Turn]] = {
            "arithmetic": self.arithmetic,
            "convert": self.convert,
            "days": self.days,
            "weekday": self.weekday,
            "look up": self.look_up,
            "both": self.both,
            "follow up": self.follow_up,
            "refused": self.refused,
            "impossible": self.impossible,
            "small": self.small,
            "talk": self.talk,
            "echo": self.echo,
            "short": self.short,
        }

    def any_kind(self, kinds: Sequence[str]) -> str:
        return self.draw.choices(kinds, weights=[WEIGHTS[kind] for kind in kinds])[0]

    def ask(self, phrasings: Phrasings, **values: Any) -> str:
        text = self.draw.choice(phrasings.of(self.heldout)).format(**values)
        opening = self.draw.choice(phrasing.OPENINGS.of(self.heldout))
        if self.draw.random() < 0.2:  # as many people type
            return opening.lower() + text.rstrip(".?!")
        return opening + text if opening else text[:1].upper() + text[1:]

    def number(self, decimals: bool = True) -> str:
        digits = self.draw.choice((1, 2, 2, 3, 3, 4, 5))
        whole = self.draw.randrange(10 ** (digits - 1), 10**digits)
        if decimals and self.draw.random() < 0.15:
            return number_text(Decimal(whole) + Decimal(self.draw.randrange(1, 100)) / 100)
        return str(whole)

    def arithmetic(self, before: list[Turn]) -> Turn:
        if self.draw.random() < 0.1:
            a, b, c = (self.number(decimals=False) for _ in range(3))
            expression = f"{a} {self.draw.choice('+-*')} {b} {self.draw.choice('+-*')} {c}"
            return self.calculation("arithmetic", self.ask(phrasing.EXPRESSION, expression=expression), expression)
        sign, phrasings = self.draw.choice(_SIGNS)
        a, b = self.number(), self.number(decimals=sign != "/")
        return self.calculation("arithmetic", self.ask(phrasings, a=a, b=b), f"{a} {sign} {b}")

    def follow_up(self, before: list[Turn]) -> Turn:
        if not before or before[-1].kind not in ("arithmetic", "follow up"):
            return self.arithmetic(before)
        a, b = before[-1].answers[-1], self.number(decimals=False)
        sign, phrasings = self.draw.choice((("+", phrasing.MORE), ("*", phrasing.TIMES)))
        return self.calculation("follow up", self.ask(phrasings, b=b), f"{a} {sign} {b}")

    def calculation(self, kind: str, question: str, expression: str) -> Turn:
        answer = self.toolbox.run("calculate", {"expression": expression})
        return Turn(
            kind=kind,
            question=question,
            steps=((("calculate", {"expression": expression}),),),
            answers=(answer,),
            reply=f"{expression} = {answer}",
            needs=("calculate",),
            plan=(f"calculate works out {expression}.",),
        )

    def both(self, before: list[Turn]) -> Turn:
        one, two = (f"{self.number(False)} {self.draw.choice('+-*')} {self.number(False)}" for _ in range(2))
        results = [self.toolbox.run("calculate", {"expression": text}) for text in (one, two)]
        return Turn(
            kind="both",
            question=self.ask(phrasing.BOTH, one=one, two=two),
            steps=(tuple(("calculate", {"expression": text}) for text in (one, two)),),
            answers=tuple(results),
            reply=f"{one} = {results[0]} and {two} = {results[1]}",
            needs=("calculate",),
            plan=(f"calculate works out {one} and {two}.",),
        )

    def convert(self, before: list[Turn]) -> Turn:
        unit, to = (self.unit(name) for name in self.draw.sample(UNITS[self.draw.choice(list(UNITS))], 2))
        value = self.number()
        arguments = {"value": float(value) if "." in value else int(value), "unit": unit, "to": to}
        answer = self.toolbox.run("convert", arguments)
        return Turn(
            kind="convert",
            question=self.ask(phrasing.CONVERT, value=value, unit=unit, to=to),
            steps=((("convert", arguments),),),
            answers=(answer,),
            reply=f"{value} {unit} are {answer} {to}.",
            needs=("convert",),
            plan=(f"convert turns {value} {unit} to {to}.",),
        )

    def unit(self, name: str) -> str:
        """The unit in full, or in short."""
        return self.draw.choice(SHORT_UNITS[name]) if name in SHORT_UNITS and self.draw.random() < 0.2 else name

    def date(self) -> datetime.date:
        return datetime.date(1950, 1, 1) + datetime.timedelta(days=self.draw.randrange(31_000))

    def days(self, before: list[Turn]) -> Turn:
        start = self.date()
        end = start + datetime.timedelta(days=self.draw.randrange(1, 2000))
        arguments = {"start": start.isoformat(), "end": end.isoformat()}
        answer = self.toolbox.run("days_between", arguments)
        return Turn(
            kind="days",
            question=self.ask(phrasing.DAYS, **arguments),
            steps=((("days_between", arguments),),),
            answers=(answer,),
            reply=f"From {start} to {end} it is {answer} days.",
            needs=("days_between",),
            plan=(f"days_between counts from {start} to {end}.",),
        )

    def weekday(self, before: list[Turn]) -> Turn:
        date = self.date().isoformat()
        answer = self.toolbox.run("weekday", {"date": date})
        return Turn(
            kind="weekday",
            question=self.ask(phrasing.WEEKDAY, date=date),
            steps=((("weekday", {"date": date}),),),
            answers=(answer,),
            reply=f"{date} is a {answer}.",
            needs=("weekday",),
            plan=(f"weekday tells the day of {date}.",),
        )

    def look_up(self, before: list[Turn]) -> Turn:
        person, field = self.draw.choice(self.toolbox.people), self.draw.choice(FIELDS)
        answer = person.record[field]
        return Turn(
            kind="look up",
            question=self.ask(phrasing.LOOK_UP, field=field, name=person.name),
            steps=(
                (("find_person", {"name": person.name}),),
                (("get_field", {"id": person.id, "field": field}),),
            ),
            answers=(answer,),
            reply=f"The {field} of {person.name} is {answer}.",
            needs=("find_person", "get_field"),
            plan=(f"find_person gives the id of {person.name}.", f"get_field reads the {field} of {person.id}."),
        )

    def refused(self, before: list[Turn]) -> Turn:
        """Something that a tool could do, but the tool is not declared."""
        kind = self.draw.choice(("arithmetic", "convert", "days", "weekday", "look up"))
        wanted = self.made[kind](before)
        return replace(
            wanted,
            kind="refused",
            steps=(),
            answers=("no tool",),
            reply="I have no tool for that.",
            plan=(f"There is no {wanted.needs[0]} here.",),
        )

    def impossible(self, before: list[Turn]) -> Turn:
        place, name = self.draw.choice(phrasing.PLACES), self.draw.choice(phrasing.FIRST)
        return Turn(
            kind="impossible",
            question=self.ask(phrasing.IMPOSSIBLE, place=place, name=name),
            steps=(),
            answers=("no tool",),
            reply="I have no tool for that.",
            plan=("No tool here does that.",),
        )

    def small(self, before: list[Turn]) -> Turn:
        a, b = self.draw.randrange(10), self.draw.randrange(10)
        return Turn(
            kind="small",
            question=self.ask(phrasing.SMALL, a=a, b=b),
            steps=(),
            answers=(str(a + b),),
            reply=f"{a} + {b} = {a + b}",
            plan=(f"{a} + {b} is small.",),
        )

    def talk(self, before: list[Turn]) -> Turn:
        thanks = bool(before) and self.draw.random() < 0.4
        return Turn(
            kind="talk",
            question=self.ask(phrasing.THANKS if thanks else phrasing.GREETING),
            steps=(),
            answers=("welcome" if thanks else "nano-chat",),
            reply="You are welcome." if thanks else phrasing.ABOUT,
            plan=("They thank me." if thanks else "They ask about me.",),
        )

    def echo(self, before: list[Turn]) -> Turn:
        """Words and numbers to be said again: nothing else has as much to copy in so few tokens."""
        said = " ".join(self._item() for _ in range(self.draw.randrange(1, 6)))
        return Turn(
            kind="echo",
            question=self.draw.choice(phrasing.ECHO.of(self.heldout)).format(said=said),
            steps=(),
            answers=(said,),
            reply=said,
            plan=(f"They want {said}",),
        )

    def short(self, before: list[Turn]) -> Turn:
        """Another question in as few words as it has: an expression, a value and its units, dates, a field and a name."""
        kinds = ("arithmetic", "arithmetic", "convert", "convert", "days", "weekday", "look up", "both")
        asked = self.made[self.draw.choice(kinds)]([])
        calls = [arguments for step in asked.steps for _, arguments in step]
        said = " ".join(str(value) for arguments in calls for key, value in arguments.items() if key != "id")
        return Turn(
            kind="short",
            question=self.draw.choice(phrasing.SHORT.of(self.heldout)).format(question=asked.question),
            steps=(),
            answers=(said,),
            reply=said,
            plan=asked.plan[:1],
        )

    def _item(self) -> str:
        kind = self.draw.randrange(8)
        if kind < 3:
            return self.number(decimals=False)
        if kind == 3:
            return f"{self.draw.choice(phrasing.FIRST)} {self.draw.choice(phrasing.LAST)}"
        if kind == 4:
            return self.draw.choice((*UNITS[self.draw.choice(list(UNITS))], *WEEKDAYS, *phrasing.PLACES, *FIELDS))
        if kind == 5:
            return f"{self.number()} {self.draw.choice('+-*/')} {self.number()}"
        return self.date().isoformat() if kind == 6 else self.number()


_SIGNS = (("+", phrasing.ADD), ("-", phrasing.SUBTRACT), ("*", phrasing.MULTIPLY), ("/", phrasing.DIVIDE))
WEIGHTS = {
    "arithmetic": 5.0,
    "follow up": 2.0,
    "both": 1.0,
    "convert": 3.0,
    "days": 2.0,
    "weekday": 1.5,
    "look up": 2.5,
    "refused": 2.0,
    "impossible": 1.2,
    "small": 1.0,
    "talk": 0.8,
    "echo": 0.4,
    "short": 0.4,
}
KINDS = tuple(WEIGHTS)
NO_CALLS = ("refused", "impossible", "small", "talk", "echo", "short")


def _people(draw: random.Random) -> tuple[Person, ...]:
    names = draw.sample([f"{first} {last}" for first in phrasing.FIRST for last in phrasing.LAST], 8)
    ids = draw.sample(range(100, 10_000), len(names))
    return tuple(
        Person(
            id=id_,
            name=name,
            record={
                "phone": f"555-{draw.randrange(1000, 10_000)}",
                "city": draw.choice(phrasing.PLACES),
                "room": f"{draw.choice('ABCDEF')}{draw.randrange(10, 400)}",
            },
        )
        for name, id_ in zip(names, ids, strict=True)
    )


def _declared(draw: random.Random, turns: Sequence[Turn]) -> tuple[Tool, ...]:
    """What the turns need but for those refused, and up to two others, or all others there are."""
    needed = _needed(turns)
    others = [name for name in TOOLS if name not in needed | _lacking(turns)]
    more = len(others) if draw.random() < 0.35 else min(len(others), draw.choice((0, 0, 1, 2)))
    names = [*sorted(needed), *draw.sample(others, more)]
    draw.shuffle(names)
    return tuple(TOOLS[name] for name in names)


def _needed(turns: Sequence[Turn]) -> set[str]:
    return {name for turn in turns if turn.kind != "refused" for name in turn.needs}


def _lacking(turns: Sequence[Turn]) -> set[str]:
    return {name for turn in turns if turn.kind == "refused" for name in turn.needs}


def _messages(turn: Turn, toolbox: Toolbox, tools: Sequence[Tool], effort: Effort | None, at: int) -> list[Message]:
    messages = [user(turn.question)]
    known = f"They ask: {turn.question} I have {', '.join(tool.name for tool in tools) or 'no tools'}."
    for index, step in enumerate(turn.steps):
        calls = [
            ToolCall(id=f"call_{at}_{index}_{place}", name=name, arguments=arguments)
            for place, (name, arguments) in enumerate(step)
        ]
        messages.append(assistant(reasoning=_reasoning(effort, known, turn.plan[index]), tool_calls=calls))
        for call in calls:
            assert isinstance(call.arguments, dict)
            result = toolbox.run(call.name, call.arguments)
            messages.append(tool_result(result, call_id=call.id))
            known = f"The tool says {result}."
    closing = "That is the answer." if turn.steps else turn.plan[-1]
    return [*messages, assistant(turn.reply, reasoning=_reasoning(effort, known, closing))]


def _reasoning(effort: Effort | None, known: str, plan: str) -> str:
    """Nothing, a sentence, or also all that is known: the question and the tools, or the last result."""
    if effort in (None, "low"):
        return ""
    return plan if effort == "high" else f"{known} {plan}"
