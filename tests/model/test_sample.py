"""From logits to the next token."""

import math

import pytest
import torch

from trivium.model.sample import sample


def frequencies(logits, **options):
    generator = torch.Generator().manual_seed(0)
    ids, _ = sample(torch.tensor([logits]).expand(20_000, -1), generator=generator, **options)
    return ids.bincount(minlength=len(logits)) / 20_000


def test_draws_follow_the_softmax():
    logits = [math.log(0.5), math.log(0.3), math.log(0.2)]
    torch.testing.assert_close(frequencies(logits), torch.tensor([0.5, 0.3, 0.2]), rtol=0, atol=0.015)
    # temperature 1/2 squares the odds: 25 : 9 : 4
    torch.testing.assert_close(
        frequencies(logits, temperature=0.5), torch.tensor([25.0, 9.0, 4.0]) / 38, rtol=0, atol=0.015
    )


def test_top_p_keeps_the_fewest_that_reach_it():
    logits = [math.log(0.2), math.log(0.5), math.log(0.3)]
    assert frequencies(logits, top_p=0.5).tolist() == [0, 1, 0]
    kept = frequencies(logits, top_p=0.7)
    assert kept[0] == 0
    torch.testing.assert_close(kept[1:], torch.tensor([5 / 8, 3 / 8]), rtol=0, atol=0.015)
    assert (frequencies(logits, top_p=0.81) > 0).all()


def test_temperature_zero_takes_the_largest_and_the_lower_id_on_a_tie():
    ids, logprobs = sample(torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]]), temperature=0)
    assert ids.tolist() == [1, 0]
    torch.testing.assert_close(logprobs[0], torch.tensor([0.0, 2.0, 2.0]).log_softmax(-1)[1])


def test_log_probabilities_are_the_models_own():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    ids, logprobs = sample(logits, temperature=0.1, top_p=0.9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(logprobs[0], logits.log_softmax(-1)[0, ids[0]])


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6, 1e6])
def test_extreme_temperatures_stay_finite(temperature):
    ids, logprobs = sample(torch.tensor([[1e4, -1e4, 0.0]]), temperature=temperature)
    assert logprobs.isfinite().all()
    assert 0 <= int(ids[0]) < 3


@pytest.mark.parametrize("bad", [[float("nan"), 1.0], [float("inf"), 1.0], [-float("inf"), -float("inf")]])
@pytest.mark.parametrize("temperature", [0, 1])
def test_rows_without_a_largest_number_give_no_id(bad, temperature):
    with pytest.raises(ValueError, match="row 1 of the logits holds nan or"):
        sample(torch.tensor([[0.0, 1.0], bad]), temperature=temperature)


def test_an_id_ruled_out_is_never_drawn():
    assert frequencies([0.0, -math.inf, 0.0])[1] == 0
