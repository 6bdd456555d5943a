"""Quantile balancing is a minimisation of the dual of balanced routing, a linear programme that HiGHS solves beside it."""

import numpy as np
import pytest
import torch

from tests.ops.oracles import alternate, balanced_optimum, dual, loads
from trivium.ops.balance import count_experts, quantile_balance_

# 8 tokens, 4 experts, top-1, all over 32: without a bias the experts take 4, 3, 1 and 0 tokens.
WORKED = torch.tensor(
    [
        [17.0, 11, 16, 15],
        [16, 10, 4, 8],
        [17, 6, 7, 4],
        [14, 5, 2, 9],
        [1, 11, 6, 7],
        [11, 17, 10, 2],
        [11, 19, 14, 5],
        [10, 2, 19, 6],
    ]
)
SIZES = [(8, 4, 1), (8, 4, 2), (12, 6, 2), (24, 6, 1), (24, 8, 3), (40, 8, 2), (6, 6, 1), (30, 5, 2)]  # N, E, k


def instance(num_tokens, num_experts, seed):
    random = np.random.default_rng(seed)
    return 1 / (1 + np.exp(-random.normal(size=(num_tokens, num_experts)) - random.normal(size=num_experts)))


def test_the_worked_example():
    # t = the second largest = (16, 10, 7, 9, 7, 11, 14, 10); m = 2. s - t by expert, the third largest:
    # 0: (1, 6, 10, 5, -6, 0, -3, 0) 5   1: (-5, 0, -1, -4, 4, 6, 5, -8) 4   2: (0, -6, 0, -7, -1, -1, 0, 9) 0
    # 3: (-1, -2, -3, 0, 0, -9, -9, -4) -1.  b = (-5, -4, 0, 1), its mean -2.
    bias_E = torch.zeros(4)
    assert count_experts(WORKED / 32, bias_E, 1).tolist() == [4, 3, 1, 0]
    quantile_balance_(bias_E, WORKED / 32, 1)
    assert (32 * bias_E).tolist() == [-3, -2, 2, 3]
    assert count_experts(WORKED / 32, bias_E, 1).tolist() == [2, 2, 2, 2]
    # The best that two tokens each can do: tokens 1 and 2 to expert 0, 5 and 6 to 1, 0 and 7 to 2, 3 and 4 to 3.
    value, x_NE, _ = balanced_optimum(WORKED.double().numpy(), 1)
    assert value == pytest.approx(16 + 17 + 17 + 19 + 16 + 19 + 9 + 7, abs=1e-9)
    assert np.abs(x_NE - x_NE.round()).max() < 1e-9
    assert dual(WORKED.double().numpy(), np.array([-3.0, -2, 2, 3]), 1) == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize(("num_tokens", "num_experts", "num_active"), SIZES)
def test_the_alternation_closes_the_gap_to_the_programme(num_tokens, num_experts, num_active):
    for seed in range(4):
        score_NE = instance(num_tokens, num_experts, seed)
        value, x_NE, price_E = balanced_optimum(score_NE, num_active)
        assert np.abs(x_NE - x_NE.round()).max() < 1e-9  # whole tokens, by themselves
        assert dual(score_NE, price_E, num_active) == pytest.approx(value, abs=1e-9)  # the prices are a bias
        bias_E, values = alternate(score_NE, num_active, ends=False)
        assert abs(values[-1] - value) < 1e-9
        assert np.diff(values).max(initial=0) < 1e-12  # it never rises
        # With every token's choice clear, it is the programme's, and loads are even.
        sums_NE = -np.sort(-(score_NE + bias_E), axis=1)
        clear_N = sums_NE[:, num_active - 1] - sums_NE[:, num_active] > 1e-9
        chosen_NE = score_NE + bias_E >= sums_NE[:, num_active - 1, None]
        assert np.array_equal(chosen_NE[clear_N], x_NE[clear_N] > 0.5) and clear_N.any()


@pytest.mark.parametrize(("num_tokens", "num_experts", "num_active"), [*SIZES, (512, 16, 2)])
def test_quantile_balancing_is_the_alternation_from_the_lower_ends(num_tokens, num_experts, num_active):
    """It may come to rest above the programme's value, where no coordinate alone leads down.

    With few tokens that shows; what is left does not grow with them (0.04 of 74 here at 512).
    """
    score_NE = instance(num_tokens, num_experts, seed=num_tokens)
    value, _, _ = balanced_optimum(score_NE, num_active)
    bias_E, values = alternate(score_NE, num_active, ends=True, most=20)
    assert np.diff(values).max(initial=0) < 1e-12 and min(values) > value - 1e-9
    assert values[-1] <= values[0] <= dual(score_NE, np.zeros(num_experts), num_active)
    if num_tokens == 512:
        assert values[-1] - value < 1e-3 * (dual(score_NE, np.zeros(num_experts), num_active) - value)
    ours_E = torch.zeros(num_experts)
    for _ in values:
        quantile_balance_(ours_E, torch.tensor(score_NE, dtype=torch.float32), num_active)
    np.testing.assert_allclose(ours_E.numpy(), bias_E, atol=1e-5)  # float32, twenty turns


@pytest.mark.parametrize(("num_tokens", "num_experts", "num_active"), SIZES)
def test_the_duals_gradient_is_load_less_target(num_tokens, num_experts, num_active):
    """Of D as it is minimised: dD/db_e = load_e − N·k/n. Of the prices −b, or uphill: target − load.

    D is linear as long as nobody's choice changes, so the difference quotient is exact but for rounding.
    """
    score_NE = instance(num_tokens, num_experts, seed=1)
    bias_E = 0.3 * np.random.default_rng(2).normal(size=num_experts)
    want_E = loads(score_NE, bias_E, num_active) - num_tokens * num_active / num_experts
    step = 1e-7
    for e in range(num_experts):
        up_E, down_E = bias_E.copy(), bias_E.copy()
        up_E[e] += step
        down_E[e] -= step
        slope = (dual(score_NE, up_E, num_active) - dual(score_NE, down_E, num_active)) / (2 * step)
        assert slope == pytest.approx(want_E[e], abs=1e-5)
    assert np.abs(want_E).max() > 0
    # A subgradient: D lies above its tangent everywhere.
    for seed in range(20):
        far_E = np.random.default_rng(seed).normal(size=num_experts)
        tangent = dual(score_NE, bias_E, num_active) + want_E @ (far_E - bias_E)
        assert dual(score_NE, far_E, num_active) >= tangent - 1e-9
