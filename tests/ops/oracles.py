"""Balanced routing as a linear programme, its dual, and the dual's alternating minimisation: float64, on its own code.

Maximise Σ s_ie x_ie with Σ_e x_ie = k, Σ_i x_ie = N·k/n, 0 ≤ x ≤ 1. With b_e in the place of minus an expert's price, the
dual is D(b) = Σ_i (sum of the k largest of s_i + b) − (N·k/n) Σ_e b_e, to be minimised; or, with t_i as the price of a
token, D(b, t) = Σ_i [k·t_i + Σ_e max(0, s_ie + b_e − t_i)] − (N·k/n) Σ_e b_e.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

Array = NDArray[np.float64]


def balanced_optimum(score_NE: Array, num_active: int) -> tuple[float, Array, Array]:
    """The programme's value, the assignment [N, E], and −price of the experts [E] (HiGHS)."""
    N, E = score_NE.shape
    token_rows = sparse.kron(sparse.eye(N), np.ones((1, E)))
    expert_rows = sparse.kron(np.ones((1, N)), sparse.eye(E))
    found = linprog(
        -score_NE.ravel(),
        A_eq=sparse.vstack([token_rows, expert_rows]).tocsr(),
        b_eq=np.concatenate([np.full(N, num_active), np.full(E, N * num_active / E)]),
        bounds=(0, 1),
        method="highs",
    )
    assert found.status == 0, found.message
    return -found.fun, found.x.reshape(N, E), found.eqlin.marginals[N:]


def dual(score_NE: Array, bias_E: Array, num_active: int) -> float:
    """D(b)."""
    N, E = score_NE.shape
    chosen = np.sort(score_NE + bias_E, axis=1)[:, E - num_active :]
    return float(chosen.sum() - N * num_active / E * bias_E.sum())


def loads(score_NE: Array, bias_E: Array, num_active: int) -> Array:
    """Tokens of every expert, where no two sums are equal."""
    chosen_NA = np.argsort(-(score_NE + bias_E), axis=1)[:, :num_active]
    return np.bincount(chosen_NA.ravel(), minlength=len(bias_E)).astype(float)


def alternate(score_NE: Array, num_active: int, *, ends: bool, most: int = 2000) -> tuple[Array, list[float]]:
    """Minimise D(b, t) over t and over b in turn until b stands still; b, and D(b) behind every turn.

    Each is an interval: t_i lies anywhere from the (k+1)-th to the k-th largest of s_i + b, −b_e anywhere from the
    (m+1)-th to the m-th largest of s_ie − t_i, m = N·k/n. Their lower ends are quantile balancing; else the middles.
    """
    N, E = score_NE.shape
    m = N * num_active // E
    bias_E, values = np.zeros(E), []
    for _ in range(most):
        sums_NE = -np.sort(-(score_NE + bias_E), axis=1)
        t_N = sums_NE[:, num_active] if ends else sums_NE[:, num_active - 1 : num_active + 1].mean(1)
        margins_NE = -np.sort(-(score_NE - t_N[:, None]), axis=0)
        moved_E = -margins_NE[m] if ends else -margins_NE[m - 1 : m + 1].mean(0)
        moved_E -= moved_E.mean()
        values.append(dual(score_NE, moved_E, num_active))
        if np.abs(moved_E - bias_E).max() < 1e-15:
            break
        bias_E = moved_E
    return bias_E, values
