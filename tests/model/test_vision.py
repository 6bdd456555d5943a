"""The vision tower against the fixture, and its parts against numbers worked out by hand."""

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trivium.config import K3Config, VisionConfig, preset
from trivium.model.vision import (
    Pixels,
    PositionGrid,
    Projector,
    VisionTower,
    expand_placeholders,
    merge_windows,
    num_merged,
    patch_angles,
    rotate_pairs,
    scatter_features,
    time_term,
)

FIXTURE = Path(__file__).parents[1] / "fixtures" / "k3-tiny-c"
ABSOLUTE = {"rtol": 0.0, "atol": 5e-5}  # float32 against the fixture's float64, largest seen 3e-6


@cache
def fixture() -> tuple[K3Config, dict[str, Tensor], dict[str, Tensor]]:
    expected = np.load(FIXTURE / "expected.npz")
    names = ("pixel_values", "grid_thws", "tower_out", "vision_features", "vl_input_ids", "vl_input_ids_expanded")
    weights = load_file(FIXTURE / "model.safetensors")
    return K3Config.from_json(FIXTURE), weights, {name: torch.from_numpy(expected[name]) for name in names}


def loaded(module: nn.Module, prefix: str) -> nn.Module:
    weights = fixture()[1]
    mine = {name.removeprefix(prefix): weight.float() for name, weight in weights.items() if name.startswith(prefix)}
    module.load_state_dict(mine, strict=True)
    return module


def tower() -> VisionTower:
    return loaded(VisionTower(fixture()[0].vision), "vision_tower.")


def projector() -> Projector:
    return loaded(Projector(fixture()[0].vision), "mm_projector.")


def pixels() -> Pixels:
    expected = fixture()[2]
    grids = tuple(tuple(grid) for grid in expected["grid_thws"].tolist())
    return Pixels(values_P3HW=expected["pixel_values"], grids=grids)


def small_config(**changed: int) -> VisionConfig:
    sizes = {
        "patch_size": 2,
        "init_pos_emb_height": 2,
        "init_pos_emb_width": 2,
        "init_pos_emb_time": 4,
        "vt_hidden_size": 4,
        "vt_intermediate_size": 6,
        "vt_num_hidden_layers": 1,
        "vt_num_attention_heads": 1,
        "qkv_hidden_size": 8,
        "text_hidden_size": 10,
    }
    return VisionConfig(**{**sizes, **changed})


# --- Against the fixture: a 4 x 6 image, one of the native 8 x 8, three frames of 2 x 4, and one window -------------


def test_the_tower_equals_the_fixture():
    torch.testing.assert_close(tower()(pixels()), fixture()[2]["tower_out"], **ABSOLUTE)


def test_the_projector_equals_the_fixture():
    expected = fixture()[2]
    torch.testing.assert_close(projector()(expected["tower_out"]), expected["vision_features"], **ABSOLUTE)
    torch.testing.assert_close(projector()(tower()(pixels())), expected["vision_features"], **ABSOLUTE)


def test_float64_leaves_only_the_rounding_of_the_stored_values():
    run, project, expected = tower().double(), projector().double(), fixture()[2]
    feature_MD = project(run(pixels()))
    torch.testing.assert_close(feature_MD, expected["vision_features"].double(), rtol=0.0, atol=1e-6)


def test_the_expansion_equals_the_fixture():
    config, _, expected = fixture()
    ids = expected["vl_input_ids"][0].tolist()
    expanded = expand_placeholders(ids, pixels().grids, config.media_placeholder_token_id)
    assert expanded == expected["vl_input_ids_expanded"][0].tolist()


def test_an_item_does_not_see_its_neighbours():
    whole, run = pixels(), tower()
    together_M4D = run(whole)
    noise_P3HW = torch.randn(whole.values_P3HW.shape, generator=torch.Generator().manual_seed(4))
    patch_idx, row_idx = 0, 0
    for grid in whole.grids:
        patches = slice(patch_idx, patch_idx := patch_idx + math.prod(grid))
        rows = slice(row_idx, row_idx := row_idx + num_merged(grid))
        others_P3HW = noise_P3HW.clone()
        others_P3HW[patches] = whole.values_P3HW[patches]
        beside_M4D = run(Pixels(values_P3HW=others_P3HW, grids=whole.grids))
        assert torch.equal(beside_M4D[rows], together_M4D[rows])
        alone_M4D = run(Pixels(values_P3HW=whole.values_P3HW[patches], grids=(grid,)))
        # The number of rows of a matrix product may change the order of its sums: 3e-6 seen.
        torch.testing.assert_close(alone_M4D, together_M4D[rows], rtol=0.0, atol=1e-5)


