"""Vision: patches to rows of the text model's width, and those rows onto their placeholders.

`VisionTower` and `Projector` carry the released parameter names (behind `vision_tower.` and `mm_projector.`). Items of
one `Pixels` lie one behind the other and never see each other: there is no padding and no attention mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trivium.config import VisionConfig
from trivium.model.heads import Blocks
from trivium.model.layers import Linear, RMSNorm
from trivium.ops.pixels import Grid, Pixels, num_merged, num_patches
from trivium.ops.precision import work_dtype

NORM_EPS = 1.1920929e-07  # the tower's norms name no eps: the framework's default, float32's epsilon in every dtype
BASE = 10000.0  # of the rotation's frequencies and of the time term's
MAX_SIDE = 512  # rows or columns: the released tower turns positions up to 511


class VisionTower(nn.Module):
    """Patches to merged windows: Pixels -> [M, 4, D], M the sum of num_merged, D = vt_hidden_size.

    Runs in `dtype`, None for that of its parameters; norms, rotation and softmax in float32.
    Raises ValueError for an item with more than init_pos_emb_time frames, a side above 512, or another patch size.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config)
        self.encoder = Encoder(config)

    def forward(self, pixels: Pixels, dtype: torch.dtype | None = None) -> Tensor:
        self._check(pixels)
        x_PD = self.patch_embed(pixels, dtype or self.patch_embed.proj.weight.dtype)
        x_PD = self.encoder(x_PD, pixels.grids)
        items = x_PD.split([num_patches(grid) for grid in pixels.grids])
        merged = [merge_windows(item_PD, grid) for item_PD, grid in zip(items, pixels.grids, strict=True)]
        return torch.cat([x_PD[:0].view(0, 4, self.config.vt_hidden_size), *merged])

    def _check(self, pixels: Pixels) -> None:
        if pixels.values_P3HW.shape[-1] != self.config.patch_size:
            raise ValueError(
                f"vision tower: wanted patches of {self.config.patch_size} pixels, got {pixels.values_P3HW.shape[-1]}"
            )
        for item_idx, (num_frames, num_rows, num_columns) in enumerate(pixels.grids):
            if num_frames > self.config.init_pos_emb_time:
                raise ValueError(
                    f"vision tower: item {item_idx} has {num_frames} frames, "
                    f"wanted at most init_pos_emb_time {self.config.init_pos_emb_time}"
                )
            if max(num_rows, num_columns) > MAX_SIDE:
                raise ValueError(
                    f"vision tower: item {item_idx} has {num_rows} x {num_columns} patches, "
                    f"wanted at most {MAX_SIDE} on a side"
                )


class Projector(nn.Module):
    """Merged windows [M, 4, D] to rows of the text model [M, text_hidden_size]. No norm before, one behind."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            Linear(config.merged_size, config.merged_size),
            nn.GELU(),  # the exact one, with erf
            Linear(config.merged_size, config.text_hidden_size),
        )
        self.post_norm = RMSNorm(config.text_hidden_size, config.projector_ln_eps)

    def forward(self, merged_M4D: Tensor) -> Tensor:
        return self.post_norm(self.proj(merged_M4D.flatten(1)))


class PatchEmbedding(nn.Module):
    """A patch's pixels through one matrix, plus where and when the patch is."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = PatchProjection(config)
        self.pos_emb = PositionGrid(config)

    def forward(self, pixels: Pixels, dtype: torch.dtype) -> Tensor:
        return self.proj(pixels.values_P3HW.to(dtype)) + self.pos_emb(pixels.grids).to(dtype)


