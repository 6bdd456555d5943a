"""Quantile balancing by counting: margins in 1000 bins an expert, whole numbers that add up in any order."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_BINS = 1000
NUM_COUNTS = NUM_BINS + 2  # the first and the last for what lies out of range
BIN_WIDTH = 2 / (NUM_BINS - 1)
_AT_ONCE = 2**16  # margins in flight: all that is computed of them stays in a CPU's cache


@torch.no_grad()
def count_margins_(count_EX: Tensor, score_NE: Tensor, bias_E: Tensor, num_active: int) -> None:
    """Add the margins of N tokens to the counts [E, 1002] (int32): below the bins, in each of 1000 bins, above them.

    With t_i = the (k+1)-th largest of s_i + b, the margins are x_ie = s_ie − t_i. The bins have one width, w = 2 / 999;
    the first is centred on the least margin there can be, the last on the greatest. Both follow from the bias alone.
    From 0 ≤ s ≤ 1 comes b_e ≤ s_ie + b_e ≤ 1 + b_e; an order statistic rises with what it is taken of; so with c = the
    (k+1)-th largest bias c ≤ t_i ≤ 1 + c, and −1 − c ≤ x_ie ≤ 1 − c. Half a bin at either end is room for float32 to
    round. What is out of range comes of scores beyond 0 and 1, or NaN.

    Every token counts by itself, so that the counts do not depend on how tokens are cut into calls. k = n counts
    nothing. Raises ValueError for shapes or dtypes that do not fit. K3 technical report, quantile balancing by
    histogram.
    """
    num_experts = _check(count_EX, bias_E, num_active)
    if score_NE.ndim != 2 or score_NE.shape[1] != num_experts:
        raise ValueError(f"histogram: wanted scores [N, {num_experts}], got {tuple(score_NE.shape)}")
    if num_active == num_experts:  # there is no (k+1)-th
        return
    least = _least_margin(bias_E, num_active)
    first_E = torch.arange(num_experts, device=bias_E.device) * NUM_COUNTS + 1
    one = torch.ones((), dtype=torch.int32, device=bias_E.device)
    for part_NE in score_NE.float().split(max(1, _AT_ONCE // num_experts)):
        threshold_N = (part_NE + bias_E).topk(num_active + 1, dim=1).values[:, -1]
        bin_NE = (part_NE - threshold_N[:, None]).sub_(least).mul_((NUM_BINS - 1) / 2).round_()
        index_Y = bin_NE.nan_to_num_(nan=-1.0).clamp_(-1, NUM_BINS).long().add_(first_E).flatten()
        count_EX.view(-1).scatter_add_(0, index_Y, one.expand(len(index_Y)))


@torch.no_grad()
def quantile_balance_counts_(bias_E: Tensor, count_EX: Tensor, num_active: int) -> None:
    """`quantile_balance_` of the tokens that `count_margins_` has counted under this bias, in place.

    N is the sum of an expert's counts, m = floor(N·k/n), b_e = −(`margin_quantile` of rank m + 1), then minus the mean
    over e: behind it the errors of two experts differ by less than two bins. N·k < n leaves b as it is, so does k = n.
    Everything stays on the bias's device; nothing is read back. Raises ValueError for shapes or dtypes that do not fit.
    """
    num_experts = _check(count_EX, bias_E, num_active)
    if num_active == num_experts:
        return
    num_choices_E = count_EX.sum(1) * num_active
    moved_E = -margin_quantile(count_EX, num_choices_E // num_experts + 1, bias_E, num_active)
    moved_E -= moved_E.mean()
    bias_E.copy_(torch.where(num_choices_E >= num_experts, moved_E, bias_E))


def margin_quantile(count_EX: Tensor, rank_E: Tensor, bias_E: Tensor, num_active: int) -> Tensor:
    """About the `rank_E`-th largest margin of each expert (int64, from 1), float32, of what `count_margins_` counted.

    It lies in the bin j = 0 .. 999 where the counts from the top first reach the rank, and is the r-th largest of the q
    margins there. As if they lay evenly it is taken to be −1 − c + w·(j + 1/2 − (r − 1/2)/q), with w and c as in
    `count_margins_`. Where nothing is out of range the error is below one bin: margin to bin is a monotone function,
    also as float32 rounds it, so the bins hold the margins in their order, and bin j the one of this rank; it and the
    value taken both lie between that bin's edges, which are w apart.
    """
    reached_EX = count_EX.flip(1).cumsum(1)  # int64, from the top
    from_top_E1 = torch.searchsorted(reached_EX, rank_E[:, None]).clamp_(max=NUM_COUNTS - 1)  # of no tokens: none
    in_bin_E1 = count_EX.gather(1, NUM_COUNTS - 1 - from_top_E1)
    place_E1 = rank_E[:, None] - reached_EX.gather(1, from_top_E1) + in_bin_E1
    bin_E1 = NUM_BINS - from_top_E1 + 0.5 - (place_E1.double() - 0.5) / in_bin_E1
    return (_least_margin(bias_E, num_active) + BIN_WIDTH * bin_E1[:, 0]).float()


def out_of_range(count_EX: Tensor) -> Tensor:
    """How many margins fell outside the bins, int64, over all leading axes."""
    return count_EX[..., 0].sum() + count_EX[..., -1].sum()


def _least_margin(bias_E: Tensor, num_active: int) -> Tensor:
    return -1 - bias_E.topk(num_active + 1).values[-1]


def _check(count_EX: Tensor, bias_E: Tensor, num_active: int) -> int:
    """The number of experts."""
    if bias_E.ndim != 1 or count_EX.shape != (len(bias_E), NUM_COUNTS):
        raise ValueError(
            f"histogram: wanted a bias [E] and counts [E, {NUM_COUNTS}], got {tuple(bias_E.shape)} and "
            f"{tuple(count_EX.shape)}"
        )
    if bias_E.dtype != torch.float32 or count_EX.dtype != torch.int32 or not count_EX.is_contiguous():
        raise ValueError(
            f"histogram: wanted a float32 bias and contiguous int32 counts, got {bias_E.dtype} and {count_EX.dtype} "
            f"with strides {count_EX.stride()}"
        )
    if not 1 <= num_active <= len(bias_E):
        raise ValueError(f"histogram: wanted 1 to {len(bias_E)} active experts, got {num_active}")
    return len(bias_E)
