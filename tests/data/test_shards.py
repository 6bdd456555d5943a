import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trivium.data import shards
from trivium.data.pack import pieces
from trivium.data.shards import (
    BYTES_PER_ID,
    MANIFEST,
    Counted,
    open_shards,
    read_manifest,
    reuse_shards,
    write_shards,
)

BOS = 9
NUM_BYTES_W = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0])
DOCUMENTS = [[BOS, 1, 2, 3], [BOS], [BOS, *[4] * 30], [BOS, 5], [BOS, 6, 7], [BOS], [BOS, 8]]


def written(folder, documents=DOCUMENTS, shard_tokens=5, num_bytes_W=NUM_BYTES_W, **more):
    arrays = (np.array(ids, dtype=np.int32) for ids in documents)
    arguments = {"first_id": BOS, "text": "text", "tokenizer": "tokenizer", **more}
    return write_shards(folder, arrays, num_bytes_W=num_bytes_W, shard_tokens=shard_tokens, **arguments)


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_by_hand(tmp_path):
    stream = written(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bytes-per-id.bin",
        "manifest.json",
        *(f"tokens-{idx:05d}.{kind}" for idx in range(4) for kind in ("bin", "starts")),
    ]
    # A shard ends with the document that brings it to 5 tokens: 4 + 1, 31, 2 + 3, and what is left.
    assert (tmp_path / "tokens-00000.bin").read_bytes() == bytes([9, 0, 1, 0, 2, 0, 3, 0, 9, 0])
    assert np.fromfile(tmp_path / "tokens-00002.starts", dtype="<i8").tolist() == [0, 2, 5]
    manifest = read_manifest(tmp_path)
    assert (manifest.version, manifest.vocab_size, manifest.dtype, manifest.first_id) == (2, 11, "uint16", BOS)
    assert (manifest.text, manifest.tokenizer) == ("text", "tokenizer")
    assert (manifest.num_tokens, manifest.num_documents) == (44, 7)
    assert [(shard.num_tokens, shard.num_documents) for shard in manifest.shards] == [(5, 2), (31, 1), (5, 2), (3, 2)]
    # 1, 2, 3 stand for 2 + 3 + 4 bytes, thirty 4 for 5 each, 5 for 6, 6 and 7 for 7 + 8, 8 for 9.
    assert manifest.num_bytes == stream.num_bytes == 9 + 150 + 6 + 15 + 9
    assert stream.num_targets == 44 - 7


