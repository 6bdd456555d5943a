from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trivium.chat.pieces import MAX_CHARS
from trivium.data.batch import Batch
from trivium.data.pack import TokenStream, make_batch, pieces, tokenize
from trivium.data.source import Document
from trivium.ops.rows import Rows

BOS = 256
NUM_BYTES_W = torch.tensor([1] * 256 + [0])


def stream_of(*texts):
    documents = [Document(source=str(idx), path=f"{idx}.txt", text=text) for idx, text in enumerate(texts)]
    return tokenize(documents, lambda text: list(text.encode()), bos_id=BOS, num_bytes_W=NUM_BYTES_W)


def test_two_documents_by_hand():
    stream = stream_of("abcd", "x")
    assert stream.ids_T.tolist() == [BOS, 97, 98, 99, 100, BOS, 120] and stream.ids_T.dtype == torch.int32
    assert stream.starts.tolist() == [0, 5, 7] and stream.num_targets == stream.num_bytes == 5
    assert pieces(stream, 3).tolist() == [[0, 3], [3, 4], [5, 6]]
    assert stream.read(3, 6).tolist() == [99, 100, BOS] and stream.read(7, 7).dtype == torch.int64
    batch = make_batch(stream, pieces(stream, 3), "test")
    assert batch.ids_T.tolist() == [BOS, 97, 98, 99, BOS]
    assert batch.targets_T.tolist() == [97, 98, 99, 100, 120]
    assert batch.rows.starts == (0, 3, 4, 5) and batch.num_bytes == 5


@given(texts=st.lists(st.text(max_size=30), max_size=5), max_len=st.integers(1, 9))
def test_every_byte_is_a_target_once_and_none_across_documents(texts, max_len):
    stream = stream_of(*texts)
    assert stream.num_bytes == stream.num_targets == sum(len(text.encode()) for text in texts)
    targets = [idx + 1 for first, end in pieces(stream, max_len).tolist() for idx in range(first, end)]
    assert targets == [idx for start, end in pairwise(stream.starts.tolist()) for idx in range(start + 1, end)]
    assert all(0 < end - first <= max_len for first, end in pieces(stream, max_len))


@pytest.mark.parametrize("lengths", [[], [0], [1], [1, 0, 0, 1], [2], [0, 7, 1, 6, 0], [5, 5, 5], [13]])
@pytest.mark.parametrize("max_len", [1, 2, 3, 4, 6, 100])
def test_pieces_are_those_of_a_walk_document_by_document(lengths, max_len):
    starts = np.cumsum([0, *lengths])
    stream = TokenStream(ids_T=torch.zeros(sum(lengths)), starts=starts, num_bytes_W=NUM_BYTES_W)
    want = [
        [first, min(first + max_len, end - 1)]
        for start, end in pairwise(starts.tolist())
        for first in range(start, end - 1, max_len)
    ]
    assert pieces(stream, max_len).tolist() == want and pieces(stream, max_len).shape == (len(want), 2)
    assert stream.num_targets == sum(end - first for first, end in want)


@pytest.mark.parametrize("starts", [(), (0,), (0, 2), (1, 3), (0, 2, 1, 3), (0, 4)])
def test_bounds_that_are_none_of_these_tokens_are_refused(starts):
    with pytest.raises(ValueError, match="^stream: wanted bounds that rise from 0 to 3, got "):
        TokenStream(ids_T=torch.zeros(3), starts=starts, num_bytes_W=NUM_BYTES_W)


@pytest.mark.parametrize(("first", "end"), [(-1, 2), (3, 2), (0, 8), (8, 8)])
def test_tokens_that_are_not_there_cannot_be_read(first, end):
    with pytest.raises(ValueError, match=f"^stream: tokens {first} to {end} of 7 are not there$"):
        stream_of("abcd", "x").read(first, end)


