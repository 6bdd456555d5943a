"""Image: how many tokens a picture takes, from its size alone."""

from __future__ import annotations

import math

PATCH = 14
MERGED = 2 * PATCH  # one token stands for two by two patches
MAX_PATCHES = 65_536
MAX_SIDE = 512 * PATCH


def resized(width: int, height: int) -> tuple[int, int]:
    """Width and height in pixels after the released resize plan, which never enlarges.

    The scale is min(1, sqrt(65536 / (max(1, W // 14) · max(1, H // 14))), 7168 / W, 7168 / H).
    """
    patches = max(1, width // PATCH) * max(1, height // PATCH)
    scale = min(1.0, math.sqrt(MAX_PATCHES / patches), MAX_SIDE / width, MAX_SIDE / height)
    return tuple(min(max(1, math.floor(side * scale)), MAX_SIDE) for side in (width, height))  # type: ignore[return-value]


def num_tokens(width: int, height: int) -> int:
    """Tokens of a picture of so many pixels: resized, then filled up to whole tokens of 28 by 28 pixels."""
    columns, rows = (-(-side // MERGED) for side in resized(width, height))
    return columns * rows