class PatchProjection(nn.Module):
    """A convolution whose kernel [D, 3, patch, patch] covers the whole patch: one dot product a channel."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vt_hidden_size, 3, config.patch_size, config.patch_size))

    def forward(self, values_P3HW: Tensor) -> Tensor:
        return F.linear(values_P3HW.flatten(1), self.weight.flatten(1).to(values_P3HW.dtype))


class PositionGrid(nn.Module):
    """A learned vector for each place of a square, stretched to the item's grid; a fixed one for each frame."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(config.init_pos_emb_height, config.init_pos_emb_width, config.vt_hidden_size)
        )

    def forward(self, grids: Sequence[Grid]) -> Tensor:
        none_PD = self.weight[:0].flatten(0, 1)
        return torch.cat([none_PD, *(self._item(grid) for grid in grids)])

    def _item(self, grid: Grid) -> Tensor:
        num_frames, num_rows, num_columns = grid
        place_PD = self._stretched(num_rows, num_columns).flatten(0, 1)
        if num_frames == 1:  # an image has no time term, not even frame 0's, whose cosines are 1
            return place_PD
        time_FD = time_term(num_frames, place_PD.shape[-1], work_dtype(place_PD), place_PD.device)
        return (place_PD + time_FD.to(place_PD.dtype)[:, None]).flatten(0, 1)

    def _stretched(self, num_rows: int, num_columns: int) -> Tensor:
        if (num_rows, num_columns) == self.weight.shape[:2]:
            return self.weight
        image_1DHW = self.weight.to(work_dtype(self.weight)).permute(2, 0, 1)[None]
        image_1DHW = F.interpolate(
            image_1DHW, size=(num_rows, num_columns), mode="bilinear", align_corners=False, antialias=False
        )
        return image_1DHW[0].permute(1, 2, 0).to(self.weight.dtype)


