from collections import Counter
from itertools import islice, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trivium.data.batch import Batch
from trivium.data.pack import TokenStream, pack, pieces, shuffled_batches, tokenize
from trivium.data.source import Document
from trivium.ops.rows import Rows

BOS = 256
NUM_BYTES_W = torch.tensor([1] * 256 + [0])


def stream_of(*texts):
    documents = [Document(source=str(idx), path=f"{idx}.txt", text=text) for idx, text in enumerate(texts)]
    return tokenize(documents, lambda text: list(text.encode()), bos_id=BOS, num_bytes_W=NUM_BYTES_W)


def numbered_stream(lengths):
    """Documents in which every token has an id of its own, so that each can be found again."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    ids_T = torch.arange(starts[-1], dtype=torch.int32)
    return TokenStream(ids_T=ids_T, starts=tuple(starts), num_bytes_W=torch.ones(starts[-1] + 1, dtype=torch.int64))


def test_two_documents_by_hand():
    stream = stream_of("abcd", "x")
    batches = list(pack(stream, pieces(stream, 3), 4, "test"))
    assert [batch.ids_T.tolist() for batch in batches] == [[BOS, 97, 98, 99], [BOS]]
    assert [batch.targets_T.tolist() for batch in batches] == [[97, 98, 99, 100], [120]]
    assert [batch.rows.starts for batch in batches] == [(0, 3, 4), (0, 1)]
    assert [batch.num_bytes for batch in batches] == [4, 1]


@given(lengths=st.lists(st.integers(1, 20), max_size=8), max_len=st.integers(1, 12), num_tokens=st.integers(1, 17))
def test_every_token_is_a_target_once_and_none_across_documents(lengths, max_len, num_tokens):
    stream = numbered_stream(lengths)
    first_of_document = set(stream.starts[:-1])
    batches = list(pack(stream, pieces(stream, max_len), num_tokens, "test"))
    targets = [target for batch in batches for target in batch.targets_T.tolist()]
    assert sorted(targets) == [idx for idx in range(sum(lengths)) if idx not in first_of_document]
    assert len(targets) == stream.num_targets
    for batch in batches:
        assert torch.equal(batch.targets_T, batch.ids_T + 1)  # the next token of the stream, so of the document
        assert batch.rows.max_len <= max_len
        for start, end in pairwise(batch.rows.starts):
            ids = batch.ids_T[start:end].tolist()
            assert ids == list(range(ids[0], ids[0] + len(ids)))
            assert not first_of_document & set(ids[1:])  # a sequence never runs into the next document
    assert all(batch.rows.num_tokens == num_tokens for batch in batches[:-1])


@given(texts=st.lists(st.text(max_size=30), max_size=5), max_len=st.integers(1, 9), num_tokens=st.integers(1, 11))
def test_every_byte_is_counted_once(texts, max_len, num_tokens):
    stream = stream_of(*texts)
    num_bytes = sum(len(text.encode()) for text in texts)
    assert stream.num_bytes == num_bytes
    assert sum(batch.num_bytes for batch in pack(stream, pieces(stream, max_len), num_tokens, "test")) == num_bytes


def test_a_tokenizer_that_loses_a_byte_is_found_out():
    document = Document(source="a", path="a.txt", text="abc")
    with pytest.raises(ValueError, match="^data: the tokens of a.txt stand for 2 bytes of 3$"):
        tokenize([document], lambda text: list(text.encode())[1:], bos_id=BOS, num_bytes_W=NUM_BYTES_W)


def test_shuffled_batches_have_one_size_and_see_every_token_once_an_epoch():
    stream = numbered_stream([9, 4, 30, 7])  # 46 targets: two batches of 23 an epoch
    batches = list(islice(shuffled_batches(stream, max_len=5, num_tokens=23, seed=0, source="test"), 6))
    assert {batch.rows.num_tokens for batch in batches} == {23}
    for epoch in (batches[0:2], batches[2:4], batches[4:6]):
        assert set(Counter(t for batch in epoch for t in batch.targets_T.tolist()).values()) == {1}
    assert not torch.equal(batches[0].ids_T, batches[2].ids_T)


def test_the_order_depends_on_the_seed_alone():
    stream = numbered_stream([9, 4, 30, 7])

    def first(seed):
        return next(shuffled_batches(stream, max_len=5, num_tokens=23, seed=seed, source="test")).ids_T

    assert torch.equal(first(3), first(3)) and not torch.equal(first(3), first(4))


def test_nothing_to_train_on_is_refused():
    with pytest.raises(ValueError, match="^data: not one token has another one behind it, nothing to train on$"):
        shuffled_batches(stream_of("", ""), max_len=5, num_tokens=8, seed=0, source="test")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("targets_T", torch.zeros(2, dtype=torch.int64), r"targets_T wants torch.int64 of shape \(3,\), got .* \(2,\)"),
        ("ids_T", torch.zeros(3), r"ids_T wants torch.int64 of shape \(3,\), got torch.float32"),
        ("weight_T", torch.ones(3, dtype=torch.float64), "weight_T wants torch.float32"),
        ("advantage_T", torch.ones(4), "advantage_T wants torch.float32"),
        ("num_bytes", -1, "num_bytes is never negative, got -1"),
    ],
)
def test_a_batch_is_checked_where_it_is_made(field, value, message):
    fields = {
        "ids_T": torch.zeros(3, dtype=torch.int64),
        "targets_T": torch.zeros(3, dtype=torch.int64),
        "weight_T": torch.ones(3),
        "rows": Rows.one(3),
        "num_bytes": 0,
        "source": "test",
    }
    Batch(**fields)
    with pytest.raises(ValueError, match=f"^batch: {message}"):
        Batch(**{**fields, field: value})
