"""The short convolution token by token."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.ops.precision import work_dtype
from trivium.ops.rows import Rows


def short_conv_reference(x_TX: Tensor, weight_X14: Tensor, rows: Rows, window_S3X: Tensor) -> tuple[Tensor, Tensor]:
    work = work_dtype(x_TX)
    tap_X4 = weight_X14[:, 0].to(work)
    y, windows = [], []
    for (start, end), window_3X in zip(pairwise(rows.starts), window_S3X, strict=True):
        history_NX = torch.cat([window_3X, x_TX[start:end]])
        for t in range(end - start):
            z_X = sum(tap_X4[:, i] * history_NX[t + i].to(work) for i in range(4))
            y.append(F.silu(z_X))
        windows.append(history_NX[-3:])
    y_TX = torch.stack(y).to(x_TX.dtype) if y else x_TX
    return y_TX, torch.stack(windows) if windows else window_S3X
