"""The chat room's own time beside the tokenizer's: rendering, parsing, and encoding beside tiktoken itself.

    python benchmarks/chat.py [--tokenizer FOLDER]

One process, one thread, all measured in turn: CPU time, the least of the rounds. Ratios are what counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import tiktoken

from trivium.chat.message import Conversation, Message, Options, Tool, ToolCall, assistant, tool_result, user
from trivium.chat.parse import parse
from trivium.chat.pieces import PATTERN
from trivium.chat.render import Content, Renderer, render
from trivium.chat.tokenizer import Tokenizer, train_tokenizer

ROUNDS = 9


def conversation(num_messages: int, num_tools: int) -> Conversation:
    """Turns of four messages: a question, a call, its result and an answer, each of some sentences."""
    words = (
        "The quick survey of rivers shows that water levels rose by 12.5 cm in 2024, most of all near the old bridge. "
    )
    tools = tuple(
        Tool(
            name=f"lookup_{number}",
            description=f"Looks up entry {number} of the register. {words}",
            parameters={
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for."},
                    "limit": {"type": "integer", "minimum": 1},
                    "filters": {"type": "array", "items": {"type": "string", "enum": ["new", "old", "all"]}},
                },
                "required": ["query"],
            },
        )
        for number in range(num_tools)
    )
    messages: list[Message] = []
    while len(messages) < num_messages:
        number = len(messages)
        call = ToolCall(id=f"call_{number}", name="lookup_1", arguments={"query": f"river {number}", "limit": 3})
        messages += [
            user(f"Question {number}: {words * 3}"),
            assistant(reasoning=words * 2, tool_calls=[call]),
            tool_result(words * 8, call_id=call.id),
            assistant(words * 3, reasoning=words),
        ]
    return Conversation(messages=tuple(messages[:num_messages]), options=Options(tools=tools, effort="high"))


def cpu_s(run: Callable[[], object]) -> float:
    """Seconds of CPU of one call, the least of some: what other programs take is not in it."""
    run()
    times = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        run()
        times.append(time.process_time() - begun)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, help="a folder with tiktoken.model; else one trained on our source")
    folder = parser.parse_args().tokenizer
    source = "".join(path.read_text() for path in sorted(Path(__file__).parents[1].glob("trivium/**/*.py")))
    tokenizer = Tokenizer.from_folder(folder) if folder else train_tokenizer([source], 3840)
    plain = tiktoken.Encoding(
        name="plain",
        pat_str=PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(tokenizer.vocabulary.ranks)},
        special_tokens=tokenizer.special_ids,
    )
    talk = conversation(200, 100)
    renderer = Renderer(tokenizer)
    prompt = renderer.render(talk)
    contents = [segment.text for segment in render(talk).segments if isinstance(segment, Content)]
    rows = {
        "200 messages, 100 tools: rendered to segments": cpu_s(lambda: render(talk)),
        "the same to ids": cpu_s(lambda: renderer.render(talk)),
        "the same to ids, first time": cpu_s(lambda: Renderer(tokenizer).render(talk)),
        "the tokenizer alone, on each segment of content": cpu_s(lambda: [tokenizer.encode(text) for text in contents]),
        "tiktoken alone, on the same": cpu_s(lambda: [plain.encode_ordinary(text) for text in contents]),
        "tiktoken alone, on what is not cached": cpu_s(
            lambda: [plain.encode_ordinary(text) for text in contents if len(text) > 16 and "JSONSchema" not in text]
        ),
    }
    for name, seconds in rows.items():
        print(f"{1e3 * seconds:9.2f} ms  {name}")
    own = rows["the same to ids"] / rows["the tokenizer alone, on each segment of content"]
    print(f"{len(prompt.ids):,} ids; rendering to ids takes {own:.2f} of the tokenizer's time on the same segments")

    text = source[:400_000]
    ours, theirs = cpu_s(lambda: tokenizer.encode(text)), cpu_s(lambda: plain.encode_ordinary(text))
    print(
        f"encoding {len(text):,} characters: {ours * 1e3:.1f} ms, tiktoken {theirs * 1e3:.1f} ms: {ours / theirs:.2f}"
    )

    said = assistant(source[:200_000], reasoning=source[200_000:300_000])
    ids = renderer.render(Conversation(messages=(said,)), answer=False)
    begin = ids.written.index(True)
    answer = ids.ids[begin:]
    parsed_s = cpu_s(lambda: parse(answer, tokenizer, channel="think"))
    decoded_s = cpu_s(lambda: tokenizer.decode(answer))
    print(
        f"parsing {len(answer):,} ids: {1e6 * parsed_s / len(answer):.2f} us an id, "
        f"decoding alone {1e6 * decoded_s / len(answer):.2f}"
    )


if __name__ == "__main__":
    main()
