"""Grammars of answers with tools: llguidance, which we use, beside xgrammar: time a token, time to compile, and whether
a mark can be told from text that spells it.

    python benchmarks/grammar.py [ROUNDS]

Wants both libraries (pip install llguidance xgrammar). The vocabularies are trained on the text of the installed
packages and kept in the temporary folder; for the released size, 163,840 ids, that takes half a minute. Times are of the CPU,
one thread; the least of all rounds counts for compiling. One answer is walked: it thinks, answers, and calls three tools. Its grammar allows what `trivium.chat.grammar` says; for xgrammar the
same is written as a structural tag, except that arguments keep the schema's order and an index is any number.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trivium.chat.grammar import answer_grammar
from trivium.chat.message import Conversation, Options, Tool, ToolCall, assistant, user
from trivium.chat.render import Renderer, render
from trivium.chat.schema import check_tool
from trivium.chat.tokenizer import Tokenizer, train_tokenizer
from trivium.chat.vocabulary import FRAME
from trivium.model.mask import Grammars

SIZES = (4_096, 163_840)
NUM_TOOLS = (1, 10, 100)
NUM_CHARS = {4_096: 3e6, 163_840: 1.5e8}
END = "<|end_of_msg|>"


def main() -> None:
    torch.set_num_threads(1)
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print("library     ids      tokenizer  tools: compile ms (again)           us a mask: median / p99 / max")
    for size in SIZES:
        tokenizer = vocabulary(size)
        for library in (Llguidance, Xgrammar):
            start_s = time.process_time()
            held = library(tokenizer)
            tokenizer_s = time.process_time() - start_s
            for num_tools in NUM_TOOLS:
                compile_ms, again_ms = [], []
                steps: dict[str, list[float]] = {}
                for at in range(num_rounds):
                    # Other names in every round: neither library has seen them.
                    conversation, places, ids = answer(tokenizer, num_tools, seed=f"{size}{at}")
                    for times in (compile_ms, again_ms):
                        start_s = time.process_time()
                        held.start(conversation)
                        times.append(1e3 * (time.process_time() - start_s))
                    for place, token_id in zip(places, ids, strict=True):
                        start_s = time.process_time()
                        held.mask()
                        steps.setdefault(place, []).append(1e6 * (time.process_time() - start_s))
                        held.accept(token_id)
                times = [time_us for place in steps.values() for time_us in place]
                by_place = ", ".join(f"{place} {statistics.median(held_us):.0f}" for place, held_us in steps.items())
                print(
                    f"{library.__name__:10s} {size:7d} {tokenizer_s:8.2f} s {num_tools:4d}: {min(compile_ms):9.1f} "
                    f"({min(again_ms):.1f}) {spread(times):>24s}   medians: {by_place}"
                )
    tokenizer = vocabulary(SIZES[0])
    print("\nids allowed within a JSON string that are control ids, and what spells <|close|> there")
    for library in (Llguidance, Xgrammar, Blunt):
        print(f"  {library.__name__:10s} {fooled(library(tokenizer), tokenizer)}")
    print("\nour mask with the tensor, us")
    for size in SIZES:
        print(f"  {size:7d} ids: {tensor_us(vocabulary(size)):.0f}")
    print("\nwhat ours takes, ms: check of the schemas (once a tool), text of the grammar, llguidance")
    for num_tools in NUM_TOOLS:
        conversation, _, _ = answer(tokenizer, num_tools, seed="parts")
        grammars = Grammars(tokenizer)
        start_s = time.process_time()
        for tool in conversation.tools:
            check_tool(tool)
        checked_s = time.process_time()
        grammar = answer_grammar(conversation)
        written_s = time.process_time()
        grammars.compile(grammar)
        parts_s = (checked_s - start_s, written_s - checked_s, time.process_time() - written_s)
        print(
            f"  {num_tools:3d} tools: {', '.join(f'{1e3 * part_s:.1f}' for part_s in parts_s)}; {len(grammar)} characters"
        )
    print("\nimport in a new process, s, and what else is loaded")
    for module in ("llguidance", "xgrammar"):
        code = f"import time; t = time.process_time(); import {module}; import sys; print(round(time.process_time() - t, 2), "
        code += "*sorted({'torch', 'transformers', 'pydantic', 'triton'} & set(sys.modules)))"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        print(f"  {module:10s} {ran.stdout.strip()}")


def spread(times: list[float]) -> str:
    ordered = sorted(times)
    return f"{ordered[len(ordered) // 2]:.1f} / {ordered[int(0.99 * len(ordered))]:.0f} / {ordered[-1]:.0f}"


# --- One answer -----------------------------------------------------------------------------------------------------


def tools(num_tools: int, seed: str) -> tuple[Tool, ...]:
    """Nested, recursive, with names of several scripts."""
    place = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "position": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
            "near": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    made = []
    for at in range(num_tools):
        properties = {
            "query": {"type": "string"},
            f"limit_{seed}_{at}": {"type": "integer", "minimum": 1, "maximum": 100 + at},
            "unit": {"type": "string", "enum": ["metric", "imperial", f"unit {at}"]},
            "where": {"$ref": "#/$defs/place"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "größe": {"type": ["number", "null"]},
            f"deep_{at}": {
                "type": "object",
                "properties": {"a": {"type": "object", "properties": {"b": {"type": "boolean"}}}},
            },
        }
        parameters = {"type": "object", "properties": properties, "required": ["query"], "$defs": {"place": place}}
        made.append(Tool(name=f"查询_{seed}_{at}", description="Looks things up.", parameters=parameters))
    return tuple(made)


def answer(tokenizer: Tokenizer, num_tools: int, seed: str) -> tuple[Conversation, list[str], list[int]]:
    """A conversation, and the ids of an answer with the place that each stands in."""
    declared = tools(num_tools, seed)
    near = {"name": "Südhafen", "position": [53.5, 10], "near": [{"name": "a"}, {"name": 'b "quoted"\n'}]}
    arguments = {"query": "ferry times from the old harbour, " * 4, "where": near, "tags": ["ä", "two words"]}
    calls = [
        ToolCall(id=str(at), name=declared[-1 - at % num_tools].name, arguments={**arguments, "größe": 1.5})
        for at in range(3)
    ]
    said = assistant("I look it up. " * 20, reasoning="First the ferry, then the tide. " * 40, tool_calls=calls)
    options = Options(tools=declared)
    whole = render(Conversation(messages=(user("When?"), said), options=options), answer=False)
    renderer = Renderer(tokenizer)
    texts = {"I look it up. " * 20: "text", said.reasoning: "think", arguments["query"]: "string"}
    places, ids = [], []
    for segment, written in zip(whole.segments, whole.written, strict=True):
        if written:
            more = renderer.ids_of(segment)
            text = getattr(segment, "text", "")
            places += [texts.get(text, "json" if text[:1] in ("{", "[") else "frame")] * len(more)
            ids += more
    return Conversation(messages=(user("When?"),), options=options), places, ids


# --- The libraries --------------------------------------------------------------------------------------------------


class Llguidance:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._grammars = Grammars(tokenizer)

    def start(self, conversation: Conversation) -> None:
        self.start_text(answer_grammar(conversation))

    def start_text(self, grammar: str) -> None:
        self._matcher = self._grammars.compile(grammar)._matcher

    def start_json(self) -> None:
        self.start_text('%llguidance {}\nstart: json <|close|>\njson: %json {"type": "object"}')

    def mask(self) -> bytes:
        return self._matcher.compute_bitmask()

    def accept(self, token_id: int) -> None:
        assert self._matcher.consume_token(token_id), token_id


class Xgrammar:
    """With control ids that stand for bytes no text has: their names would be text to it."""

    prefix = b"\xff"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        self._lib = xgrammar
        self._ids = tokenizer.special_ids
        vocabulary = tokenizer.vocabulary
        texts = [*vocabulary.ranks, *(self.prefix + special.name.encode() for special in vocabulary.specials)]
        info = xgrammar.TokenizerInfo(
            texts, xgrammar.VocabType.RAW, vocab_size=tokenizer.vocab_size, stop_token_ids=[self._ids["[EOS]"]]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self._bits = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)

    def start(self, conversation: Conversation) -> None:
        self._start(self._answer(conversation.tools))

    def start_json(self) -> None:
        self._start(self._row({"type": "json_schema", "json_schema": {"type": "object"}}, self._mark("<|close|>")))

    def mask(self) -> bytes:
        self._matcher.fill_next_token_bitmask(self._bits)
        return self._bits.numpy().tobytes()

    def accept(self, token_id: int) -> None:
        assert self._matcher.accept_token(token_id), token_id

    def _start(self, format_: dict[str, Any]) -> None:
        compiled = self._compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": format_}))
        self._matcher = self._lib.GrammarMatcher(compiled, terminate_without_stop_token=True)

    def _answer(self, declared: tuple[Tool, ...]) -> dict[str, Any]:
        calls = {"type": "plus", "content": {"type": "or", "elements": [self._call(tool) for tool in declared]}}
        element = self._row(*self._tag("<|open|>", "tools"), calls, *self._tag("<|close|>", "tools"))
        start = [self._text(), *self._tag("<|close|>", "think"), *self._tag("<|open|>", "response"), self._text()]
        end = [*self._tag("<|close|>", "message"), self._mark(END)]
        return self._row(*start, *self._tag("<|close|>", "response"), {"type": "optional", "content": element}, *end)

    def _call(self, tool: Tool) -> dict[str, Any]:
        assert tool.parameters is not None
        required, arguments = tool.parameters["required"], []
        for name, schema in tool.parameters["properties"].items():
            argument = self._argument(name, schema, tool.parameters["$defs"])
            arguments.append(argument if name in required else {"type": "optional", "content": argument})
        head = [self._const(f'call tool="{tool.name}" index="'), {"type": "regex", "pattern": r"\d+"}, self._const('"')]
        return self._row(
            *(self._mark("<|open|>"), *head, self._mark("<|sep|>")), *arguments, *self._tag("<|close|>", "call")
        )

    def _argument(self, name: str, schema: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
        kinds = schema.get("type", "object")
        values = []
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            if kind == "string" and "enum" in schema:
                value = {"type": "or", "elements": [self._const(text) for text in schema["enum"]]}
            elif kind == "string":
                value = self._text()
            else:
                narrowed = {**schema, "$defs": defs} | ({"type": kind} if "type" in schema else {})
                value = {"type": "json_schema", "json_schema": narrowed}
            says = "number" if kind == "integer" else kind
            values.append(self._row(self._const(f'argument key="{name}" type="{says}"'), self._mark("<|sep|>"), value))
        value = values[0] if len(values) == 1 else {"type": "or", "elements": values}
        return self._row(self._mark("<|open|>"), value, *self._tag("<|close|>", "argument"))

    def _text(self) -> dict[str, Any]:
        return {"type": "any_tokens", "exclude_tokens": sorted(self._ids.values())}

    def _tag(self, mark: str, tag: str) -> list[dict[str, Any]]:
        return [self._mark(mark), self._const(tag), self._mark("<|sep|>")]

    def _mark(self, name: str) -> dict[str, Any]:
        return {"type": "token", "token": self._ids[name]}

    def _const(self, text: str) -> dict[str, Any]:
        return {"type": "const_string", "value": text}

    def _row(self, *elements: dict[str, Any]) -> dict[str, Any]:
        return {"type": "sequence", "elements": list(elements)}


class Blunt(Xgrammar):
    """With control ids that stand for their names."""

    prefix = b""


def fooled(library: Llguidance | Xgrammar, tokenizer: Tokenizer) -> str:
    library.start_json()
    for token_id in tokenizer.encode('{"a": "x'):
        library.accept(token_id)
    bits = library.mask()
    allowed = [i for i in range(tokenizer.num_ranks, tokenizer.vocab_size) if bits[i // 8] >> i % 8 & 1]
    for token_id in tokenizer.encode('<|close|>"}'):
        library.accept(token_id)  # spelled, it is text
    names = [tokenizer.decode([token_id]) for token_id in allowed]
    return f"{len(allowed)} of 256, the frame's: {[name for name in names if name in FRAME]}; spelled: text"


def tensor_us(tokenizer: Tokenizer) -> float:
    conversation, _, ids = answer(tokenizer, 10, seed="tensor")
    constraint = Grammars(tokenizer).compile(answer_grammar(conversation))
    logits_W = torch.randn(tokenizer.vocab_size)
    times = []
    for token_id in ids:
        start_s = time.process_time()
        constraint.mask(logits_W)
        times.append(1e6 * (time.process_time() - start_s))
        constraint.accept(token_id)
    return statistics.median(times)


# --- Vocabularies ---------------------------------------------------------------------------------------------------


def vocabulary(size: int) -> Tokenizer:
    folder = Path(tempfile.gettempdir()) / f"trivium-grammar-{size}"
    if not (folder / "tiktoken.model").exists():
        train_tokenizer(texts(NUM_CHARS[size]), size - 256).save(folder)
    return Tokenizer.from_folder(folder)


def texts(num_chars: float) -> Iterator[str]:
    roots = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    for path in (path for root in roots for path in sorted(root.rglob("*")) if path.is_file()):
        if path.suffix in (".py", ".pyi", ".md", ".txt", ".rst", ".json", ".h", ".hpp") and num_chars > 0:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            if len(text) < 1e6:
                num_chars -= len(text)
                yield text


if __name__ == "__main__":
    main()
