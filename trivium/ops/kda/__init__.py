"""Kimi Delta Attention: a gated delta rule with one decay per head and key channel.

Kimi Linear, arXiv 2510.26692, equations 1 and 6-9; K3 bounds the gate (spec: lower_bound = -5 a step).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trivium.ops import backend, cpu
from trivium.ops.kda.chunked import kda_chunked, kda_tile
from trivium.ops.kda.gate import KdaInputs, check_lower_bound, kda_gate, l2_norm
from trivium.ops.kda.native import kda_native
from trivium.ops.kda.reference import kda_chunk_terms, kda_recurrent, kda_reference
from trivium.ops.precision import work_dtype
from trivium.ops.rows import Rows, Tile

__all__ = ["kda", "kda_chunk_terms", "kda_gate", "kda_recurrent", "l2_norm"]


def kda(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    decay_in_THK: Tensor,
    beta_in_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    rows: Rows,
    state_SHKV: Tensor | None = None,
    *,
    lower_bound: float = -5.0,
    with_map: bool = False,
) -> tuple[Tensor, ...]:
    """Outputs o_THV in v's dtype and the states after every sequence's last token (float32; float64 for float64).

    Takes raw projections: q and k are normalised here and q scaled by K^-1/2, the gate and beta squashed here.
    Per head, with g = lower_bound * sigmoid(exp(A_log) * (decay_in + dt_bias)) and beta = sigmoid(beta_in):

        S <- diag(exp g_t) S;  S <- S + beta_t k_t (v_t - S^T k_t)^T;  o_t = S^T q_t

    The decay comes first, the error uses the decayed state, the output sees the current token. States start at
    `state_SHKV`, or at zero. With `with_map` also A_SHKK and B_SHKV, the affine map of each sequence's tokens on the
    state that enters it: S_out = A S_in + B.

    Raises ValueError for shapes that do not fit, or a bound whose tile of 16 tokens could leave float32.
    """
    T, H, K = q_THK.shape
    V = v_THV.shape[-1]
    if min(H, K, V) < 1:
        raise ValueError(f"kda: wanted at least one head, key and value dimension, got H={H}, K={K}, V={V}")
    wanted = {
        "k": (k_THK, (T, H, K)),
        "v": (v_THV, (T, H, V)),
        "decay_in": (decay_in_THK, (T, H, K)),
        "beta_in": (beta_in_TH, (T, H)),
        "A_log": (A_log_H, (H,)),
        "dt_bias": (dt_bias_HK, (H, K)),
    }
    if state_SHKV is not None:
        wanted["state"] = (state_SHKV, (rows.num_sequences, H, K, V))
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"kda: {name} wants shape {shape}, got {tuple(tensor.shape)}")
    if rows.num_tokens != T:
        raise ValueError(f"kda: rows hold {rows.num_tokens} tokens, q holds {T}")
    check_lower_bound(lower_bound)
    work = work_dtype(v_THV)
    if state_SHKV is None:
        state_SHKV = torch.zeros(rows.num_sequences, H, K, V, dtype=work, device=v_THV.device)
    inputs = KdaInputs(q_THK, k_THK, v_THV, decay_in_THK, beta_in_TH, A_log_H, dt_bias_HK)
    chunked = kda_tile if isinstance(rows, Tile) else kda_chunked
    native = kda_native if cpu.serves(*inputs, state_SHKV) else None
    run = backend.choose("kda", reference=kda_reference, torch=chunked, native=native)
    if with_map:
        return _with_map(run, inputs, rows, state_SHKV.to(work), lower_bound)
    return run(inputs, rows, state_SHKV.to(work), lower_bound)


def _with_map(
    run: Callable[..., tuple[Tensor, Tensor]], inputs: KdaInputs, rows: Rows, state_SHKV: Tensor, lower_bound: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A and B in the same pass: a state's columns do not mix, so extra columns start at 0 (B) and at I (A)."""
    S, H, K, V = state_SHKV.shape
    identity_SHKK = torch.eye(K, dtype=state_SHKV.dtype, device=state_SHKV.device).expand(S, H, K, K)
    wide_state = torch.cat([state_SHKV, torch.zeros_like(state_SHKV), identity_SHKK], dim=-1)
    v_THV = inputs.v_THV
    wide_v = torch.cat([v_THV, v_THV, v_THV.new_zeros(*v_THV.shape[:2], K)], dim=-1)
    wide_o, wide_state = run(inputs._replace(v_THV=wide_v), rows, wide_state, lower_bound)
    state_SHKV, B_SHKV, A_SHKK = wide_state.split([V, V, K], dim=-1)
    return wide_o[..., :V], state_SHKV, A_SHKK, B_SHKV