def test_a_long_text_is_encoded_in_the_parts_in_which_the_tokenizer_cuts_it():
    seen = []

    def encode(text):
        seen.append(text)
        return list(text.encode())

    text = "ab" * (MAX_CHARS // 2) + "c"
    stream = tokenize([Document(source="a", path="a", text=text)], encode, bos_id=BOS, num_bytes_W=NUM_BYTES_W)
    assert [len(part) for part in seen] == [MAX_CHARS, 1]
    assert stream.ids_T.tolist() == [BOS, *text.encode()]


def test_a_tokenizer_that_loses_a_byte_is_found_out():
    document = Document(source="a", path="a.txt", text="abc")
    with pytest.raises(ValueError, match="^data: the tokens of a.txt stand for 2 bytes of 3$"):
        tokenize([document], lambda text: list(text.encode())[1:], bos_id=BOS, num_bytes_W=NUM_BYTES_W)


def test_a_piece_has_a_length():
    with pytest.raises(ValueError, match="^pieces: wanted a positive length, got 0$"):
        pieces(stream_of("abc"), 0)


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


# --- What counts, and documents in one piece


def weighted_stream(lengths, flags):
    """Documents of so many tokens, whose ids stand for one byte more than they are: id 3 for 4."""
    ids_T = torch.arange(sum(lengths), dtype=torch.int32)
    return TokenStream(
        ids_T=ids_T,
        starts=np.cumsum([0, *lengths]),
        num_bytes_W=torch.arange(sum(lengths) + 1) + 1,
        weight_T=torch.tensor(flags, dtype=torch.bool),
    )


def test_a_batch_weighs_its_targets_as_the_stream_does_and_counts_their_bytes_by_hand():
    stream = weighted_stream([5, 3], [1, 0, 1, 1, 0, 1, 0, 1])
    assert stream.num_bytes == 1 + 3 + 4 + 6 + 8 and stream.num_targets == 6
    assert stream.weights(1, 4).tolist() == [0.0, 1.0, 1.0] and stream.weights(1, 4).dtype == torch.float32
    batch = make_batch(stream, [[0, 3], [5, 7]], "test")
    assert batch.targets_T.tolist() == [1, 2, 3, 6, 7]
    assert batch.weight_T.tolist() == [0, 1, 1, 0, 1]  # a weight is its target's, not its input's
    assert batch.num_bytes == 3 + 4 + 8


def test_without_weights_every_token_counts():
    stream = stream_of("abcd", "x")
    assert stream.weight_T is None and stream.weights(0, 7).tolist() == [1.0] * 7
    assert make_batch(stream, [[0, 4]], "test").weight_T.tolist() == [1.0] * 4


def test_there_is_a_weight_for_each_token():
    with pytest.raises(ValueError, match=r"^stream: wanted 8 weights, got \(7,\)$"):
        weighted_stream([5, 3], [1] * 7)
    with pytest.raises(ValueError, match="^stream: tokens 7 to 9 of 8 are not there$"):
        weighted_stream([5, 3], [1] * 8).weights(7, 9)


def test_whole_documents_that_are_too_long_are_left_out_by_hand():
    stream = weighted_stream([5, 3, 1, 0, 4], [1] * 13)  # 4, 2, 0, 0 and 3 inputs
    assert pieces(stream, 4, whole=True).tolist() == [[0, 4], [5, 7], [9, 12]]
    assert pieces(stream, 3, whole=True).tolist() == [[5, 7], [9, 12]]
    assert pieces(stream, 2, whole=True).tolist() == [[5, 7]]
    assert pieces(stream, 1, whole=True).shape == (0, 2)


@given(lengths=st.lists(st.integers(0, 14), max_size=6), max_len=st.integers(1, 13))
def test_a_whole_piece_is_a_document(lengths, max_len):
    stream = weighted_stream(lengths, [1] * sum(lengths))
    want = [[start, end - 1] for start, end in pairwise(stream.starts.tolist()) if 1 <= end - 1 - start <= max_len]
    assert pieces(stream, max_len, whole=True).tolist() == want