@given(
    sizes=st.lists(st.integers(0, 12), max_size=12),
    shard_tokens=st.integers(1, 40),
    span=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_shards_read_as_the_documents_in_a_row(tmp_path_factory, sizes, shard_tokens, span):
    documents = [[BOS, *(idx % 9 for idx in range(size))] for size in sizes]
    ids = [id_ for document in documents for id_ in document]
    stream = written(tmp_path_factory.mktemp("shards"), documents, shard_tokens)
    assert stream.ids_T.tolist() == ids and stream.ids_T.dtype == torch.int32
    assert stream.starts.tolist() == np.cumsum([0, *map(len, documents)]).tolist()
    assert torch.equal(stream.num_bytes_W, NUM_BYTES_W)
    first, end = sorted(round(part * len(ids)) for part in span)  # also across shards
    assert stream.read(first, end).tolist() == ids[first:end] and stream.read(first, end).dtype == torch.int64
    assert len(stream.parts) == 0 or max(map(len, stream.parts[:-1]), default=0) < shard_tokens + 13
    for first, end in pieces(stream, 5).tolist():
        assert BOS not in stream.read(first, end + 1)[1:]
    for first, end in ((-1, 0), (0, len(ids) + 1)):
        with pytest.raises(ValueError, match=f"^stream: tokens {first} to {end} of {len(ids)} are not there$"):
            stream.read(first, end)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_the_last_id_of_a_vocabulary_comes_back(tmp_path, vocab_size, dtype):
    num_bytes_W = torch.arange(vocab_size)
    stream = written(tmp_path, [[BOS, vocab_size - 1, 0]], num_bytes_W=num_bytes_W)
    assert stream.manifest.dtype == dtype and stream.read(0, 3).tolist() == [BOS, vocab_size - 1, 0]
    assert stream.num_bytes == BOS + vocab_size - 1


def test_a_long_document_is_written_in_blocks_and_is_one(tmp_path, monkeypatch):
    want = written(tmp_path / "whole")
    monkeypatch.setattr(shards, "_BLOCK_TOKENS", 7)
    assert written(tmp_path / "blocks").manifest == want.manifest
    assert content_of(tmp_path / "blocks") == content_of(tmp_path / "whole")


def test_one_document_is_held_at_a_time(tmp_path):
    alive, most = set(), 0

    class Ids(np.ndarray):
        def __del__(self):
            alive.discard(id(self))

    def documents():
        nonlocal most
        for _ in range(50):
            ids = np.array([BOS, 1, 2]).view(Ids)
            alive.add(id(ids))
            most = max(most, len(alive))
            yield ids
            del ids

    arguments = {"num_bytes_W": NUM_BYTES_W, "first_id": BOS, "text": "", "tokenizer": "", "shard_tokens": 20}
    assert write_shards(tmp_path, documents(), **arguments).manifest.num_tokens == 150
    assert most <= 3  # this one, the one before it, and one on its way


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[BOS, 1], [1, 2]], r"document 1: wanted id 9 first, got \[1\]"),
        ([[BOS, 1], []], r"document 1: wanted id 9 first, got \[\]"),
        ([[BOS, 11]], "document 0: wanted ids from 0 to 10, got 9 to 11"),
        ([[BOS, -1]], "document 0: wanted ids from 0 to 10, got -1 to 9"),
    ],
)
def test_documents_that_are_none_are_refused_and_leave_nothing(tmp_path, documents, message):
    with pytest.raises(ValueError, match=f"^shards: {message}$"):
        written(tmp_path, [*DOCUMENTS[:4], *documents][-len(documents) :])
    assert content_of(tmp_path) == {}
    with pytest.raises(ValueError, match="^shards: shard_tokens: wanted at least 1, got 0$"):
        written(tmp_path, shard_tokens=0)


# --- Killed


class Killed(BaseException):
    """From some call on nothing reaches the disk any more: the process is dead, or the disk is."""


def killed_at(monkeypatch, number, folder):
    """Write, with every call that changes the folder failing from that one on. Whether it came so far."""
    calls = 0

    def counted(real):
        def call(*arguments, **more):
            nonlocal calls
            calls += 1
            if calls > number:
                raise Killed
            return real(*arguments, **more)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(shards._Hashed, "write", counted(shards._Hashed.write))
        patch.setattr(os, "fsync", counted(os.fsync))
        for name in ("open", "replace", "unlink"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        try:
            written(folder)
        except Killed:
            return False
    return True


def test_wherever_a_write_is_killed_the_folder_is_whole_or_has_no_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # nobody pulls the plug, and 1,000 of them take seconds
    whole, old, folder = (tmp_path / name for name in ("whole", "old", "folder"))
    written(whole)
    written(old, [[BOS, 1]] * 9)
    want, number, seen, done = content_of(whole), 0, set(), False
    while not done:
        for name, content in content_of(old).items():  # old shards lie there, more of them
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        done = killed_at(monkeypatch, number, folder)
        if (folder / MANIFEST).exists():
            stream = open_shards(folder, verify=True)  # raises for shards of two writes, or half of one
            seen.add("new" if stream.manifest == read_manifest(whole) else "old")
        else:
            seen.add("none")
            with pytest.raises(ValueError, match=f"{MANIFEST}: cannot be read: .*; shards without a manifest are not"):
                open_shards(folder)
        written(folder)  # what is left does not stand in the way
        assert content_of(folder) == want
        number += 1
    assert seen == {"old", "none", "new"} and number > 60


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(self, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards._Hashed, "write", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path)
    assert content_of(tmp_path) == {}


# --- Damage


def cut(name, num_bytes=1):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-num_bytes])


