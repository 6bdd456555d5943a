"""One read without a stacked copy of its sources and without normalised keys: the differentiable torch path."""

from __future__ import annotations

import torch
from torch import Tensor

from trivium.ops.once import once_differentiable
from trivium.ops.precision import work_dtype


def attnres_fused(blocks: tuple[Tensor, ...], sum_TD: Tensor, query_D: Tensor, eps: float) -> Tensor:
    """`attnres`; saves its inputs and nothing of their size."""
    return _AttnRes.apply(query_D, eps, *blocks, sum_TD)


def _scores(source_TD: Tensor, query_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """query . v / rms(v), and 1 / rms(v). Sums along a row, whose order does not depend on the number of rows."""
    rms_inv_T = torch.rsqrt(torch.linalg.vector_norm(source_TD, dim=-1).square() / source_TD.shape[-1] + eps)
    return (source_TD * query_D).sum(-1) * rms_inv_T, rms_inv_T


def _softmax(score_NT: Tensor) -> Tensor:
    """Over N. torch's own gives a token other bits as threads share the tokens out in another way: 16 of 100, and 16 of 16."""
    e_NT = (score_NT - score_NT.amax(0)).exp()
    total_T = e_NT[0].clone()
    for e_T in e_NT[1:]:
        total_T += e_T
    return e_NT / total_T


class _AttnRes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query_D: Tensor, eps: float, *given: Tensor) -> Tensor:
        work = work_dtype(given[-1])
        query = query_D.to(work)
        sources = [source_TD.to(work) for source_TD in given]
        scores, rms_invs = zip(*(_scores(source_TD, query, eps) for source_TD in sources), strict=True)
        score_NT, rms_inv_NT = torch.stack(scores), torch.stack(rms_invs)
        weight_NT = _softmax(score_NT)
        x_TD = weight_NT[0][:, None] * sources[0]
        for weight_T, source_TD in zip(weight_NT[1:], sources[1:], strict=True):
            x_TD.addcmul_(weight_T[:, None], source_TD)
        ctx.save_for_backward(query_D, weight_NT, score_NT, rms_inv_NT, *given)
        return x_TD.to(given[-1].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_TD: Tensor):
        query_D, weight_NT, score_NT, rms_inv_NT, *sources = ctx.saved_tensors
        work = weight_NT.dtype
        dx_TD, query = dx_TD.to(work), query_D.to(work)
        T, D = dx_TD.shape
        dweight_NT = torch.stack([(dx_TD * source_TD).sum(-1) for source_TD in sources])
        dscore_NT = weight_NT * (dweight_NT - (weight_NT * dweight_NT).sum(0))
        # score = q.v r with r = (v.v / D + eps)^-1/2, so dscore/dv = q r - score r^2 v / D
        along_query_NT = dscore_NT * rms_inv_NT
        along_source_NT = -along_query_NT * rms_inv_NT * score_NT / D
        dquery_D = query.new_zeros(D)
        gradients = []
        for n, source_TD in enumerate(sources):
            gradient_TD = weight_NT[n][:, None] * dx_TD
            gradient_TD.addcmul_(along_query_NT[n][:, None], query.expand(T, D))
            gradient_TD.addcmul_(along_source_NT[n][:, None], source_TD.to(work))
            gradients.append(gradient_TD.to(source_TD.dtype))
            dquery_D += along_query_NT[n] @ source_TD.to(work)
        return dquery_D.to(query_D.dtype), None, *gradients
