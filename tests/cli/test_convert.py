"""`trivium convert`: what is in the new folder, and the change in held-out loss it prints."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

import trivium
from tests.tiny import tiny_config
from trivium import cli
from trivium.api import Model
from trivium.chat.tokenizer import train_tokenizer
from trivium.checkpoint import published
from trivium.cli.convert import _change
from trivium.data.corpus import stream_of, write_heldout
from trivium.data.source import Document
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.train.heldout import score

NUM_RANKS = 300
FIXTURES = Path(__file__).parent.parent / "fixtures"
TEXTS = [f"def f{idx}(x):\n    return x + {idx}  # adds {idx}\n" * 3 for idx in range(40)]
HELDOUT = [Document(source=f"h{idx}", path=f"h{idx}.py", text=f"def held{idx}(y):\n    return y\n") for idx in range(4)]


def main(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main([str(argument) for argument in arguments])
    return exit_.value.code, *capsys.readouterr()


def network(seed):
    network = KimiK3(tiny_config(NUM_RANKS))
    initialise_(network, seed)
    return network


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, NUM_RANKS)


@pytest.fixture
def run(tmp_path, tokenizer):
    """A finished run, as far as a conversion looks at it."""
    folder = tmp_path / "run"
    Model(network=network(seed=1), tokenizer=tokenizer).save(folder)
    write_heldout(folder, HELDOUT)
    (folder / "run.json").write_text('{"finished": true}')
    return folder


def test_packed_and_back_each_step_is_measured_where_the_last_one_ended(run, tmp_path, capsys):
    packed, back = tmp_path / "packed", tmp_path / "back"
    there = json.loads(main(capsys, "convert", run, packed, "--pack-experts", "--json")[1])
    again = json.loads(main(capsys, "convert", packed, back, "--unpack-experts", "--json")[1])

    assert [form["experts"] for form in (there["before"], there["after"], again["after"])] == [
        "unpacked",
        "packed",
        "unpacked",
    ]
    assert there["heldout"]["change"]["loss"] != 0 and there["heldout"]["after"] == again["heldout"]["before"]
    assert abs(again["heldout"]["change"]["loss"]) < 1e-6  # what MXFP4 holds is exact in float32
    loss = there["heldout"]["after"]["loss"] - there["heldout"]["before"]["loss"]
    assert there["heldout"]["change"]["loss"] == loss
    assert there["heldout"]["before"]["num_bytes"] == sum(document.num_bytes for document in HELDOUT)
    # 4 bits and an eighth of a scale byte for 32: all routed experts are 17/128 of their float32 size.
    routed_bytes = 2 * 6 * 3 * 32 * 32 * 4
    assert there["before"]["num_bytes"] - there["after"]["num_bytes"] == routed_bytes * (128 - 17) // 128
    assert again["after"]["num_bytes"] == there["before"]["num_bytes"]
    assert "quantization_config" in json.loads((packed / "config.json").read_text())["text_config"]
    assert "quantization_config" not in json.loads((back / "config.json").read_text())["text_config"]
    names = {"config.json", "generation_config.json", "model.safetensors", "tiktoken.model", "tokenizer_config.json"}
    assert files(back).keys() == names | {"heldout.jsonl"}


def test_the_figures_are_the_scores_of_both_folders(run, tmp_path, tokenizer, capsys):
    _, out, _ = main(capsys, "convert", run, tmp_path / "out", "--pack-experts")
    stream = stream_of(HELDOUT, tokenizer)
    before, after = (score(trivium.load(folder).network, stream) for folder in (run, tmp_path / "out"))
    assert f"{before.loss:.4f} → {after.loss:.4f} ({after.loss - before.loss:+.4f}) nats a token" in out
    assert f"{before.bpb:.4f} → {after.bpb:.4f} ({after.bpb - before.bpb:+.4f}) bits per byte" in out
    assert f"all {before.num_bytes:,} bytes" in out and out.endswith(f"written to {tmp_path / 'out'}\n")


def test_the_figure_behind_is_of_what_lies_on_disk(run, tmp_path, tokenizer, monkeypatch, capsys):
    save = Model.save

    def save_another(model, path, **options):
        model.network.load_state_dict(network(seed=2).state_dict())
        save(model, path, **options)
        model.network.load_state_dict(network(seed=1).state_dict())

    monkeypatch.setattr(Model, "save", save_another)
    content = json.loads(main(capsys, "convert", run, tmp_path / "out", "--json")[1])
    stream = stream_of(HELDOUT, tokenizer)
    assert content["heldout"]["before"]["loss"] == pytest.approx(score(network(seed=1), stream).loss, abs=1e-6)
    assert content["heldout"]["after"]["loss"] == pytest.approx(score(network(seed=2), stream).loss, abs=1e-6)
    assert content["heldout"]["change"]["loss"] != 0


def test_packing_what_was_packed_gives_the_same_bytes_and_says_so(run, tmp_path, capsys):
    packed, again, bare = (tmp_path / name for name in ("packed", "again", "bare"))
    assert "nothing was converted" not in main(capsys, "convert", run, packed, "--pack-experts")[1]
    assert "nothing was converted" in main(capsys, "convert", packed, again, "--pack-experts")[1]
    assert "nothing was converted" in main(capsys, "convert", packed, bare)[1]
    assert files(packed) == files(again) == files(bare)


def test_a_dtype_is_that_of_the_rest_and_packing_reads_the_exact_weights(run, tmp_path, capsys):
    narrow, both, exact = (tmp_path / name for name in ("narrow", "both", "exact"))
    content = json.loads(main(capsys, "convert", run, narrow, "--dtype", "bfloat16", "--json")[1])
    assert (content["before"]["dtype"], content["after"]["dtype"]) == ("float32", "bfloat16")
    main(capsys, "convert", run, both, "--dtype", "bfloat16", "--pack-experts")
    main(capsys, "convert", run, exact, "--pack-experts")
    got, want = (trivium.load(folder, experts="packed").network.state_dict() for folder in (both, exact))
    for name in want:
        if ".experts." in name:
            assert torch.equal(got[name], want[name])
    assert got["language_model.lm_head.weight"].dtype == torch.bfloat16


def test_a_released_checkpoint_unpacks_to_the_same_logits(tmp_path, capsys):
    released = FIXTURES / "k3-tiny-a"
    code, out, err = main(capsys, "convert", released, tmp_path / "out", "--unpack-experts", "--dtype", "float32")
    assert (code, err) == (0, "") and "held-out loss not measured" in out
    ids = [[3, 1, 4, 1, 5, 9, 2, 6]]
    got, want = (trivium.load(folder, dtype="float32").logits(ids)[0] for folder in (tmp_path / "out", released))
    assert torch.equal(got, want)
    assert not (tmp_path / "out" / "heldout.jsonl").exists()


def test_a_folder_with_something_in_it_is_left_alone(run, tmp_path, capsys):
    before = files(run)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("mine")
    for out, wanted in ((run, "the one that is read"), (taken, "not overwritten"), (taken / "mine", "not overwritten")):
        code, _, err = main(capsys, "convert", run, out, "--pack-experts")
        assert code == 1 and wanted in err and err.count("\n") == 1
    assert files(run) == before and files(taken) == {"mine": b"mine"}
    (tmp_path / "empty").mkdir()
    assert main(capsys, "convert", run, tmp_path / "empty")[0] == 0
    assert files(run) == before


def test_a_full_disk_leaves_nothing_and_the_same_command_works_once_there_is_room(run, tmp_path, monkeypatch, capsys):
    def full(file, **_):
        file.write(b"a part")
        raise OSError(28, "No space left on device")

    before, out = files(run), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(published, "write_tensors", full)
        code, _, err = main(capsys, "convert", run, out, "--pack-experts")
    assert code == 1 and "No space left on device" in err and err.count("\n") == 1
    assert files(out) == {} and files(run) == before
    assert main(capsys, "convert", run, out, "--pack-experts")[0] == 0


def test_a_change_of_nothing_has_no_minus():
    assert _change(4.0, 4.0 - 1e-9) == "4.0000 → 4.0000 (+0.0000)"
    assert _change(4.0, 3.9) == "4.0000 → 3.9000 (-0.1000)"


def test_experts_of_both_kinds_want_a_word(tmp_path, capsys):
    """One matrix of a packed checkpoint is stored plain: which form is kept is not for us to say."""
    from trivium.checkpoint.safetensors import read_header, write_tensors

    mixed = tmp_path / "mixed"
    shutil.copytree(FIXTURES / "k3-tiny-a", mixed, ignore=shutil.ignore_patterns("*.npz", "README.md"))
    file = mixed / "model.safetensors"
    content = file.read_bytes()
    tensors = {
        name: (entry.dtype, entry.shape, content[entry.start : entry.end]) for name, entry in read_header(file).items()
    }
    name = next(name for name in tensors if name.endswith(".experts.0.w1.weight_packed"))
    rows, columns = tensors.pop(name)[1]
    del tensors[name.replace("_packed", "_scale")]
    tensors[name.removesuffix("_packed")] = ("BF16", (rows, 2 * columns), bytes(rows * columns * 4))
    with file.open("wb") as opened:
        headers = [(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()]
        write_tensors(opened, headers, lambda name: tensors[name][2])

    code, _, err = main(capsys, "convert", mixed, tmp_path / "out")
    assert code == 1 and "say --pack-experts or --unpack-experts" in err and not (tmp_path / "out").exists()
    for word, experts in (("--pack-experts", "packed"), ("--unpack-experts", "unpacked")):
        content = json.loads(main(capsys, "convert", mixed, tmp_path / word, word, "--json")[1])
        assert (content["before"]["experts"], content["after"]["experts"]) == ("mixed", experts)


@pytest.mark.parametrize("arguments", [("--dtype", "float16"), ("--dtype", "int8")])
def test_a_dtype_that_is_none_of_both_is_one_line(run, tmp_path, capsys, arguments):
    code, _, err = main(capsys, "convert", run, tmp_path / "out", *arguments)
    assert code == 1 and err == f"error: dtype: wanted bfloat16 or float32, got '{arguments[1]}'\n"


def test_an_unfinished_run_is_not_converted(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"finished": false}')
    code, _, err = main(capsys, "convert", tmp_path / "run", tmp_path / "out")
    assert code == 1 and "this run is unfinished" in err and not (tmp_path / "out").exists()


# --- GGUF -------------------------------------------------------------------------------------------------------


def kinds(path):
    """How many tensors of each kind a GGUF file holds, and its fields."""
    reader = pytest.importorskip("gguf").GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return Counter(tensor.tensor_type.name for tensor in reader.tensors), fields


def test_gguf_lands_beside_the_run_and_is_not_overwritten(run, tmp_path, capsys):
    pytest.importorskip("gguf")
    before = files(run)
    code, out, err = main(capsys, "convert", run, "--to", "gguf")
    assert (code, err) == (0, "") and out.endswith(f"written to {tmp_path / 'run.gguf'}\n")
    count, fields = kinds(tmp_path / "run.gguf")
    assert count.keys() == {"F32"} and fields["general.name"] == "run"
    assert len(fields["tokenizer.ggml.tokens"]) == NUM_RANKS + 256
    assert files(run) == before
    content = (tmp_path / "run.gguf").read_bytes()
    code, _, err = main(capsys, "convert", run, "--to", "gguf")
    assert code == 1 and "not overwritten" in err and err.count("\n") == 1
    assert (tmp_path / "run.gguf").read_bytes() == content
    assert main(capsys, "convert", run, "--to", "gguf", "--out", tmp_path / "b.gguf")[0] == 0
    assert (tmp_path / "b.gguf").read_bytes() == content


def test_gguf_of_a_released_checkpoint_keeps_its_packed_experts_or_unpacks_them(tmp_path, capsys):
    pytest.importorskip("gguf")
    released = FIXTURES / "k3-tiny-d"  # bfloat16, eight MoE layers, a vision tower and no tokenizer
    packed = json.loads(main(capsys, "convert", released, tmp_path / "p.gguf", "--to", "gguf", "--json")[1])
    assert packed["before"]["experts"] == packed["after"]["experts"] == "packed"
    assert packed["after"]["num_bytes"] == (tmp_path / "p.gguf").stat().st_size
    assert packed["left_out"] == ["the vision tower", "a tokenizer, which the folder does not have", "a chat template"]
    count, fields = kinds(tmp_path / "p.gguf")
    assert count.keys() == {"F32", "BF16", "MXFP4"} and count["MXFP4"] == 24
    assert fields["tokenizer.ggml.model"] == "none"

    options = ("--to", "gguf", "--unpack-experts", "--dtype", "float16", "--json")
    plain = json.loads(main(capsys, "convert", released, tmp_path / "u.gguf", *options)[1])
    assert (plain["after"]["experts"], plain["after"]["dtype"]) == ("unpacked", "float16")
    assert kinds(tmp_path / "u.gguf")[0].keys() == {"F32", "F16"}


def test_gguf_packs_the_experts_of_a_run(run, tmp_path, capsys):
    pytest.importorskip("gguf")
    _, out, _ = main(capsys, "convert", run, tmp_path / "p.gguf", "--to", "gguf", "--pack-experts")
    assert "routed experts packed as MXFP4, the rest float32" in out
    assert kinds(tmp_path / "p.gguf")[0]["MXFP4"] == 2 * 3


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--to", "onnx"), "to: wanted released or gguf, got 'onnx'"),
        (("--to", "gguf", "--dtype", "int8"), "dtype: wanted one of float32, bfloat16, float16, got 'int8'"),
        (("a.gguf", "--to", "gguf", "--out", "b.gguf"), "out: wanted once, got a.gguf and --out b.gguf"),
    ],
)
def test_what_cannot_be_meant_is_one_line(run, capsys, arguments, wanted):
    pytest.importorskip("gguf")
    code, _, err = main(capsys, "convert", run, *arguments)
    assert code == 1 and err == f"error: {wanted}\n"
