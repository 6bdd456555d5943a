"""What a grammar takes: conversations, answers to them, and a small tokenizer."""

import re
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from trivium.chat.grammar import answer_grammar
from trivium.chat.message import Conversation, Options, Tool, ToolCall, assistant, user
from trivium.chat.render import Renderer
from trivium.chat.tokenizer import train_tokenizer
from trivium.model.mask import Grammars

pytest.importorskip("jsonschema", reason="schemas are checked by jsonschema, of the extra [serve]")
pytest.importorskip("llguidance", reason="grammars are held by llguidance, of the extra [serve]")

TOKENIZER = train_tokenizer([Path(textwrap.__file__).read_text(encoding="utf-8")], 600)
RENDERER = Renderer(TOKENIZER)
GRAMMARS = Grammars(TOKENIZER)
MARKS = {"{O}": "<|open|>", "{C}": "<|close|>", "{S}": "<|sep|>", "{E}": "<|end_of_msg|>"}

THINK, SAY, END = "hm{C}think{S}{O}response{S}", "Yes.{C}response{S}", "{C}message{S}{E}"
EMPTY = "{C}response{S}"

NOW = Tool(name="now")
WEATHER = Tool(
    name="weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "at": {"type": ["number", "null"]},
            "places": {"type": "array", "items": {"$ref": "#/$defs/place"}},
            "exact": {"type": "boolean"},
        },
        "required": ["city", "days"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "in": {"$ref": "#/$defs/place"}},
                "required": ["name"],
                "additionalProperties": False,
            }
        },
    },
)


def conversation(*tools, messages=(), **options):
    return Conversation(messages=messages or (user("Hi"),), options=Options(tools=tools, **options))


def ids_of(text):
    """Ids of a text in which {O}, {C}, {S} and {E} are the marks."""
    parts = re.split(r"(\{[OCSE]\})", text)
    return [
        i
        for part in parts
        for i in (TOKENIZER.encode_control(MARKS[part]) if part in MARKS else TOKENIZER.encode(part))
    ]


def taken(grammar, ids):
    """How many ids the grammar takes, and whether it is finished by them."""
    constraint = GRAMMARS.compile(grammar)
    for count, token_id in enumerate(ids):
        try:
            constraint.accept(token_id)
        except ValueError:
            return count, False
    return len(ids), constraint.is_finished


def takes(chat, answer, whole=True):
    """Whether the grammar of the conversation takes this text; as a whole, or as a beginning."""
    ids = ids_of(answer)
    count, finished = taken(answer_grammar(chat), ids)
    return count == len(ids) and (finished or not whole)


def written(chat, said):
    """What the assistant writes when it says this: the ids that training has a loss on."""
    prompt = RENDERER.render(replace(chat, messages=(*chat.messages, said)), answer=False)
    return [token_id for token_id, by_assistant in zip(prompt.ids, prompt.written, strict=True) if by_assistant]


def takes_said(chat, said):
    ids = written(chat, said)
    return taken(answer_grammar(chat), ids) == (len(ids), True)


def called(*calls, **said):
    made = [ToolCall(id=str(at), name=name, arguments=arguments) for at, (name, arguments) in enumerate(calls)]
    return assistant(tool_calls=made, **said)


def takes_arguments(schema, arguments, **tool):
    chat = conversation(Tool(name="f", parameters=schema, **tool), tool_choice="required", parallel_calls=False)
    return takes_said(chat, called(("f", arguments)))


def object_of(required=True, **properties):
    return {"type": "object", "properties": properties, "required": list(properties) if required else []}
