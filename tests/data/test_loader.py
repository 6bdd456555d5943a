import json
from itertools import islice, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trivium.data.loader import Loader
from trivium.data.pack import TokenStream

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=6).filter(lambda lengths: max(lengths) > 1)
MAX_LEN, NUM_TOKENS = st.integers(1, 12), st.integers(1, 50)


def numbered_stream(lengths):
    """Documents in which every token has an id of its own, so that each can be found again."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    ids_T = torch.arange(starts[-1], dtype=torch.int32)
    return TokenStream(ids_T=ids_T, starts=tuple(starts), num_bytes_W=torch.ones(starts[-1] + 1, dtype=torch.int64))


def loader_of(lengths, max_len=5, num_tokens=23, seed=0):
    return Loader(numbered_stream(lengths), max_len=max_len, num_tokens=num_tokens, seed=seed, source="test")


def content(batch):
    return batch.ids_T.tolist(), batch.targets_T.tolist(), batch.rows.starts, batch.num_bytes


@given(lengths=LENGTHS, max_len=MAX_LEN, num_tokens=NUM_TOKENS)
def test_every_token_is_a_target_once_an_epoch_and_none_across_documents(lengths, max_len, num_tokens):
    stream = numbered_stream(lengths)
    first_of_document = set(stream.starts[:-1])
    num_batches = -(-3 * stream.num_targets // num_tokens)  # three epochs, and what fills the last batch
    batches = list(islice(loader_of(lengths, max_len, num_tokens), num_batches))
    targets = [target for batch in batches for target in batch.targets_T.tolist()]
    for epoch in range(3):
        seen = targets[epoch * stream.num_targets : (epoch + 1) * stream.num_targets]
        assert sorted(seen) == [idx for idx in range(sum(lengths)) if idx not in first_of_document]
    for batch in batches:
        assert batch.rows.num_tokens == num_tokens and batch.rows.max_len <= max_len
        assert torch.equal(batch.targets_T, batch.ids_T + 1)  # the next token of the stream, so of the document
        for start, end in pairwise(batch.rows.starts):
            ids = batch.ids_T[start:end].tolist()
            assert ids == list(range(ids[0], ids[0] + len(ids)))
            assert not first_of_document & set(ids[1:])  # a sequence never runs into the next document


@given(lengths=LENGTHS, max_len=MAX_LEN, num_tokens=NUM_TOKENS, seed=st.integers(0, 9), num_before=st.integers(0, 12))
def test_after_a_restore_the_batches_are_those_that_would_have_followed(lengths, max_len, num_tokens, seed, num_before):
    going_on = loader_of(lengths, max_len, num_tokens, seed)
    for _ in range(num_before):
        next(going_on)
    state = json.loads(json.dumps(going_on.state()))
    restored = loader_of(lengths, max_len, num_tokens, seed)
    next(restored)  # a restore does not depend on where the loader was
    restored.restore(state)
    assert restored.state() == state
    for _ in range(5):
        assert content(next(restored)) == content(next(going_on))
        assert restored.state() == going_on.state()


def test_a_position_by_hand():
    loader = loader_of([5], max_len=2, num_tokens=3)  # 4 inputs: two pieces of 2
    states = []
    for _ in range(4):
        next(loader)
        states.append(tuple(loader.state().values()))
    assert states == [(0, 1, 1), (1, 1, 0), (2, 0, 1), (3, 0, 0)]  # 3, 6, 9, 12 tokens on


def test_the_order_depends_on_the_seed_and_the_epoch_alone():
    lengths = [9, 4, 30, 7]  # 46 targets: two batches of 23 an epoch

    def epochs(seed):
        batches = [batch.ids_T.tolist() for batch in islice(loader_of(lengths, seed=seed), 4)]
        return batches[:2], batches[2:]

    assert epochs(3) == epochs(3)
    assert epochs(3)[0] != epochs(4)[0] and epochs(3)[0] != epochs(3)[1]


def test_nothing_to_train_on_is_refused():
    with pytest.raises(ValueError, match="^data: not one token has another one behind it, nothing to train on$"):
        loader_of([1, 1])
    with pytest.raises(ValueError, match="^loader: wanted a positive number of tokens, got 0$"):
        loader_of([5], num_tokens=0)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"epoch": 0, "piece": 0}, "wanted a state of the whole numbers epoch, piece and offset, got {'epoch'"),
        ({"epoch": 0, "piece": 0, "offset": 0, "seed": 1}, "wanted a state of the whole numbers"),
        ({"epoch": 0, "piece": 0, "offset": 1.0}, "wanted a state of the whole numbers"),
        ({"epoch": 0, "piece": True, "offset": 0}, "wanted a state of the whole numbers"),
        ({"epoch": -1, "piece": 0, "offset": 0}, "{.*} does not fit a stream of 2 pieces$"),
        ({"epoch": 0, "piece": 2, "offset": 0}, "{.*} does not fit a stream of 2 pieces$"),
        ({"epoch": 0, "piece": -1, "offset": 0}, "{.*} does not fit a stream of 2 pieces$"),
        ({"epoch": 0, "piece": 1, "offset": 2}, "{.*} does not fit: that piece has 2 tokens$"),
        ({"epoch": 0, "piece": 1, "offset": -1}, "{.*} does not fit: that piece has 2 tokens$"),
    ],
)
def test_a_state_of_another_stream_is_refused_and_changes_nothing(state, message):
    loader = loader_of([5], max_len=2, num_tokens=3)
    next(loader)
    before = loader.state()
    with pytest.raises(ValueError, match=f"^loader: {message}"):
        loader.restore(state)
    assert loader.state() == before
