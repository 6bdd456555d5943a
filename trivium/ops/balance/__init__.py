"""Which experts a token takes, with what weights, and how the selection bias is moved so that all are used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.backend import choose
from trivium.ops.balance.native import quantile_balance_native_, route_native, select_experts_native
from trivium.ops.balance.quantile import quantile_balance_kth_, select_topk
from trivium.ops.balance.reference import quantile_balance_reference_, select_experts_reference
from trivium.ops.precision import work_dtype
from trivium.ops.sigmoid import sigmoid


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """Where the tokens go: the chosen experts (int64, ascending by id), their weights, and the scores of all."""

    experts_TA: Tensor
    weights_TA: Tensor  # float32, in the order of experts_TA
    scores_TE: Tensor  # float32


def route(logit_TE: Tensor, bias_E: Tensor, num_active: int, scale: float = 1.0) -> Route:
    """The route of every token.

    s = sigmoid(logit) in float32; the experts are those of the largest s + bias; the weights are s at these over their
    sum + 1e-20, times `scale`. The bias selects and nothing else: no weight holds it, no gradient reaches it. Released
    modelling code. Raises ValueError as `select_experts`.
    """
    _check("select_experts", logit_TE, bias_E, num_active)
    native = route_native if cpu.serves(logit_TE, bias_E) else None
    run = choose("route", reference=_route, torch=_route, native=native)
    weights_TA, score_TE, experts_TA = run(logit_TE, bias_E.detach(), num_active, scale)
    return Route(experts_TA=experts_TA, weights_TA=weights_TA, scores_TE=score_TE)


def _route(logit_TE: Tensor, bias_E: Tensor, num_active: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    score_TE = sigmoid(logit_TE.to(work_dtype(logit_TE)))
    experts_TA = select_experts(score_TE.detach(), bias_E, num_active)
    chosen_TA = score_TE.gather(1, experts_TA)
    weights_TA = chosen_TA / (chosen_TA.sum(1, keepdim=True) + 1e-20) * scale
    return weights_TA, score_TE, experts_TA


def select_experts(score_TE: Tensor, bias_E: Tensor, num_active: int) -> Tensor:
    """The `num_active` experts of the largest score + bias of every token, int64, ascending by id.

    Of equal sums the lower id is taken. Training and decoding both come here. Raises ValueError for shapes that do not
    fit or a number outside 1 .. E.
    """
    _check("select_experts", score_TE, bias_E, num_active)
    native = select_experts_native if cpu.serves(score_TE, bias_E) else None
    run = choose("select_experts", reference=select_experts_reference, torch=select_topk, native=native)
    return run(score_TE.detach(), bias_E.detach(), num_active)


@torch.no_grad()
def quantile_balance_(bias_E: Tensor, score_NE: Tensor, num_active: int) -> None:
    """Move the selection bias in place so that each expert would take the same number of these N tokens.

    With k = `num_active` and n experts: t_i = the (k+1)-th largest of s_i + b, which a further expert would have to
    beat; m = floor(N·k/n), an expert's fair share; b_e = −(the (m+1)-th largest over i of s_ie − t_i); then minus the
    mean over e. In float32. So exactly m tokens have s_ie + b_e > t_i, except for an expert whose bias stays: the
    tokens for which it came in at k + 1 all tie, and at most m lie above them. N·k < n leaves b as it is, so does k = n.
    K3 technical report, quantile balancing. Raises ValueError for shapes that do not fit, a bias that is not float32,
    and scores that are not finite.
    """
    _check("quantile_balance_", score_NE, bias_E, num_active)
    if bias_E.dtype != torch.float32:
        raise ValueError(f"quantile_balance_: the bias is float32, got {bias_E.dtype}")
    if not score_NE.isfinite().all():
        raise ValueError("quantile_balance_: scores hold NaN or infinity")
    num_tokens, num_experts = score_NE.shape
    if num_tokens * num_active < num_experts or num_active == num_experts:
        return
    score_NE = score_NE.float()
    native = quantile_balance_native_ if cpu.serves(score_NE, bias_E) else None
    run = choose("quantile_balance_", reference=quantile_balance_reference_, torch=quantile_balance_kth_, native=native)
    run(bias_E, score_NE, num_active)


def count_experts(score_NE: Tensor, bias_E: Tensor, num_active: int) -> Tensor:
    """How many of the N tokens take each expert, int64 [E]."""
    expert_X = select_experts(score_NE, bias_E, num_active).flatten()
    one_X = torch.ones_like(expert_X)
    return one_X.new_zeros(len(bias_E)).scatter_add_(0, expert_X, one_X)  # bincount reads its largest id back


def max_violation(count_E: Tensor) -> float:
    """How far the busiest expert lies above the mean: max count / mean count − 1; 0 where nothing was routed."""
    total = int(count_E.sum())
    return int(count_E.max()) * len(count_E) / total - 1 if total else 0.0


def idle_experts(count_E: Tensor) -> int:
    """How many experts no token took."""
    return int((count_E == 0).sum())


def _check(op: str, score_TE: Tensor, bias_E: Tensor, num_active: int) -> None:
    if score_TE.ndim != 2 or bias_E.shape != score_TE.shape[1:]:
        raise ValueError(
            f"{op}: wanted scores [T, E] and bias [E], got {tuple(score_TE.shape)} and {tuple(bias_E.shape)}"
        )
    if not 1 <= num_active <= len(bias_E):
        raise ValueError(f"{op}: wanted 1 to {len(bias_E)} active experts, got {num_active}")
