"""Chat: conversations to a stream of tokens in which only what the assistant wrote counts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trivium.chat.completions import read_request
from trivium.chat.message import Conversation
from trivium.chat.render import Mark, Prompt, Renderer, render
from trivium.chat.tokenizer import Tokenizer
from trivium.data.corpus import HELDOUT_TOKENS, TOKENS
from trivium.data.ids import fingerprint_of_tokenizer, num_bytes_of_ids
from trivium.data.pack import TokenStream
from trivium.data.shards import Counted, Shards, open_shards, reuse_shards, write_shards


def read_conversations(path: Path) -> Iterator[Conversation]:
    """The conversations of a JSONL file: on each line a Chat Completions request, its answers among the messages.

    Empty lines are passed over. Raises ValueError that names the file and the line.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield _conversation(line)
                except ValueError as error:
                    raise ValueError(f"{path}: line {number}: {error}") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8: {error}") from error


def _conversation(line: str) -> Conversation:
    try:
        body = json.loads(line)
    except RecursionError as error:
        raise ValueError("too deep") from error
    if not isinstance(body, dict):
        raise ValueError(f"wanted an object with messages, got {type(body).__name__}")
    conversation = read_request(body)
    if not any(message.role == "assistant" for message in conversation.messages):
        raise ValueError("messages: the assistant says nothing, so there is nothing to learn")
    if any(message.images for message in conversation.messages):
        raise ValueError("messages: pictures cannot be trained on")
    if conversation.messages[-1].partial:
        raise ValueError("messages: the last answer is partial, wanted whole ones")
    options = conversation.options
    if options.tool_choice != "auto" or options.response_format.kind != "text":
        # They are said in front of an answer that is asked for; behind the last one nobody would answer them.
        raise ValueError("tool_choice, response_format: are of one answer, and a whole conversation has none")
    return conversation


def tokens_of(conversation: Conversation, renderer: Renderer) -> Counted:
    """The ids of a whole conversation, and which of them the assistant wrote: a call that fell back to text is not counted."""
    prompt: Prompt = renderer.render(conversation, answer=False)
    return Counted(np.array(prompt.ids, dtype=np.int32), np.array(prompt.written, dtype=np.bool_))


def chat_stream(conversations: Iterable[Conversation], tokenizer: Tokenizer) -> TokenStream:
    """The conversations in memory, one document each."""
    renderer = Renderer(tokenizer)
    documents = [tokens_of(conversation, renderer) for conversation in conversations]
    return TokenStream(
        ids_T=torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int32), *(ids for ids, _ in documents)])),
        starts=np.cumsum([0, *(len(ids) for ids, _ in documents)]),
        num_bytes_W=num_bytes_of_ids(tokenizer),
        weight_T=torch.from_numpy(np.concatenate([np.empty(0, dtype=np.bool_), *(flags for _, flags in documents)])),
    )


def fingerprint_of(conversations: Iterable[Conversation]) -> str:
    """SHA-256 of the conversations as they are rendered: what another version renders otherwise is another text."""
    said = hashlib.sha256()
    for conversation in conversations:
        said.update(hashlib.sha256(_rendered(conversation)).digest())
    return said.hexdigest()


def _rendered(conversation: Conversation) -> bytes:
    return render(conversation, answer=False).text.encode()


def chat_shards(
    conversations: Iterable[Conversation],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    text: str,
    say: Callable[[str], None],
    max_tokens: int | None = None,
) -> Shards:
    """The conversations as shards in a folder: those that are there if made of this `text` by this tokenizer, or new ones.

    Those of more than `max_tokens` tokens are left out, and counted.
    """
    made_of = {"text": text, "tokenizer": fingerprint_of_tokenizer(tokenizer)}
    there = reuse_shards(folder, made_of, say)
    if there is not None:
        return there
    say(f"tokenizing to {folder}")
    renderer, num_long = Renderer(tokenizer), 0

    def documents() -> Iterator[Counted]:
        nonlocal num_long
        for conversation in conversations:
            document = tokens_of(conversation, renderer)
            if max_tokens is None or len(document.ids) <= max_tokens:
                yield document
            else:
                num_long += 1
        if num_long:
            say(f"{num_long:,} conversations of more than {max_tokens:,} tokens are left out")

    return write_shards(
        folder,
        documents(),
        num_bytes_W=num_bytes_of_ids(tokenizer),
        first_id=tokenizer.special_ids[Mark.OPEN.value],
        **made_of,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatStreams:
    """What to learn from, on disk in `folder`, and what to score with."""

    train: Shards
    heldout: TokenStream
    folder: Path


def num_counted(shards: Shards) -> int:
    """Tokens that count as targets."""
    return sum(int(flags.sum()) for flags in shards.counted if flags is not None)


def build_chat(path: Path, tokenizer: Tokenizer, out: Path, say: Callable[[str], None]) -> ChatStreams:
    """A JSONL file as shards in out/tokens and, for the conversations held out, in out/heldout.

    Raises ValueError that names the line that is no conversation; what was there before is then as it was.
    """
    conversations = list(read_conversations(path))
    train, heldout = split(conversations)
    text = fingerprint_of(conversations)
    chat_shards(heldout, tokenizer, out / HELDOUT_TOKENS, text=text, say=say)
    chat_shards(train, tokenizer, out / TOKENS, text=text, say=say)
    return open_chat(out, tokenizer)


def open_chat(folder: Path, tokenizer: Tokenizer) -> ChatStreams:
    """What `build_chat` wrote. Raises ValueError where it was written for another tokenizer, or is not whole."""
    train, heldout = (open_shards(folder / name, verify=True) for name in (TOKENS, HELDOUT_TOKENS))
    for name, shards in ((TOKENS, train), (HELDOUT_TOKENS, heldout)):
        if shards.manifest.tokenizer != fingerprint_of_tokenizer(tokenizer):
            raise ValueError(f"{folder / name}: made with another tokenizer than this model's; make it anew")
    if train.manifest.text != heldout.manifest.text:  # one of two writes was killed between the two
        raise ValueError(f"{folder}: {TOKENS} and {HELDOUT_TOKENS} were made of other texts; make them anew")
    in_memory = TokenStream(
        ids_T=heldout.ids_T, starts=heldout.starts, num_bytes_W=heldout.num_bytes_W, weight_T=heldout.weight_T
    )
    return ChatStreams(train=train, heldout=in_memory, folder=folder / TOKENS)


def split(
    conversations: Sequence[Conversation], fraction: float = 0.05
) -> tuple[list[Conversation], list[Conversation]]:
    """To learn from, and to score with: a share of them, at least one and at most 200, by the hash of what they say.

    The same conversation, twice in a file, is on one side. Raises ValueError for fewer than two different ones.
    """
    by_hash: dict[str, list[Conversation]] = {}
    for conversation in conversations:
        by_hash.setdefault(hashlib.sha256(_rendered(conversation)).hexdigest(), []).append(conversation)
    if len(by_hash) < 2:
        raise ValueError(f"data: wanted at least 2 different conversations, got {len(by_hash)}")
    num_heldout = min(200, max(1, round(fraction * len(by_hash))))
    keys = sorted(by_hash)
    heldout = [by_hash[key][0] for key in keys[:num_heldout]]
    return [conversation for key in keys[num_heldout:] for conversation in by_hash[key]], heldout
