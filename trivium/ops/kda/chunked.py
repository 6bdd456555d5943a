"""KDA over chunks of 64 tokens, each built of four tiles of 16: the differentiable torch path.

Inside a chunk everything is matrix products; between chunks the state moves one step a chunk, for all sequences that
still have one. Shapes never depend on how many tokens follow, so a later token changes no earlier bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.config import TILE
from trivium.ops.kda.gate import KdaInputs, kda_gate, l2_norm
from trivium.ops.once import once_differentiable
from trivium.ops.precision import work_dtype
from trivium.ops.rows import Chunks, Rows
from trivium.ops.sigmoid import sigmoid

CHUNK = 64


def kda_chunked(inputs: KdaInputs, rows: Rows, state_SHKV: Tensor, lower_bound: float) -> tuple[Tensor, Tensor]:
    """`kda` in chunks. Backward saves its inputs, new values and one entering state a chunk; it recomputes the rest."""
    if rows.past_S and rows.max_len == 1 and not _needs_grad(*inputs, state_SHKV):
        return _step(inputs, rows, state_SHKV, lower_bound)
    return _KdaChunked.apply(*inputs, state_SHKV, rows, lower_bound)


def kda_tile(inputs: KdaInputs, rows: Rows, state_SHKV: Tensor, lower_bound: float) -> tuple[Tensor, Tensor]:
    """`kda` in chunks of one tile of 16 tokens: the grid of the deterministic mode. Not differentiable."""
    chunks = rows.chunks(TILE)
    terms = _chunk_terms(*_gather_inputs(inputs, chunks), chunks, lower_bound)
    o_NHCV, state_SHKV, _, _ = _scan(terms, state_SHKV, chunks, keep=False)
    return chunks.scatter(o_NHCV.transpose(1, 2)).to(inputs.v_THV.dtype), state_SHKV


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _step(inputs: KdaInputs, rows: Rows, state_SHKV: Tensor, lower_bound: float) -> tuple[Tensor, Tensor]:
    """At most one token a sequence, all at once."""
    q_THK, k_THK, v_THV, decay_in_THK, beta_in_TH, A_log_H, dt_bias_HK = inputs
    work = work_dtype(v_THV)
    some_empty = 0 in rows.lengths
    entering_THKV = state_SHKV[rows.sequence_of_T] if some_empty else state_SHKV
    k_THK = l2_norm(k_THK)
    log_decay_THK = kda_gate(decay_in_THK, A_log_H, dt_bias_HK, lower_bound)
    decayed_THKV = entering_THKV * log_decay_THK.exp()[..., None]
    miss_THV = v_THV.to(work) - (k_THK[..., None, :] @ decayed_THKV).squeeze(-2)
    write_THK = sigmoid(beta_in_TH.to(work))[..., None] * k_THK
    next_THKV = decayed_THKV + write_THK[..., None] * miss_THV[..., None, :]
    q_THK = l2_norm(q_THK) * q_THK.shape[-1] ** -0.5
    o_THV = (q_THK[..., None, :] @ next_THKV).squeeze(-2).to(v_THV.dtype)
    if some_empty:
        next_THKV = state_SHKV.index_copy(0, rows.sequence_of_T, next_THKV)
    return o_THV, next_THKV


class _Terms(NamedTuple):
    """What one chunk needs of its own tokens; N chunks at once, u = U - W S its new values."""

    q_in_NHCK: Tensor  # queries, decayed from the chunk's start
    A_qk_NHCC: Tensor
    U_NHCV: Tensor
    W_NHCK: Tensor
    k_out_NHCK: Tensor  # keys, decayed to the chunk's end
    decay_NHK: Tensor  # of the whole chunk


def _gather_inputs(inputs: KdaInputs, chunks: Chunks) -> tuple[Tensor, ...]:
    """The five per-token inputs as [N, H, C, ...], and the two parameters as they are.

    Contiguous whatever N is: a product of strided and of copied operands need not have the same bits.
    """
    *tokens, A_log_H, dt_bias_HK = inputs
    return (*(chunks.gather(x).transpose(1, 2).contiguous() for x in tokens), A_log_H, dt_bias_HK)


def _chunk_terms(
    q_NHCK: Tensor,
    k_NHCK: Tensor,
    v_NHCV: Tensor,
    decay_in_NHCK: Tensor,
    beta_in_NHC: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    chunks: Chunks,
    lower_bound: float,
) -> _Terms:
    work = work_dtype(v_NHCV)
    q_NHCK = l2_norm(q_NHCK) * q_NHCK.shape[-1] ** -0.5
    k_NHCK = l2_norm(k_NHCK)
    g_NHCK = kda_gate(decay_in_NHCK.transpose(1, 2), A_log_H, dt_bias_HK, lower_bound).transpose(1, 2)
    beta_NHC = sigmoid(beta_in_NHC.to(work))
    if chunks.pad_NC is not None:  # a pad forgets nothing; it writes nothing either, its k and v are 0
        g_NHCK = g_NHCK.masked_fill(chunks.pad_NC[:, None, :, None], 0.0)
    sum_NHCK = _cumulative(g_NHCK)
    A_kk_NHCC, A_qk_NHCC = _Pairs.apply(q_NHCK, k_NHCK, sum_NHCK)
    in_NHCK = sum_NHCK.exp()
    right_NHCX = torch.cat([v_NHCV.to(work), in_NHCK * k_NHCK], dim=-1) * beta_NHC[..., None]
    # Substitution, never powers of A: with keys nearly parallel and beta near 1 the powers cancel to nothing.
    solved_NHCX = torch.linalg.solve_triangular(
        beta_NHC[..., None] * A_kk_NHCC, right_NHCX, upper=False, unitriangular=True
    )
    U_NHCV, W_NHCK = solved_NHCX.split([v_NHCV.shape[-1], k_NHCK.shape[-1]], dim=-1)
    # Log decay from behind a token to the chunk's end, summed from the end: as a difference of two sums from the start,
    # the last key's exact 0 would send +x and -x to the gate, where x is e^5 times all it should get at the bound.
    after_NHCK = F.pad(g_NHCK[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2)
    return _Terms(
        q_in_NHCK=in_NHCK * q_NHCK,
        A_qk_NHCC=A_qk_NHCC,
        U_NHCV=U_NHCV,
        W_NHCK=W_NHCK,
        k_out_NHCK=after_NHCK.exp() * k_NHCK,
        decay_NHK=in_NHCK[:, :, -1],
    )


def _cumulative(g_NHCK: Tensor) -> Tensor:
    """Sum of log decay from the chunk's start, each token included: first inside tiles, then over them.

    The gate's gradient is the reverse of these sums; 16 terms at a time lose fewer digits than 64.
    """
    tile_NHJIK = g_NHCK.unflatten(2, (-1, TILE)).cumsum(3)
    # Shifted, not "cumsum minus own": (a + b) - b is not a in float32, and b holds tokens that come later.
    before_NHJK = F.pad(tile_NHJIK[:, :, :-1, -1], (0, 0, 1, 0)).cumsum(2)
    return (tile_NHJIK + before_NHJK[:, :, :, None]).flatten(2, 3)


class _Pairs(torch.autograd.Function):
    """sum_d k_i k_j exp(b_i - b_j) strictly below the diagonal, and sum_d q_i k_j exp(b_i - b_j) up to it.

    A tile's rows meet all columns up to its end, both against the tile's first row. That anchor never lies later than
    the row that uses it, exp(b_i - anchor) <= 1, and exp(anchor - b_j) grows over at most 15 steps: e^75 at -5 a step.
    A token meets its own key undecayed, apart from the tiles: through them it would send +x and -x to the gate.
    """

    @staticmethod
    def forward(ctx, q_NHCK: Tensor, k_NHCK: Tensor, sum_NHCK: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q_NHCK, k_NHCK, sum_NHCK)
        N, H, C, _ = q_NHCK.shape
        kk_NHCC, qk_NHCC = q_NHCK.new_zeros(2, N, H, C, C)
        for start in range(0, C, TILE):
            rows, columns = slice(start, start + TILE), slice(0, start + TILE)
            left_NHXK, _, right_NHJK, _ = _tile_factors(q_NHCK, k_NHCK, sum_NHCK, rows, columns)
            kk_NHIJ, qk_NHIJ = (left_NHXK @ right_NHJK.transpose(-1, -2)).split(TILE, dim=2)
            kk_NHCC[:, :, rows, columns] = kk_NHIJ.tril(start - 1)
            qk_NHCC[:, :, rows, columns] = qk_NHIJ.tril(start - 1)
        qk_NHCC.diagonal(dim1=-2, dim2=-1).copy_((q_NHCK * k_NHCK).sum(-1))
        return kk_NHCC, qk_NHCC

    @staticmethod
    @once_differentiable
    def backward(ctx, dkk_NHCC: Tensor, dqk_NHCC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_NHCK, k_NHCK, sum_NHCK = ctx.saved_tensors
        own_NHC1 = dqk_NHCC.diagonal(dim1=-2, dim2=-1)[..., None]
        dq_NHCK, dk_NHCK, dsum_NHCK = own_NHC1 * k_NHCK, own_NHC1 * q_NHCK, torch.zeros_like(sum_NHCK)
        for start in range(0, q_NHCK.shape[2], TILE):
            rows, columns = slice(start, start + TILE), slice(0, start + TILE)
            left_NHXK, rise_NHIK, right_NHJK, fall_NHJK = _tile_factors(q_NHCK, k_NHCK, sum_NHCK, rows, columns)
            dpair_NHXJ = torch.cat([d[:, :, rows, columns].tril(start - 1) for d in (dkk_NHCC, dqk_NHCC)], dim=2)
            dleft_NHXK, dright_NHJK = dpair_NHXJ @ right_NHJK, dpair_NHXJ.transpose(-1, -2) @ left_NHXK
            dleft_k_NHIK, dleft_q_NHIK = dleft_NHXK.split(TILE, dim=2)
            dk_NHCK[:, :, rows].addcmul_(dleft_k_NHIK, rise_NHIK)
            dq_NHCK[:, :, rows].addcmul_(dleft_q_NHIK, rise_NHIK)
            dk_NHCK[:, :, columns].addcmul_(dright_NHJK, fall_NHJK)
            # The anchor's own gradient is 0: it takes from the columns what it gives to the rows.
            for part in (dleft_NHXK.mul_(left_NHXK)).split(TILE, dim=2):
                dsum_NHCK[:, :, rows] += part
            dsum_NHCK[:, :, columns] -= dright_NHJK.mul_(right_NHJK)
        return dq_NHCK, dk_NHCK, dsum_NHCK


def _tile_factors(
    q_NHCK: Tensor, k_NHCK: Tensor, sum_NHCK: Tensor, rows: slice, columns: slice
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A tile's k rows over its q rows, and the keys it meets, decayed against the tile's first row; and the decays."""
    anchor_NH1K = sum_NHCK[:, :, rows.start : rows.start + 1]
    rise_NHIK = (sum_NHCK[:, :, rows] - anchor_NH1K).exp_()
    fall_NHJK = (anchor_NH1K - sum_NHCK[:, :, columns]).exp_()
    left_NHXK = torch.cat([rise_NHIK * k_NHCK[:, :, rows], rise_NHIK * q_NHCK[:, :, rows]], dim=2)
    return left_NHXK, rise_NHIK, fall_NHJK * k_NHCK[:, :, columns], fall_NHJK


