"""Models read from and written to the released layout: what comes back is what went in, and nothing saved is lost."""

import errno
import json
import os
import re
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch

from trivium.checkpoint import published, safetensors
from trivium.checkpoint.index import check_published
from trivium.checkpoint.names import released_tensors
from trivium.checkpoint.published import default_files, read_published, write_published
from trivium.config import K3Config, preset
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.ops import mxfp4

FIXTURES = Path(__file__).parent.parent / "fixtures"
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts"
A_LOG = "language_model.model.layers.0.self_attn.A_log"
EMBED = "language_model.model.embed_tokens.weight"


def fixture(name):
    return FIXTURES / f"k3-tiny-{name}"


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.fixture
def tiny():
    """A model of fixture a's geometry in bfloat16, drawn by the training initialisation, experts unpacked."""
    model = KimiK3(K3Config.from_json(fixture("a")).with_packed_experts(False))
    initialise_(model, seed=3)
    return model


# --- The table and the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "packed"), [("k3", True), ("k3", False), ("nano", False)])
def test_the_table_names_every_parameter_and_buffer_with_its_shape_and_dtype(name, packed):
    config = preset(name)
    with torch.device("meta"):
        model = KimiK3(config, experts="packed" if packed else "unpacked")
    wanted = {}
    for spec in released_tensors(config, packed=packed):
        shape = (spec.shape[0] - spec.padding,) if spec.padding else spec.shape
        shape = shape if spec.expert is None else (config.moe.num_experts, *shape)
        wanted[spec.parameter] = (published.STORED_TORCH_DTYPE[spec.dtype], shape)
    assert {key: (value.dtype, tuple(value.shape)) for key, value in model.state_dict().items()} == wanted


# --- Round trips ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", "abcd")
def test_kept_packed_the_layout_round_trips(name, tmp_path, stored):
    loaded = read_published(fixture(name), experts="packed")
    write_published(loaded.model, tmp_path, layout=loaded.layout)
    assert stored(tmp_path) == stored(fixture(name))  # names, shards, dtypes, shapes, bytes
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((fixture(name) / "config.json").read_text())
    index = "model.safetensors.index.json"
    assert (tmp_path / index).exists() == (fixture(name) / index).exists()
    if (tmp_path / index).exists():
        assert json.loads((tmp_path / index).read_text()) == json.loads((fixture(name) / index).read_text())
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"max_length": 4096, "eos_token_id": loaded.config.eos_token_id}


@pytest.mark.parametrize("name", "ab")  # in b the pair of one matrix may lie in two shards
def test_unpacked_and_packed_again_gives_the_same_values(name, tmp_path):
    loaded = read_published(fixture(name))
    write_published(loaded.model, tmp_path, pack_experts=True, layout=loaded.layout)
    again = read_published(tmp_path)
    assert again.config.packs_experts
    assert again.layout.file_of == loaded.layout.file_of
    assert_same(again.model.state_dict(), values(loaded.model))


def test_unpacked_experts_are_the_decoded_rows_of_the_stack(stored):
    loaded = read_published(fixture("a"), dtype="float32")
    files = stored(fixture("a"))
    for expert, matrix in ((0, "w1"), (7, "w2"), (15, "w3")):
        codes, scales = (
            torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape)
            for _, _, shape, content in (
                files[f"{EXPERT}.{expert}.{matrix}.weight_{part}"] for part in ("packed", "scale")
            )
        )
        found = loaded.model.state_dict()[f"{EXPERT}.{matrix}.weight"][expert]
        assert torch.equal(found, mxfp4.unpack(codes, scales, torch.float32))


def test_an_unpacked_model_is_saved_without_quantization_config(tiny, tmp_path):
    write_published(tiny, tmp_path)
    config, index = check_published(tmp_path)
    assert not config.packs_experts
    assert f"{EXPERT}.3.w2.weight" in index.stored
    assert {entry.dtype for entry in index.stored.values()} == {"BF16", "F32"}
    assert_same(read_published(tmp_path).model.state_dict(), values(tiny))


def test_a_log_is_padded_on_disk_and_only_there(tiny, tmp_path, stored):
    write_published(tiny, tmp_path)
    _, dtype, shape, content = stored(tmp_path)[A_LOG]
    assert (dtype, shape) == ("F32", (128,))
    assert content[8:] == bytes(126 * 4)
    assert read_published(tmp_path).model.state_dict()[A_LOG].shape == (2,)


