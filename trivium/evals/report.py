"""A model's report: its held-out text beside compressors and disorder, its samples beside real text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from rich.console import Group
from rich.table import Table

from trivium.data.corpus import Corpus, stream_of
from trivium.data.pack import TokenStream
from trivium.data.source import Document
from trivium.evals.compression import Compressed, compressed_bpb
from trivium.evals.continuation import continuations
from trivium.evals.likeness import Likeness, likeness, words_of
from trivium.model.kimi_k3 import KimiK3
from trivium.train.heldout import Heldout, score

PROMPT_TOKENS = 32

# Of .6, .7, .8, .9 and 1 the one at which words and variety are both nearest to real text: a nano of four minutes had
# .94 of its known words at .6 and .99 of its variety, .95 and 1.03 at .7, .92 and 1.08 at .8, .83 and 1.15 at 1.
TEMPERATURE = 0.7


@dataclass(frozen=True, kw_only=True)
class Samples:
    """`sampled` is of what the model wrote at `num_samples` places of held-out text, `real` of what stands there."""

    num_samples: int
    sample_tokens: int
    temperature: float
    seed: int
    sampled: Likeness
    real: Likeness

    @property
    def word_share_ratio(self) -> float | None:
        """Sampled over real; None where either is missing or the real one is 0."""
        return _ratio(self.sampled.word_share, self.real.word_share)

    @property
    def distinct_4grams_ratio(self) -> float | None:
        """Sampled over real; None where either is missing or the real one is 0."""
        return _ratio(self.sampled.distinct_4grams, self.real.distinct_4grams)


@dataclass(frozen=True, kw_only=True)
class Report:
    """`shuffled` is the held-out text with the lines of each document in random order; None where that changes nothing.

    `samples` is None where no document of the held-out text is long enough for one.
    """

    heldout: Heldout
    shuffled: Heldout | None
    compressed: Compressed
    samples: Samples | None

    def table(self) -> Group:
        """Two tables for people: bits per byte, and the samples."""
        return Group(_bytes_table(self), "", _samples_table(self.samples) if self.samples else _NO_SAMPLES)

    def to_json(self) -> dict[str, Any]:
        """Every figure, null where there is none."""
        content = asdict(self)
        if self.samples:
            content["samples"]["word_share_ratio"] = self.samples.word_share_ratio
            content["samples"]["distinct_4grams_ratio"] = self.samples.distinct_4grams_ratio
        return content


def report(
    model: KimiK3,
    corpus: Corpus,
    *,
    seed: int = 0,
    temperature: float = TEMPERATURE,
    num_samples: int = 50,
    sample_tokens: int = 200,
    say: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Score the held-out text, the same with its lines in random order, compress it, and sample. `say` hears each stage.

    Samples are begun at `num_samples` places spread over the held-out text, or fewer where it has no room for them: 32
    tokens are given, `sample_tokens` are drawn, and held against what follows there. Raises ValueError when there is
    no held-out token.
    """
    heldout = corpus.text.heldout
    mixed = shuffle_lines(heldout, seed)
    changed = any(ours.text != theirs.text for ours, theirs in zip(mixed, heldout, strict=True))
    say("scoring the held-out text")
    whole = score(model, corpus.heldout)
    shuffled = None
    if changed:
        say("scoring it with its lines in random order")
        shuffled = score(model, stream_of(mixed, corpus.tokenizer))
    say("compressing it")
    compressed = compressed_bpb(heldout, corpus.text.train)
    say(f"sampling {num_samples} × {sample_tokens} tokens")
    samples = _samples(model, corpus, seed, temperature, num_samples, sample_tokens)
    return Report(heldout=whole, shuffled=shuffled, compressed=compressed, samples=samples)