def test_the_order_of_frames_matters_only_through_the_time_term():
    run, frames = tower(), torch.randn(3, 4, 3, 14, 14, generator=torch.Generator().manual_seed(1))
    forward_M4D = run(Pixels(values_P3HW=frames.flatten(0, 1), grids=((3, 2, 2),)))
    backward = Pixels(values_P3HW=frames.flip(0).flatten(0, 1), grids=((3, 2, 2),))
    assert (run(backward) - forward_M4D).abs().max() > 1e-2
    run.patch_embed.pos_emb._item = lambda grid: (
        run.patch_embed.pos_emb._stretched(*grid[1:]).flatten(0, 1).repeat(3, 1)
    )
    torch.testing.assert_close(
        run(Pixels(values_P3HW=frames.flatten(0, 1), grids=((3, 2, 2),))), run(backward), rtol=0.0, atol=1e-5
    )


# --- Names ---------------------------------------------------------------------------------------------------------


def test_the_released_tower_has_165_tensors_and_the_projector_3():
    config = preset("k3").vision
    with torch.device("meta"):
        shapes = {name: tuple(weight.shape) for name, weight in VisionTower(config).state_dict().items()}
        projector_shapes = {name: tuple(weight.shape) for name, weight in Projector(config).state_dict().items()}
    block = {
        "norm0.weight": (1024,),
        "norm1.weight": (1024,),
        "wqkv.weight": (4608, 1024),
        "wo.weight": (1024, 1536),
        "mlp.fc0.weight": (4096, 1024),
        "mlp.fc1.weight": (1024, 4096),
    }
    wanted = {f"encoder.blocks.{i}.{name}": shape for i in range(27) for name, shape in block.items()}
    wanted |= {"patch_embed.proj.weight": (1024, 3, 14, 14), "patch_embed.pos_emb.weight": (64, 64, 1024)}
    wanted |= {"encoder.final_layernorm.weight": (1024,)}
    assert shapes == wanted and len(shapes) == 165
    assert projector_shapes == {
        "proj.0.weight": (4096, 4096),
        "proj.2.weight": (7168, 4096),
        "post_norm.weight": (7168,),
    }


# --- By hand -------------------------------------------------------------------------------------------------------


def test_pair_2i_turns_by_column_and_pair_2i_plus_1_by_row():
    # 8 channels: f_0 = 1, f_1 = 10000^(-4/8) = 0.01. Patches in order (0,0) (0,1) (0,2) (0,3) (1,0) ...
    angle_PJ = patch_angles((1, 2, 4), head_dim=8)
    torch.testing.assert_close(angle_PJ[3], torch.tensor([3.0, 0.0, 0.03, 0.0]))
    torch.testing.assert_close(angle_PJ[4], torch.tensor([0.0, 1.0, 0.0, 0.01]))
    torch.testing.assert_close(angle_PJ[6], torch.tensor([2.0, 1.0, 0.02, 0.01]))


def test_frames_turn_alike():
    torch.testing.assert_close(patch_angles((3, 2, 2), 8), patch_angles((1, 2, 2), 8).repeat(3, 1), rtol=0, atol=0)


def test_a_pair_turns_as_a_complex_number():
    x_PHK = torch.tensor([[[1.0, 0.0, 0.0, 1.0]]])
    got = rotate_pairs(x_PHK, torch.tensor([[0.5, 2.0]]))
    wanted = torch.tensor([[[math.cos(0.5), math.sin(0.5), -math.sin(2.0), math.cos(2.0)]]])
    torch.testing.assert_close(got, wanted)


def test_a_product_of_turned_vectors_knows_only_the_offset():
    q_K, k_K = torch.randn(2, 8, generator=torch.Generator().manual_seed(2))
    angle_PJ = patch_angles((1, 6, 6), 8)
    q_PK = rotate_pairs(q_K.expand(36, 1, 8), angle_PJ)[:, 0]
    k_PK = rotate_pairs(k_K.expand(36, 1, 8), angle_PJ)[:, 0]
    # From (0, 0) to (1, 2), and from (3, 2) to (4, 4): patches 0, 8 and 20, 28.
    torch.testing.assert_close(q_PK[0] @ k_PK[8], q_PK[20] @ k_PK[28], rtol=1e-5, atol=1e-5)
    assert not torch.isclose(q_PK[0] @ k_PK[8], q_PK[0] @ k_PK[13], rtol=1e-2)  # (2, 1): rows are not columns