def flip(name, at=0):
    def flipped(folder):
        content = bytearray((folder / name).read_bytes())
        content[at] ^= 1
        (folder / name).write_bytes(content)

    return flipped


def change(**values):
    def changed(folder):
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps({**manifest, **values}))

    return changed


def change_shard(idx, **values):
    def changed(folder):
        shards = json.loads((folder / MANIFEST).read_text())["shards"]
        shards[idx].update(values)
        change(shards=shards)(folder)

    return changed


def remove(name):
    return lambda folder: (folder / name).unlink()


AT_ONCE = [
    (cut("tokens-00001.bin"), "tokens-00001.bin: wanted 62 bytes, got 61$"),
    (cut("tokens-00001.bin", 2), "tokens-00001.bin: wanted 62 bytes, got 60$"),
    (cut("tokens-00002.starts", 8), "tokens-00002.starts: wanted 24 bytes, got 16$"),
    (cut(BYTES_PER_ID), "bytes-per-id.bin: wanted 88 bytes, got 87$"),
    (remove("tokens-00003.bin"), "tokens-00003.bin: cannot be read: No such file or directory$"),
    (remove("tokens-00003.starts"), "tokens-00003.starts: cannot be read: No such file or directory$"),
    (remove(BYTES_PER_ID), "bytes-per-id.bin: cannot be read: No such file or directory$"),
    (
        flip("tokens-00002.starts", 8),
        "tokens-00002.starts: wanted the SHA-256 [0-9a-f]{64}, got [0-9a-f]{64}: this is ",
    ),
    (flip(BYTES_PER_ID), "bytes-per-id.bin: wanted the SHA-256 "),
    (remove(MANIFEST), "manifest.json: cannot be read: No such file or directory; shards without a manifest are not"),
    (cut(MANIFEST, 9), "manifest.json: not JSON: "),
    (lambda folder: (folder / MANIFEST).write_text("[" * 100_000), "manifest.json: not JSON: "),
    (lambda folder: (folder / MANIFEST).write_text("[]"), "manifest.json: version: wanted 2, got None$"),
    (change(version=1), "manifest.json: version: wanted 2, got 1$"),
    (change(shards={}), "manifest.json: shards: wanted a list, got {}$"),
    (change(shards=[1]), "manifest.json: shard 0: wanted an object, got 1$"),
    (change(more=1), "manifest.json: wanted the fields version, .*, shards; got version, .*, more$"),
    (change(num_bytes="1"), "manifest.json: num_bytes: wanted a whole number from 0 on, got '1'$"),
    (change(vocab_size=True), "manifest.json: vocab_size: wanted a whole number from 0 on, got True$"),
    (change(num_tokens=-1), "manifest.json: num_tokens: wanted a whole number from 0 on, got -1$"),
    (change(num_tokens=45), "manifest.json: num_tokens: the shards come to 44, got 45$"),
    (change(num_documents=6), "manifest.json: num_documents: the shards come to 7, got 6$"),
    (change(dtype="float32"), "manifest.json: dtype: wanted uint16 or uint32, got float32$"),
    (change(dtype="uint32"), "tokens-00000.bin: wanted 20 bytes, got 10$"),
    (change_shard(1, name="../tokens-00001.bin"), "manifest.json: shard 1: name: wanted tokens-00001.bin, got ../tok"),
    (change_shard(1, name="tokens-00000.bin"), "manifest.json: shard 1: name: wanted tokens-00001.bin, got tokens-0"),
    (change_shard(3, sha256=None), "manifest.json: shard 3: sha256: wanted a string, got None$"),
]


@pytest.mark.parametrize(("damage", "message"), AT_ONCE, ids=range(len(AT_ONCE)))
def test_damage_is_found_when_shards_are_opened(tmp_path, damage, message):
    written(tmp_path)
    open_shards(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=f"^{tmp_path}/{message}"):
        open_shards(tmp_path)


