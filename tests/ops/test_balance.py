"""Routing and quantile balancing: the definitions, ties, what one update holds to, and which way it moves."""

import math

import pytest
import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.backend import use_backend
from trivium.ops.balance import (
    count_experts,
    idle_experts,
    max_violation,
    quantile_balance_,
    route,
    select_experts,
)
from trivium.ops.balance.native import route_backward, route_native, select_experts_native

BUILT = pytest.mark.skipif(cpu.missing is not None, reason=f"native: {cpu.missing}")
FAST = ("torch", pytest.param("native", marks=BUILT))
ALL = ("reference", *FAST)


def distinct_scores(num_tokens: int, num_experts: int, seed: int = 0) -> Tensor:
    """Scores in (0, 1), all different, on a grid of 2^-20: their sums and differences are exact in float32."""
    draw = torch.Generator().manual_seed(seed)
    ticks = torch.randperm(2**20 - 1, generator=draw)[: num_tokens * num_experts] + 1
    return ticks.view(num_tokens, num_experts).float() / 2**20


def grid_bias(num_experts: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(-(2**9), 2**9, (num_experts,), generator=draw).float() / 2**10


@pytest.mark.parametrize("backend", ALL)
def test_route_by_hand(backend):
    # scores 0.5, 0.8, 0.2, 0.9; the bias lifts expert 2 to 0.95 and holds expert 3 at 0.4: 1 and 2 are taken
    logit_TE = torch.tensor([[0.5, 0.8, 0.2, 0.9]]).logit()
    with use_backend(backend):
        got = route(logit_TE, torch.tensor([0.0, 0.0, 0.75, -0.5]), 2, scale=2.5)
    assert got.experts_TA.tolist() == [[1, 2]]
    torch.testing.assert_close(got.weights_TA, torch.tensor([[2.0, 0.5]]))  # 0.8 and 0.2 of their sum 1, times 2.5
    torch.testing.assert_close(got.scores_TE, torch.tensor([[0.5, 0.8, 0.2, 0.9]]))


@pytest.mark.parametrize("backend", ALL)
def test_equal_sums_go_to_the_lower_id(backend):
    score_TE = torch.tensor([[0.5] * 6, [0.1, 0.9, 0.5, 0.5, 0.5, 0.9], [0.9, 0.2, 0.2, 0.9, 0.9, 0.9]])
    with use_backend(backend):
        assert select_experts(score_TE, torch.zeros(6), 3).tolist() == [[0, 1, 2], [1, 2, 5], [0, 3, 4]]
        # a tie of the sums, not of the scores: 0.5 + 0.25 = 0.75
        tie = select_experts(torch.tensor([[0.25, 0.5, 0.75]]), torch.tensor([0.0, 0.25, 0.0]), 1)
        assert tie.tolist() == [[1]]
        signed = torch.tensor([[-1.0, -0.0, 0.0]])
        assert select_experts(signed, torch.zeros(3), 1).tolist() == [[1]]  # -0 equals 0


@pytest.mark.parametrize(("num_experts", "num_active"), [(2, 1), (7, 3), (16, 4), (48, 4), (48, 47), (5, 5), (896, 16)])
def test_topk_equals_the_loop(num_experts, num_active):
    draw = torch.Generator().manual_seed(num_experts)
    coarse = torch.randint(0, 8, (40, num_experts), generator=draw) / 8  # nearly every row has ties
    for score_TE in (coarse, distinct_scores(40, num_experts), coarse[:0]):
        bias_E = grid_bias(num_experts)
        with use_backend("reference"):
            want_TA = select_experts(score_TE, bias_E, num_active)
        for backend in ("torch", *(["native"] if cpu.missing is None else [])):
            with use_backend(backend):
                got_TA = select_experts(score_TE, bias_E, num_active)
            assert torch.equal(got_TA, want_TA) and got_TA.dtype == torch.int64
            assert got_TA.shape == (len(score_TE), num_active)


@pytest.mark.parametrize("backend", FAST)
def test_one_tokens_route_does_not_depend_on_the_others(backend):
    draw = torch.Generator().manual_seed(5)
    logit_TE = 3 * torch.randn(60, 37, generator=draw)
    logit_TE[3, :20] = 0.0  # ties, that take the slow way
    bias_E = grid_bias(37) / 4
    with use_backend(backend):
        whole = route(logit_TE, bias_E, 6)
    for num_tokens in (1, 2, 7, 33):
        with use_backend(backend):
            parts = [route(part.clone(), bias_E, 6) for part in logit_TE.split(num_tokens)]
        for name in ("experts_TA", "weights_TA", "scores_TE"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("lost", [[4], [0, 1], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_a_nan_row_disturbs_no_other(backend, lost):
    logit_TE = distinct_scores(5, 8)
    with use_backend(backend):
        want = route(logit_TE, torch.zeros(8), 3)
        logit_TE[2, lost] = math.nan
        got = route(logit_TE, torch.zeros(8), 3)
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(got.experts_TA[others], want.experts_TA[others])
    assert torch.equal(got.weights_TA[others], want.weights_TA[others])
    assert 0 <= got.experts_TA.min() and got.experts_TA.max() < 8
    assert all(len(set(experts_A)) == 3 for experts_A in got.experts_TA.tolist())


@BUILT
@pytest.mark.parametrize(("num_tokens", "num_experts", "num_active"), [(0, 5, 2), (1, 1, 1), (40, 48, 4), (33, 19, 7)])
def test_native_route_equals_the_torch_path_with_its_gradients(num_tokens, num_experts, num_active):
    draw = torch.Generator().manual_seed(num_tokens)
    logit_TE = 6 * torch.randn(num_tokens, num_experts, generator=draw)
    logit_TE[: num_tokens // 4] *= 20  # saturated, both ways
    bias_E = grid_bias(num_experts)
    coefficient_TA = torch.randn(num_tokens, num_active, generator=draw)
    coefficient_TE = torch.randn(num_tokens, num_experts, generator=draw)
    results = []
    for backend in ("native", "torch"):
        x_TE = logit_TE.clone().requires_grad_()
        with use_backend(backend):
            got = route(x_TE, bias_E, num_active, scale=1.75)
        losses = ((got.weights_TA * coefficient_TA).sum(), (got.scores_TE * coefficient_TE).sum())
        results.append(
            [got, *(torch.autograd.grad(loss, x_TE, retain_graph=True)[0] for loss in (*losses, sum(losses)))]
        )
    (got, *gradients), (want, *wanted) = results
    assert torch.equal(got.experts_TA, want.experts_TA)
    torch.testing.assert_close(got.weights_TA, want.weights_TA, rtol=2e-6, atol=1e-12)
    torch.testing.assert_close(got.scores_TE, want.scores_TE, rtol=1e-6, atol=1e-37)
    for mine, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@BUILT
def test_the_custom_ops_hold_to_their_contract():
    logit_TE, bias_E = distinct_scores(6, 9).requires_grad_(), grid_bias(9)
    torch.library.opcheck(select_experts_native.registered, (logit_TE.detach(), bias_E, 3))
    torch.library.opcheck(route_native.registered, (logit_TE, bias_E, 3, 2.5))
    weights_TA, _, experts_TA = route_native(logit_TE.detach(), bias_E, 3, 2.5)
    torch.library.opcheck(route_backward.registered, (weights_TA, None, logit_TE.detach(), experts_TA, 2.5))


def test_weights_sum_to_the_scale_and_carry_the_gradient():
    logit_TE = (4 * distinct_scores(6, 9) - 2).double().requires_grad_()
    bias_E = grid_bias(9).double().requires_grad_()
    got = route(logit_TE, bias_E, 4, scale=1.75)
    torch.testing.assert_close(got.weights_TA.sum(1), torch.full((6,), 1.75, dtype=torch.float64))
    coefficient = torch.arange(24.0, dtype=torch.float64).view(6, 4)
    grads = torch.autograd.grad((got.weights_TA * coefficient).sum(), (logit_TE, bias_E), allow_unused=True)
    assert grads[1] is None
    touched = torch.zeros(6, 9, dtype=torch.bool).scatter_(1, got.experts_TA, True)
    assert torch.equal(grads[0] != 0, touched)
    assert torch.autograd.gradcheck(lambda x: route(x, bias_E, 4, scale=1.75).weights_TA, logit_TE)


def test_scores_of_zero_give_weights_of_zero():
    for backend in ("torch", *(["native"] if cpu.missing is None else [])):
        with use_backend(backend):
            got = route(torch.full((1, 4), -200.0), torch.zeros(4), 2)  # exp(-200) is 0 in float32, 0 / 0 would be nan
        assert got.scores_TE.tolist() == [[0.0] * 4] and got.weights_TA.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("backend", ALL)
def test_quantile_balance_by_hand(backend):
    # 4 tokens, 3 experts, top-1, all over 8. t = the second largest = (3, 5, 4, 4); m = floor(4/3) = 1.
    # s - t by expert: 0: (4, 1, 1, 3)   1: (0, 0, -3, -2)   2: (-2, -3, 0, 0); the second largest: 3, 0, 0.
    # b = (-3, 0, 0), its mean -1.
    score_NE = torch.tensor([[7.0, 3, 1], [6, 5, 2], [5, 1, 4], [7, 2, 4]]) / 8
    bias_E = torch.zeros(3)
    with use_backend(backend):
        assert select_experts(score_NE, bias_E, 1)[:, 0].tolist() == [0, 0, 0, 0]
        quantile_balance_(bias_E, score_NE, 1)
        chosen = select_experts(score_NE, bias_E, 1)
    assert bias_E.tolist() == [-2 / 8, 1 / 8, 1 / 8]
    assert chosen[:, 0].tolist() == [0, 1, 2, 0]  # the last token stands on its threshold, 5 to 5: the lower id


@pytest.mark.parametrize("backend", ALL)
def test_quantile_balance_of_two_choices_by_hand(backend):
    # 5 tokens, 4 experts, top-2, all over 8. With b = (0, -1, -1, 2) the third largest s + b are t = (3, 1, 4, 2, 4);
    # m = floor(10/4) = 2. s - t by expert: 0: (4, 4, 0, 2, 0)   1: (-1, 1, 3, 0, 2)   2: (1, 0, -1, 1, -3)
    # 3: (0, 3, 1, -1, 3); the third largest: 2, 1, 0, 1. b = (-2, -1, 0, -1), its mean -1.
    score_NE = torch.tensor([[7.0, 2, 4, 3], [5, 2, 1, 4], [4, 7, 3, 5], [4, 2, 3, 1], [4, 6, 1, 7]]) / 8
    bias_E = torch.tensor([0.0, -1, -1, 2]) / 8
    with use_backend(backend):
        before_E = count_experts(score_NE, bias_E, 2)
        quantile_balance_(bias_E, score_NE, 2)
        after_E = count_experts(score_NE, bias_E, 2)
    assert (8 * bias_E).tolist() == [-1, 0, 1, 0]
    assert (before_E.tolist(), after_E.tolist()) == ([3, 2, 0, 5], [3, 2, 2, 3])


@pytest.mark.parametrize("num_tokens", [8, 9, 64, 101])
@pytest.mark.parametrize("num_active", [1, 3, 7])
@pytest.mark.parametrize("backend", ALL)
def test_m_tokens_lie_above_their_threshold_for_every_expert(backend, num_tokens, num_active):
    score_NE, bias_E = distinct_scores(num_tokens, 8, seed=num_tokens), grid_bias(8)
    threshold_N = (score_NE + bias_E).sort(1, descending=True).values[:, num_active]
    with use_backend(backend):
        quantile_balance_(bias_E, score_NE, num_active)
    excess_NE = score_NE - threshold_N[:, None]
    m = num_tokens * num_active // 8
    unshifted_E = -excess_NE.sort(0, descending=True).values[m]
    shift = unshifted_E.mean()
    assert torch.equal(bias_E, unshifted_E - shift)  # all on the grid, 8 experts: even the mean is exact
    sum_NE = score_NE + (bias_E + shift)
    num_above_E = (sum_NE > threshold_N[:, None]).sum(0)
    num_reaching_E = (sum_NE >= threshold_N[:, None]).sum(0)
    stays_E = unshifted_E == grid_bias(8)
    assert (num_above_E <= m).all() and (num_reaching_E > m).all()
    assert (num_above_E == m)[~stays_E].all() and (num_reaching_E == m + 1)[~stays_E].all()
    # Where it stays, the tokens that tie are those for which this expert came in at k + 1.
    came_next_N = (score_NE + grid_bias(8)).argsort(1, descending=True)[:, num_active]
    tied_E = (num_reaching_E - num_above_E)[stays_E]
    assert torch.equal(tied_E, came_next_N.bincount(minlength=8)[stays_E])
    assert not stays_E.all()


@pytest.mark.parametrize("values", ["distinct", "ties"])
@pytest.mark.parametrize("backend", FAST)
def test_kthvalue_equals_the_loop(values, backend):
    for num_tokens, num_experts, num_active in ((24, 6, 2), (50, 7, 6), (7, 7, 1), (33, 16, 4)):
        score_NE = distinct_scores(num_tokens, num_experts)
        score_NE = (score_NE * 8).round() / 8 if values == "ties" else score_NE
        got_E, want_E = grid_bias(num_experts), grid_bias(num_experts)
        with use_backend(backend):
            quantile_balance_(got_E, score_NE, num_active)
        with use_backend("reference"):
            quantile_balance_(want_E, score_NE, num_active)
        assert torch.equal(got_E, want_E)


@pytest.mark.parametrize("backend", ALL)
def test_a_shift_of_all_biases_changes_nothing(backend):
    score_NE = distinct_scores(40, 8)
    bias_E, shifted_E = grid_bias(8), grid_bias(8) + 0.375
    with use_backend(backend):
        quantile_balance_(bias_E, score_NE, 3)
        quantile_balance_(shifted_E, score_NE, 3)
    assert torch.equal(bias_E, shifted_E)
    assert bias_E.mean().abs() < 1e-7


@pytest.mark.parametrize("seed", range(3))
def test_one_update_evens_out_skewed_scores(seed):
    draw = torch.Generator().manual_seed(seed)
    favour_E = torch.linspace(-2, 2, 32)[torch.randperm(32, generator=draw)]
    score_NE = (torch.randn(2048, 32, generator=draw) + favour_E).sigmoid()
    bias_E = torch.zeros(32)
    before = count_experts(score_NE, bias_E, 4)
    quantile_balance_(bias_E, score_NE, 4)
    after = count_experts(score_NE, bias_E, 4)
    assert max_violation(before) > 2 and idle_experts(before) > 0
    assert max_violation(after) < 0.3 and idle_experts(after) == 0
    wrong = count_experts(score_NE, -bias_E, 4)  # the other sign makes it worse
    assert max_violation(wrong) > max_violation(before)


@pytest.mark.parametrize(("num_tokens", "num_active"), [(0, 2), (1, 2), (3, 2), (9, 8)])
@pytest.mark.parametrize("backend", ALL)
def test_too_few_tokens_or_nothing_to_choose_leaves_the_bias(backend, num_tokens, num_active):
    bias_E = grid_bias(8)
    with use_backend(backend):
        quantile_balance_(bias_E, distinct_scores(num_tokens, 8), num_active)
    assert torch.equal(bias_E, grid_bias(8))


@pytest.mark.parametrize("backend", ALL)
def test_as_many_choices_as_experts_are_enough_to_balance(backend):
    # N k = n = 2: one token each. All over 8: t = (3, 5), the smaller of each; m = 1.
    # s - t by expert: 0: (2, 1)   1: (0, 0); the second largest: 1, 0. b = (-1, 0), its mean -1/2.
    bias_E = torch.zeros(2)
    with use_backend(backend):
        quantile_balance_(bias_E, torch.tensor([[5.0, 3.0], [6.0, 5.0]]) / 8, 1)
        # 2 tokens, 3 experts, top-2: fewer tokens than experts. t = (1, 2), the smallest; m = floor(4/3) = 1.
        # s - t by expert: 0: (3, 3)   1: (2, 0)   2: (0, 2); the second largest: 3, 0, 0. b = (-3, 0, 0), its mean -1.
        wide_E = torch.zeros(3)
        quantile_balance_(wide_E, torch.tensor([[4.0, 3.0, 1.0], [5.0, 2.0, 4.0]]) / 8, 2)
    assert bias_E.tolist() == [-0.5 / 8, 0.5 / 8]
    assert wide_E.tolist() == [-2 / 8, 1 / 8, 1 / 8]


def test_the_bias_is_moved_where_it_is():
    module = torch.nn.Module()
    module.register_buffer("bias", torch.zeros(8))
    quantile_balance_(module.bias, distinct_scores(30, 8), 2)
    assert module.state_dict()["bias"].abs().max() > 0


def test_gauges_by_hand():
    count_E = torch.tensor([6, 0, 2, 0])
    assert max_violation(count_E) == 2.0  # 6 over a mean of 2, less 1
    assert idle_experts(count_E) == 2
    assert max_violation(torch.zeros(4, dtype=torch.int64)) == 0.0
    assert count_experts(torch.tensor([[0.1, 0.9, 0.5], [0.2, 0.1, 0.3]]), torch.zeros(3), 2).tolist() == [1, 1, 2]


def test_bad_input_is_named():
    score_NE, bias_E = distinct_scores(10, 4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"wanted scores \[T, E\] and bias \[E\], got \(10, 4\) and \(3,\)"):
        select_experts(score_NE, bias_E[:3], 2)
    for num_active in (0, 5):
        with pytest.raises(ValueError, match=f"select_experts: wanted 1 to 4 active experts, got {num_active}"):
            select_experts(score_NE, bias_E, num_active)
    with pytest.raises(ValueError, match="quantile_balance_: the bias is float32, got torch.bfloat16"):
        quantile_balance_(bias_E.bfloat16(), score_NE, 2)
    for bad in (math.nan, math.inf):
        score_NE[3, 1] = bad
        with pytest.raises(ValueError, match="quantile_balance_: scores hold NaN or infinity"):
            quantile_balance_(bias_E, score_NE, 2)
        assert (bias_E == 0).all()