def time_term(
    num_frames: int, dim: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """What each frame adds, [frames, dim]: dim/2 sines, then dim/2 cosines, of frame * 10000^(-2i/dim)."""
    frequency = BASE ** (-torch.arange(dim // 2, dtype=dtype, device=device) / (dim // 2))
    angle = torch.arange(num_frames, dtype=dtype, device=device)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class Encoder(nn.Module):
    """The blocks and the norm behind them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.vt_num_hidden_layers))
        self.final_layernorm = RMSNorm(config.vt_hidden_size, NORM_EPS)

    def forward(self, x_PD: Tensor, grids: Sequence[Grid]) -> Tensor:
        angles = [x_PD.new_empty(0, self.head_dim // 2, dtype=work_dtype(x_PD))]
        angles += [patch_angles(grid, self.head_dim, work_dtype(x_PD), x_PD.device) for grid in grids]
        angle_PJ = torch.cat(angles)
        bounds = [0]
        for grid in grids:
            bounds.append(bounds[-1] + num_patches(grid))
        for block in self.blocks:
            x_PD = block(x_PD, angle_PJ, bounds)
        return self.final_layernorm(x_PD)


def patch_angles(
    grid: Grid, head_dim: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """The angle by which each pair of channels turns, [P, head_dim/2].

    Pair 2i turns by column * f_i and pair 2i+1 by row * f_i, f_i = 10000^(-4i/head_dim); all frames turn alike.
    """
    num_frames, num_rows, num_columns = grid
    frequency = BASE ** (-4 * torch.arange(head_dim // 4, dtype=dtype, device=device) / head_dim)
    row = torch.arange(num_rows, dtype=dtype, device=device)[:, None, None]
    column = torch.arange(num_columns, dtype=dtype, device=device)[None, :, None]
    by_column, by_row = torch.broadcast_tensors(column * frequency, row * frequency)
    angle_PJ = torch.stack([by_column, by_row], dim=-1).flatten(2).flatten(0, 1)
    return angle_PJ.repeat(num_frames, 1)


def rotate_pairs(x_PHK: Tensor, angle_PJ: Tensor) -> Tensor:
    """Turn each pair of neighbouring channels (2j, 2j+1) by angle j, in the angles' dtype, back in that of x."""
    cos_P1J, sin_P1J = angle_PJ.cos()[:, None], angle_PJ.sin()[:, None]
    first_PHJ, second_PHJ = x_PHK.to(angle_PJ.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack(
        [first_PHJ * cos_P1J - second_PHJ * sin_P1J, first_PHJ * sin_P1J + second_PHJ * cos_P1J], dim=-1
    )
    return turned.flatten(-2).to(x_PHK.dtype)


class VisionBlock(nn.Module):
    """x += wo(attention(norm0(x))); x += mlp(norm1(x))."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.vt_num_attention_heads
        self.norm0 = RMSNorm(config.vt_hidden_size, NORM_EPS)
        self.norm1 = RMSNorm(config.vt_hidden_size, NORM_EPS)
        self.wqkv = Linear(config.vt_hidden_size, 3 * config.qkv_hidden_size)
        self.wo = Linear(config.qkv_hidden_size, config.vt_hidden_size)
        self.mlp = VisionMLP(config)

    def forward(self, x_PD: Tensor, angle_PJ: Tensor, bounds: Sequence[int]) -> Tensor:
        x_PD = x_PD + self.wo(self._attention(self.norm0(x_PD), angle_PJ, bounds))
        return x_PD + self.mlp(self.norm1(x_PD))

    def _attention(self, x_PD: Tensor, angle_PJ: Tensor, bounds: Sequence[int]) -> Tensor:
        q_PHK, k_PHK, v_PHK = self.wqkv(x_PD).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q_PHK, k_PHK = rotate_pairs(q_PHK, angle_PJ), rotate_pairs(k_PHK, angle_PJ)
        # One call an item: a patch sees its own item and no other. The scale is K^-0.5, the call's default. The batch
        # dim of 1 is what the fused kernels ask for; without it all P x P weights are written out.
        q_1HPK, k_1HPK, v_1HPK = (x_PHK.transpose(0, 1)[None] for x_PHK in (q_PHK, k_PHK, v_PHK))
        items = [v_1HPK[:, :, :0]]
        for start, end in pairwise(bounds):
            one = slice(start, end)
            items.append(F.scaled_dot_product_attention(q_1HPK[:, :, one], k_1HPK[:, :, one], v_1HPK[:, :, one]))
        return torch.cat(items, dim=2)[0].transpose(0, 1).flatten(1)

    def head_blocks(self) -> dict[str, Blocks]:
        """wqkv: all heads' q, then their k, then their v."""
        heads = (self.wo.weight.shape[1] // self.num_heads,) * self.num_heads
        return {"wqkv.weight": Blocks(rows=3 * heads), "wo.weight": Blocks(columns=heads)}


class VisionMLP(nn.Module):
    """fc1(gelu(fc0(x))), gelu in its tanh form."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc0 = Linear(config.vt_hidden_size, config.vt_intermediate_size)
        self.fc1 = Linear(config.vt_intermediate_size, config.vt_hidden_size)

    def forward(self, x_PD: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(x_PD), approximate="tanh"))


def merge_windows(item_PD: Tensor, grid: Grid) -> Tensor:
    """One item's patches averaged over frames and gathered by window: [P, D] -> [num_merged, 4, D].

    Windows are row-major; inside one, patches come as (0,0), (0,1), (1,0), (1,1) of (row, column).
    """
    num_frames, num_rows, num_columns = grid
    frames = item_PD.view(num_frames, num_rows // 2, 2, num_columns // 2, 2, -1)
    return frames.mean(0).transpose(1, 2).reshape(num_merged(grid), 4, -1)


def expand_placeholders(ids: Sequence[int], grids: Sequence[Grid], media_id: int) -> list[int]:
    """Each media id repeated as often as its item has merged tokens, items in order.

    Raises ValueError when ids holds another number of media ids than there are grids.
    """
    num_places = sum(token_id == media_id for token_id in ids)
    if num_places != len(grids):
        raise ValueError(f"placeholders: the text holds {num_places} of id {media_id}, got {len(grids)} images")
    expanded: list[int] = []
    remaining = iter(grids)
    for token_id in ids:
        expanded += [token_id] * (num_merged(next(remaining)) if token_id == media_id else 1)
    return expanded


def scatter_features(embed_TD: Tensor, ids_T: Tensor, feature_MD: Tensor, media_id: int) -> Tensor:
    """embed_TD with the rows where ids_T is media_id replaced by the rows of feature_MD, in order.

    Functional and differentiable in both. Raises ValueError when the counts or the widths differ.
    """
    place_M = (ids_T == media_id).nonzero()[:, 0]
    if place_M.shape[0] != feature_MD.shape[0]:
        raise ValueError(
            f"placeholders: the text holds {place_M.shape[0]} of id {media_id}, got {feature_MD.shape[0]} feature rows"
        )
    if embed_TD.shape[1:] != feature_MD.shape[1:]:
        raise ValueError(
            f"placeholders: wanted feature rows of {list(embed_TD.shape[1:])}, got {list(feature_MD.shape[1:])}"
        )
    return embed_TD.index_copy(0, place_M, feature_MD.to(embed_TD.dtype))
