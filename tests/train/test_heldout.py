"""The held-out loss: every token once, given all of its document before it, however it is cut."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.tiny import tiny_config
from trivium.chat.tokenizer import train_tokenizer
from trivium.data.corpus import stream_of
from trivium.data.pack import TokenStream
from trivium.data.source import Document
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.ops.rows import Rows
from trivium.train.heldout import excerpt, score
from trivium.train.loss import bits_per_byte, token_nll

NUM_RANKS = 300
CONFIG = tiny_config(NUM_RANKS)
SHAPES = {
    "odd": (1, 2, 3, 17, 33, 64, 65, 1),
    "one long, many short": (2, 2, 190, *20 * (2,), 1),
    "one": (2,),
    "more than lanes": 19 * (5,),
}


@pytest.fixture(scope="module")
def model():
    model = KimiK3(CONFIG)
    initialise_(model, 3)
    with torch.no_grad():  # of a fresh model every token has nearly the same loss, whatever was before it
        model.language_model.lm_head.weight.mul_(20)
    return model.eval()


def random_stream(lengths, seed=0):
    """Documents of so many tokens, [BOS] among them; an id stands for 0 to 4 bytes."""
    generator = torch.Generator().manual_seed(seed)
    starts = (0, *torch.tensor(lengths).cumsum(0).tolist())
    ids_T = torch.randint(0, NUM_RANKS, (starts[-1],), generator=generator, dtype=torch.int32)
    ids_T[list(starts[:-1])] = CONFIG.bos_token_id
    num_bytes_W = torch.randint(0, 5, (CONFIG.vocab_size,), generator=generator)
    num_bytes_W[NUM_RANKS:] = 0
    return TokenStream(ids_T=ids_T, starts=starts, num_bytes_W=num_bytes_W)


@torch.no_grad()
def whole(model, stream):
    """The same sum, each document in one forward without a state."""
    nll = 0.0
    for start, end in pairwise(stream.starts):
        if end - start > 1:
            ids_T = stream.ids_T[start:end].long()
            hidden_TD, _ = model(ids_T[:-1], Rows.one(len(ids_T) - 1))
            nll += float(token_nll(hidden_TD, model.language_model.lm_head.weight, ids_T[1:]).double().sum())
    return nll


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch_tokens", [1, 7, 16, 100, 2048])
def test_windows_score_what_whole_documents_do(model, shape, batch_tokens):
    stream = random_stream(SHAPES[shape])
    got, nll = score(model, stream, batch_tokens=batch_tokens), whole(model, stream)
    assert got.num_tokens == sum(length - 1 for length in SHAPES[shape]) == stream.num_targets
    assert got.num_bytes == stream.num_bytes
    assert got.loss == pytest.approx(nll / got.num_tokens, rel=2e-6)  # float32, products of other sizes
    assert got.bpb == pytest.approx(bits_per_byte(nll, stream.num_bytes), rel=2e-6)


def test_what_a_window_begins_with_depends_on_the_windows_before_it(model):
    """The law above would not see a lost state if none mattered: here it costs 0.1 % and more, 500 times its bound."""
    stream = random_stream((65,))
    cut = TokenStream(ids_T=stream.ids_T, starts=(0, 33, 65), num_bytes_W=stream.num_bytes_W)
    nll = whole(model, stream)
    ids_T = stream.ids_T.long()
    with torch.no_grad():
        hidden_TD, _ = model(ids_T[:-1], Rows.of([33, 31]))
        lost = float(token_nll(hidden_TD, model.language_model.lm_head.weight, ids_T[1:]).double().sum())
    assert abs(lost / nll - 1) > 1e-3
    assert score(model, cut).num_tokens == 63  # two documents: what the second begins with is no target


def test_no_more_than_batch_tokens_go_through_the_model_at_once(model, monkeypatch):
    seen, forward = [], KimiK3.forward

    def watched(self, ids_T, rows, *rest):
        seen.append((len(ids_T), rows.num_sequences))
        return forward(self, ids_T, rows, *rest)

    monkeypatch.setattr(KimiK3, "forward", watched)
    score(model, random_stream(SHAPES["odd"]), batch_tokens=20)
    assert max(tokens for tokens, _ in seen) <= 20 and max(sequences for _, sequences in seen) == 6
    assert sum(tokens for tokens, _ in seen) == random_stream(SHAPES["odd"]).num_targets  # no token twice


def test_every_byte_of_the_documents_is_counted(model):
    texts = ["def f(x):\n    return x\n", "naïve … 日本語 🦊\n" * 5, "x", "tail without line end"]
    tokenizer = train_tokenizer([text * 30 for text in texts], NUM_RANKS)
    documents = [Document(source=str(idx), path=f"{idx}.txt", text=text) for idx, text in enumerate(texts)]
    got = score(model, stream_of(documents, tokenizer), batch_tokens=13)
    assert got.num_bytes == sum(len(text.encode()) for text in texts)
    assert got.bpb == pytest.approx(bits_per_byte(got.loss * got.num_tokens, got.num_bytes))


def test_the_order_of_the_documents_does_not_matter(model):
    lengths = SHAPES["odd"]
    stream = random_stream(lengths)
    parts = [stream.ids_T[start:end] for start, end in pairwise(stream.starts)][::-1]
    starts = (0, *torch.tensor(lengths[::-1]).cumsum(0).tolist())
    other = TokenStream(ids_T=torch.cat(parts), starts=starts, num_bytes_W=stream.num_bytes_W)
    assert score(model, other).loss == pytest.approx(score(model, stream).loss, rel=2e-6)


def test_scoring_changes_nothing():
    model = KimiK3(CONFIG)
    initialise_(model, 3)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    stream = random_stream(SHAPES["odd"])
    assert score(model, stream) == score(model, stream)
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(not layer.take_scores() for layer in model.moe_layers())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


# --- What counts


def weighted(stream, seed=0, share=0.4):
    """The same documents, of whose tokens some count."""
    flags = torch.rand(len(stream.ids_T), generator=torch.Generator().manual_seed(seed)) < share
    return replace(stream, weight_T=flags)


@torch.no_grad()
@pytest.mark.parametrize("shape", ["odd", "one long, many short", "more than lanes"])
@pytest.mark.parametrize("batch_tokens", [1, 7, 16, 2048])
def test_only_tokens_that_count_are_scored(model, shape, batch_tokens):
    stream = weighted(random_stream(SHAPES[shape], seed=4))
    nll, num_tokens, num_bytes = 0.0, 0, 0
    for start, end in pairwise(stream.starts.tolist()):
        ids_T, counts_T = stream.ids_T[start:end].long(), stream.weight_T[start:end]
        if end - start > 1:
            hidden_TD, _ = model(ids_T[:-1], Rows.one(len(ids_T) - 1))
            nll_T = token_nll(hidden_TD, model.language_model.lm_head.weight, ids_T[1:])
            for place in range(1, end - start):  # [BOS] is no target, whatever is said of it
                if counts_T[place]:
                    nll += float(nll_T[place - 1])
                    num_tokens += 1
                    num_bytes += int(stream.num_bytes_W[ids_T[place]])
    got = score(model, stream, batch_tokens=batch_tokens)
    assert (got.num_tokens, got.num_bytes) == (num_tokens, num_bytes)
    assert got.loss == pytest.approx(nll / num_tokens, rel=2e-6)  # float32, products of other sizes
    assert got.bpb == pytest.approx(bits_per_byte(nll, num_bytes), rel=2e-6)


def test_where_all_count_it_is_the_same_as_where_nothing_is_said(model):
    stream = random_stream(SHAPES["odd"])
    assert score(model, weighted(stream, share=2.0)) == score(model, stream)


def test_what_does_not_count_is_read_all_the_same(model):
    """A question is context: without it the answer has another loss."""
    stream = random_stream((40,))
    answer = replace(stream, weight_T=torch.arange(40) >= 30)
    alone = TokenStream(ids_T=stream.ids_T[29:], starts=(0, 11), num_bytes_W=stream.num_bytes_W)
    got, without = score(model, answer), score(model, alone)
    assert (got.num_tokens, got.num_bytes) == (without.num_tokens, without.num_bytes)
    assert abs(got.loss / without.loss - 1) > 1e-3


def test_where_nothing_counts_it_is_said(model):
    stream = random_stream(SHAPES["odd"])
    first_alone = torch.zeros(len(stream.ids_T), dtype=torch.bool)
    first_alone[list(stream.starts[:-1])] = True  # the first token of a document is no target
    with pytest.raises(ValueError, match="^held out: no token to score$"):
        score(model, replace(stream, weight_T=first_alone))


def test_an_excerpt_has_the_flags_of_its_tokens():
    """Each id is its own place, so that it can be found again."""
    stream = replace(random_stream((8, 101, 101)), ids_T=torch.arange(210, dtype=torch.int32))
    stream = weighted(stream)
    part = excerpt(stream, 60, 60)
    assert 0 < len(part.ids_T) < 210
    assert part.weight_T.tolist() == stream.weight_T[part.ids_T.long()].tolist()
    assert excerpt(random_stream((8, 101)), 60, 60).weight_T is None


@pytest.mark.parametrize("lengths", [(), (1,), (1, 1, 1)])
def test_where_there_is_no_token_to_score_it_is_said(model, lengths):
    with pytest.raises(ValueError, match="^held out: no token to score$"):
        score(model, random_stream(lengths))


@pytest.mark.parametrize(
    ("lengths", "num_tokens", "piece_len", "want"),
    [
        ((101,), 1000, 10, 10 * [10]),  # all of it
        ((101,), 50, 10, 5 * [10]),  # 100 are twice 50: every other piece
        ((101,), 33, 10, [10, 10, 10]),  # every third of 10 pieces
        ((8, 101, 101), 60, 60, [7, 40, 40]),  # by tokens and not by pieces: 7 stand for 24, 47 for 162
        ((8, 101), 1000, 60, [7, 60, 40]),
        ((6, 1, 6, 6, 6), 10, 60, [5, 5]),  # whole documents, every other one; [BOS] alone is none
        ((301, 4), 1, 100, [100]),  # never nothing
    ],
)
def test_an_excerpt_is_spread_over_the_tokens(lengths, num_tokens, piece_len, want):
    stream = random_stream(lengths)
    part = excerpt(stream, num_tokens, piece_len)
    assert [end - start - 1 for start, end in pairwise(part.starts)] == want
    assert part.num_targets == sum(want)
    whole = stream.ids_T.tolist()
    for start, end in pairwise(part.starts):  # each is consecutive there
        ids = part.ids_T[start:end].tolist()
        assert any(whole[at : at + len(ids)] == ids for at in range(len(whole)))


def test_an_excerpt_of_everything_in_whole_documents_scores_the_same(model):
    stream = random_stream(SHAPES["odd"])
    part = excerpt(stream, 10**6, 1024)
    got, want = score(model, part), score(model, stream)
    assert (got.num_tokens, got.num_bytes) == (want.num_tokens, want.num_bytes)
    assert got.loss == pytest.approx(want.loss, rel=2e-6)