def test_float64_a_log_is_written_back_as_it_was_until_it_is_trained(tmp_path, stored):
    loaded = read_published(fixture("b"))
    name = "language_model.model.layers.1.self_attn.A_log"
    before = torch.frombuffer(bytearray(stored(fixture("b"))[name][3]), dtype=torch.float64)
    with torch.no_grad():
        loaded.model.state_dict()[name][0] += 1.0
    write_published(loaded.model, tmp_path, layout=loaded.layout)
    after = torch.frombuffer(bytearray(stored(tmp_path)[name][3]), dtype=torch.float64)
    assert after[0] == loaded.model.state_dict()[name][0].double() != before[0]
    assert torch.equal(after[1:], before[1:])
    write_published(loaded.model, tmp_path)  # without the layout: the table's dtype
    assert stored(tmp_path)[name][1] == "F32"


@pytest.mark.parametrize("dtype", ["float32", torch.float16])
def test_a_dtype_converts_the_trunk_and_leaves_what_is_always_float32(dtype, tmp_path):
    wanted = read_published(fixture("a")).model.state_dict()
    loaded = read_published(fixture("a"), dtype=dtype)
    trunk = torch.float16 if dtype is torch.float16 else torch.float32
    found = loaded.model.state_dict()
    for name, value in wanted.items():
        kept = value.dtype == torch.float32
        assert found[name].dtype == (torch.float32 if kept else trunk), name
        assert torch.equal(found[name], value.to(found[name].dtype)), name
    write_published(loaded.model, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["dtype"] == saved["text_config"]["dtype"] == ("float16" if dtype is torch.float16 else "float32")
    write_published(loaded.model, tmp_path, dtype="bfloat16")
    assert read_published(tmp_path).model.state_dict()[EMBED].dtype == torch.bfloat16


# --- Shards -----------------------------------------------------------------------------------------------------


def test_k3_is_sharded_as_released():
    file_of = default_files(released_tensors(preset("k3"), packed=True))
    assert len(set(file_of.values())) == 96
    layers = "language_model.model.layers."
    assert file_of[f"{layers}0.mlp.up_proj.weight"] == "model-00001-of-000096.safetensors"
    assert file_of[f"{layers}92.block_sparse_moe.experts.895.w2.weight_scale"] == "model-00093-of-000096.safetensors"
    ends = {"language_model.lm_head.weight", EMBED, "language_model.model.norm.weight"}
    ends |= {f"language_model.model.output_attn_res_{part}.weight" for part in ("norm", "proj")}
    assert {name for name, file in file_of.items() if file == "model-00094-of-000096.safetensors"} == ends
    assert file_of["mm_projector.post_norm.weight"] == "model-00095-of-000096.safetensors"
    assert Counter(file_of.values())["model-00096-of-000096.safetensors"] == 165  # the vision tower


def test_from_the_limit_on_a_save_is_sharded_and_reads_the_same(tiny, tmp_path, monkeypatch):
    specs = list(released_tensors(tiny.config, packed=False))
    num_bytes = sum(spec.num_bytes for spec in specs)
    assert set(default_files(specs, num_bytes + 1).values()) == {"model.safetensors"}
    assert len(set(default_files(specs, num_bytes).values())) == 9 + 3
    monkeypatch.setattr(published, "default_files", lambda specs: default_files(specs, num_bytes))
    write_published(tiny, tmp_path)
    assert min(path.name for path in tmp_path.glob("*.safetensors")) == "model-00001-of-000012.safetensors"
    assert_same(read_published(tmp_path).model.state_dict(), values(tiny))


def test_files_of_the_save_before_are_gone_and_others_stay(tiny, copy_of):
    folder = copy_of("b")
    (folder / "notes.safetensors").write_bytes(b"not named by the index")
    write_published(tiny, folder)
    assert sorted(os.listdir(folder)) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes.safetensors",
    ]
    assert_same(read_published(folder).model.state_dict(), values(tiny))


# --- What is refused --------------------------------------------------------------------------------------------


