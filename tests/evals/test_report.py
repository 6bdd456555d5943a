"""The report of a model: a tiny one that knows nothing, and a stand-in that knows everything."""

import io
import json
from collections import Counter

import pytest
import torch
from rich.console import Console

from tests.tiny import tiny_config
from trivium.chat.tokenizer import train_tokenizer
from trivium.data.corpus import Corpus, Text, stream_of
from trivium.data.pack import TokenStream
from trivium.data.source import Document
from trivium.evals import report as room
from trivium.evals.compression import compressed_bpb
from trivium.evals.likeness import Likeness
from trivium.evals.report import Samples, places, report, shuffle_lines
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.train.heldout import score

NUM_RANKS = 280
TRAIN = [f"def f{idx}(value):\n    return value + {idx}  # adds {idx}\n" * 4 for idx in range(20)]
HELDOUT = [f"def g{idx}(number):\n    return number * {idx}  # times {idx}\n" * 6 for idx in range(4)]
TOKENIZER = train_tokenizer(TRAIN, NUM_RANKS)


def documents(texts):
    return tuple(Document(source=str(idx), path=f"{idx}.py", text=text) for idx, text in enumerate(texts))


def corpus_of(heldout):
    text = Text(
        what="test",
        train=documents(TRAIN),
        heldout=documents(heldout),
        left_out={},
        exact=0,
        near=None,
        fingerprint="",
    )
    train, held = stream_of(text.train, TOKENIZER), stream_of(text.heldout, TOKENIZER)
    return Corpus(text=text, tokenizer=TOKENIZER, train=train, heldout=held)


def printed(renderable):
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


@pytest.fixture(scope="module")
def model():
    model = KimiK3(tiny_config(NUM_RANKS))
    initialise_(model, 0)
    return model


def test_every_figure_is_where_it_belongs(model):
    corpus = corpus_of(HELDOUT)
    got = report(model, corpus, seed=1, temperature=0.9, num_samples=3, sample_tokens=20)
    assert got.heldout == score(model, corpus.heldout)
    assert got.shuffled == score(model, stream_of(shuffle_lines(corpus.text.heldout, 1), TOKENIZER)) != got.heldout
    assert got.heldout.num_bytes == got.shuffled.num_bytes == sum(map(len, HELDOUT))
    assert got.compressed == compressed_bpb(corpus.text.heldout, corpus.text.train)
    assert (got.samples.num_samples, got.samples.sample_tokens, got.samples.temperature) == (3, 20, 0.9)
    # An untrained model draws what comes: hardly any run of four twice, while these texts say all things six times.
    assert got.samples.sampled.distinct_4grams > 0.9
    content = json.loads(json.dumps(got.to_json()))
    assert content["heldout"]["bpb"] == got.heldout.bpb and content["compressed"]["gzip"] == got.compressed.gzip
    assert content["samples"]["real"]["longest_copy"] == got.samples.real.longest_copy
    assert content["samples"]["distinct_4grams_ratio"] == got.samples.distinct_4grams_ratio
    text = printed(got.table())
    for figure in (got.heldout.bpb, got.shuffled.bpb, got.compressed.primed_xz, got.samples.real.distinct_4grams):
        assert f"{figure:.3f}" in text


def test_a_model_that_writes_what_stands_there_is_as_real_text(model, monkeypatch):
    corpus = corpus_of(HELDOUT)
    held = corpus.heldout.ids_T.tolist()

    def what_follows(model, prompts, *, num_tokens, temperature, seed):
        assert (temperature, seed) == (0.3, 7)
        firsts = places(corpus.heldout, 32 + num_tokens, len(prompts))
        assert [held[first : first + 32] for first in firsts] == prompts
        return [held[first + 32 : first + 32 + num_tokens] for first in firsts]

    monkeypatch.setattr(room, "continuations", what_follows)
    samples = report(model, corpus, seed=7, temperature=0.3, num_samples=4, sample_tokens=25).samples
    assert samples.sampled == samples.real
    # Held-out files hold "def" and "return", and "number" and "times", which the training text has not.
    assert 0 < samples.real.word_share < 1
    assert samples.word_share_ratio == samples.distinct_4grams_ratio == 1


def test_too_little_text_for_samples_or_disorder_is_said(model):
    got = report(model, corpus_of(["one line alone", "x\nx\nx\n"]))
    assert got.samples is None and got.shuffled is None
    assert got.to_json()["samples"] is None and got.to_json()["shuffled"] is None
    text = printed(got.table())
    assert "no samples: no document of the held-out text is long enough" in text
    assert any("random order" in line and line.rstrip(" │").endswith("-") for line in text.splitlines())


def test_places_by_hand():
    # Three documents of 7, 1 and 4 tokens, [BOS] among them: room for 1 2 3 | 4 5 6, none, and 9 10 11.
    stream = TokenStream(ids_T=torch.zeros(12, dtype=torch.int32), starts=(0, 7, 8, 12), num_bytes_W=torch.zeros(1))
    assert places(stream, 3, 50) == [1, 4, 9]
    assert places(stream, 3, 2) == [1, 4]
    assert places(stream, 6, 50) == [1]
    assert places(stream, 7, 50) == []


def test_lines_in_random_order_are_the_same_lines():
    texts = ["a\nb\nc\nd\ne\n", "no end\nof line\nat the end", "", "\n\n", "one"]
    before, after = documents(texts), shuffle_lines(documents(texts), 3)
    for old, new in zip(before, after, strict=True):
        assert Counter(old.text.split("\n")) == Counter(new.text.split("\n"))
        assert (old.path, old.num_bytes, old.text.endswith("\n")) == (new.path, new.num_bytes, new.text.endswith("\n"))
    assert after[0].text != before[0].text
    assert after == shuffle_lines(before, 3) != shuffle_lines(before, 4)


def test_a_ratio_without_both_sides_is_none():
    def samples(sampled, real):
        sides = [Likeness(word_share=share, distinct_4grams=0.5, longest_copy=0) for share in (sampled, real)]
        return Samples(num_samples=1, sample_tokens=9, temperature=1.0, seed=0, sampled=sides[0], real=sides[1])

    assert samples(0.6, 0.8).word_share_ratio == pytest.approx(0.75)
    assert samples(0.0, 0.8).word_share_ratio == 0
    assert [samples(*pair).word_share_ratio for pair in ((None, 0.8), (0.6, None), (0.6, 0.0))] == [None] * 3
