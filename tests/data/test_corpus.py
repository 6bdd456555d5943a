import json
import random
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import trivium
from trivium.chat import tokenizer as chat_tokenizer
from trivium.data import corpus
from trivium.data.corpus import HELDOUT_FILE, TOKENS, build_corpus, gather_text, read_heldout, stream_of, write_heldout
from trivium.data.shards import open_shards
from trivium.data.source import Document

NUM_RANKS = 300


def random_text(seed, num_lines=40):
    rng = random.Random(seed)
    return "".join(" ".join(f"w{rng.randrange(5000)}" for _ in range(8)) + "\n" for _ in range(num_lines))


@pytest.fixture
def folder(tmp_path):
    """20 texts of about 1.9 KB each, one of them twice, and two files that are none."""
    for idx in range(20):
        (tmp_path / f"{chr(ord('a') + idx)}.txt").write_text(random_text(idx))
    (tmp_path / "z.txt").write_text(random_text(0) + "\n")
    (tmp_path / "picture.png").write_bytes(b"\0")
    (tmp_path / "nothing").write_bytes(b"")
    return tmp_path


def test_a_folder_is_read_cleaned_and_split(folder):
    stages = []
    text = gather_text(folder, say=stages.append)
    paths = sorted(document.path for document in [*text.train, *text.heldout])
    assert paths == [f"{chr(ord('a') + idx)}.txt" for idx in range(20)]
    assert text.left_out == {"binary": ("picture.png",), "empty": ("nothing",)}
    assert [stage.split()[0] for stage in stages] == ["reading", "looking"]
    about = json.loads(json.dumps(text.about()))
    assert about == {
        "what": str(folder),
        "fingerprint": text.fingerprint,
        "train_files": 18,
        "train_bytes": sum(len(document.text) for document in text.train),
        "heldout": "whole top-level names",
        "heldout_files": 2,
        "heldout_bytes": sum(len(document.text) for document in text.heldout),
        "heldout_names": sorted(document.source for document in text.heldout),
        "left_out": {"binary": 1, "empty": 1},
        "exact": 1,
        "near": text.near,
    }
    assert gather_text(folder).fingerprint == text.fingerprint
    (folder / "b.txt").write_text("changed")
    assert gather_text(folder).fingerprint != text.fingerprint


def test_what_is_held_out_is_said(folder, tmp_path_factory):
    book = tmp_path_factory.mktemp("book")
    (book / "book.txt").write_text(random_text(0, 1000))
    text = gather_text(book / "book.txt")
    about = text.about()
    assert (about["heldout"], about["heldout_names"]) == ("the last part of book.txt", ["book.txt"])
    assert text.train[0].text + text.heldout[0].text == random_text(0, 1000)
    about = gather_text(folder.rename(book / "src").parent).about()
    assert about["heldout"] == "whole files" and all(name.startswith("src/") for name in about["heldout_names"])


def test_without_a_folder_it_is_the_standard_library():
    text = gather_text(None)
    assert text.what.startswith("the standard library of Python 3.")
    assert 200_000 < sum(document.num_bytes for document in text.heldout) <= 256 * 1024


def test_a_corpus_is_both_parts_as_tokens(folder):
    text = gather_text(folder)
    built = build_corpus(text, num_ranks=NUM_RANKS)
    tokenizer = built.tokenizer
    assert built.text is text and tokenizer.num_ranks == NUM_RANKS
    for stream, documents in ((built.train, text.train), (built.heldout, text.heldout)):
        assert stream.num_bytes == sum(document.num_bytes for document in documents)
        for document, start, end in zip(documents, stream.starts, stream.starts[1:], strict=False):
            bos_id, *ids = stream.ids_T[start:end].tolist()
            assert bos_id == tokenizer.bos_id and ids == tokenizer.encode(document.text)
    assert built.train.num_bytes_W.tolist() == [*map(len, tokenizer.vocabulary.ranks), *[0] * 256]