def test_a_flipped_token_is_found_on_demand(tmp_path):
    written(tmp_path)
    flip("tokens-00001.bin", 7)(tmp_path)
    assert len(open_shards(tmp_path).parts) == 4
    with pytest.raises(ValueError, match=f"^{tmp_path}/tokens-00001.bin: wanted the SHA-256 .*: this is not what was"):
        open_shards(tmp_path, verify=True)


def test_ids_beyond_the_vocabulary_and_bounds_that_fall_are_found_though_their_hashes_agree(tmp_path):
    """What another program wrote, or ours with a fault in it, is whole and wrong."""
    written(tmp_path, [[BOS, 1, 2, 3], [BOS, 4]], shard_tokens=9)
    path = tmp_path / "tokens-00000.bin"
    np.array([BOS, 1, 11, 3, BOS, 4], dtype="<u2").tofile(path)
    change_shard(0, sha256=shards.hashlib.sha256(path.read_bytes()).hexdigest())(tmp_path)
    with pytest.raises(ValueError, match=f"^{path}: has the id 11, wanted ids below 11$"):
        open_shards(tmp_path, verify=True)
    path = path.with_suffix(".starts")
    for starts in ([0, 7, 6], [0, 0, 6], [1, 4, 6], [0, 4, 5]):
        np.array(starts, dtype="<i8").tofile(path)
        change_shard(0, starts_sha256=shards.hashlib.sha256(path.read_bytes()).hexdigest())(tmp_path)
        with pytest.raises(ValueError, match=f"^{path}: wanted bounds that rise from 0 to 6$"):
            open_shards(tmp_path)


# --- What counts


COUNTED = [[0, 1, 1, 0], [1], [0] * 30 + [1], [0, 0], [0, 1, 1], [0], [1, 0]]  # of DOCUMENTS


def written_counted(folder, flags=COUNTED, documents=DOCUMENTS, **more):
    counted = [
        Counted(np.array(ids, dtype=np.int32), np.array(own, dtype=bool))
        for ids, own in zip(documents, flags, strict=True)
    ]
    arguments = {"first_id": BOS, "text": "text", "tokenizer": "tokenizer", "shard_tokens": 5, **more}
    return write_shards(folder, counted, num_bytes_W=NUM_BYTES_W, **arguments)


def test_what_counts_by_hand(tmp_path):
    stream = written_counted(tmp_path)
    assert (tmp_path / "tokens-00000.counted").read_bytes() == bytes([0, 1, 1, 0, 1])
    assert (tmp_path / "tokens-00002.counted").read_bytes() == bytes([0, 0, 0, 1, 1])
    # 1 and 2 stand for 2 + 3 bytes, the last 4 for 5, 6 and 7 for 7 + 8; [BOS] counts where it is said, for none.
    assert stream.num_bytes == read_manifest(tmp_path).num_bytes == 5 + 5 + 15
    assert stream.num_targets == 44 - 7  # what counts is another question
    assert open_shards(tmp_path, verify=True).weight_T.tolist() == [bool(flag) for own in COUNTED for flag in own]
    assert stream.weight_T.dtype == torch.bool and stream.weights(0, 3).dtype == torch.float32


@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    shard_tokens=st.integers(1, 40),
    span=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    data=st.randoms(use_true_random=False),
)
def test_flags_read_as_those_of_the_documents_in_a_row(tmp_path_factory, sizes, shard_tokens, span, data):
    documents = [[BOS, *(idx % 9 for idx in range(size))] for size in sizes]
    flags = [[data.randrange(2) for _ in document] for document in documents]
    stream = written_counted(tmp_path_factory.mktemp("shards"), flags, documents, shard_tokens=shard_tokens)
    whole = [flag for own in flags for flag in own]
    assert stream.weight_T.tolist() == [bool(flag) for flag in whole]
    first, end = sorted(round(part * len(whole)) for part in span)  # also across shards
    assert stream.weights(first, end).tolist() == whole[first:end]
    ids = [id_ for document in documents for id_ in document]
    assert stream.num_bytes == sum(int(NUM_BYTES_W[id_]) for id_, flag in zip(ids, whole, strict=True) if flag)
    for first, end in ((-1, 0), (0, len(whole) + 1)):
        with pytest.raises(ValueError, match=f"^stream: tokens {first} to {end} of {len(whole)} are not there$"):
            stream.weights(first, end)