def test_the_time_term_is_half_sines_half_cosines():
    # dim 4: frequencies 1 and 10000^(-1/2) = 0.01.
    wanted = torch.tensor([[math.sin(f), math.sin(f / 100), math.cos(f), math.cos(f / 100)] for f in range(3)])
    torch.testing.assert_close(time_term(3, 4), wanted)


def test_only_more_than_one_frame_has_a_time_term():
    position = PositionGrid(small_config())
    nn.init.zeros_(position.weight)
    assert torch.equal(position([(1, 2, 2)]), torch.zeros(4, 4))
    wanted = time_term(2, 4).repeat_interleave(4, dim=0)
    torch.testing.assert_close(position([(2, 2, 2)]), wanted)
    assert torch.equal(wanted[0], torch.tensor([0.0, 0.0, 1.0, 1.0]))  # frame 0 too, its cosines are 1


@pytest.mark.parametrize(
    ("native", "asked", "wanted"),
    [
        (2, 4, [0.0, 0.25, 0.75, 1.0]),  # centres at -.25 (clamped), .25, .75, 1.25 (clamped)
        (4, 2, [0.5, 2.5]),  # centres at .5 and 2.5; with antialiasing 0.714 and 2.286
        (4, 4, [0.0, 1.0, 2.0, 3.0]),
    ],
)
def test_the_position_grid_is_stretched_from_half_pixel_centres(native, asked, wanted):
    position = PositionGrid(small_config(init_pos_emb_height=native, init_pos_emb_width=native))
    ramp = torch.arange(native, dtype=torch.float32)
    with torch.no_grad():  # channels 0, 1 grow with the row, 2, 3 with the column
        position.weight[..., :2] = ramp[:, None, None]
        position.weight[..., 2:] = ramp[None, :, None]
    got = position([(1, asked, 2)]).view(asked, 2, 4)
    torch.testing.assert_close(got[:, 0, 0], torch.tensor(wanted))
    got = position([(1, 2, asked)]).view(2, asked, 4)
    torch.testing.assert_close(got[0, :, 3], torch.tensor(wanted))


def test_windows_are_row_major_inside_and_out():
    # 4 x 4 patches numbered along the rows.
    patch_PD = torch.arange(16.0)[:, None]
    wanted = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert merge_windows(patch_PD, (1, 4, 4)).squeeze(-1).tolist() == wanted


def test_frames_are_averaged():
    patch_PD = torch.tensor([0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 16.0])[:, None]
    assert merge_windows(patch_PD, (2, 2, 2)).squeeze(-1).tolist() == [[5.0, 6.0, 7.0, 9.5]]


def test_the_towers_norms_add_float32_epsilon_and_the_projectors_its_own():
    config = small_config(projector_ln_eps=1e-5)
    norm, post_norm = VisionTower(config).encoder.final_layernorm, Projector(config).post_norm
    nn.init.ones_(norm.weight)
    nn.init.ones_(post_norm.weight)
    # 1e-4 / sqrt(1e-8 + eps), float32's epsilon being 2^-23
    small, wanted = torch.full((4,), 1e-4), torch.full((4,), 1e-4 / math.sqrt(1e-8 + 2**-23))
    torch.testing.assert_close(norm(small), wanted, rtol=1e-5, atol=0.0)
    small, wanted = torch.full((10,), 1e-4), torch.full((10,), 1e-4 / math.sqrt(1e-8 + 1e-5))
    torch.testing.assert_close(post_norm(small), wanted, rtol=1e-5, atol=0.0)


# --- Placeholders --------------------------------------------------------------------------------------------------


def test_each_placeholder_becomes_as_many_as_its_item_has_windows():
    assert [num_merged(grid) for grid in [(1, 2, 2), (3, 2, 4), (1, 8, 6)]] == [1, 2, 12]
    assert expand_placeholders([5, 9, 6, 9, 9], [(1, 2, 4), (2, 2, 2), (1, 2, 6)], 9) == [5, 9, 9, 6, 9, 9, 9, 9]
    assert expand_placeholders([5, 6], [], 9) == [5, 6]


@pytest.mark.parametrize("grids", [[], [(1, 2, 2)], [(1, 2, 2)] * 3])
def test_a_placeholder_without_its_image_is_refused(grids):
    with pytest.raises(ValueError, match=f"^placeholders: the text holds 2 of id 9, got {len(grids)} images$"):
        expand_placeholders([9, 5, 9], grids, 9)