def shuffle_lines(documents: Sequence[Document], seed: int) -> list[Document]:
    """Each document with its lines in random order: the same lines and as many bytes."""
    order = random.Random(seed)
    mixed = []
    for document in documents:
        end = "\n" if document.text.endswith("\n") else ""
        lines = document.text.removesuffix("\n").split("\n")
        order.shuffle(lines)
        mixed.append(replace(document, text="\n".join(lines) + end))
    return mixed


def places(stream: TokenStream, num_tokens: int, count: int) -> list[int]:
    """Where `num_tokens` tokens of one document begin, none [BOS], none overlapping: at most `count`, evenly spread."""
    free = [
        first for start, end in pairwise(stream.starts) for first in range(start + 1, end - num_tokens + 1, num_tokens)
    ]
    count = min(count, len(free))
    return [free[idx * len(free) // count] for idx in range(count)]


def _samples(
    model: KimiK3, corpus: Corpus, seed: int, temperature: float, num_samples: int, sample_tokens: int
) -> Samples | None:
    firsts = places(corpus.heldout, PROMPT_TOKENS + sample_tokens, num_samples)
    if not firsts:
        return None
    ids_T = corpus.heldout.ids_T
    prompts = [ids_T[first : first + PROMPT_TOKENS].tolist() for first in firsts]
    real = [ids_T[first + PROMPT_TOKENS : first + PROMPT_TOKENS + sample_tokens].tolist() for first in firsts]
    sampled = continuations(model, prompts, num_tokens=sample_tokens, temperature=temperature, seed=seed)
    train_words = words_of(document.text for document in corpus.text.train)
    of_sampled, of_real = (
        likeness(
            ids,
            [corpus.tokenizer.decode(row) for row in ids],
            train_ids_T=corpus.train.ids_T.numpy(),
            train_words=train_words,
        )
        for ids in (sampled, real)
    )
    return Samples(
        num_samples=len(firsts),
        sample_tokens=sample_tokens,
        temperature=temperature,
        seed=seed,
        sampled=of_sampled,
        real=of_real,
    )


def _ratio(sampled: float | None, real: float | None) -> float | None:
    return sampled / real if sampled is not None and real else None


_NO_SAMPLES = "no samples: no document of the held-out text is long enough for one"


def _bytes_table(report: Report) -> Table:
    table = Table(
        title=f"Held-out text: {report.heldout.num_bytes:,} bytes the model was not trained on",
        title_justify="left",
        caption="Fewer bits are better: text that is foreseen needs fewer.",
        caption_justify="left",
    )
    table.add_column("")
    table.add_column("bits per byte", justify="right")
    shuffled, compressed = report.shuffled, report.compressed
    table.add_row("this model", f"{report.heldout.bpb:.3f}", style="bold")
    table.add_row("this model, the lines of each file in random order", _figure(shuffled.bpb if shuffled else None))
    table.add_section()
    table.add_row("gzip -9, each file alone", _figure(compressed.gzip))
    table.add_row("xz -9, each file alone", _figure(compressed.xz))
    table.add_row("xz -9 that has read the training text", _figure(compressed.primed_xz))
    return table


def _samples_table(samples: Samples) -> Table:
    table = Table(
        title=(
            f"{samples.num_samples} samples of {samples.sample_tokens} tokens at temperature {samples.temperature:g}, "
            "and what stands there"
        ),
        title_justify="left",
        caption="Known words and variety should be near the real text's; a long copy is text learnt by heart.",
        caption_justify="left",
    )
    table.add_column("")
    for name in ("sampled", "real", "ratio"):
        table.add_column(name, justify="right")
    sampled, real = samples.sampled, samples.real
    table.add_row(
        "words that occur in the training text",
        *map(_figure, (sampled.word_share, real.word_share, samples.word_share_ratio)),
    )
    table.add_row(
        "runs of 4 tokens that differ from one another",
        *map(_figure, (sampled.distinct_4grams, real.distinct_4grams, samples.distinct_4grams_ratio)),
    )
    table.add_row("longest copy of training text, tokens", str(sampled.longest_copy), str(real.longest_copy), "")
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
