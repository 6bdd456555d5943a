"""What a folder holds is checked before anything is allocated: one exact message for each way to be wrong."""

import json
import re
import struct

import pytest

from trivium.checkpoint.index import check_published

LAYER = "language_model.model.layers."
Q_PROJ = f"{LAYER}0.self_attn.q_proj.weight"
A_LOG = f"{LAYER}0.self_attn.A_log"
EXPERT = f"{LAYER}1.block_sparse_moe.experts.3.w2.weight"


def refused(folder, message):
    with pytest.raises(ValueError) as caught:
        check_published(folder)
    assert str(caught.value) == message


def test_fixtures_are_accepted_as_folder_as_file_and_as_index(copy_of):
    single, sharded = copy_of("a"), copy_of("b")
    for path in (single, single / "model.safetensors"):
        config, index = check_published(path)
        assert config.num_layers == 9
        assert len(index.specs) == 1020
        assert set(index.file_of.values()) == {"model.safetensors"}
    for path in (sharded, sharded / "model.safetensors.index.json"):
        assert len(check_published(path)[1].paths) == 3


def test_missing_shard(copy_of):
    folder = copy_of("b")
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(
        folder,
        f"{folder}/model-00002-of-00003.safetensors: is missing, "
        "but model.safetensors.index.json puts 504 tensors in it",
    )


def test_truncated_file(copy_of):
    folder = copy_of("a")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    refused(folder, f"{path}: truncated: wanted 1348352 bytes, got 1348345")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q_PROJ), "{folder}: {q}: tensor is missing, wanted BF16 [64, 64]"),
        (
            lambda t: (t.pop(Q_PROJ), t.pop(A_LOG)),
            "{folder}: {q}: tensor is missing, wanted BF16 [64, 64] (and 1 more)",
        ),
        (lambda t: t.update(extra=("F32", (1,), bytes(4))), "{file}: extra: no tensor of this config, got F32 [1]"),
        (
            lambda t: t.update({Q_PROJ: ("BF16", (64, 63), bytes(2 * 64 * 63))}),
            "{file}: {q}: wanted BF16 [64, 64], got BF16 [64, 63]",
        ),
        (
            lambda t: t.update({Q_PROJ: ("BF16", (4096,), bytes(2 * 4096))}),
            "{file}: {q}: wanted BF16 [64, 64], got BF16 [4096]",
        ),
        (
            lambda t: t.update({Q_PROJ: ("F32", (64, 64), bytes(4 * 64 * 64))}),
            "{file}: {q}: wanted BF16 [64, 64], got F32 [64, 64]",
        ),
        (
            lambda t: t.update({A_LOG: ("F32", (2,), bytes(8))}),
            "{file}: {a_log}: wanted F32 [128], got F32 [2]",
        ),
        (
            lambda t: t.update({A_LOG: ("F32", (128,), bytes(400) + struct.pack("<f", 0.5) + bytes(108))}),
            "{file}: {a_log}: wanted zeros behind the 2 heads, got 0.5 at 100",
        ),
        (
            lambda t: t.update({A_LOG: ("F64", (128,), bytes(1016) + struct.pack("<d", -1e-300))}),
            "{file}: {a_log}: wanted zeros behind the 2 heads, got -1e-300 at 127",
        ),
        (
            lambda t: t.pop(f"{EXPERT}_scale"),
            "{file}: {expert}_packed: packed without its scale, wanted {expert}_scale U8 [32, 1]",
        ),
        (
            lambda t: t.pop(f"{EXPERT}_packed"),
            "{folder}: {expert}_packed: tensor is missing, wanted U8 [32, 16]",
        ),
        (
            lambda t: t.update({EXPERT: ("BF16", (32, 32), bytes(2048))}),
            "{file}: {expert}: stored twice, packed and unpacked",
        ),
        (
            lambda t: t.update({f"{EXPERT}_packed": ("I8", (32, 16), bytes(512))}),
            "{file}: {expert}_packed: wanted U8 [32, 16], got I8 [32, 16]",
        ),
    ],
)
def test_wrong_tensors(copy_of, edit, change, message):
    folder = copy_of("a")
    file = folder / "model.safetensors"
    edit(file, change)
    refused(folder, message.format(folder=folder, file=file, q=Q_PROJ, a_log=A_LOG, expert=EXPERT))


def test_packed_is_decided_matrix_by_matrix_and_not_by_the_config(copy_of, edit):
    folder = copy_of("a")

    def unpack_one(tensors):
        del tensors[f"{EXPERT}_packed"], tensors[f"{EXPERT}_scale"]
        tensors[EXPERT] = ("BF16", (32, 32), bytes(2048))

    edit(folder / "model.safetensors", unpack_one)
    config, index = check_published(folder)
    assert config.packs_experts
    assert [spec.name for spec in index.specs if spec.expert is not None and spec.dtype != "U8"] == [EXPERT]


def test_index_against_its_shards(copy_of, edit):
    folder = copy_of("b")
    path = folder / "model.safetensors.index.json"
    good = json.loads(path.read_text())
    first, second = folder / "model-00001-of-00003.safetensors", folder / "model-00002-of-00003.safetensors"

    def with_index(**changes):
        path.write_text(json.dumps({**good, **changes}))

    with_index(weight_map={**good["weight_map"], "extra": first.name})
    refused(folder, f"{first}: extra: the index puts this tensor here, the file does not hold it")
    with_index(weight_map={name: file for name, file in good["weight_map"].items() if name != Q_PROJ})
    refused(folder, f"{first}: {Q_PROJ}: the file holds this tensor, the index does not name it")
    with_index(weight_map={**good["weight_map"], Q_PROJ: second.name})
    refused(folder, f"{first}: {Q_PROJ}: the file holds this tensor, the index puts it in {second.name}")
    with_index(weight_map={**good["weight_map"], Q_PROJ: "../other.safetensors"})
    refused(folder, f"{path}: weight_map: wanted the name of a file in this folder, got '../other.safetensors'")
    with_index(weight_map=[])
    refused(folder, f"{path}: wanted a weight_map of tensor names to file names")
    with_index(metadata={"total_size": 1622911})
    refused(folder, f"{path}: total_size says 1622911 bytes, the shards hold 1622912")
    with_index(metadata={})  # the size may be left out
    check_published(folder)
    path.write_text("{")
    with pytest.raises(ValueError, match=re.escape(f"{path}: not a JSON file: ")):
        check_published(folder)


def test_a_folder_without_a_checkpoint_or_with_two(copy_of, tmp_path):
    folder = copy_of("a")
    refused(tmp_path / "nowhere", f"{tmp_path}/nowhere: no such folder")
    refused(folder / "config.json", f"{folder}/config.json: wanted a folder, a .safetensors file or its .index.json")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "other.safetensors"}}))
    refused(folder, f"{folder}: holds model.safetensors and an index that does not name it; name the one to read")
    assert len(check_published(folder / "model.safetensors")[1].specs) == 1020
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").unlink()
    refused(folder, f"{folder}: wanted model.safetensors or model.safetensors.index.json in it, found neither")


def test_no_config(copy_of):
    folder = copy_of("a")
    (folder / "config.json").unlink()
    refused(folder, f"{folder}/config.json: cannot be read: No such file or directory")
