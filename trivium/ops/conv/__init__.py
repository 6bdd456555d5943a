"""The short convolution in front of KDA: causal, depthwise, four taps, then SiLU."""

from __future__ import annotations

import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.backend import choose
from trivium.ops.conv.extended import short_conv_extended
from trivium.ops.conv.native import short_conv_native
from trivium.ops.conv.reference import short_conv_reference
from trivium.ops.rows import Rows

NUM_TAPS = 4


def short_conv(x_TX: Tensor, weight_X14: Tensor, rows: Rows, window_S3X: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(y_TX, window_S3X): the convolved tokens, and the last three inputs of every sequence, oldest first.

    y_t = silu(sum over i = 0..3 of weight[:, 0, i] · x_{t−3+i}): tap 3 meets the current token. What lies before a
    sequence is its window, or zeros; nothing passes between sequences. A sequence of fewer than three tokens keeps
    the rest of its window, an empty one all of it. Sums are float32 (float64 for float64); y and the window have the
    dtype of x. Released modelling code. Raises ValueError for shapes or dtypes that do not fit.
    """
    num_tokens, width = x_TX.shape
    if num_tokens != rows.num_tokens:
        raise ValueError(f"short_conv: x has {num_tokens} tokens, rows {rows.num_tokens}")
    if weight_X14.shape != (width, 1, NUM_TAPS):
        raise ValueError(f"short_conv: weight is {(width, 1, NUM_TAPS)}, got {tuple(weight_X14.shape)}")
    if window_S3X is None:
        window_S3X = x_TX.new_zeros(rows.num_sequences, NUM_TAPS - 1, width)
    if window_S3X.shape != (rows.num_sequences, NUM_TAPS - 1, width):
        wanted = (rows.num_sequences, NUM_TAPS - 1, width)
        raise ValueError(f"short_conv: window is {wanted}, got {tuple(window_S3X.shape)}")
    if window_S3X.dtype != x_TX.dtype or not torch.is_floating_point(x_TX):
        raise ValueError(f"short_conv: x and window want one floating dtype, got {x_TX.dtype} and {window_S3X.dtype}")
    native = short_conv_native if cpu.serves(x_TX, weight_X14, window_S3X) else None
    run = choose("short_conv", reference=short_conv_reference, torch=short_conv_extended, native=native)
    return run(x_TX, weight_X14, rows, window_S3X)