def test_a_given_tokenizer_is_used_and_wants_the_right_ranks(folder):
    text = gather_text(folder)
    tokenizer = chat_tokenizer.train_tokenizer([random_text(99, 400)], NUM_RANKS)
    assert build_corpus(text, num_ranks=NUM_RANKS, tokenizer=tokenizer).tokenizer is tokenizer
    with pytest.raises(ValueError, match="^data: wanted a tokenizer of 301 ranks, got one of 300$"):
        build_corpus(text, num_ranks=301, tokenizer=tokenizer)


def test_the_tokenizer_is_trained_on_the_training_text_alone(folder, monkeypatch):
    seen = []

    def train(texts, num_ranks):
        seen.extend(texts)
        return chat_tokenizer.Tokenizer(chat_tokenizer.Vocabulary.of_ranks([bytes([value]) for value in range(256)]))

    monkeypatch.setattr(chat_tokenizer, "train_tokenizer", train)
    text = gather_text(folder)
    build_corpus(text, num_ranks=256)
    assert seen == [document.text for document in text.train]


def test_too_little_text_for_the_ranks_says_how_much_is_wanted(folder):
    text = gather_text(folder)
    left = sum(document.num_bytes for document in text.train)
    with pytest.raises(
        ValueError,
        match=rf"^data: .* ranks, wanted 9000: .*; {left:,} bytes are left .* 9,000 ranks want roughly 189 KB$",
    ):
        build_corpus(text, num_ranks=9000)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.9])
def test_a_sample_is_spread_evenly_and_never_more_than_asked_for(monkeypatch, share):
    monkeypatch.setattr(corpus, "_SAMPLE_BLOCK_CHARS", 100)
    text = "".join(f"{idx:05d} €\n" for idx in range(5000))  # 8 characters and ten bytes a line
    small = [Document(source="s", path=f"{idx}", text=f"{idx:05d} small\n") for idx in range(3000)]
    blocks = list(corpus._sample([Document(source="big", path="big", text=text), *small], share))
    # In all 50,000 bytes and 36,000. Never a block (125 bytes) less than the share of what was seen.
    assert 86_000 * share - 125 < sum(len(block.encode()) for block in blocks) <= 86_000 * share
    starts = [text.index(block) for block in blocks if "€" in block]
    gaps = {after - before for before, after in pairwise(starts)}
    assert max(gaps) - min(gaps) <= 200  # as even as whole blocks can be, of 124 or 126 bytes
    assert len(blocks) - len(starts) == pytest.approx(3000 * share, abs=11)  # a block weighs as much as ten of these


def test_a_stream_of_nothing_is_empty(folder):
    tokenizer = build_corpus(gather_text(folder), num_ranks=NUM_RANKS).tokenizer
    assert stream_of([], tokenizer).starts.tolist() == [0]


def test_with_a_folder_the_training_tokens_are_shards_that_are_used_again(folder, tmp_path_factory, monkeypatch):
    runs = tmp_path_factory.mktemp("run")
    text = gather_text(folder)
    memory = build_corpus(text, num_ranks=NUM_RANKS)
    tokenizer = memory.tokenizer

    def build(text, tokenizer=tokenizer):
        said, encoded = [], []

        def encode(self, part):
            encoded.append(part)
            return real_encode(self, part)

        monkeypatch.setattr(chat_tokenizer.Tokenizer, "encode", encode)
        built = build_corpus(text, num_ranks=NUM_RANKS, tokenizer=tokenizer, folder=runs, say=said.append)
        monkeypatch.setattr(chat_tokenizer.Tokenizer, "encode", real_encode)
        return built.train, said, set(encoded) & {document.text for document in text.train} != set()

    real_encode = chat_tokenizer.Tokenizer.encode
    for made_now in (True, False):
        train, said, was_encoded = build(text)
        assert was_encoded == made_now
        assert torch.equal(train.ids_T, memory.train.ids_T) and (train.starts == memory.train.starts).all()
        assert torch.equal(train.num_bytes_W, memory.train.num_bytes_W) and train.num_bytes == memory.train.num_bytes
        assert train.num_targets == memory.train.num_targets
    assert said == [f"{runs / TOKENS}: {len(memory.train.ids_T):,} tokens are there already"]
    assert torch.equal(open_shards(runs / TOKENS).ids_T, memory.train.ids_T)  # as another process does

    # Of another tokenizer, of another text, cut short: written anew, and it is said why.
    other = chat_tokenizer.train_tokenizer([random_text(99, 400)], NUM_RANKS)
    train, said, was_encoded = build(text, other)
    assert was_encoded and said[0] == f"{runs / TOKENS}: of another tokenizer, written anew"
    assert torch.equal(train.ids_T, stream_of(text.train, other).ids_T)
    (folder / "a.txt").write_text(random_text("another"))
    text = gather_text(folder)
    _, said, was_encoded = build(text)
    assert was_encoded and said[0] == f"{runs / TOKENS}: of another text and tokenizer, written anew"
    content = (runs / TOKENS / "tokens-00000.bin").read_bytes()
    for damaged, message in ((content[:-1], "wanted .* bytes, got "), (content[:-1] + b"~", "wanted the SHA-256 ")):
        (runs / TOKENS / "tokens-00000.bin").write_bytes(damaged)
        _, said, was_encoded = build(text)
        assert was_encoded and re.match(f"{runs / TOKENS}/tokens-00000.bin: {message}.*; written anew$", said[0])
        assert (runs / TOKENS / "tokens-00000.bin").read_bytes() == content


