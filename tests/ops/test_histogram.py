"""Quantile balancing by histogram: where the bins lie, how far it is from the exact op, and that counts are counts."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trivium.ops.balance import quantile_balance_
from trivium.ops.balance.histogram import (
    BIN_WIDTH,
    NUM_BINS,
    NUM_COUNTS,
    count_margins_,
    margin_quantile,
    out_of_range,
    quantile_balance_counts_,
)


def counts_of(score_NE: Tensor, bias_E: Tensor, num_active: int) -> Tensor:
    count_EX = torch.zeros(len(bias_E), NUM_COUNTS, dtype=torch.int32)
    count_margins_(count_EX, score_NE, bias_E, num_active)
    return count_EX


@st.composite
def cases(draw, most_tokens=70):
    """Scores in [0, 1], some of them all but 0 or 1 or tied, and a bias of up to several units; 1 ≤ k < n."""
    num_experts = draw(st.integers(2, 12))
    num_active = draw(st.integers(1, num_experts - 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logit_NE = torch.randn(draw(st.integers(0, most_tokens)), num_experts, generator=generator)
    score_NE = (draw(st.sampled_from([0.1, 1.0, 30.0])) * logit_NE).sigmoid()
    if draw(st.booleans()):
        score_NE = (8 * score_NE).round() / 8
    bias_E = draw(st.sampled_from([0.0, 0.3, 7.0])) * torch.randn(num_experts, generator=generator)
    return score_NE, bias_E, num_active


@given(cases())
def test_within_one_bin_of_the_margin_and_two_of_the_bias(case):
    score_NE, bias_E, num_active = case
    num_tokens, num_experts = score_NE.shape
    count_EX = counts_of(score_NE, bias_E, num_active)
    threshold_N = (score_NE + bias_E).sort(1, descending=True).values[:, num_active]
    margin_NE = (score_NE - threshold_N[:, None]).sort(0, descending=True).values
    rounding = 1e-6 * (1 + float(bias_E.abs().max()))  # of float32, in the margin and in the bin's edge
    for rank in range(1, num_tokens + 1, 7):
        got_E = margin_quantile(count_EX, torch.full((num_experts,), rank), bias_E, num_active)
        assert (got_E - margin_NE[rank - 1]).abs().max() < BIN_WIDTH + rounding
    ours_E, exact_E = bias_E.clone(), bias_E.clone()
    quantile_balance_counts_(ours_E, count_EX, num_active)
    quantile_balance_(exact_E, score_NE, num_active)
    error_E = ours_E - exact_E
    assert error_E.max() - error_E.min() < 2 * BIN_WIDTH + 2 * rounding
    if num_tokens * num_active < num_experts:
        assert torch.equal(ours_E, bias_E) and torch.equal(exact_E, bias_E)


@given(cases())
def test_no_score_between_0_and_1_is_out_of_range(case):
    score_NE, bias_E, num_active = case
    score_NE[:1] = 0.0
    score_NE[1:2] = 1.0
    score_NE[2:3, ::2] = 0.0
    score_NE[3:4, 1::2] = 1.0
    count_EX = counts_of(score_NE, bias_E, num_active)
    assert out_of_range(count_EX) == 0
    assert torch.equal(count_EX.sum(1), torch.full((len(bias_E),), len(score_NE)))


def test_the_bins_reach_as_far_as_margins_can():
    # k = 1 and a second largest bias of 0.25: the second largest sum lies from 0.25 to 1.25, a margin from -1.25 to 0.75.
    bias_E = torch.tensor([0.25, -0.5, 0.5])
    # Token 0: sums 1.25, 0.5, 0.5 and t = 0.5: expert 0 has 0.5. Token 1: sums .25, -.5, 1.5; t = .25; margins -.25, -.25,
    # .75. Token 2: sums 1.25, -.5, 1.5; t = 1.25; margins -.25, -1.25, -.25.
    score_NE = torch.tensor([[1.0, 1, 0], [0, 0, 1], [1, 0, 1]])
    count_EX = counts_of(score_NE, bias_E, 1)
    assert count_EX[1, 1] == 1 and count_EX[2, NUM_BINS] == 1  # the first bin and the last
    assert count_EX[0].nonzero()[:, 0].tolist() == [1 + round(1.0 / BIN_WIDTH), 1 + round(1.75 / BIN_WIDTH)]


def test_interpolation_by_hand():
    # 2 experts, top-1, 4 tokens: m = 2, the third largest. Expert 0 has one margin in bin 700 and three in bin 600: the
    # second of those three, the middle of the bin. Expert 1: two in bin 800, two in bin 300: the first of those two, a
    # quarter below its upper edge. The smaller bias is 0: bin j is centred on -1 + j w.
    bias_E = torch.tensor([0.0, 0.5])
    count_EX = torch.zeros(2, NUM_COUNTS, dtype=torch.int32)
    count_EX[0, 701], count_EX[0, 601], count_EX[1, 801], count_EX[1, 301] = 1, 3, 2, 2
    got_E = margin_quantile(count_EX, torch.tensor([3, 3]), bias_E, 1)
    torch.testing.assert_close(got_E, torch.tensor([-1 + 600 * 2 / 999, -1 + 300.25 * 2 / 999]))
    quantile_balance_counts_(bias_E, count_EX, 1)
    torch.testing.assert_close(bias_E, torch.tensor([-299.75 / 999, 299.75 / 999]))  # minus, and less the mean


def test_what_is_out_of_range_is_counted_and_goes_to_the_ends():
    score_NE = torch.tensor([[0.5, 0.2, 0.1], [3.0, 0.2, 0.1], [0.5, 0.2, -9.0], [0.5, math.nan, 0.1]])
    bias_E = torch.zeros(3)
    count_EX = counts_of(score_NE, bias_E, 1)
    # 3.0 less 0.2 lies above 1, -9 less 0.2 below -1. A NaN ranks first in its token, so 0.5 comes second.
    assert count_EX[:, 0].tolist() == [0, 1, 1] and count_EX[:, -1].tolist() == [1, 0, 0]
    assert out_of_range(count_EX) == 3
    assert count_EX.sum(1).tolist() == [4, 4, 4]
    quantile_balance_counts_(bias_E, count_EX, 1)
    assert bias_E.isfinite().all() and bias_E[0] < bias_E[1] and bias_E[0] < bias_E[2]
    above_EX = torch.zeros(3, NUM_COUNTS, dtype=torch.int32)
    above_EX[:, -1] = 4
    assert (margin_quantile(above_EX, torch.tensor([2, 2, 2]), bias_E, 1) > 1 - bias_E.sort().values[1]).all()


@given(cases(), st.lists(st.integers(0, 70), max_size=4))
def test_counts_add_up_however_the_tokens_are_cut(case, cuts):
    score_NE, bias_E, num_active = case
    whole_EX = counts_of(score_NE, bias_E, num_active)
    parts_EX = torch.zeros_like(whole_EX)
    bounds = [0, *sorted(min(cut, len(score_NE)) for cut in cuts), len(score_NE)]
    for first, end in reversed(list(pairwise(bounds))):
        count_margins_(parts_EX, score_NE[first:end].clone(), bias_E, num_active)
    assert torch.equal(parts_EX, whole_EX)


def test_more_margins_than_are_worked_on_at_once():
    generator = torch.Generator().manual_seed(0)
    score_NE, bias_E = torch.rand(1500, 200, generator=generator), torch.zeros(200)  # 65,536 at once: five parts
    parts_EX = sum(counts_of(part_NE, bias_E, 5) for part_NE in score_NE.split(1))
    assert torch.equal(counts_of(score_NE, bias_E, 5), parts_EX)


@pytest.mark.parametrize(("num_tokens", "num_active"), [(0, 2), (1, 2), (3, 2), (9, 8)])
def test_too_few_tokens_or_nothing_to_choose_leaves_the_bias(num_tokens, num_active):
    bias_E = torch.linspace(-1, 3, 8)
    count_EX = counts_of(torch.rand(num_tokens, 8, generator=torch.Generator().manual_seed(0)), bias_E, num_active)
    quantile_balance_counts_(bias_E, count_EX, num_active)
    assert torch.equal(bias_E, torch.linspace(-1, 3, 8))


def test_the_bias_is_moved_where_it_is():
    bias_E = torch.zeros(8)
    place = bias_E.data_ptr()
    quantile_balance_counts_(bias_E, counts_of(torch.rand(50, 8), bias_E, 2), 2)
    assert bias_E.data_ptr() == place and bias_E.abs().max() > 0 and bias_E.mean().abs() < 1e-7


def test_nothing_is_read_back_from_the_device():
    with torch.device("meta"):  # memory without numbers: an .item() or a nonzero() raises
        bias_E, count_EX = torch.zeros(8), torch.zeros(8, NUM_COUNTS, dtype=torch.int32)
        count_margins_(count_EX, torch.zeros(50, 8), bias_E, 2)
        quantile_balance_counts_(bias_E, count_EX, 2)
    assert bias_E.is_meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_counts_the_same():
    generator = torch.Generator().manual_seed(0)
    score_NE, bias_E = torch.rand(3000, 48, generator=generator), torch.randn(48, generator=generator)
    want_EX = counts_of(score_NE, bias_E, 4)
    want_E = bias_E.clone()
    quantile_balance_counts_(want_E, want_EX, 4)
    got_EX, score_NE, bias_E = torch.zeros_like(want_EX, device="cuda"), score_NE.cuda(), bias_E.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        count_margins_(got_EX, score_NE, bias_E, 4)
        quantile_balance_counts_(bias_E, got_EX, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got_EX.cpu(), want_EX)
    torch.testing.assert_close(bias_E.cpu(), want_E, rtol=0, atol=1e-6)  # the mean, in another order


def test_bad_input_is_named():
    bias_E, score_NE = torch.zeros(4), torch.rand(10, 4)
    count_EX = torch.zeros(4, NUM_COUNTS, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"wanted a bias \[E\] and counts \[E, 1002\], got \(4,\) and \(4, 1000\)"):
        count_margins_(torch.zeros(4, 1000, dtype=torch.int32), score_NE, bias_E, 2)
    with pytest.raises(ValueError, match=r"histogram: wanted scores \[N, 4\], got \(10, 3\)"):
        count_margins_(count_EX, score_NE[:, :3], bias_E, 2)
    with pytest.raises(ValueError, match="got torch.bfloat16 and torch.int32"):
        quantile_balance_counts_(bias_E.bfloat16(), count_EX, 2)
    with pytest.raises(ValueError, match="got torch.float32 and torch.float32"):
        quantile_balance_counts_(bias_E, count_EX.float(), 2)
    with pytest.raises(ValueError, match="contiguous int32 counts"):
        count_margins_(torch.zeros(NUM_COUNTS, 4, dtype=torch.int32).T, score_NE, bias_E, 2)
    for num_active in (0, 5):
        with pytest.raises(ValueError, match=f"histogram: wanted 1 to 4 active experts, got {num_active}"):
            count_margins_(count_EX, score_NE, bias_E, num_active)
