"""What the modules declare as heads: against the order of rows that the spec gives, and against the forward itself."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.tiny import tiny_config
from trivium.config import KdaConfig, MlaConfig, VisionConfig, model_preset
from trivium.model.heads import Blocks, Rectangle, head_blocks
from trivium.model.kda import KimiDeltaAttention
from trivium.model.kimi_k3 import KimiK3
from trivium.model.mla import GatedMla
from trivium.model.vision import VisionBlock
from trivium.ops.rows import Rows

# Every width another number, so that none can stand for another: 3 heads of 8; 3 heads of nope 5, rest 3, v 4.
CONFIG = replace(
    tiny_config(44),
    kda=KdaConfig(num_heads=3, head_dim=8),
    mla=MlaConfig(num_heads=3, q_lora_rank=14, kv_lora_rank=11, qk_nope_head_dim=5, qk_rope_head_dim=3, v_head_dim=4),
    vision=VisionConfig(
        patch_size=2,
        init_pos_emb_height=4,
        init_pos_emb_width=4,
        init_pos_emb_time=2,
        vt_hidden_size=10,
        vt_intermediate_size=12,
        vt_num_hidden_layers=2,
        vt_num_attention_heads=3,
        qkv_hidden_size=24,
        text_hidden_size=32,
    ),
)


def meta_model(config):
    with torch.device("meta"):
        return KimiK3(config)


def test_a_grid_by_hand():
    assert Blocks(rows=(2, 1), columns=(3, 4)).rectangles(3, 7) == [
        Rectangle(0, 2, 0, 3),
        Rectangle(0, 2, 3, 7),
        Rectangle(2, 3, 0, 3),
        Rectangle(2, 3, 3, 7),
    ]
    assert Blocks().rectangles(3, 7) == [Rectangle(0, 3, 0, 7)]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("layers.0.self_attn.q_proj", Blocks(rows=(8, 8, 8))),
        ("layers.0.self_attn.k_proj", Blocks(rows=(8, 8, 8))),
        ("layers.0.self_attn.v_proj", Blocks(rows=(8, 8, 8))),
        ("layers.0.self_attn.g_proj", Blocks(rows=(8, 8, 8))),
        ("layers.0.self_attn.f_b_proj", Blocks(rows=(8, 8, 8))),
        ("layers.0.self_attn.o_proj", Blocks(columns=(8, 8, 8))),
        ("layers.0.self_attn.f_a_proj", None),
        ("layers.0.self_attn.b_proj", None),
        ("layers.2.self_attn.q_a_proj", None),
        ("layers.2.self_attn.q_b_proj", Blocks(rows=(8, 8, 8))),
        ("layers.2.self_attn.kv_a_proj_with_mqa", Blocks(rows=(11, 3))),
        ("layers.2.self_attn.kv_b_proj", Blocks(rows=(5, 4, 5, 4, 5, 4))),
        ("layers.2.self_attn.g_proj", Blocks(rows=(4, 4, 4))),
        ("layers.2.self_attn.o_proj", Blocks(columns=(4, 4, 4))),
        ("layers.1.block_sparse_moe.experts.w1", None),
        ("layers.1.block_sparse_moe.shared_experts.gate_proj", None),
        ("layers.0.mlp.down_proj", None),
    ],
)
def test_the_text_model_by_hand(name, want):
    assert head_blocks(meta_model(CONFIG)).get(f"language_model.model.{name}.weight") == want


def test_the_vision_tower_by_hand():
    found = head_blocks(meta_model(CONFIG))
    for block_idx in range(2):
        block = f"vision_tower.encoder.blocks.{block_idx}"
        assert found[f"{block}.wqkv.weight"] == Blocks(rows=(8,) * 9)
        assert found[f"{block}.wo.weight"] == Blocks(columns=(8, 8, 8))
    assert {name.split(".")[-2] for name in found if "vision" in name} == {"wqkv", "wo"}


def test_the_released_model_has_96_heads_everywhere():
    config = replace(model_preset("k3"), num_layers=4, vision=None)
    found = head_blocks(meta_model(config))
    counts = {name.split(".", 3)[3]: max(len(cut.rows), len(cut.columns)) for name, cut in found.items()}
    assert counts.pop("3.self_attn.kv_b_proj.weight") == 192  # keys and values
    assert counts.pop("3.self_attn.kv_a_proj_with_mqa.weight") == 2
    assert set(counts.values()) == {96} and len(counts) == 3 * 6 + 3


@pytest.mark.parametrize("preset", ["nano", "micro", "mini", "k3"])
def test_blocks_tile_their_matrices(preset):
    model = meta_model(replace(model_preset(preset), num_layers=4))
    for name, cut in head_blocks(model).items():
        num_out, num_in = model.get_parameter(name).shape[-2:]
        rectangles = cut.rectangles(num_out, num_in)
        assert sum(one.height * one.width for one in rectangles) == num_out * num_in
        edges = sorted((one.top, one.left, one.bottom, one.right) for one in rectangles)
        for (top, _, bottom, right), (next_top, next_left, _, _) in pairwise(edges):
            assert (next_top, next_left) == ((top, right) if right < num_in else (bottom, 0))


def moved(matrix, cut, order):
    """The blocks of a matrix in another order of heads: of equal shares of its blocks, one a head."""
    side, spans = (0, cut.rows) if cut.rows else (1, cut.columns)
    parts = matrix.split(spans, side)
    each = len(parts) // len(order)
    return torch.cat([part for head in order for part in parts[each * head : each * (head + 1)]], side)


def drawn(module):
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return module


@torch.no_grad()
def test_kda_heads_in_another_order_are_the_same_layer():
    layer = drawn(KimiDeltaAttention(CONFIG, "layer"))
    x_TD = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    want_TD, _ = layer(x_TD, Rows.one(9), None)
    order = [2, 0, 1]
    for name, cut in head_blocks(layer).items():
        layer.get_parameter(name).copy_(moved(layer.get_parameter(name), cut, order))
    for conv in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d):
        conv.weight.copy_(moved(conv.weight, Blocks(rows=(8, 8, 8)), order))
    layer.b_proj.weight.copy_(layer.b_proj.weight[order])
    layer.A_log.copy_(layer.A_log[order])
    layer.dt_bias.copy_(layer.dt_bias.view(3, 8)[order].flatten())
    torch.testing.assert_close(layer(x_TD, Rows.one(9), None)[0], want_TD, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_mla_heads_in_another_order_are_the_same_layer():
    layer = drawn(GatedMla(CONFIG))
    x_TD = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    want_TD, _ = layer(x_TD, Rows.one(9), None)
    for name, cut in head_blocks(layer).items():
        if name != "kv_a_proj_with_mqa.weight":  # what it makes is of no one head
            layer.get_parameter(name).copy_(moved(layer.get_parameter(name), cut, [2, 0, 1]))
    torch.testing.assert_close(layer(x_TD, Rows.one(9), None)[0], want_TD, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_vision_heads_in_another_order_are_the_same_block():
    block = drawn(VisionBlock(CONFIG.vision))
    x_PD = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    angle_PJ = torch.rand(6, 4, generator=torch.Generator().manual_seed(1))
    want_PD = block(x_PD, angle_PJ, [0, 6])
    wqkv, wo = block.wqkv.weight, block.wo.weight
    cut = block.head_blocks()
    thirds = [moved(third, Blocks(rows=cut["wqkv.weight"].rows[:3]), [2, 0, 1]) for third in wqkv.chunk(3)]
    wqkv.copy_(torch.cat(thirds))
    wo.copy_(moved(wo, cut["wo.weight"], [2, 0, 1]))
    torch.testing.assert_close(block(x_PD, angle_PJ, [0, 6]), want_PD, rtol=1e-4, atol=1e-5)


class Declares(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.proj = nn.Linear(4, 6, bias=False)
        self.head_blocks = lambda: blocks


@pytest.mark.parametrize(
    ("blocks", "error"),
    [
        (
            {"proj.weight": Blocks(rows=(3, 4))},
            r"a\.proj\.weight: declared as .*: blocks: wanted rows that add up to 6",
        ),
        (
            {"proj.weight": Blocks(columns=(2,))},
            r"a\.proj\.weight: .* wanted columns that add up to 4, got 2 from 1 span",
        ),
        ({"prj.weight": Blocks()}, r"a\.prj\.weight: declared as .* has no attribute `prj`"),
        ({"proj.bias": Blocks()}, r"a\.proj\.bias: declared as "),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(blocks, error):
    with pytest.raises(ValueError, match=error):
        head_blocks(nn.ModuleDict({"a": Declares(blocks)}))


def test_an_empty_head_is_refused():
    with pytest.raises(ValueError, match=r"blocks: wanted rows of at least 1, got \(3, 0\)"):
        Blocks(rows=(3, 0))
