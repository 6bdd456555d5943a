"""BPE: byte-pair ranks from text, trained by `tokenizers` on the released pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from trivium.chat.pieces import PATTERN, check_text, cut_text


def train_bpe(texts: Iterable[str], num_ranks: int) -> tokenizers.Tokenizer:
    """A byte-level BPE of up to `num_ranks` entries: the 256 bytes, then merges from the most frequent pair down.

    Fewer come out when every piece of the texts is one entry before. The texts are cut as encoding cuts them. The order
    of the texts does not matter: pairs of equal count are taken by their parts' ids.
    """
    if num_ranks < 256:
        raise ValueError(f"num_ranks: wanted at least the 256 single bytes, got {num_ranks}")
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=num_ranks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_parts(texts), trainer)
    return bpe


def ranks_of(bpe: tokenizers.Tokenizer) -> tuple[bytes, ...]:
    """The trained entries by tiktoken rank: the 256 bytes by value, then the result of each merge in order.

    tiktoken joins the adjacent pair whose concatenation has the lowest rank, `tokenizers` the pair that was merged
    first. The two agree because a trained merge always makes a new entry. Had x + y = t been made from other parts at
    rank r, the stretch of text under x and y, whose borders stand to the end, would have been cut at rank r like every
    stretch of these bytes, and joined then: x and y could not meet later.
    """
    byte_of = _byte_of_char()
    merges = json.loads(bpe.to_str())["model"]["merges"]
    merged = [bytes(byte_of[char] for part in pair for char in part) for pair in merges]
    ranks = (*(bytes([value]) for value in range(256)), *merged)
    assert len(set(ranks)) == len(ranks), "a trained merge made an entry twice"
    return ranks


def _parts(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        check_text(text)
        yield from cut_text(text)


def _byte_of_char() -> dict[str, int]:
    """The byte each character of byte-level BPE stands for.

    Visible Latin-1 characters stand for themselves; the 68 other bytes, in order, are U+0100 to U+0143.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [value for value in range(256) if value not in visible]
    return {chr(value): value for value in visible} | {chr(256 + idx): value for idx, value in enumerate(hidden)}