def test_gathering_text_and_reading_held_out_text_need_no_torch_and_no_tokenizer():
    program = (
        "import sys, pathlib\n"
        "from trivium.data.corpus import gather_text, read_heldout, write_heldout\n"
        "gather_text(None)\n"
        "print({'torch', 'tiktoken', 'tokenizers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(trivium.__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "set()\n", done.stderr


# --- heldout.jsonl

DOCUMENTS = [
    Document(source="a", path="a/ü.txt", text='"quoted"\r\n\u2028 a line\x85 and €\N{GRINNING FACE}\n'),
    Document(source="b", path="b.txt", text=""),
]


def test_held_out_text_comes_back_as_it_was(tmp_path):
    write_heldout(tmp_path, DOCUMENTS)
    assert read_heldout(tmp_path) == DOCUMENTS
    assert [path.name for path in tmp_path.iterdir()] == [HELDOUT_FILE]
    lines = (tmp_path / HELDOUT_FILE).read_bytes().split(b"\n")
    assert len(lines) == 3 and json.loads(lines[1]) == {"source": "b", "path": "b.txt", "text": ""}


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    write_heldout(tmp_path, DOCUMENTS)

    def documents():
        yield DOCUMENTS[1]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_heldout(tmp_path, documents())
    assert read_heldout(tmp_path) == DOCUMENTS
    assert [path.name for path in tmp_path.iterdir()] == [HELDOUT_FILE]


GOOD = b'{"source": "a", "path": "a", "text": "x"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": no document in it"),
        (GOOD + b"{nonsense}\n" + GOOD, ": line 2: not JSON: "),
        (GOOD + GOOD.replace(b"x", b"\xff"), ": line 2: not JSON: "),
        (GOOD + b"\n", ": line 2: not JSON: "),
        (GOOD + b"[1]\n", ": line 2: wanted an object of the strings source, path and text$"),
        (b'{"source": "a", "path": "a"}\n', ": line 1: wanted an object of the strings source, path and text$"),
        (GOOD.replace(b'"x"', b"1"), ": line 1: wanted an object of the strings source, path and text$"),
        (GOOD.replace(b"}", b', "more": ""}'), ": line 1: wanted an object of the strings source, path and text$"),
        (GOOD + GOOD[:-1], ": line 2: cut off, wanted a line end$"),
        (GOOD + b"[" * 100_000 + b"\n", ": line 2: not JSON: "),
    ],
)
def test_a_damaged_line_is_named(tmp_path, content, message):
    (tmp_path / HELDOUT_FILE).write_bytes(content)
    with pytest.raises(ValueError, match=f"^.*/{HELDOUT_FILE}{message}"):
        read_heldout(tmp_path)


def test_a_folder_without_held_out_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"^.*/{HELDOUT_FILE}: cannot be read: No such file or directory$"):
        read_heldout(tmp_path)
