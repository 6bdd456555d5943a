"""Phrasing: how people ask, as templates, those to learn from and those held out to ask with.

A held-out one says what the others say in another way: its words stand in them, its wording does not.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phrasings:
    """Templates for `str.format`."""

    learned: tuple[str, ...]
    heldout: tuple[str, ...]

    def of(self, heldout: bool) -> tuple[str, ...]:
        return self.heldout if heldout else self.learned


def crossed(frames: Phrasings, cores: Phrasings) -> Phrasings:
    """Every core in every frame. Held out is what has a held-out frame or core: no learned phrasing is among them."""

    def fill(frames: tuple[str, ...], cores: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(frame.replace("{core}", core) for frame in frames for core in cores)

    heldout = fill(frames.heldout, cores.learned) + fill(frames.learned, cores.heldout)
    return Phrasings(learned=fill(frames.learned, cores.learned), heldout=heldout)


def joined(*parts: Phrasings) -> Phrasings:
    """All of them."""
    return Phrasings(
        learned=tuple(text for part in parts for text in part.learned),
        heldout=tuple(text for part in parts for text in part.heldout),
    )


# In front of a question whose first word is small, or that stands alone.
OPENINGS = Phrasings(
    learned=("", "", "", "Please tell me: ", "Quick question: ", "Hi! ", "Hello, ", "I would like to know: ", "Help me: ",
             "One more thing: ", "Now: ", "Tell me, ", "Next: "),
    heldout=("", "", "Hi, tell me: ", "A question: ", "Please: "),
)  # fmt: skip

THING = Phrasings(  # around something that has a value
    learned=("what is {core}?", "how much is {core}?", "work out {core}.", "calculate {core}.", "give me {core}.",
             "tell me {core}.", "I need {core}.", "compute {core}.", "find {core}.", "do you know {core}?",
             "please work out {core}.", "can you tell me {core}?", "{core}", "{core}?", "{core}, please.",
             "I would like to have {core}.", "what would {core} be?", "let me know {core}."),
    heldout=("could you find {core}?", "please give me {core}.", "I want to know {core}.", "what do you get for {core}?",
             "please calculate {core}.", "{core} is what?"),
)  # fmt: skip
DEED = Phrasings(  # around something to be done
    learned=("{core}.", "please {core}.", "can you {core}?", "I want you to {core}.", "would you {core}?", "{core} for me.",
             "help me to {core}.", "now {core}."),
    heldout=("could you {core}?", "{core}, please.", "I need you to {core}."),
)  # fmt: skip


def _operation(sign: str, word: str, noun: str, deeds: Phrasings, tales: Phrasings) -> Phrasings:
    things = Phrasings(
        learned=(f"{{a}} {word} {{b}}", f"{{a}} {sign} {{b}}", f"the {noun} of {{a}} and {{b}}", f"{{a}}{sign}{{b}}"),
        heldout=(),
    )
    return joined(crossed(THING, things), crossed(DEED, deeds), tales)


ADD = _operation(
    "+", "plus", "sum",
    Phrasings(("add {a} and {b}", "add {b} to {a}", "sum up {a} and {b}"), ("add up {a} and {b}",)),
    Phrasings(("I have {a} and get {b} more. How many is that?", "what do {a} and {b} make together?",
               "{a} of these and {b} of those: how many in all?"),
              ("how much do {a} and {b} make?", "I get {b} more and had {a}. How many is that?")),
)  # fmt: skip
SUBTRACT = _operation(
    "-", "minus", "difference",
    Phrasings(("subtract {b} from {a}", "take {b} from {a}", "take {b} away from {a}"), ("subtract from {a} the {b}",)),
    Phrasings(("I have {a} and lose {b}. How many are left?", "what is left of {a} without {b}?",
               "of {a} I give away {b}. How many are left?"),
              ("how much is left if I take {b} from {a}?", "I lose {b} and had {a}. How many are left?")),
)  # fmt: skip
MULTIPLY = _operation(
    "*", "times", "product",
    Phrasings(("multiply {a} by {b}", "multiply {a} and {b}", "take {a} times {b}"), ("multiply {a} with {b}",)),
    Phrasings(("there are {a} boxes of {b} each. How many in all?", "I buy {a} packs of {b} each. How many is that?",
               "{a} rows of {b} each: how many in all?"),
              ("how many are {a} boxes of {b} each?", "{a} packs of {b} each: how many is that?")),
)  # fmt: skip
DIVIDE = _operation(
    "/", "divided by", "quotient",
    Phrasings(("divide {a} by {b}", "split {a} into {b} parts", "share {a} among {b}"), ("divide {a} into {b} parts",)),
    Phrasings(("share {a} among {b} people. How many has each?", "{b} people share {a}. How many has each?",
               "split {a} into {b} parts. How large is each?"),
              ("how many has each if {b} people share {a}?", "{a} are shared among {b} people. How many has each?")),
)  # fmt: skip
EXPRESSION = crossed(THING, Phrasings(("{expression}",), ()))
MORE = Phrasings(  # about the number before
    learned=("and plus {b}?", "add {b} to that.", "now add {b}.", "and {b} more?", "what is that plus {b}?", "please add {b}.",
             "and if I add {b}?"),
    heldout=("now add {b} to that.", "and now plus {b}?"),
)  # fmt: skip
TIMES = Phrasings(
    learned=("and times {b}?", "multiply that by {b}.", "now multiply by {b}.", "and that times {b}?", "what is that times {b}?",
             "please multiply by {b}.", "and if I multiply by {b}?"),
    heldout=("now multiply that by {b}.", "and now times {b}?"),
)  # fmt: skip
CONVERT = joined(
    crossed(THING, Phrasings(("{value} {unit} in {to}",), ())),
    crossed(DEED, Phrasings(("convert {value} {unit} to {to}", "turn {value} {unit} into {to}", "change {value} {unit} to {to}",
                             "express {value} {unit} in {to}"), ("convert {value} {unit} into {to}",))),
    Phrasings(("how many {to} are {value} {unit}?", "I have {value} {unit}. What is that in {to}?",
               "{value} {unit} are how many {to}?", "how many {to} are there in {value} {unit}?",
               "{value} {unit}: how many {to}?", "{value} {unit} to {to}"),
              ("how many {to} is {value} {unit}?", "I have {value} {unit}. How many {to} are that?",
               "what are {value} {unit} in {to}?")),
)  # fmt: skip
DAYS = joined(
    crossed(THING, Phrasings(("the number of days from {start} to {end}", "the number of days between {start} and {end}"), ())),
    crossed(DEED, Phrasings(("count the days from {start} to {end}",), ("count the days between {start} and {end}",))),
    Phrasings(("how many days are there from {start} to {end}?", "how many days lie between {start} and {end}?",
               "days from {start} to {end}", "I leave on {start} and return on {end}. How many days is that?",
               "how many days are there between {start} and {end}?", "from {start} to {end}: how many days?"),
              ("how many days are between {start} and {end}?", "how many days lie from {start} to {end}?",
               "I return on {end} and leave on {start}. How many days is that?")),
)  # fmt: skip
WEEKDAY = joined(
    crossed(THING, Phrasings(("the day of the week of {date}", "the weekday of {date}"), ())),
    Phrasings(("what day of the week is {date}?", "which weekday is {date}?", "on which day of the week does {date} fall?",
               "what weekday was {date}?", "is {date} a Monday, or what day is it?", "which day of the week was {date}?"),
              ("what weekday is {date}?", "which day of the week is {date}?", "on which weekday does {date} fall?")),
)  # fmt: skip
LOOK_UP = joined(
    crossed(THING, Phrasings(("the {field} of {name}", "{name}'s {field}"), ())),
    crossed(DEED, Phrasings(("look up the {field} of {name}", "find the {field} of {name}"), ("look for the {field} of {name}",))),
    Phrasings(("which {field} does {name} have?", "what {field} has {name}?", "{field} of {name}", "{name}: which {field}?",
               "I look for {name}. Which {field}?"),
              ("which {field} has {name}?", "what {field} does {name} have?", "find out which {field} {name} has.")),
)  # fmt: skip
BOTH = Phrasings(  # two sums at once
    learned=("work out {one} and {two}.", "what are {one} and {two}?", "calculate both {one} and {two}.",
             "I need {one} and also {two}.", "{one} and {two}", "tell me {one} and {two}.", "compute {one} and then {two}.",
             "give me {one} and {two}.", "what is {one}, and what is {two}?"),
    heldout=("calculate {one} and also {two}.", "what are {one} and also {two}?", "find {one} and {two}."),
)  # fmt: skip

# What no tool here can do: the subject, as a question.
IMPOSSIBLE = Phrasings(
    learned=("what is the weather in {place}?", "will it rain in {place}?", "book a table in {place}.",
             "send a mail to {name}.", "play some music.", "what is the news from {place}?", "turn on the light.",
             "buy a ticket to {place}.", "translate a text for {name}.", "how is the traffic in {place}?",
             "what is the capital of {place}?", "who is the mayor of {place}?", "tell me a joke.",
             "write a poem about {place}.", "how old is {name}?", "what time is it?", "what should I eat in {place}?",
             "who won the match in {place}?", "sing a song for {name}.", "open the door.", "call {name}.",
             "how far is it to {place}?", "is {place} nice?", "what do you think of {name}?", "how do I get to {place}?",
             "write a program for {name}.", "who was {name}?", "explain the war of {place}.", "I feel sad."),
    heldout=("will there be rain in {place}?", "book a room in {place}.", "send {name} a mail.", "turn off the music.",
             "how is the weather in {place}?", "tell me a story.", "who is the king of {place}?",
             "write a song about {name}.", "when was {name} born?"),
)  # fmt: skip
GREETING = Phrasings(
    learned=("hello!", "hi there!", "good morning!", "hey, how are you?", "hi, who are you?", "what are you?",
             "who are you?", "what is your name?", "are you a large model?", "good evening, what can you do?",
             "what can you do?", "can you help me?"),
    heldout=("good morning, who are you?", "hey, what can you do?", "what is your name, please?", "hi, can you help me?"),
)  # fmt: skip
THANKS = Phrasings(
    learned=("thanks!", "thank you.", "great, thanks.", "good, thank you!"), heldout=("great, thank you!",)
)
SMALL = Phrasings(  # sums that want no tool
    learned=(
        "what is {a} plus {b}, from memory?",
        "without a tool: {a} plus {b}?",
        "in your head: what is {a} plus {b}?",
    ),
    heldout=("what is {a} plus {b}, in your head?", "from memory: {a} plus {b}?"),
)

SHORT = Phrasings(  # a question in as few words as there may be
    learned=("in short: {question}", "say it in short: {question}", "make it short: {question}", "note: {question}"),
    heldout=("please say in short: {question}",),
)
ECHO = Phrasings(
    learned=(
        "repeat: {said}",
        "say {said}",
        "echo {said}",
        "please repeat {said}",
        "write {said} again.",
        "Say: {said}",
    ),
    heldout=("please say {said}", "repeat {said}"),
)

PLACES = (
    "Paris",
    "Rome",
    "Berlin",
    "Oslo",
    "Madrid",
    "Vienna",
    "Lisbon",
    "Dublin",
    "Prague",
    "Athens",
    "Tokyo",
    "Cairo",
)
FIRST = ("Ada", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Karen", "Leo", "Maria",
         "Nina", "Oscar", "Paul", "Rosa", "Simon", "Tina", "Victor")  # fmt: skip
LAST = ("Adams", "Baker", "Clark", "Dunn", "Evans", "Fischer", "Green", "Hall", "Jones", "King", "Lopez", "Meyer",
        "Novak", "Olsen", "Parker", "Quinn", "Reed", "Stone", "Turner", "West")  # fmt: skip

ABOUT = (
    "I am nano-chat, a small K3 model with 8 million parameters. I use tools for arithmetic, dates, units and look-ups, "
    "and I know little else."
)