def test_experts_stored_unpacked_cannot_be_kept_packed(tiny, tmp_path):
    write_published(tiny, tmp_path)
    name = f"{EXPERT}.0.w1.weight"
    message = f"{tmp_path}/model.safetensors: {name}: experts kept packed want {name}_packed, got BF16 [32, 32]"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        read_published(tmp_path, experts="packed")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"experts": "some"}, "experts: wanted unpacked or packed, got 'some'"),
        ({"dtype": "float8"}, "dtype: wanted one of bfloat16, float32, float16, float64, got float8"),
        ({"dtype": torch.int32}, "dtype: wanted one of bfloat16, float32, float16, float64, got torch.int32"),
    ],
)
def test_unknown_choices(arguments, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        read_published(fixture("a"), **arguments)


def test_nothing_is_allocated_for_a_folder_that_is_wrong(copy_of, monkeypatch):
    folder = copy_of("b")
    (folder / "model-00003-of-00003.safetensors").unlink()
    monkeypatch.setattr(published, "KimiK3", lambda *_, **__: pytest.fail("a model was built"))
    with pytest.raises(ValueError, match="is missing, but model.safetensors.index.json puts 502 tensors in it"):
        read_published(folder)


def test_a_weight_that_float16_cannot_hold_is_refused_and_nothing_is_replaced(tiny, tmp_path):
    write_published(tiny, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with torch.no_grad():
        tiny.state_dict()[EMBED][5, 5] = 70144.0  # a bfloat16 number
    with pytest.raises(ValueError, match=f"^{re.escape(EMBED)}: wanted at most 65504 for float16, got 70144"):
        write_published(tiny, tmp_path, dtype="float16")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_weight_that_bfloat16_cannot_hold_is_refused(tiny, tmp_path):
    tiny = tiny.float()
    with torch.no_grad():
        tiny.state_dict()[EMBED][5, 5] = 3.4e38
    with pytest.raises(
        ValueError, match=f"^{re.escape(EMBED)}: wanted at most 3.38953e\\+38 for bfloat16, got 3.4e\\+38"
    ):
        write_published(tiny, tmp_path, dtype="bfloat16")


def test_a_weight_that_is_not_finite_is_not_packed(tiny, tmp_path):
    with torch.no_grad():
        tiny.state_dict()[f"{EXPERT}.w3.weight"][2, 0, 0] = torch.nan
    name = f"{EXPERT}.2.w3.weight_packed"
    with pytest.raises(ValueError, match=f"^{re.escape(name)}: mxfp4: 1 of 1024 weights are NaN or infinite"):
        write_published(tiny, tmp_path, pack_experts=True)
    assert list(tmp_path.iterdir()) == []


def test_scales_beyond_the_dtype_are_refused_unpacked_and_kept_packed(copy_of, edit):
    folder = copy_of("a")
    name = f"{EXPERT}.3.w1.weight"

    def huge(tensors):
        dtype, shape, content = tensors[f"{name}_scale"]
        tensors[f"{name}_scale"] = (dtype, shape, content[:-1] + bytes([255]))

    edit(folder / "model.safetensors", huge)
    message = (
        f"{folder}/model.safetensors: {name}_packed: its scales reach byte 255, beyond bfloat16; keep experts packed"
    )
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        read_published(folder)
    loaded = read_published(folder, experts="packed")
    assert loaded.model.state_dict()[f"{EXPERT}.w1.weight_scale"][3, -1, -1] == 255


@pytest.mark.parametrize("full_after_bytes", [0, 100_000, 700_000])
def test_a_full_disk_loses_nothing_saved_before(copy_of, monkeypatch, full_after_bytes):
    folder = copy_of("b")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    loaded = read_published(folder, experts="packed")
    written = 0
    write_tensors = safetensors.write_tensors

    def on_a_full_disk(file, tensors, bytes_of):
        def counted(name):
            nonlocal written
            content = bytes_of(name)
            written += len(content)
            if written > full_after_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return content

        write_tensors(file, tensors, counted)

    monkeypatch.setattr(published, "write_tensors", on_a_full_disk)
    shard = 1 if full_after_bytes < 600_000 else 2  # the first holds 602,640 bytes of tensors
    message = f"{folder}/model-0000{shard}-of-00003.safetensors: cannot be written: No space left on device"
    with pytest.raises(OSError, match="^" + re.escape(message)):
        write_published(loaded.model, folder, layout=loaded.layout)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# --- Memory -----------------------------------------------------------------------------------------------------


def test_one_stored_tensor_is_held_at_a_time_and_its_scale_with_it(monkeypatch):
    held, most = [], 0
    safe_open = published.safe_open

    class Watched:
        def __init__(self, *arguments, **options):
            self._file = safe_open(*arguments, **options)

        def get_tensor(self, name):
            nonlocal most
            value = self._file.get_tensor(name)
            held.append(weakref.ref(value))
            most = max(most, sum(reference() is not None for reference in held))
            return value

    monkeypatch.setattr(published, "safe_open", Watched)
    read_published(fixture("a"), experts="packed")
    assert (most, len(held)) == (1, 1020)
    held.clear()
    read_published(fixture("a"))
    assert (most, len(held)) == (2, 1020)
