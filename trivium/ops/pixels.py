"""Pixels: how the patches of several images travel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Grid = tuple[int, int, int]  # frames, rows, columns, in patches


@dataclass(frozen=True, kw_only=True, eq=False)
class Pixels:
    """The patches of all images, item by item, each item row-major over (frame, row, column).

    `values_P3HW` are floating point, P patches of 3 channels and patch x patch pixels. `grids` say on the host how many
    frames, rows and columns each item has; a frame's rows and columns are even, since 2 x 2 patches become one token.
    """

    values_P3HW: Tensor
    grids: tuple[Grid, ...]

    def __post_init__(self) -> None:
        shape = tuple(self.values_P3HW.shape)
        if len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3] or not self.values_P3HW.is_floating_point():
            raise ValueError(
                f"pixels: wanted floating-point patches [P, 3, patch, patch], "
                f"got {list(shape)} {self.values_P3HW.dtype}"
            )
        for item_idx, grid in enumerate(self.grids):
            if len(grid) != 3 or any(type(size) is not int or size < 1 for size in grid):
                raise ValueError(f"pixels: item {item_idx} wants a grid of 3 positive whole numbers, got {grid}")
            if grid[1] % 2 or grid[2] % 2:
                raise ValueError(f"pixels: item {item_idx} wants even rows and columns, got {grid[1]} x {grid[2]}")
        if sum(num_patches(grid) for grid in self.grids) != shape[0]:
            raise ValueError(
                f"pixels: the grids {self.grids} hold {sum(num_patches(grid) for grid in self.grids)} patches, "
                f"got {shape[0]}"
            )


def num_patches(grid: Grid) -> int:
    """Patches of one item: frames * rows * columns."""
    num_frames, num_rows, num_columns = grid
    return num_frames * num_rows * num_columns


def num_merged(grid: Grid) -> int:
    """Text positions of one item: one for each 2 x 2 window; frames are averaged away."""
    _, num_rows, num_columns = grid
    return num_rows * num_columns // 4
