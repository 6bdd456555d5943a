"""The short convolution over one extended buffer: three window rows in front of every sequence, then its tokens.

Four shifted multiply-adds over the whole buffer then serve every sequence at once. The rows that a window's position
would yield mix two sequences; they are never read, and carry no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trivium.ops.once import once_differentiable
from trivium.ops.precision import work_dtype
from trivium.ops.rows import Rows
from trivium.ops.sigmoid import sigmoid

# Elements worked on at once, 512 KB in float32: temporaries stay this small however long the prompt, and in one core's
# cache (backward of 2,048 x 576 on one core: 15 ms, 21 over whole buffers; on two cores no difference).
BLOCK_NUMEL = 2**17


def short_conv_extended(x_TX: Tensor, weight_X14: Tensor, rows: Rows, window_S3X: Tensor) -> tuple[Tensor, Tensor]:
    start_S1 = rows.starts_S1.long() + 3 * torch.arange(rows.num_sequences + 1, device=x_TX.device)
    three = torch.arange(3, device=x_TX.device)
    token_T = torch.arange(rows.num_tokens, device=x_TX.device) + 3 * (rows.sequence_of_T + 1)
    before_M = (start_S1[:-1, None] + three).flatten()  # the window rows, M = 3S
    last_M = (start_S1[1:, None] - 3 + three).flatten()  # the last three rows of every sequence
    return _ShortConv.apply(x_TX, weight_X14, window_S3X, token_T, before_M, last_M)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TX: Tensor,
        weight_X14: Tensor,
        window_S3X: Tensor,
        token_T: Tensor,
        before_M: Tensor,
        last_M: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_TX, weight_X14, window_S3X, token_T, before_M, last_M)
        work = work_dtype(x_TX)
        tap_4X = weight_X14[:, 0].T.to(work).contiguous()
        row_NX = _extend(x_TX, window_S3X, token_T, before_M)
        y_NX = torch.empty(row_NX.shape, dtype=work, device=x_TX.device)  # its first three rows stay unwritten
        for start, end in _blocks(row_NX):
            z_CX = _convolve(row_NX[start - 3 : end].to(work), tap_4X, out=y_NX[start:end])
            z_CX.mul_(sigmoid(z_CX))
        window_S3X = row_NX.index_select(0, last_M).view(window_S3X.shape)
        return y_NX.index_select(0, token_T).to(x_TX.dtype), window_S3X

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_TX: Tensor, d_window_S3X: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        x_TX, weight_X14, window_S3X, token_T, before_M, last_M = ctx.saved_tensors
        work = work_dtype(x_TX)
        tap_4X = weight_X14[:, 0].T.to(work).contiguous()
        row_NX = _extend(x_TX, window_S3X, token_T, before_M)
        num_rows, width = row_NX.shape
        # d_z of every row, 0 at window rows, and three rows of zeros that the last shifts reach into.
        d_z_NX = torch.zeros(num_rows + 3, width, dtype=work, device=x_TX.device)
        d_z_NX.index_copy_(0, token_T, d_y_TX.to(work))
        d_tap_4X = torch.zeros_like(tap_4X)
        for start, end in _blocks(row_NX):
            block_CX = row_NX[start - 3 : end].to(work)
            z_CX = _convolve(block_CX, tap_4X, out=torch.empty_like(d_z_NX[start:end]))
            s_CX = sigmoid(z_CX)
            # silu'(z) = s·(1 + z·(1 − s))
            d_z_CX = d_z_NX[start:end].mul_(torch.rsub(s_CX, 1).mul_(z_CX).add_(1).mul_(s_CX))
            for i in range(4):
                d_tap_4X[i] += torch.mul(d_z_CX, block_CX[i : i + end - start], out=z_CX).sum(0)
        # Row j was tap i of row j + 3 − i.
        d_row_NX = torch.empty(num_rows, width, dtype=work, device=x_TX.device)
        for start, end in _blocks(row_NX, first=0):
            _convolve(d_z_NX[start : end + 3], tap_4X.flip(0), out=d_row_NX[start:end])
        d_row_NX.index_add_(0, last_M, d_window_S3X.flatten(0, 1).to(work))
        d_x_TX = d_row_NX.index_select(0, token_T).to(x_TX.dtype)
        d_window_S3X = d_row_NX.index_select(0, before_M).view(window_S3X.shape).to(x_TX.dtype)
        return d_x_TX, d_tap_4X.T[:, None].to(weight_X14.dtype), d_window_S3X, None, None, None


def _extend(x_TX: Tensor, window_S3X: Tensor, token_T: Tensor, before_M: Tensor) -> Tensor:
    row_NX = x_TX.new_empty(len(token_T) + len(before_M), x_TX.shape[1])
    row_NX.index_copy_(0, before_M, window_S3X.flatten(0, 1))
    return row_NX.index_copy_(0, token_T, x_TX)


def _blocks(row_NX: Tensor, first: int = 3) -> Iterator[tuple[int, int]]:
    num_rows, width = row_NX.shape
    step = max(BLOCK_NUMEL // max(width, 1), 1)
    return ((start, min(start + step, num_rows)) for start in range(first, num_rows, step))


def _convolve(row_CX: Tensor, tap_4X: Tensor, out: Tensor) -> Tensor:
    """The sum over i of tap i times the rows shifted by i, in this order for every row: three rows fewer."""
    torch.mul(row_CX[:-3], tap_4X[0], out=out)
    for i in (1, 2, 3):
        out.addcmul_(row_CX[i : i + len(out)], tap_4X[i])
    return out
