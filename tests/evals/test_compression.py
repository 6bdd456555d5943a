"""Bits per byte under gzip and xz."""

import lzma
import random

import pytest

from trivium.data.source import Document
from trivium.evals import compression
from trivium.evals.compression import compressed_bpb, gzip_bpb


def documents(*texts):
    return [Document(source=str(idx), path=f"{idx}.txt", text=text) for idx, text in enumerate(texts)]


def noise(num_chars, seed):
    return "".join(random.Random(seed).choices("0123456789abcdef", k=num_chars))


def test_one_letter_takes_21_bytes_of_gzip():
    # 10 of header, 3 of deflate, 8 of checksum and length; the empty document costs nothing.
    assert gzip_bpb(documents("a", "")) == 8 * 21


def test_every_file_stands_alone():
    one = noise(3000, seed=0)
    assert gzip_bpb(documents(one, one)) == gzip_bpb(documents(one))
    assert compressed_bpb(documents(one, one), []).xz == compressed_bpb(documents(one), []).xz


@pytest.mark.parametrize("text", ["a", "def f(x):\n    return x\n" * 500, noise(100_000, seed=1) * 2, "Ünï" * 30_000])
def test_xz_is_that_of_preset_9(text):
    content = text.encode()
    want = 8 * len(lzma.compress(content, preset=9)) / len(content)
    assert compressed_bpb(documents(text), []).xz == want


def test_primed_is_what_the_held_out_text_adds():
    train, heldout = (
        ("def f(x):\n    return x\n" + noise(3000, seed=5), "def g(y):\n"),
        ("    return y\n", "", noise(99, 6)),
    )
    before, all_of_it = "".join(train).encode(), "".join(train + heldout).encode()
    added = len(lzma.compress(all_of_it, preset=9)) - len(lzma.compress(before, preset=9))
    got = compressed_bpb(documents(*heldout), documents(*train))
    assert got.primed_xz == 8 * added / (len(all_of_it) - len(before))


def test_what_stands_in_the_training_text_costs_next_to_nothing():
    text = noise(20_000, seed=2)  # 4 bits a letter: a byte of it cannot be told in less
    primed = compressed_bpb(documents(text), documents("something else\n", text))
    assert primed.xz > 4 and primed.primed_xz < 0.05
    assert compressed_bpb(documents(text), documents(noise(20_000, seed=3))).primed_xz > 4


def test_held_out_text_that_fills_the_dictionary_leaves_no_room_for_training_text(monkeypatch):
    monkeypatch.setattr(compression, "DICTIONARY_BYTES", 4096)
    text = noise(5000, seed=4)
    got = compressed_bpb(documents(text), documents(text))
    assert got == compressed_bpb(documents(text), []) and got.primed_xz > 4


@pytest.mark.parametrize("limit", [0, 1, 4, 5, 6, 11, 12, 99])
def test_the_last_bytes_of_the_training_text(limit):
    joined = "oneÜtwothree".encode()
    assert (
        compression._last_bytes(documents("oneÜ", "two", "", "three"), limit) == joined[max(0, len(joined) - limit) :]
    )


def test_no_text_at_all_is_refused():
    with pytest.raises(ValueError, match="^compression: wanted text of at least one byte, got 1 empty documents$"):
        gzip_bpb(documents(""))
    with pytest.raises(ValueError, match="^compression: wanted text of at least one byte, got 0 empty documents$"):
        compressed_bpb([], documents("text"))