def test_features_take_the_placeholders_in_order():
    embed_TD = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]], requires_grad=True)
    feature_MD = torch.tensor([[10.0, 11.0], [20.0, 21.0]], requires_grad=True)
    got = scatter_features(embed_TD, torch.tensor([9, 3, 9, 3]), feature_MD, 9)
    assert got.tolist() == [[10.0, 11.0], [2.0, 2.0], [20.0, 21.0], [4.0, 4.0]]
    assert embed_TD.tolist()[0] == [1.0, 1.0]  # functional
    (got * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]).sum().backward()
    assert embed_TD.grad[:, 0].tolist() == [0.0, 2.0, 0.0, 4.0]
    assert feature_MD.grad[:, 0].tolist() == [1.0, 3.0]


def test_features_that_do_not_fit_are_refused():
    ids_T = torch.tensor([9, 3, 9])
    with pytest.raises(ValueError, match=r"^placeholders: the text holds 2 of id 9, got 3 feature rows$"):
        scatter_features(torch.zeros(3, 2), ids_T, torch.zeros(3, 2), 9)
    with pytest.raises(ValueError, match=r"^placeholders: wanted feature rows of \[2\], got \[1\]$"):
        scatter_features(torch.zeros(3, 2), ids_T, torch.zeros(2, 1), 9)


# --- Borders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "grids", "message"),
    [
        ((6, 3, 2, 2), ((1, 3, 2),), "pixels: item 0 wants even rows and columns, got 3 x 2"),
        ((6, 3, 2, 2), ((1, 2, 3),), "pixels: item 0 wants even rows and columns, got 2 x 3"),
        ((5, 3, 2, 2), ((1, 2, 2),), r"pixels: the grids \(\(1, 2, 2\),\) hold 4 patches, got 5"),
        ((0, 3, 2, 2), ((0, 2, 2),), r"pixels: item 0 wants a grid of 3 positive whole numbers, got \(0, 2, 2\)"),
        ((4, 2, 2, 2), ((1, 2, 2),), r"pixels: wanted floating-point patches .*, got \[4, 2, 2, 2\] torch.float32"),
    ],
)
def test_pixels_that_contradict_their_grids_are_refused(shape, grids, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Pixels(values_P3HW=torch.zeros(shape), grids=grids)


def test_whole_number_pixels_are_refused():
    with pytest.raises(ValueError, match=r"wanted floating-point patches .* torch.uint8$"):
        Pixels(values_P3HW=torch.zeros(4, 3, 2, 2, dtype=torch.uint8), grids=((1, 2, 2),))


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ((5, 2, 2), "vision tower: item 0 has 5 frames, wanted at most init_pos_emb_time 4"),
        ((1, 2, 514), "vision tower: item 0 has 2 x 514 patches, wanted at most 512 on a side"),
    ],
)
def test_items_beyond_the_tower_are_refused(grid, message):
    run = VisionTower(small_config())
    with pytest.raises(ValueError, match=f"^{message}$"):
        run(Pixels(values_P3HW=torch.zeros(math.prod(grid), 3, 2, 2), grids=(grid,)))


def test_patches_of_another_size_are_refused():
    with pytest.raises(ValueError, match="^vision tower: wanted patches of 14 pixels, got 2$"):
        tower()(Pixels(values_P3HW=torch.zeros(4, 3, 2, 2), grids=((1, 2, 2),)))


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="^vt_hidden_size 5 is odd"):
        small_config(vt_hidden_size=5)


def test_no_items_give_no_rows():
    empty = Pixels(values_P3HW=torch.zeros(0, 3, 14, 14), grids=())
    merged_M4D = tower()(empty)
    assert merged_M4D.shape == (0, 4, 32)
    assert projector()(merged_M4D).shape == (0, 64)


def test_gradients_reach_every_parameter():
    run, project = tower(), projector()
    feature_MD = project(run(pixels()))
    feature_MD.backward(torch.randn(feature_MD.shape, generator=torch.Generator().manual_seed(3)))
    for name, weight in [*run.named_parameters(), *project.named_parameters()]:
        assert weight.grad is not None and weight.grad.isfinite().all() and weight.grad.any(), name


def test_bfloat16_stays_near_float32():
    expected = fixture()[2]
    run, project = tower().bfloat16(), projector().bfloat16()
    feature_MD = project(run(pixels()))
    assert feature_MD.dtype == torch.bfloat16 and feature_MD.isfinite().all()
    # Features have RMS about 1; eight bits over two blocks and the projector leave a few hundredths.
    error = (feature_MD.float() - expected["vision_features"]).norm() / expected["vision_features"].norm()
    assert error < 0.03
