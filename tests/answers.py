"""Answers as text in which {O}, {C}, {S} and {E} stand for marks, and a tokenizer of one id a byte to read them with."""

import json

from trivium.chat.message import Conversation, Options, Tool, user
from trivium.chat.parse import Parser, parse
from trivium.chat.render import Renderer, escaped
from trivium.chat.tokenizer import Tokenizer
from trivium.chat.vocabulary import Vocabulary

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

CALL = '{O}call tool="g" index="1"{S}{C}call{S}'  # of no arguments


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


def is_object(text: str) -> bool:
    """Whether a client would take the text of a call's arguments."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


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
