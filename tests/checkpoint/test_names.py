"""The table of released tensors: counts and sizes worked out in the published tables, shapes held to real headers."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from trivium.checkpoint.names import packed_pair, released_tensors
from trivium.checkpoint.safetensors import read_header
from trivium.config import K3Config, preset

FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.fixture(scope="module")
def released():
    return list(released_tensors(preset("k3"), packed=True))


def test_k3_has_497_220_names_of_the_published_dtypes(released):
    assert len({spec.name for spec in released}) == len(released) == 497_220
    by_hand = 93 * 8 + 69 * 12 + 24 * 6 + 3 + 92 * 8 + 92 * 896 * 6 + 5 + 3 + 165
    assert by_hand == 497_220
    assert Counter(spec.dtype for spec in released) == {"U8": 494_592, "BF16": 2_122, "F32": 506}


def test_k3_has_2_779_931_837_184_parameters_in_1_560_860_324_864_bytes(released):
    per_item = Counter()
    for spec in released:
        if spec.dtype == "U8":
            per_item["packed"] += 2 * spec.numel if spec.name.endswith("_packed") else 0  # two 4-bit numbers a byte
        else:
            per_item[spec.dtype] += spec.numel
    assert per_item == {"packed": 2_722_740_830_208, "BF16": 57_179_884_544, "F32": 11_122_432}
    assert per_item.total() == 2_779_931_837_184
    assert sum(spec.num_bytes for spec in released) == 1_560_860_324_864


def test_unpacked_k3_has_the_same_parameters_and_a_third_of_the_expert_names(released):
    unpacked = list(released_tensors(preset("k3"), packed=False))
    assert sum(spec.numel for spec in unpacked) == 2_779_931_837_184
    assert len(unpacked) == 497_220 - 92 * 896 * 3
    assert all(spec.dtype != "U8" for spec in unpacked)


def test_k3_shapes(released):
    shapes = {spec.name: (spec.dtype, spec.shape) for spec in released}
    layer = "language_model.model.layers."
    for name, dtype, shape in (
        (f"{layer}0.self_attn.A_log", "F32", (128,)),
        (f"{layer}0.self_attn.q_conv1d.weight", "F32", (12288, 1, 4)),
        (f"{layer}0.self_attn.f_b_proj.weight", "BF16", (12288, 128)),
        (f"{layer}0.mlp.down_proj.weight", "BF16", (7168, 33792)),
        (f"{layer}92.self_attn.kv_b_proj.weight", "BF16", (24576, 512)),
        (f"{layer}92.self_attn.q_b_proj.weight", "BF16", (18432, 1536)),
        (f"{layer}92.self_attn.kv_a_proj_with_mqa.weight", "BF16", (576, 7168)),
        (f"{layer}1.block_sparse_moe.experts.895.w1.weight_packed", "U8", (3072, 1792)),
        (f"{layer}1.block_sparse_moe.experts.895.w2.weight_scale", "U8", (3584, 96)),
        ("vision_tower.encoder.blocks.26.wqkv.weight", "BF16", (4608, 1024)),
        ("mm_projector.proj.2.weight", "BF16", (7168, 4096)),
    ):
        assert shapes[name] == (dtype, shape), name


@pytest.mark.parametrize("name", "abcd")
def test_names_and_shapes_are_those_of_files_of_the_released_layout(name):
    folder = FIXTURES / f"k3-tiny-{name}"
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= {tensor: entry.shape for tensor, entry in read_header(path).items()}
    table = {spec.name: spec.shape for spec in released_tensors(K3Config.from_json(folder), packed=True)}
    assert table == found


def test_experts_are_rows_of_a_stacked_parameter_and_pack_two_numbers_a_byte():
    specs = {spec.name: spec for spec in released_tensors(preset("nano"), packed=False)}
    spec = specs["language_model.model.layers.1.block_sparse_moe.experts.5.w2.weight"]
    assert spec.parameter == "language_model.model.layers.1.block_sparse_moe.experts.w2.weight"
    assert (spec.expert, spec.shape) == (5, (96, 64))
    codes, scales = packed_pair(spec)
    assert (codes.name, codes.shape, codes.expert) == (f"{spec.name}_packed", (96, 32), 5)
    assert (scales.parameter, scales.shape, scales.dtype) == (f"{spec.parameter}_scale", (96, 2), "U8")


def test_a_log_is_stored_padded_to_a_multiple_of_128():
    specs = {spec.name: spec for spec in released_tensors(preset("nano"), packed=False)}  # 3 heads
    spec = specs["language_model.model.layers.0.self_attn.A_log"]
    assert (spec.shape, spec.padding) == ((128,), 125)


def test_the_table_and_the_check_need_no_torch():
    code = "import sys, trivium.checkpoint.index; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