def _scan(
    terms: _Terms, state_SHKV: Tensor, chunks: Chunks, keep: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The states' way through the chunks. `keep`: also every chunk's entering state and new values, for backward."""
    state_SHKV = state_SHKV[chunks.order_S]
    N, (_, H, K, V) = len(terms.U_NHCV), state_SHKV.shape
    o_NHCV = torch.empty_like(terms.U_NHCV)
    entering_NHKV = state_SHKV.new_empty(N, H, K, V) if keep else None
    u_NHCV = torch.empty_like(o_NHCV) if keep else None
    for at, count in chunks.steps:
        S_HKV = state_SHKV[:count]
        u = terms.U_NHCV[at] - terms.W_NHCK[at] @ S_HKV
        o_NHCV[at] = terms.q_in_NHCK[at] @ S_HKV + terms.A_qk_NHCC[at] @ u
        if keep:
            entering_NHKV[at], u_NHCV[at] = S_HKV, u
        state_SHKV[:count] = terms.decay_NHK[at][..., None] * S_HKV + terms.k_out_NHCK[at].transpose(-1, -2) @ u
    return o_NHCV, state_SHKV[chunks.place_S], entering_NHKV, u_NHCV


def _scan_backward(
    terms: _Terms, do_NHCV: Tensor, dstate_SHKV: Tensor, entering_NHKV: Tensor, u_NHCV: Tensor, chunks: Chunks
) -> tuple[_Terms, Tensor]:
    """Gradients of the terms and of the entering states: the scan run backwards."""
    dS_SHKV = dstate_SHKV[chunks.order_S]
    leaving_NHKV = torch.empty_like(entering_NHKV)
    du_NHCV = terms.A_qk_NHCC.transpose(-1, -2) @ do_NHCV
    dS_own_NHKV = terms.q_in_NHCK.transpose(-1, -2) @ do_NHCV
    for at, count in reversed(chunks.steps):
        dS_HKV = dS_SHKV[:count]
        leaving_NHKV[at] = dS_HKV
        du_NHCV[at] += terms.k_out_NHCK[at] @ dS_HKV
        dS_SHKV[:count] = (
            terms.decay_NHK[at][..., None] * dS_HKV + dS_own_NHKV[at] - terms.W_NHCK[at].transpose(-1, -2) @ du_NHCV[at]
        )
    gradients = _Terms(
        q_in_NHCK=do_NHCV @ entering_NHKV.transpose(-1, -2),
        A_qk_NHCC=do_NHCV @ u_NHCV.transpose(-1, -2),
        U_NHCV=du_NHCV,
        W_NHCK=-du_NHCV @ entering_NHKV.transpose(-1, -2),
        k_out_NHCK=u_NHCV @ leaving_NHKV.transpose(-1, -2),
        decay_NHK=(entering_NHKV * leaving_NHKV).sum(-1),
    )
    return gradients, dS_SHKV[chunks.place_S]


class _KdaChunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, decay_in, beta_in, A_log, dt_bias, state_SHKV, rows: Rows, lower_bound: float):
        inputs = KdaInputs(q, k, v, decay_in, beta_in, A_log, dt_bias)
        chunks = rows.chunks(CHUNK)
        terms = _chunk_terms(*_gather_inputs(inputs, chunks), chunks, lower_bound)
        keep = any(ctx.needs_input_grad)
        o_NHCV, state_SHKV, entering_NHKV, u_NHCV = _scan(terms, state_SHKV, chunks, keep)
        if keep:
            ctx.save_for_backward(*inputs, entering_NHKV, u_NHCV)
            ctx.chunks, ctx.lower_bound = chunks, lower_bound
        return chunks.scatter(o_NHCV.transpose(1, 2)).to(v.dtype), state_SHKV

    @staticmethod
    @once_differentiable
    def backward(ctx, do_THV, dstate_SHKV):
        *inputs, entering_NHKV, u_NHCV = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        do_NHCV = chunks.gather(do_THV).transpose(1, 2).contiguous().to(u_NHCV.dtype)
        with torch.enable_grad():
            leaves = tuple(x.detach().requires_grad_() for x in _gather_inputs(KdaInputs(*inputs), chunks))
            terms = _chunk_terms(*leaves, chunks, ctx.lower_bound)
        plain = _Terms(*(term.detach() for term in terms))
        dterms, dstate_SHKV = _scan_backward(plain, do_NHCV, dstate_SHKV, entering_NHKV, u_NHCV, chunks)
        *dtokens, dA_log, ddt_bias = torch.autograd.grad(terms, leaves, dterms)
        dtokens = [chunks.scatter(x.transpose(1, 2)) for x in dtokens]
        return *dtokens, dA_log, ddt_bias, dstate_SHKV, None, None