def test_without_flags_all_counts_and_no_file_says_so(tmp_path):
    stream = written(tmp_path)
    assert stream.weight_T is None and stream.weights(2, 9).tolist() == [1.0] * 7
    assert not list(tmp_path.glob("*.counted"))


def test_flags_of_a_long_document_are_counted_in_its_blocks(tmp_path, monkeypatch):
    want = written_counted(tmp_path / "whole").manifest
    monkeypatch.setattr(shards, "_BLOCK_TOKENS", 7)
    assert written_counted(tmp_path / "blocks").manifest == want
    assert content_of(tmp_path / "blocks") == content_of(tmp_path / "whole")


@pytest.mark.parametrize("plain_first", [True, False])
def test_either_all_documents_say_what_counts_or_none_does(tmp_path, plain_first):
    ids = np.array([BOS, 1], dtype=np.int32)
    documents = [ids, Counted(ids, np.array([False, True]))][:: 1 if plain_first else -1]
    with pytest.raises(ValueError, match="^shards: document 1: either all documents say what counts, or none does$"):
        write_shards(tmp_path, documents, num_bytes_W=NUM_BYTES_W, first_id=BOS, text="", tokenizer="")
    assert content_of(tmp_path) == {}


def test_there_is_a_flag_for_each_id(tmp_path):
    with pytest.raises(ValueError, match="^shards: document 1: wanted 1 flags of what counts, got 2$"):
        written_counted(tmp_path, [COUNTED[0], [1, 1], *COUNTED[2:]])
    assert content_of(tmp_path) == {}


def test_shards_with_flags_leave_nothing_to_those_without(tmp_path):
    written_counted(tmp_path / "there")
    assert written(tmp_path / "there").weight_T is None
    written(tmp_path / "fresh")
    assert content_of(tmp_path / "there") == content_of(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut("tokens-00001.counted"), "tokens-00001.counted: wanted 31 bytes, got 30$"),
        (remove("tokens-00001.counted"), "tokens-00001.counted: cannot be read: No such file or directory$"),
    ],
)
def test_flags_that_are_not_whole_are_found_when_shards_are_opened(tmp_path, damage, message):
    written_counted(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=f"^{tmp_path}/{message}"):
        open_shards(tmp_path)


def test_a_flipped_flag_is_found_on_demand(tmp_path):
    written_counted(tmp_path)
    flip("tokens-00001.counted", 7)(tmp_path)
    assert open_shards(tmp_path).weights(12, 13).tolist() == [1.0]
    with pytest.raises(ValueError, match=f"^{tmp_path}/tokens-00001.counted: wanted the SHA-256 .*: this is not what"):
        open_shards(tmp_path, verify=True)


# --- Used again


def test_shards_of_the_same_text_and_tokenizer_are_used_again(tmp_path):
    same, said = {"text": "text", "tokenizer": "tokenizer"}, []
    assert reuse_shards(tmp_path / "none", same, said.append) is None and not said
    written(tmp_path)
    assert reuse_shards(tmp_path, same, said.append).manifest == read_manifest(tmp_path)
    for other, what in (({"text": "x"}, "text"), ({"text": "x", "tokenizer": "y"}, "text and tokenizer")):
        assert reuse_shards(tmp_path, same | other, said.append) is None
        assert said[-1] == f"{tmp_path}: of another {what}, written anew"
    flip("tokens-00001.bin", 7)(tmp_path)
    assert reuse_shards(tmp_path, same, said.append) is None and said[-1].endswith("not what was written; written anew")
    (tmp_path / MANIFEST).write_text("{")
    assert reuse_shards(tmp_path, same, said.append) is None and "manifest.json: not JSON" in said[-1]
    assert said[0] == f"{tmp_path}: 44 tokens are there already" and len(said) == 5
