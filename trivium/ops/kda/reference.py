"""KDA as the paper writes it: token by token, and the terms of its chunk form under their published names."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trivium.ops.kda.gate import KdaInputs, kda_gate, l2_norm
from trivium.ops.precision import work_dtype
from trivium.ops.rows import Rows
from trivium.ops.sigmoid import sigmoid


def kda_step(
    state_HKV: Tensor, q_HK: Tensor, k_HK: Tensor, v_HV: Tensor, log_decay_HK: Tensor, beta_H: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: output o_HV and the state behind it (arXiv 2510.26692, eq. 1). q is already scaled."""
    state_HKV = state_HKV * log_decay_HK.exp()[..., None]
    miss_HV = v_HV - torch.einsum("hk,hkv->hv", k_HK, state_HKV)
    state_HKV = state_HKV + torch.einsum("hk,hv->hkv", beta_H[:, None] * k_HK, miss_HV)
    return torch.einsum("hk,hkv->hv", q_HK, state_HKV), state_HKV


def kda_recurrent(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    log_decay_THK: Tensor,
    beta_TH: Tensor,
    rows: Rows,
    state_SHKV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Every sequence token by token, from inputs that are already normalised, scaled and gated."""
    output, states = [], []
    for s in range(rows.num_sequences):
        state_HKV = state_SHKV[s]
        for t in range(rows.starts[s], rows.starts[s + 1]):
            o_HV, state_HKV = kda_step(state_HKV, q_THK[t], k_THK[t], v_THV[t], log_decay_THK[t], beta_TH[t])
            output.append(o_HV)
        states.append(state_HKV)
    o_THV = torch.stack(output) if output else v_THV.new_zeros(v_THV.shape, dtype=state_SHKV.dtype)
    return o_THV, torch.stack(states) if states else state_SHKV


def kda_reference(inputs: KdaInputs, rows: Rows, state_SHKV: Tensor, lower_bound: float) -> tuple[Tensor, Tensor]:
    """`kda` by its definition."""
    q_THK, k_THK, v_THV, decay_in_THK, beta_in_TH, A_log_H, dt_bias_HK = inputs
    work = work_dtype(v_THV)
    log_decay_THK = kda_gate(decay_in_THK, A_log_H, dt_bias_HK, lower_bound)
    q_THK = l2_norm(q_THK) * q_THK.shape[-1] ** -0.5
    beta_TH = sigmoid(beta_in_TH.to(work))
    o_THV, state_SHKV = kda_recurrent(q_THK, l2_norm(k_THK), v_THV.to(work), log_decay_THK, beta_TH, rows, state_SHKV)
    return o_THV.to(v_THV.dtype), state_SHKV


class ChunkTerms(NamedTuple):
    """The chunk form's quantities, named as in arXiv 2510.26692, section 3 (one head, one chunk of C tokens)."""

    Gamma: Tensor  # [C, K] cumulative decay from the chunk's start to each token, itself included
    A_kk: Tensor  # [C, C] strictly lower: beta_i sum_d k_i k_j Gamma_i / Gamma_j
    M: Tensor  # [C, C] (I + A_kk)^-1 Diag(beta)
    W: Tensor  # [C, K] M (Gamma * K)
    U: Tensor  # [C, V] M V
    A_qk: Tensor  # [C, C] lower: sum_d q_i k_j Gamma_i / Gamma_j
    O: Tensor  # [C, V] (Gamma * Q) S + A_qk (U - W S)
    S: Tensor  # [K, V] Diag(Gamma_C) S + (Gamma_C / Gamma * K)^T (U - W S)


def kda_chunk_terms(
    q_CK: Tensor, k_CK: Tensor, v_CV: Tensor, log_decay_CK: Tensor, beta_C: Tensor, state_KV: Tensor
) -> ChunkTerms:
    """Every intermediate of one chunk, each pair's decay formed on its own, so that nothing can overflow."""
    C = len(q_CK)
    cumulative_CK = log_decay_CK.cumsum(0)
    Gamma = cumulative_CK.exp()
    future_CC = torch.ones(C, C, dtype=torch.bool, device=q_CK.device).triu(1)
    # Mask before exp: a later token's gap grows without limit, exp of it is inf, and inf * 0 is nan.
    gap_CCK = (cumulative_CK[:, None] - cumulative_CK[None]).masked_fill(future_CC[..., None], -torch.inf)
    decay_CCK = gap_CCK.exp()
    A_qk = torch.einsum("ik,jk,ijk->ij", q_CK, k_CK, decay_CCK)
    A_kk = beta_C[:, None] * torch.einsum("ik,jk,ijk->ij", k_CK, k_CK, decay_CCK).tril(-1)
    identity_CC = torch.eye(C, dtype=q_CK.dtype, device=q_CK.device)
    M = torch.linalg.solve_triangular(identity_CC + A_kk, torch.diag(beta_C), upper=False)
    W, U = M @ (Gamma * k_CK), M @ v_CV
    new_value_CV = U - W @ state_KV
    O = (Gamma * q_CK) @ state_KV + A_qk @ new_value_CV
    S = Gamma[-1][:, None] * state_KV + ((cumulative_CK[-1] - cumulative_CK).exp() * k_CK).T @ new_value_CV
    return ChunkTerms(Gamma, A_kk, M, W, U, A_qk, O, S)
