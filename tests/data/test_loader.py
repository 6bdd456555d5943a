import gc
import json
import random
import threading
import time
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trivium.data.loader import Loader
from trivium.data.pack import TokenStream, make_batch, pieces
from trivium.data.shards import Counted, open_shards, write_shards

# 0 is an empty document, 1 is [BOS] alone: neither has a target.
LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(lambda lengths: max(lengths) > 1)
SHAPES = st.tuples(st.integers(1, 12), st.integers(0, 20)).map(
    lambda pair: (pair[0], sum(pair))
)  # max_len, micro_tokens


def numbered_stream(lengths):
    """Documents in which every token has an id of its own, so that each can be found again."""
    starts = np.cumsum([0, *lengths])
    num_bytes_W = torch.arange(starts[-1] + 1) % 5
    return TokenStream(ids_T=torch.arange(starts[-1], dtype=torch.int32), starts=starts, num_bytes_W=num_bytes_W)


def loader_of(lengths, max_len=5, micro_tokens=23, num_micro=1, seed=0, **more):
    stream = numbered_stream(lengths) if isinstance(lengths, list) else lengths
    return Loader(
        stream, max_len=max_len, micro_tokens=micro_tokens, num_micro=num_micro, seed=seed, source="test", **more
    )


def content(batch):
    return batch.ids_T.tolist(), batch.targets_T.tolist(), batch.rows.starts, batch.num_bytes


def steps_of(loader, count):
    return [[content(batch) for batch in micros] for micros in islice(loader, count)]


def ids_of(loader, count):
    """All ids of the next steps, one behind the other."""
    return [id_ for micros in islice(loader, count) for batch in micros for id_ in batch.ids_T.tolist()]


