"""The config: the released file in and out, presets, and what is refused."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from trivium.config import LOWEST_DECAY_BOUND, PRESETS, K2Config, K3Config, KdaConfig, model_preset, preset

FIXTURES = Path(__file__).parent / "fixtures"


def released(name="k3-tiny-a"):
    return json.loads((FIXTURES / name / "config.json").read_text())


@pytest.mark.parametrize("name", ["k3-tiny-a", "k3-tiny-b", "k3-tiny-c", "k3-tiny-d"])
def test_a_released_file_comes_back_equal_and_in_order(name):
    content = released(name)
    config = K3Config.from_json(FIXTURES / name)
    assert json.dumps(config.to_json()) == json.dumps(content)
    assert K3Config.from_json(FIXTURES / name / "config.json") == K3Config.from_json(content) == config


def test_unknown_fields_are_kept():
    content = released()
    content["made_up"] = {"a": [1, None]}
    content["text_config"]["top_k"] = 50
    content["text_config"]["linear_attn_config"]["note"] = "x"
    content["vision_config"]["made_up"] = True
    assert K3Config.from_json(content).to_json() == content


def test_null_and_order_are_kept():
    content = released()
    content["vision_config"] = None
    content["text_config"]["linear_attn_config"]["kda_layers"] = [7, 1, 2, 3, 5, 6]
    content["text_config"]["linear_attn_config"]["full_attn_layers"] = [9, 4, 8]
    assert K3Config.from_json(content).to_json() == content


def test_reading_leaves_the_caller_and_the_config_alone():
    content = released()
    before = copy.deepcopy(content)
    config = K3Config.from_json(content)
    content["text_config"]["hidden_size"] = 1
    written = config.to_json()
    written["text_config"]["hidden_size"] = 2
    assert config.to_json() == before


def test_a_changed_config_writes_what_it_is():
    config = replace(K3Config.from_json(released()), dtype="float32", vocab_size=400)
    content = config.to_json()
    assert content["dtype"] == content["text_config"]["dtype"] == "float32"
    assert content["text_config"]["vocab_size"] == 400
    assert K3Config.from_json(content) == config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_come_back_equal_through_json(name):
    config = preset(name)
    if isinstance(config, K2Config):
        return
    assert K3Config.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_the_released_preset_is_the_released_config():
    text = preset("k3").to_json()["text_config"]
    assert text["linear_attn_config"]["full_attn_layers"] == [*range(4, 93, 4), 93]
    assert len(text["linear_attn_config"]["kda_layers"]) == 69
    assert text["quantization_config"]["format"] == "mxfp4-pack-quantized"
    config = preset("k3")
    assert [config.is_mla(n) for n in (0, 2, 3, 90, 91, 92)] == [False, False, True, False, True, True]
    assert [n for n in range(93) if config.opens_block(n)] == list(range(0, 93, 12))
    assert [n for n in range(93) if config.is_dense(n)] == [0]
    assert (config.kda.width, config.kda.padded_num_heads, config.mla.qk_head_dim) == (12288, 128, 192)
    assert config.moe.shared_intermediate_size == 6144 and config.vision.head_dim == 128
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (163584, 163586, 163839)
    assert config.media_placeholder_token_id == 163605
    assert config.kda.state_numel == 96 * 128 * 128


def test_the_geometry_of_the_small_presets():
    nano = model_preset("nano")
    assert (nano.num_layers, nano.hidden_size, nano.vocab_size, nano.mla_layers) == (6, 192, 4096, (4, 6))
    assert (model_preset("micro").hidden_size, model_preset("micro").num_layers) == (512, 12)
    mini = model_preset("mini")
    assert (mini.hidden_size, mini.num_layers) == (1024, 24)
    assert (mini.moe.num_experts, mini.moe.num_experts_per_token) == (128, 8)


def test_a_variant_is_a_replace():
    full = K3Config.from_json(released())
    tiny = replace(full, num_layers=4, kda=replace(full.kda, num_heads=2, head_dim=8))
    assert tiny.kda.state_numel == 2 * 8 * 8 and tiny.mla_layers == (4,)
    assert K3Config.from_json(tiny.to_json()) == tiny


def test_other_layer_lists_are_kept():
    content = released()
    linear = content["text_config"]["linear_attn_config"]
    linear["full_attn_layers"], linear["kda_layers"] = [1, 9], [2, 3, 4, 5, 6, 7, 8]
    config = K3Config.from_json(content)
    assert config.mla_layers == (1, 9) and config.to_json() == content


@pytest.mark.parametrize("layers", [(), (1, 2, 3), (2,)])
def test_a_model_of_one_kind_of_layer_comes_back_through_json(layers):
    config = replace(model_preset("nano"), num_layers=3, full_attn_layers=layers)
    assert K3Config.from_json(json.loads(json.dumps(config.to_json()))).mla_layers == layers
    alone = replace(model_preset("nano"), num_layers=1)
    assert K3Config.from_json(alone.to_json()).mla_layers == (1,)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e18, 0.0, -1.0])
def test_a_number_that_config_json_would_not_give_back_is_refused(value):
    nano = model_preset("nano")
    for name in ("rms_norm_eps", "activation_situ_beta", "activation_situ_linear_beta"):
        with pytest.raises(ValueError, match=re.escape(f"{name}: wanted a positive number, got {value}")):
            replace(nano, **{name: value})
    with pytest.raises(ValueError, match=re.escape(f"routed_scaling_factor: wanted a positive number, got {value}")):
        replace(nano.moe, routed_scaling_factor=value)
    for name, size in (("num_layers", 10**20), ("num_layers", 10**7), ("attn_res_block_size", 10**18)):
        with pytest.raises(ValueError, match="wanted"):
            replace(nano, **{name: size})


def test_a_model_without_mla_stays_one():
    content = released()
    linear = content["text_config"]["linear_attn_config"]
    linear["full_attn_layers"], linear["kda_layers"] = [], list(range(1, 10))
    config = K3Config.from_json(content)
    assert config.mla_layers == () and config.to_json() == content
    for layers in ((4, 4, 6), (6, 4), [4]):
        with pytest.raises(ValueError, match="full_attn_layers: wanted a tuple of rising layer numbers"):
            replace(config, full_attn_layers=layers)
    with pytest.raises(ValueError, match="bos_token_id: wanted a whole number of at least 0, got 1.5"):
        replace(config, bos_token_id=1.5)


def test_packing_is_said_by_the_config():
    config = K3Config.from_json(released())
    assert config.packs_experts and config.with_packed_experts(True) is config
    plain = config.with_packed_experts(False)
    assert not plain.packs_experts and "quantization_config" not in plain.to_json()["text_config"]
    assert plain.with_packed_experts(True).to_json()["text_config"] == config.to_json()["text_config"]
    narrow = replace(plain, moe=replace(plain.moe, moe_intermediate_size=40))
    with pytest.raises(ValueError, match="moe_intermediate_size 40 is no multiple of group_size 32"):
        narrow.with_packed_experts(True)


def text(**fields):
    return {"text_config": fields}


def linear(**fields):
    return text(linear_attn_config=fields)


def vision(**fields):
    return {"vision_config": fields}


REFUSED = {
    "num_key_value_heads 2 of text_config is not num_attention_heads 4": text(num_key_value_heads=2),
    "layer 4 is in both kda_layers and full_attn_layers": linear(kda_layers=[1, 2, 3, 4, 5, 6, 7]),
    "layer 7 is in neither kda_layers nor full_attn_layers": linear(kda_layers=[1, 2, 3, 5, 6]),
    "full_attn_layers names layer 10, but num_hidden_layers is 9": linear(full_attn_layers=[4, 8, 9, 10]),
    "kda_layers names layer 0, but num_hidden_layers is 9": linear(kda_layers=[0, 1, 2, 3, 5, 6, 7]),
    'kda_layers: wanted a list of layer numbers, got "all"': linear(kda_layers="all"),
    "num_experts_per_token 17 is more than num_experts 16": text(num_experts_per_token=17),
    "first_k_dense_replace 10 is more than num_hidden_layers 9": text(first_k_dense_replace=10),
    "text_hidden_size 65 of vision_config is not hidden_size 64 of text_config": vision(text_hidden_size=65),
    "qkv_hidden_size 44 is no multiple of 4 * vt_num_attention_heads 2": vision(qkv_hidden_size=44),
    "mm_hidden_size 16 of vision_config is not vt_hidden_size 32": vision(mm_hidden_size=16),
    "eos_token_id 306 is outside vocab_size 306": text(vocab_size=306),
    "eos_token_id 5 of text_config is not eos_token_id 306": text(eos_token_id=5),
    "dtype 'float32' of text_config is not dtype 'bfloat16'": text(dtype="float32"),
    'hidden_act: wanted "situ", got "silu"': text(hidden_act="silu"),
    'moe_router_activation_func: wanted "sigmoid", got "softmax"': text(moe_router_activation_func="softmax"),
    "mla_use_nope: wanted true, got false": text(mla_use_nope=False),
    "num_nextn_predict_layers: wanted 0, got 1": text(num_nextn_predict_layers=1),
    "tie_word_embeddings: wanted false, got true": {"tie_word_embeddings": True},
    'model_type: wanted "kimi_k3", got "llama"': {"model_type": "llama"},
    "merge_kernel_size: wanted [2, 2], got [1, 1]": vision(merge_kernel_size=[1, 1]),
    "hidden_size: wanted a positive whole number, got 0": text(hidden_size=0),
    "hidden_size: wanted a positive whole number, got 64.5": text(hidden_size=64.5),
    "hidden_size: wanted a number, got true": text(hidden_size=True),
    'num_experts: wanted a number, got "16"': text(num_experts="16"),
    "rms_norm_eps: wanted a positive number, got 0": text(rms_norm_eps=0),
    "dtype: wanted one of bfloat16, float32, float16, got 'int8'": {"dtype": "int8", "text_config": {"dtype": "int8"}},
    "short_conv_kernel_size: wanted 4 taps, got 3": linear(short_conv_kernel_size=3),
    "gate_lower_bound: -5.9 is outside [-5.8, 0): over the 15 steps of a tile of 16 tokens": linear(
        gate_lower_bound=-5.9
    ),
    "gate_lower_bound: 0 is outside": linear(gate_lower_bound=0),
    "moe_intermediate_size 40 is no multiple of group_size 32 of quantization_config": text(moe_intermediate_size=40),
    "first_k_dense_replace: wanted a whole number of at least 0, got 1.5": text(first_k_dense_replace=1.5),
    "first_k_dense_replace: wanted a whole number of at least 0, got -1": text(first_k_dense_replace=-1),
    "rms_norm_eps: wanted a number, got 1000": text(rms_norm_eps=10**400),
    "group_size: wanted 32, got null": text(
        quantization_config={"format": "mxfp4-pack-quantized", "config_groups": {"g": None}}
    ),
    "vision_config: wanted an object, got []": {"vision_config": []},
    "quantization_config: wanted an object with config_groups, got [1]": text(quantization_config=[1]),
    "vt_hidden_size 31 is odd": vision(vt_hidden_size=31, mm_hidden_size=31),
    'format: wanted "mxfp4-pack-quantized", got "int4"': text(quantization_config={"format": "int4"}),
}


def merged(into, changes):
    for name, value in changes.items():
        into[name] = merged(into[name], value) if isinstance(value, dict) else value
    return into


@pytest.mark.parametrize("message", REFUSED)
def test_what_contradicts_or_is_another_model_is_refused(message):
    with pytest.raises(ValueError) as refusal:
        K3Config.from_json(merged(released(), copy.deepcopy(REFUSED[message])))
    assert message in str(refusal.value)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_experts", "kv_lora_rank", "attn_res_block_size"])
def test_a_missing_field_is_named(name):
    content = released()
    del content["text_config"][name]
    with pytest.raises(ValueError, match=f"^{name} is missing$"):
        K3Config.from_json(content)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: cannot be read: No such file"):
        K3Config.from_json(tmp_path)
    path = tmp_path / "config.json"
    for content, message in (
        (b"{", "not a JSON file"),
        (b"\xff\xfe", "not a JSON file"),
        (b"[]", "wanted a JSON object, got list"),
        (b"[" * 100_000, "not a JSON file"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message) as refusal:
            K3Config.from_json(tmp_path)
        assert str(path) in str(refusal.value)
    path.write_text('{"architectures": ["Other"]}')
    with pytest.raises(ValueError, match=r"config\.json: text_config is missing: not the config.json of a Kimi K3"):
        K3Config.from_json(tmp_path)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text("{}")

    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ValueError, match=r"config\.json: cannot be read: Permission denied"):
        K3Config.from_json(tmp_path)


def test_the_decay_bound_is_what_a_tile_can_hold():
    # 15 steps from the tile's first row to its last; float32's smallest normal number is e^-87.33, its largest e^88.7
    assert LOWEST_DECAY_BOUND == -5.8 and 15 * 5.8 < 87.33 < 15 * 5.9
    assert KdaConfig(num_heads=1, head_dim=4, gate_lower_bound=-5.8).gate_lower_bound == -5.8


def test_an_unknown_preset_is_named():
    with pytest.raises(
        ValueError, match="preset: wanted one of k3, k2, nano, micro, mini, bench, bench-xl, got 'huge'"
    ):
        preset("huge")
    with pytest.raises(ValueError, match="'k2' is for the cost tables only"):
        model_preset("k2")
