"""Many samples at once."""

import pytest
import torch

from tests.tiny import tiny_config
from trivium.evals.continuation import continuations
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