@given(lengths=LENGTHS, shape=SHAPES, num_micro=st.integers(1, 3))
@example(lengths=[3], shape=(12, 32), num_micro=3)  # 96 tokens a step of a stream of 2: 48 epochs in it
@example(lengths=[1, 0, 1, 2, 0, 1], shape=(1, 1), num_micro=1)
@example(lengths=[1000, 2, 2, 2], shape=(12, 20), num_micro=2)
def test_every_token_is_a_target_once_an_epoch_and_none_across_documents(lengths, shape, num_micro):
    stream = numbered_stream(lengths)
    max_len, micro_tokens = shape
    first_of_document = {start for start, end in pairwise(stream.starts.tolist()) if end > start}
    num_steps = -(-3 * stream.num_targets // (micro_tokens * num_micro))  # three epochs, and what fills the last step
    steps = list(islice(loader_of(stream, max_len, micro_tokens, num_micro), num_steps))
    targets = [target for micros in steps for batch in micros for target in batch.targets_T.tolist()]
    for epoch in range(3):
        seen = targets[epoch * stream.num_targets : (epoch + 1) * stream.num_targets]
        assert sorted(seen) == [idx for idx in range(sum(lengths)) if idx not in first_of_document]
    for micros in steps:
        assert len(micros) == num_micro
        for batch in micros:
            assert batch.rows.num_tokens == micro_tokens and batch.rows.max_len <= max_len
            assert torch.equal(batch.targets_T, batch.ids_T + 1)  # the next token of the stream, so of the document
            assert batch.num_bytes == sum(target % 5 for target in batch.targets_T.tolist())
            assert (batch.weight_T == 1).all()
            for start, end in pairwise(batch.rows.starts):
                ids = batch.ids_T[start:end].tolist()
                assert ids == list(range(ids[0], ids[0] + len(ids))) != []
                assert not first_of_document & set(ids[1:])  # a sequence never runs into the next document


def one_after_the_other(stream, max_len, num_tokens, seed):
    """The law in plain Python: piece after piece in the order of the epoch, cut where a batch is full."""
    whole = pieces(stream, max_len).tolist()
    epoch, spans, room = 0, [], num_tokens
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        for idx in torch.randperm(len(whole), generator=generator).tolist():
            first, end = whole[idx]
            while first < end:
                taken = min(room, end - first)
                spans.append((first, first + taken))
                first, room = first + taken, room - taken
                if not room:
                    yield make_batch(stream, spans, "test")
                    spans, room = [], num_tokens
        epoch += 1


@given(lengths=LENGTHS, shape=SHAPES, seed=st.integers(0, 9))
def test_the_arithmetic_gives_what_a_walk_piece_by_piece_gives(lengths, shape, seed):
    stream = numbered_stream(lengths)
    want = [[content(batch)] for batch in islice(one_after_the_other(stream, *shape, seed), 6)]
    assert steps_of(loader_of(stream, *shape, seed=seed), 6) == want


@settings(max_examples=40)
@given(
    lengths=LENGTHS,
    shape=SHAPES,
    per_rank=st.integers(1, 2),
    num_ranks=st.sampled_from([1, 2, 4]),
    workers=st.sampled_from([0, 1, 3]),
    restarts=st.lists(st.integers(0, 3), max_size=4),
    data=st.randoms(use_true_random=False),
)
def test_ranks_workers_and_restarts_change_nothing(lengths, shape, per_rank, num_ranks, workers, restarts, data):
    stream = numbered_stream(lengths)
    num_micro = 4 * per_rank
    whole = loader_of(stream, *shape, num_micro, seed=3)
    state = whole.state()
    for num_steps in [*restarts, 2]:  # so many steps, then killed and begun again elsewhere
        want = steps_of(whole, num_steps)
        got = [[None] * num_micro for _ in range(num_steps)]
        states = []
        for rank in range(num_ranks):
            loader = loader_of(stream, *shape, num_micro, seed=3, rank=rank, num_ranks=num_ranks, workers=workers)
            loader.restore(state)
            for step, micros in enumerate(steps_of(loader, num_steps)):
                got[step][rank::num_ranks] = micros
            states.append(loader.state())
            loader.close()
        assert got == want
        assert states == num_ranks * [whole.state()]
        state = json.loads(json.dumps(states[0]))
        num_ranks, workers = data.choice([1, 2, 4]), data.choice([0, 1, 3])


@given(lengths=LENGTHS, shape=SHAPES, seed=st.integers(0, 9), num_before=st.integers(0, 12))
def test_after_a_restore_the_batches_are_those_that_would_have_followed(lengths, shape, seed, num_before):
    going_on = loader_of(lengths, *shape, seed=seed)
    steps_of(going_on, num_before)
    state = json.loads(json.dumps(going_on.state()))
    restored = loader_of(lengths, *shape, seed=seed)
    next(restored)  # a restore does not depend on where the loader was
    restored.restore(state)
    assert restored.state() == state
    for _ in range(5):
        assert steps_of(restored, 1) == steps_of(going_on, 1)
        assert restored.state() == going_on.state()


@settings(max_examples=40)
@given(lengths=LENGTHS, max_len=st.integers(1, 8), num_before=st.integers(0, 5))
def test_another_split_of_a_step_goes_on_at_the_very_next_token(lengths, max_len, num_before):
    before = loader_of(lengths, max_len, 16, 4)
    steps_of(before, num_before)
    other = loader_of(lengths, max_len, 8, 8)
    other.restore(before.state())
    for _ in range(2):
        assert ids_of(other, 1) == ids_of(before, 1)
        assert other.state() == before.state()


def test_a_position_by_hand():
    loader = loader_of([5], max_len=2, micro_tokens=3)  # 4 inputs: two pieces of 2
    states = []
    for _ in range(4):
        next(loader)
        states.append(tuple(loader.state().values()))
    # Stage, max_len, epoch, piece, offset: 3, 6, 9, 12 tokens on.
    assert states == [(0, 2, 0, 1, 1), (0, 2, 1, 1, 0), (0, 2, 2, 0, 1), (0, 2, 3, 0, 0)]


def test_the_order_depends_on_the_seed_the_stage_and_the_epoch_alone():
    lengths = [9, 4, 30, 7]  # 46 targets: two steps of 23 an epoch

    def epochs(seed, stage):
        loader = loader_of(lengths, seed=seed)
        loader.enter_stage(stage, 5)
        return ids_of(loader, 2), ids_of(loader, 2)

    assert epochs(3, 0) == epochs(3, 0)
    orders = [tuple(ids) for seed in (3, 4, 2**32 + 3, 2**40 + 3) for stage in (0, 1, 2) for ids in epochs(seed, stage)]
    assert len(set(orders)) == 24 and len({tuple(sorted(ids)) for ids in orders}) == 1


def test_shards_and_memory_give_the_same_batches(tmp_path):
    rng = np.random.default_rng(0)
    documents = [np.array([0, *rng.integers(1, 300, size)]) for size in rng.integers(0, 40, 50)]
    num_bytes_W = torch.arange(300) % 7
    memory = TokenStream(
        ids_T=torch.from_numpy(np.concatenate(documents)).int(),
        starts=np.cumsum([0, *map(len, documents)]),
        num_bytes_W=num_bytes_W,
    )
    write_shards(tmp_path, documents, num_bytes_W=num_bytes_W, first_id=0, text="", tokenizer="", shard_tokens=100)
    disk = open_shards(tmp_path)
    assert len(disk.parts) > 5
    assert steps_of(loader_of(disk, 16, 64, 2, workers=2), 12) == steps_of(loader_of(memory, 16, 64, 2), 12)


# --- Stages


def test_a_stage_begins_with_the_next_step_and_is_entered_once():
    lengths = [40, 3, 17, 9]  # 65 targets
    for workers in (0, 2):
        loader = loader_of(lengths, max_len=2, micro_tokens=13, workers=workers)
        loader.enter_stage(0, 2)
        assert max(batch.rows.max_len for micros in islice(loader, 3) for batch in micros) == 2
        loader.enter_stage(1, 8)
        assert loader.state() == {"stage": 1, "max_len": 8, "epoch": 0, "piece": 0, "offset": 0}
        seen = []
        for _ in range(5):  # one epoch of the new stage
            loader.enter_stage(1, 8)
            (batch,) = next(loader)
            seen += batch.ids_T.tolist()
            assert 2 < batch.rows.max_len <= 8
        assert loader.state() == {"stage": 1, "max_len": 8, "epoch": 1, "piece": 0, "offset": 0}
        assert sorted(seen) == [*range(39), 40, 41, *range(43, 59), *range(60, 68)]
        loader.close()


def test_a_state_of_a_later_stage_is_gone_on_with_from_the_first():
    going_on = loader_of([40, 3, 17], max_len=2, micro_tokens=13)
    going_on.enter_stage(2, 8)
    next(going_on)
    restored = loader_of([40, 3, 17], max_len=2, micro_tokens=13)
    restored.restore(going_on.state())
    restored.enter_stage(2, 8)
    assert steps_of(restored, 4) == steps_of(going_on, 4)


@pytest.mark.parametrize(
    ("index", "max_len", "message"),
    [
        (0, 4, "loader: wanted stage 1 or one after it, got 0"),
        (1, 5, "loader: stage 1 has pieces of at most 4, got 5"),
        (2, 24, "loader: max_len 24 is more than the 23 tokens of a micro-batch, where every piece is cut"),
        (2, 0, "pieces: wanted a positive length, got 0"),
    ],
)
def test_a_stage_that_cannot_be_is_refused_and_changes_nothing(index, max_len, message):
    loader = loader_of([40, 3, 17])
    loader.enter_stage(1, 4)
    next(loader)
    before = loader.state()
    with pytest.raises(ValueError, match=f"^{message}$"):
        loader.enter_stage(index, max_len)
    assert loader.state() == before


# --- Whole documents


@st.composite
def whole_cases(draw):
    """(lengths, max_len, micro_tokens) of which at least one document is not too long."""
    lengths = draw(LENGTHS)
    least = min(length - 1 for length in lengths if length > 1)
    max_len = draw(st.integers(least, least + 12))
    return lengths, max_len, max_len + draw(st.integers(0, 20))


def documents_of(lengths, max_len):
    """The inputs of the documents that a stage of that length has."""
    return [
        (start, end - 1) for start, end in pairwise(np.cumsum([0, *lengths]).tolist()) if 1 < end - start <= max_len + 1
    ]


def spans_of(batch):
    """Where in a `numbered_stream` the sequences of a batch stand."""
    ids = batch.ids_T.tolist()
    return [(ids[start], ids[end - 1] + 1) for start, end in pairwise(batch.rows.starts)]


@given(case=whole_cases(), num_micro=st.integers(1, 3))
@example(case=([4, 4], 3, 3), num_micro=2)  # as long as a micro-batch, all of them
@example(case=([2], 1, 21), num_micro=1)  # 21 epochs in one
def test_a_whole_document_comes_once_an_epoch_and_is_never_cut(case, num_micro):
    lengths, max_len, micro_tokens = case
    want = documents_of(lengths, max_len)
    loader = loader_of(lengths, max_len, micro_tokens, num_micro, whole=True)
    batches = []
    while sum(len(spans_of(batch)) for batch in batches) < 3 * len(want):
        batches += next(loader)
    seen = [span for batch in batches for span in spans_of(batch)]
    for epoch in range(3):
        assert sorted(seen[epoch * len(want) : (epoch + 1) * len(want)]) == want
    for batch, behind in pairwise(batches):
        assert torch.equal(batch.targets_T, batch.ids_T + 1)
        first, end = spans_of(behind)[0]
        assert 0 < batch.rows.num_tokens <= micro_tokens < batch.rows.num_tokens + end - first  # as many as fit


def whole_after_whole(stream, max_len, num_tokens, seed):
    """The law in plain Python: document after document in the order of the epoch, while there is room."""
    documents = pieces(stream, max_len, whole=True).tolist()
    epoch, spans, room = 0, [], num_tokens
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        for idx in torch.randperm(len(documents), generator=generator).tolist():
            first, end = documents[idx]
            if end - first > room:
                yield make_batch(stream, spans, "test")
                spans, room = [], num_tokens
            spans.append((first, end))
            room -= end - first
        epoch += 1


@given(case=whole_cases(), seed=st.integers(0, 9))
def test_the_arithmetic_gives_what_a_walk_document_by_document_gives(case, seed):
    lengths, *shape = case
    stream = numbered_stream(lengths)
    want = [[content(batch)] for batch in islice(whole_after_whole(stream, *shape, seed), 6)]
    assert steps_of(loader_of(stream, *shape, seed=seed, whole=True), 6) == want


@settings(max_examples=40)
@given(
    case=whole_cases(),
    num_ranks=st.sampled_from([1, 2, 4]),
    workers=st.sampled_from([0, 1, 3]),
    restarts=st.lists(st.integers(0, 3), max_size=3),
    data=st.randoms(use_true_random=False),
)
def test_ranks_workers_and_restarts_change_nothing_about_whole_documents(case, num_ranks, workers, restarts, data):
    lengths, *shape = case
    stream = numbered_stream(lengths)
    alone = loader_of(stream, *shape, 4, seed=3, whole=True)
    state = alone.state()
    for num_steps in [*restarts, 2]:
        want = steps_of(alone, num_steps)
        got = [[None] * 4 for _ in range(num_steps)]
        for rank in range(num_ranks):
            loader = loader_of(stream, *shape, 4, seed=3, whole=True, rank=rank, num_ranks=num_ranks, workers=workers)
            loader.restore(state)
            for step, micros in enumerate(steps_of(loader, num_steps)):
                got[step][rank::num_ranks] = micros
            assert loader.state() == alone.state()
            loader.close()
        assert got == want
        state = json.loads(json.dumps(alone.state()))
        num_ranks, workers = data.choice([1, 2, 4]), data.choice([0, 1, 3])


def test_a_stage_has_the_documents_that_are_not_longer_by_hand():
    lengths = [3, 9, 5, 2]  # 2, 8, 4 and 1 inputs, from 0, 3, 12 and 17
    loader = loader_of(lengths, max_len=2, micro_tokens=8, whole=True)

    def seen(num_steps):
        return {span for micros in islice(loader, num_steps) for batch in micros for span in spans_of(batch)}

    assert seen(3) == {(0, 2), (17, 18)}
    assert loader.enter_stage(1, 4)
    assert seen(3) == {(0, 2), (12, 16), (17, 18)}
    assert loader.enter_stage(2, 8) and not loader.enter_stage(2, 8)
    assert seen(3) == {(0, 2), (3, 11), (12, 16), (17, 18)}  # at most one step before the 8, and one behind them


def test_in_one_piece_a_state_has_no_offset():
    loader = loader_of([3, 9, 5], max_len=8, micro_tokens=8, whole=True)
    next(loader)
    before = loader.state()
    assert before["offset"] == 0
    with pytest.raises(ValueError, match="^loader: {.*} does not fit: no document is cut$"):
        loader.restore({**before, "piece": 0, "offset": 1})
    assert loader.state() == before


def test_where_every_document_is_too_long_it_is_said():
    message = "^data: not one token in a document of at most 3 tokens has another one behind it, nothing to train on$"
    with pytest.raises(ValueError, match=message):
        loader_of([9, 5, 1], max_len=3, whole=True)


def test_shards_and_memory_give_the_same_weights(tmp_path):
    rng = np.random.default_rng(0)
    documents = [
        Counted(np.array([0, *rng.integers(1, 300, size)]), rng.random(size + 1) < 0.3)
        for size in rng.integers(1, 40, 50)
    ]
    num_bytes_W = torch.arange(300) % 7
    memory = TokenStream(
        ids_T=torch.from_numpy(np.concatenate([ids for ids, _ in documents])).int(),
        starts=np.cumsum([0, *(len(ids) for ids, _ in documents)]),
        num_bytes_W=num_bytes_W,
        weight_T=torch.from_numpy(np.concatenate([flags for _, flags in documents])),
    )
    write_shards(tmp_path, documents, num_bytes_W=num_bytes_W, first_id=0, text="", tokenizer="", shard_tokens=100)
    disk = open_shards(tmp_path)
    assert len(disk.parts) > 5
    for whole in (False, True):
        one, other = (loader_of(stream, 48, 64, 2, workers=2, whole=whole) for stream in (disk, memory))
        for _ in range(12):
            for got, want in zip(next(one), next(other), strict=True):
                assert content(got) == content(want) and torch.equal(got.weight_T, want.weight_T)
                assert got.weight_T.unique().tolist() == [0, 1]
                assert got.num_bytes == int(num_bytes_W[got.targets_T[got.weight_T == 1]].sum())


# --- Workers


class Slow(TokenStream):
    """Reads take a while each, another one every time. `num_reads` counts them; with `failing` the next one fails."""

    def read(self, first, end):
        with lock:
            self.num_reads[0] += 1
            fails = self.failing and self.failing.pop()
        if fails:
            raise OSError(5, "Input/output error")
        time.sleep(random.random() * 2e-3)
        return super().read(first, end)


lock = threading.Lock()


def slow_stream(lengths):
    plain = numbered_stream(lengths)
    stream = Slow(ids_T=plain.ids_T, starts=plain.starts, num_bytes_W=plain.num_bytes_W)
    object.__setattr__(stream, "num_reads", [0])
    object.__setattr__(stream, "failing", [])
    return stream


def test_steps_come_in_order_and_only_so_many_are_made_ahead():
    stream = slow_stream([1001])
    loader = loader_of(stream, 10, 10, workers=3)  # whole pieces: one read a step
    want = loader_of([1001], 10, 10)
    for count in range(1, 20):
        assert steps_of(loader, 1) == steps_of(want, 1)
        assert loader.state() == want.state()
        assert stream.num_reads[0] <= count + 3
    loader.close()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_what_goes_wrong_in_a_worker_arrives_with_its_step_and_loses_none(workers):
    stream = slow_stream([60, 80])
    loader, want = loader_of(stream, 10, 10, workers=workers), loader_of([60, 80], 10, 10)
    assert steps_of(loader, 3) == steps_of(want, 3)
    stream.failing.append(True)
    failed, got = 0, []
    while len(got) < 10:
        state = loader.state()
        try:
            got += steps_of(loader, 1)
        except OSError as error:
            assert error.errno == 5 and loader.state() == state
            failed += 1
    assert failed == 1 and got == steps_of(want, 10)
    loader.close()


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_workers_end_with_their_loader(how):
    before = set(threading.enumerate())
    loader = loader_of(slow_stream([60, 80]), workers=3)
    next(loader)
    state = loader.state()
    workers = set(threading.enumerate()) - before
    assert 1 <= len(workers) <= 3
    if how == "closed":
        loader.close()
        assert not any(thread.is_alive() for thread in workers)
        loader.close()
        assert loader.state() == state
        with pytest.raises(ValueError, match="^loader: it was closed$"):
            next(loader)
    else:
        del loader
        gc.collect()
        for thread in workers:
            thread.join(timeout=30)
            assert not thread.is_alive()


# --- What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_tokens": 0}, "loader: micro_tokens: wanted at least 1, got 0"),
        ({"num_micro": 0}, "loader: num_micro: wanted at least 1, got 0"),
        ({"num_ranks": 0}, "loader: num_ranks: wanted at least 1, got 0"),
        ({"workers": -1}, "loader: workers: wanted at least 0, got -1"),
        ({"rank": 2, "num_ranks": 2, "num_micro": 2}, "loader: rank: wanted one of 2 from 0 on, got 2"),
        ({"rank": -1}, "loader: rank: wanted one of 1 from 0 on, got -1"),
        (
            {"num_micro": 6, "num_ranks": 4},
            "loader: num_micro: 6 micro-batches a step cannot be shared out evenly among 4 ranks",
        ),
        (
            {"max_len": 24},
            "loader: max_len 24 is more than the 23 tokens of a micro-batch, where every piece is cut",
        ),
        ({"max_len": 0}, "pieces: wanted a positive length, got 0"),
        ({"lengths": [1, 0, 1]}, "data: not one token has another one behind it, nothing to train on"),
        ({"lengths": []}, "data: not one token has another one behind it, nothing to train on"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(arguments, message):
    """An option that could do nothing (pieces longer than what they are cut to) is an error like one that is wrong."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        loader_of(**{"lengths": [40, 3], **arguments})


STATE = {"stage": 0, "max_len": 2, "epoch": 0, "piece": 0, "offset": 0}
NUMBERS = "wanted a state of the whole numbers stage, max_len, epoch, piece, offset, got {"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"epoch": 0, "piece": 0, "offset": 0}, NUMBERS),
        ({**STATE, "seed": 1}, NUMBERS),
        ({**STATE, "offset": 1.0}, NUMBERS),
        ({**STATE, "piece": True}, NUMBERS),
        ({**STATE, "stage": None}, NUMBERS),
        ({**STATE, "max_len": 1}, "{.*} does not fit: stage 0 has pieces of at most 2$"),
        ({**STATE, "stage": -1}, "{.*} does not fit a stream of 2 pieces$"),
        ({**STATE, "epoch": -1}, "{.*} does not fit a stream of 2 pieces$"),
        ({**STATE, "piece": 2}, "{.*} does not fit a stream of 2 pieces$"),
        ({**STATE, "piece": -1}, "{.*} does not fit a stream of 2 pieces$"),
        ({**STATE, "piece": 1, "offset": 2}, "{.*} does not fit: that piece has 2 tokens$"),
        ({**STATE, "piece": 1, "offset": -1}, "{.*} does not fit: that piece has 2 tokens$"),
        ({**STATE, "stage": 1, "max_len": 3, "piece": 2}, "{.*} does not fit a stream of 2 pieces$"),
        ({**STATE, "stage": 1, "max_len": 4}, "max_len 4 is more than the 3 tokens of a micro-batch"),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_of_another_stream_is_refused_and_changes_nothing(state, message, workers):
    loader, want = (loader_of([5], max_len=2, micro_tokens=3, workers=count) for count in (workers, 0))
    next(loader), next(want)
    with pytest.raises(ValueError, match=f"^loader: {message}"):
        loader.restore(state)
    assert loader.state() == want.state()
    assert steps_of(loader, 3) == steps_of(want, 3)
    loader.close()
