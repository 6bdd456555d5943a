"""The routed experts with the tokens sorted by expert, forward and backward by hand.

A pair is a token and one of its experts; each pair has a row in a buffer where the pairs of an expert lie together.
Scattering T rows into the buffer A times, and gathering back A times in the order of the token's experts, is all the
routing there is: nothing is added in an order that depends on timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.ops.experts.reference import ExpertInputs, expert_weight
from trivium.ops.mxfp4 import PackedWeight
from trivium.ops.once import once_differentiable
from trivium.ops.precision import work_dtype
from trivium.ops.situ.fused import situ_backward, situ_forward

# One batched product over experts padded to the longest takes half the time of a product an expert (T 2,048, A 4, E 48,
# L 96, F 64 on 2 cores: 3.1 against 6.2 ms forward and backward) where nothing is padding; so pad up to twice the rows.
MOST_PADDING = 2.0

# A product of fewer rows may sum in another order (seen below 16 rows, torch 2.13 with MKL): a token's bits would then
# depend on how many others chose its expert.
FEWEST_ROWS = 16


def experts_grouped(inputs: ExpertInputs) -> Tensor:
    latent_TL, experts_TA, weights_TA, w1, w3, w2, bound, up_bound = inputs
    return _Experts.apply(latent_TL, weights_TA, w1, w3, w2, experts_TA, bound, up_bound)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        latent_TL: Tensor,
        weights_TA: Tensor,
        w1: Tensor | PackedWeight,
        w3: Tensor | PackedWeight,
        w2: Tensor | PackedWeight,
        experts_TA: Tensor,
        bound: float,
        up_bound: float,
    ) -> Tensor:
        dense = not any(isinstance(w, PackedWeight) for w in (w1, w3, w2))
        group = _group(experts_TA, w1.shape[0], may_pad=dense)
        row_ML = group.scatter(latent_TL)
        gate_MF, up_MF = group.times(row_ML, w1, transposed=True), group.times(row_ML, w3, transposed=True)
        hidden_MF = situ_forward(gate_MF, up_MF, bound, up_bound)
        out_ML = group.times(hidden_MF, w2, transposed=True)
        ctx.group, ctx.bounds, ctx.dense = group, (bound, up_bound), dense
        ctx.packed = None if dense else (w1, w3, w2)
        ctx.save_for_backward(latent_TL, weights_TA, gate_MF, up_MF, *((w1, w3, w2) if dense else ()))
        return group.gather(out_ML, weights_TA).to(latent_TL.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TL: Tensor) -> tuple[Tensor | None, ...]:
        latent_TL, weights_TA, gate_MF, up_MF, *dense = ctx.saved_tensors
        w1, w3, w2 = dense or ctx.packed
        group: Group = ctx.group
        work = work_dtype(latent_TL)
        d_row_ML = group.scatter(d_y_TL)  # before the weight
        weight_M1 = group.scatter_weights(weights_TA)
        hidden_MF = situ_forward(gate_MF, up_MF, *ctx.bounds)
        d_hidden_MF = group.times(d_row_ML, w2, transposed=False)
        # <d_y, out> of a pair is <w2ᵀ d_y, hidden>: the experts' outputs need not be kept.
        d_weight_M = (hidden_MF.to(work) * d_hidden_MF).sum(1)
        d_weights_TA = d_weight_M[group.row_TA].to(weights_TA.dtype)
        d_gate_MF, d_up_MF = situ_backward(d_hidden_MF * weight_M1, gate_MF, up_MF, *ctx.bounds)
        d_w1 = d_w3 = d_w2 = d_latent_TL = None
        if dense and any(ctx.needs_input_grad[2:5]):
            row_ML = group.scatter(latent_TL)
            d_w1, d_w3 = group.outer(d_gate_MF, row_ML), group.outer(d_up_MF, row_ML)
            d_w2 = group.outer(d_row_ML, (hidden_MF * weight_M1).to(latent_TL.dtype))
        if ctx.needs_input_grad[0]:
            d_row_ML = group.times(d_gate_MF, w1, transposed=False)
            d_row_ML += group.times(d_up_MF, w3, transposed=False)
            d_latent_TL = group.gather(d_row_ML).to(latent_TL.dtype)
        return d_latent_TL, d_weights_TA, d_w1, d_w3, d_w2, None, None, None


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Where the pairs lie in a buffer of M rows.

    `row_TA` is the row of every pair. `spans` are (expert, first row, end) of the experts that have pairs. With
    `padded_len` every expert has that many rows, the unused ones zero, and M = E · padded_len; else `padded_len` is None
    and M = T · A.
    """

    row_TA: Tensor
    num_rows: int
    num_experts: int
    spans: tuple[tuple[int, int, int], ...]
    padded_len: int | None

    def scatter(self, x_TX: Tensor) -> Tensor:
        """[M, X]: every token's row at each of its pairs, zero in padding."""
        row_MX = x_TX.new_zeros(self.num_rows, x_TX.shape[1])
        for row_T in self.row_TA.unbind(1):
            row_MX.index_copy_(0, row_T, x_TX)
        return row_MX

    def scatter_weights(self, weights_TA: Tensor) -> Tensor:
        """[M, 1]: every pair's weight, zero in padding."""
        weight_M1 = weights_TA.new_zeros(self.num_rows, 1)
        return weight_M1.index_copy_(0, self.row_TA.flatten(), weights_TA.reshape(-1, 1))

    def gather(self, row_MX: Tensor, weights_TA: Tensor | None = None) -> Tensor:
        """[T, X] float32: the sum of every token's pairs in the order of its experts, each times its weight."""
        y_TX = row_MX.new_zeros(len(self.row_TA), row_MX.shape[1], dtype=work_dtype(row_MX))
        for slot, row_T in enumerate(self.row_TA.unbind(1)):
            part_TX = row_MX.index_select(0, row_T).to(y_TX.dtype)
            if weights_TA is None:
                y_TX += part_TX
            else:
                y_TX.addcmul_(part_TX, weights_TA[:, slot, None])
        return y_TX

    def times(self, row_MX: Tensor, weight: Tensor | PackedWeight, *, transposed: bool) -> Tensor:
        """[M, Y]: every expert's rows times its matrix, or times the transposed."""
        if self.padded_len is not None:
            row_ECX = row_MX.view(self.num_experts, self.padded_len, -1)
            return torch.bmm(row_ECX, weight.mT if transposed else weight).flatten(0, 1)
        out_MY = row_MX.new_empty(self.num_rows, weight.shape[1 if transposed else 2])
        for expert_id, start, end in self.spans:
            matrix = expert_weight(weight, expert_id)
            row_CX = F.pad(row_MX[start:end], (0, 0, 0, max(0, FEWEST_ROWS - (end - start))))
            out_MY[start:end] = (row_CX @ (matrix.T if transposed else matrix))[: end - start]
        return out_MY

    def outer(self, left_MX: Tensor, right_MY: Tensor) -> Tensor:
        """[E, X, Y]: of every expert the sum of left ⊗ right over its rows, zero where it has none."""
        if self.padded_len is not None:
            left_ECX = left_MX.view(self.num_experts, self.padded_len, -1)
            sum_EXY = torch.bmm(left_ECX.mT, right_MY.view(self.num_experts, self.padded_len, -1))
            idle = sorted(set(range(self.num_experts)) - {expert_id for expert_id, _, _ in self.spans})
            sum_EXY[idle] = 0  # and not nan, whatever stands in the weights of an expert without rows
            return sum_EXY
        sum_EXY = left_MX.new_zeros(self.num_experts, left_MX.shape[1], right_MY.shape[1])
        for expert_id, start, end in self.spans:
            torch.mm(left_MX[start:end].T, right_MY[start:end], out=sum_EXY[expert_id])
        return sum_EXY


def _group(experts_TA: Tensor, num_experts: int, may_pad: bool) -> Group:
    flat_M = experts_TA.flatten()
    count_E = flat_M.bincount(minlength=num_experts)
    counts = count_E.tolist()
    num_pairs, longest = flat_M.numel(), max(FEWEST_ROWS, *counts)
    pad = may_pad and longest * num_experts <= MOST_PADDING * num_pairs
    # Pairs of one expert keep the order of the tokens.
    order_M = flat_M.argsort(stable=True)
    index_M = torch.arange(num_pairs, device=flat_M.device)
    if pad:
        sorted_M = flat_M[order_M]
        first_E = count_E.cumsum(0) - count_E
        row_M = sorted_M * longest + index_M - first_E[sorted_M]
    else:
        row_M = index_M
    spans, start = [], 0
    for expert_id, count in enumerate(counts):
        if count:
            spans.append((expert_id, start, start + count))
        start += longest if pad else count
    return Group(
        row_TA=torch.empty_like(order_M).scatter_(0, order_M, row_M).view_as(experts_TA),
        num_rows=start,
        num_experts=num_experts,
        spans=tuple(spans),
        padded_len=longest if pad else None,
    )
