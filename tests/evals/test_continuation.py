"""Many samples at once."""

import pytest
import torch

from tests.tiny import tiny_config
from trivium.evals.continuation import answers, continuations
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.ops.rows import Rows

NUM_RANKS = 300
PROMPTS = [[7], [300, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [250, 3, 250]]


@pytest.fixture(scope="module")
def model():
    model = KimiK3(tiny_config(NUM_RANKS))
    initialise_(model, 0)
    return model


@torch.no_grad()
def greedy(model, prompt, num_tokens):
    """One row alone, everything computed anew for each token."""
    ids = list(prompt)
    for _ in range(num_tokens):
        hidden_TD, _ = model(torch.tensor(ids), Rows.one(len(ids)))
        ids.append(int(model.head(hidden_TD[-1])[:NUM_RANKS].argmax()))
    return ids[len(prompt) :]


def test_all_rows_at_once_are_each_row_alone(model):
    got = continuations(model, PROMPTS, num_tokens=20, temperature=0, seed=0)
    assert got == [greedy(model, prompt, 20) for prompt in PROMPTS]
    assert len({tuple(row) for row in got}) == len(PROMPTS)


def test_control_ids_are_never_drawn(model):
    # A fresh model at this temperature draws from 556 ids alike, 256 of them control ids.
    drawn = continuations(model, PROMPTS, num_tokens=60, temperature=1000.0, seed=0)
    assert [len(row) for row in drawn] == [60] * 3
    assert max(map(max, drawn)) < NUM_RANKS and max(map(max, drawn)) > 0.9 * NUM_RANKS


def test_the_seed_decides(model):
    def once(seed, **options):
        return continuations(model, PROMPTS, num_tokens=5, temperature=1.0, seed=seed, **options)

    assert once(3) == once(3) != once(4)
    assert once(3, top_p=1e-6) == continuations(model, PROMPTS, num_tokens=5, temperature=0, seed=0)


def test_the_mode_of_the_model_is_kept(model):
    for training in (False, True):
        model.train(training)
        continuations(model, PROMPTS, num_tokens=2, temperature=1.0, seed=0)
        assert model.training is training


def test_no_prompt_gives_no_sample(model):
    assert continuations(model, [], num_tokens=2, temperature=1.0, seed=0) == []


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, r"^prompts\[1\]: wanted at least one token id, got none$"),
        ([[1]], {"num_tokens": 0}, "^num_tokens: wanted at least 1, got 0$"),
        ([[1]], {"temperature": -1}, "^temperature: wanted a number >= 0, got -1$"),
    ],
)
def test_what_cannot_be_sampled_is_refused(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        continuations(model, prompts, **{"num_tokens": 2, "temperature": 1.0, "seed": 0, **options})


# --- Answers: each row ends by itself --------------------------------------------------------------------------------


@torch.no_grad()
def alone(model, prompt, max_tokens, end_id):
    """The likeliest answer of one row, everything computed anew for each token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        hidden_TD, _ = model(torch.tensor(ids), Rows.one(len(ids)))
        ids.append(int(model.head(hidden_TD[-1]).argmax()))
        if ids[-1] == end_id:
            break
    return ids[len(prompt) :]


def ends_of(model):
    """Ids with which some of the rows end soon and others never, and one that is nobody's."""
    rows = [alone(model, prompt, 20, end_id=-1) for prompt in PROMPTS]
    return [rows[0][3], rows[1][0], rows[2][7], -1]


def test_every_answer_is_that_of_its_row_alone_and_ends_with_the_end_id(model):
    lengths = set()
    for end_id in ends_of(model):
        got = answers(model, PROMPTS, max_tokens=20, end_id=end_id)
        assert got == [alone(model, prompt, 20, end_id) for prompt in PROMPTS]
        lengths.add(tuple(map(len, got)))
    assert (20, 20, 20) in lengths and len({length for row in lengths for length in row}) > 3  # rows left, one by one


def test_an_answer_that_does_not_end_has_as_many_ids_as_it_may(model):
    for max_tokens in (1, 2, 9):
        assert [len(row) for row in answers(model, PROMPTS, max_tokens=max_tokens, end_id=-1)] == [max_tokens] * 3


def test_the_end_id_in_the_last_place_is_the_end_all_the_same(model):
    end_id = ends_of(model)[0]
    (row,) = answers(model, PROMPTS[:1], max_tokens=4, end_id=end_id)
    assert row == alone(model, PROMPTS[0], 4, end_id) and row[-1] == end_id


def test_answers_are_drawn_as_the_seed_says(model):
    def once(seed, **options):
        return answers(model, PROMPTS, max_tokens=5, end_id=-1, temperature=1.0, seed=seed, **options)

    assert once(3) == once(3) != once(4)
    assert once(3, top_p=1e-6) == answers(model, PROMPTS, max_tokens=5, end_id=-1)


def test_a_control_id_may_be_an_answer(model):
    """At this temperature all ids are alike: an answer is made of marks, where a continuation is text."""
    drawn = answers(model, PROMPTS, max_tokens=40, end_id=-1, temperature=1000.0)
    assert max(map(max, drawn)) >= NUM_RANKS


def test_answering_keeps_the_mode_of_the_model_and_no_prompt_has_no_answer(model):
    for training in (False, True):
        model.train(training)
        answers(model, PROMPTS, max_tokens=2, end_id=-1)
        assert model.training is training
    assert answers(model, [], max_tokens=2, end_id=-1) == []


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, r"^prompts\[1\]: wanted at least one token id, got none$"),
        ([[1]], {"max_tokens": 0}, "^max_tokens: wanted at least 1, got 0$"),
        ([[1]], {"top_p": 0.0}, r"^top_p: wanted a number in \(0, 1\], got 0.0$"),
    ],
)
def test_what_cannot_be_answered_is_refused(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        answers(model, prompts, **{"max_tokens": 2, "end_id": 0, **options})
