"""A small tokenizer for chats, a few conversations as requests, and a model that says what it is told."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trivium.api import Piece
from trivium.chat.message import Conversation, Message
from trivium.chat.render import Renderer, render
from trivium.chat.tokenizer import Tokenizer, train_tokenizer
from trivium.envs.synth.dialogue import dialogue

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


@cache
def tokenizer_of(num_ranks: int, num_dialogues: int = 40) -> Tokenizer:
    """Trained on generated dialogues, so that what stands in a frame is few tokens; " [/]" is one."""
    texts = [render(dialogue(seed).conversation).text for seed in range(num_dialogues)]
    return train_tokenizer([*texts, " [/]" * 300 * num_dialogues], num_ranks)


def plain(number: int) -> dict[str, Any]:
    """A question and an answer."""
    return {
        "messages": [
            {"role": "user", "content": f"Say {number}."},
            {"role": "assistant", "content": f"It is {number}.", "reasoning_content": f"They want {number}."},
        ]
    }


def with_tool(a: int, b: int) -> dict[str, Any]:
    """A question that a call answers."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": a, "b": b})}}
    return {
        "tools": [ADD],
        "messages": [
            {"role": "user", "content": f"{a} + {b}?"},
            {"role": "assistant", "reasoning_content": "add", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": str(a + b)},
            {"role": "assistant", "content": f"{a + b}."},
        ],
    }


def write_jsonl(path: Path, bodies: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


def answer_ids(renderer: Renderer, prompt: Conversation, message: Message) -> list[int]:
    """What a model that answers with the message writes behind the prompt, its end id too."""
    before = renderer.render(prompt)
    after = renderer.render(Conversation(messages=(*prompt.messages, message), options=prompt.options), answer=False)
    assert after.ids[: len(before.ids)] == before.ids
    return list(after.ids[len(before.ids) :])


def scripted(
    tokenizer: Tokenizer, script: Sequence[Callable[[], Iterable[int]] | Iterable[int]]
) -> Callable[..., Iterator[Piece]]:
    """In place of `Model.stream`: one answer after another, id by id; the prompts it was given are in `.prompts`."""
    left = iter(script)

    def stream(prompt: Sequence[int], **options: Any) -> Iterator[Piece]:
        stream.prompts.append((list(prompt), options))
        ids = list(next(left))
        for place, id_ in enumerate(ids):
            end = id_ == tokenizer.eos_id
            last = place + 1 == len(ids)
            reason = "stop" if end else "length" if last else None
            yield Piece(ids=() if end else (id_,), text="", logprobs=(), finish_reason=reason)

    stream.prompts = []
    return stream
