"""What users hold: load, logits, generate, stream, save."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import trivium
from trivium.api import Model
from trivium.chat.tokenizer import train_tokenizer
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.ops import cpu

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder with a tokenizer: the small model of the laws, untrained."""
    from dataclasses import replace

    from trivium.config import model_preset

    nano = model_preset("nano")
    num_ranks = 280
    config = replace(
        nano,
        num_layers=3,
        hidden_size=32,
        intermediate_size=48,
        vocab_size=num_ranks + 256,
        moe=replace(nano.moe, num_experts=6, num_experts_per_token=2),
        bos_token_id=num_ranks,
        eos_token_id=num_ranks + 2,
        media_placeholder_token_id=num_ranks + 21,
        pad_token_id=num_ranks + 255,
    )
    network = KimiK3(config)
    initialise_(network, seed=3)
    texts = ["the cat sat on the mat, the dog sat on the log; they and then there", "a cat and a dog — 日本語 😀 "] * 4
    folder = tmp_path_factory.mktemp("runs") / "small"
    Model(network=network, tokenizer=train_tokenizer(texts, num_ranks)).save(folder)
    return folder


@pytest.fixture(scope="module")
def model(run) -> Model:
    return trivium.load(run)


def test_a_batch_and_a_list_are_the_same_rows(model):
    ids = torch.randint(0, 280, (3, 20), generator=torch.Generator().manual_seed(0))
    batch = model.logits(ids)
    assert batch.shape == (3, 20, 536) and batch.dtype == torch.float32 and not batch.requires_grad
    ragged = model.logits([ids[0].tolist(), ids[1, :7].tolist(), []])
    assert [tuple(row.shape) for row in ragged] == [(20, 536), (7, 536), (0, 536)]
    torch.testing.assert_close(ragged[0], batch[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(ragged[1], batch[1, :7], rtol=0, atol=1e-4)
    assert model.logits(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 536)


def test_generation_is_what_the_logits_say(model):
    prompt = model.tokenizer.encode("the cat ")
    out = model.generate(prompt, max_tokens=12, temperature=0)
    ids = [*prompt, *out.ids]
    log = model.logits([ids])[0].log_softmax(-1)
    for n, (id_, logprob) in enumerate(zip(out.ids, out.logprobs, strict=True)):
        row = log[len(prompt) + n - 1]
        assert int(row.argmax()) == id_
        assert logprob == pytest.approx(float(row[id_]), abs=1e-4)
    assert out.text == model.tokenizer.decode(out.ids) and out.finish_reason == "length"
    assert model.generate("the cat ", max_tokens=12, temperature=0) == out


def test_a_seed_fixes_what_is_drawn(model):
    draw = lambda seed: model.generate("a dog", max_tokens=20, seed=seed).ids
    assert draw(1) == draw(1) != draw(2)


def test_pieces_join_to_the_whole(model):
    options = {"max_tokens": 60, "seed": 5, "temperature": 2.0}
    whole = model.generate("the ", **options)
    pieces = list(model.stream("the ", **options))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert tuple(id_ for piece in pieces for id_ in piece.ids) == whole.ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)


@pytest.mark.parametrize("at", [0, 1, 7, 23])
def test_a_stop_string_ends_the_text_and_never_leaks(model, at):
    options = {"max_tokens": 60, "seed": 5}
    free = model.generate("the ", **options).text
    stop = free[at : at + 5]
    pieces = list(model.stream("the ", stop=[stop, "never in it at all"], **options))
    text = "".join(piece.text for piece in pieces)
    assert text == free[: free.index(stop)] and pieces[-1].finish_reason == "stop"
    whole = model.generate("the ", stop=[stop], **options)
    assert whole.text == text and whole.finish_reason == "stop"


def test_the_end_id_ends_it(model, monkeypatch):
    # the model's most likely next id becomes the end id
    first = model.generate("the cat", max_tokens=1, temperature=0).ids[0]
    from dataclasses import replace

    monkeypatch.setattr(model.network, "config", replace(model.config, eos_token_id=first))
    out = model.generate("the cat", max_tokens=5, temperature=0)
    assert out == trivium.api.Generation(ids=(), text="", logprobs=(), finish_reason="stop")


def test_an_empty_prompt_starts_a_document(model):
    begin = model.generate([model.config.bos_token_id], max_tokens=4, temperature=0)
    assert model.generate("", max_tokens=4, temperature=0) == begin


def test_deterministic_logits_do_not_depend_on_company(run):
    model = trivium.load(run, deterministic=True)
    ids = torch.randint(0, 280, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    alone = model.logits([ids])[0]
    assert torch.equal(model.logits([ids[:9], ids, ids[:33]])[1], alone)
    assert torch.equal(model.logits([ids[:21]])[0], alone[:21])
    out = model.generate(ids[:21], max_tokens=9, temperature=0)
    want = model.logits([ids[:21] + list(out.ids)])[0].log_softmax(-1)
    assert out.logprobs == tuple(float(want[20 + n, id_]) for n, id_ in enumerate(out.ids))


def test_a_named_backend_runs_everything(run, model):
    ids = [[5, 6, 7, 8, 9, 10]]
    slow = trivium.load(run, backend="reference").logits(ids)[0]
    torch.testing.assert_close(slow, model.logits(ids)[0], rtol=0, atol=1e-4)
    if cpu.missing:
        with pytest.raises(ValueError, match="device cpu, backend native: no compiled kernels"):
            trivium.load(run, backend="native")
        return
    fast = trivium.load(run, backend="native").logits(ids)[0]
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-4)


def test_saved_and_loaded_again_is_the_same(model, tmp_path):
    model.save(tmp_path / "again")
    again = trivium.load(tmp_path / "again")
    ids = [[1, 2, 3, 4]]
    assert torch.equal(again.logits(ids)[0], model.logits(ids)[0])
    assert again.tokenizer.encode("a cat 日本") == model.tokenizer.encode("a cat 日本")
    assert again.config == model.config


@pytest.mark.parametrize("name", ["k3-tiny-a", "k3-tiny-b", "k3-tiny-c", "k3-tiny-d"])
def test_a_released_folder_kept_packed_saves_as_it_was(name, tmp_path):
    trivium.load(FIXTURES / name, experts="packed").save(tmp_path)
    for file in (FIXTURES / name).glob("*.safetensors"):
        with trivium_tensors(file) as old, trivium_tensors(tmp_path / file.name) as new:
            assert old.keys() == new.keys()
            for key in old.keys():  # noqa: SIM118 - no mapping
                a, b = old.get_tensor(key), new.get_tensor(key)
                assert a.dtype == b.dtype and a.shape == b.shape
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(
        (FIXTURES / name / "config.json").read_text()
    )


def trivium_tensors(file):
    from safetensors import safe_open

    return safe_open(file, framework="pt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: wanted a whole number of at least 1, got 0"),
        ({"max_tokens": 2.0}, "max_tokens: wanted a whole number of at least 1, got 2.0"),
        ({"seed": 2**64}, r"seed: wanted a whole number in \[0, 2\^63\), got 18446744073709551616"),
        ({"temperature": None}, "temperature: wanted a number >= 0, got None"),
        ({"stop": None}, "stop: wanted a sequence of strings that are not empty, got None"),
        ({"temperature": -1}, "temperature: wanted a number >= 0, got -1"),
        ({"temperature": float("nan")}, "temperature: wanted a number >= 0, got nan"),
        ({"top_p": 0}, r"top_p: wanted a number in \(0, 1\], got 0"),
        ({"stop": "abc"}, "stop: wanted a sequence of strings that are not empty, got 'abc'"),
        ({"stop": [""]}, r"stop: wanted a sequence of strings that are not empty, got \(''"),
    ],
)
def test_wrong_options_are_refused_before_the_first_token(model, options, message):
    with pytest.raises(ValueError, match=message):
        model.stream("the", **options)


def test_wrong_ids_are_named(model):
    with pytest.raises(ValueError, match=r"ids\[1\]: wanted token ids in \[0, 536\), got 536"):
        model.logits([[1], [2, 536]])
    with pytest.raises(ValueError, match=r"prompt: wanted token ids in \[0, 536\), got -1"):
        model.generate([-1])
    with pytest.raises(ValueError, match=r"prompt: wanted token ids in \[0, 536\), got 1.0"):
        model.generate([1.0])
    with pytest.raises(ValueError, match="prompt: wanted at least one token id, got none"):
        model.generate([])
    with pytest.raises(ValueError, match=r"ids: wanted \[B, T\], got \[3\]"):
        model.logits(torch.tensor([1, 2, 3]))


def test_whole_numbers_of_other_kinds_are_ids(model):
    want = model.logits([[1, 2, 3]])[0]
    for row in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), (1, np.int32(2), 3)):
        assert torch.equal(model.logits([row])[0], want)
    for bad in (b"abc", "abc", 7):
        with pytest.raises(ValueError, match=r"ids\[0\]: wanted a row of token ids, got"):
            model.logits([bad])
    with pytest.raises(ValueError, match="ids: wanted rows of token ids, got NoneType"):
        model.logits(None)
    with pytest.raises(ValueError, match="prompt: wanted a row of token ids, got b'abc'"):
        model.generate(b"abc")
    with pytest.raises(ValueError, match=r"prompt: wanted token ids in \[0, 536\), got tensor\(3.\)"):
        model.generate(torch.tensor([3.0]))


def test_stop_strings_may_come_from_anything(model):
    options = {"max_tokens": 60, "seed": 5}
    free = model.generate("the ", **options).text
    assert model.generate("the ", stop=(word for word in [free[3:8]]), **options).finish_reason == "stop"


def test_text_needs_a_tokenizer():
    model = trivium.load(FIXTURES / "k3-tiny-a")
    with pytest.raises(ValueError, match="prompt: text needs a tokenizer"):
        model.generate("text")
    with pytest.raises(ValueError, match="stop: strings need a tokenizer"):
        model.generate([1], stop=["x"])
    out = model.generate([1, 2], max_tokens=3, temperature=0)
    assert len(out.ids) == 3 and out.text == ""


def test_what_cannot_be_loaded_says_so(run, tmp_path):
    with pytest.raises(ValueError, match="backend: wanted one of reference, torch, native, got 'fast'"):
        trivium.load(run, backend="fast")
    with pytest.raises(ValueError, match="deterministic: its equalities are established on the CPU only, not on meta"):
        trivium.load(run, device="meta", deterministic=True)
    with pytest.raises(ValueError, match="device: 'gpu' is not one that torch knows"):
        trivium.load(run, device="gpu")
    with pytest.raises(ValueError, match="wanted model.safetensors or model.safetensors.index.json in it"):
        trivium.load(tmp_path)
    shutil.copytree(run, tmp_path / "other")
    shutil.copy(FIXTURES / "k3-tiny-a" / "config.json", tmp_path / "other")
    with pytest.raises(ValueError, match="language_model"):  # names the first tensor that does not fit
        trivium.load(tmp_path / "other")
    with pytest.raises(ValueError, match="no-such-folder"):
        trivium.load(tmp_path / "no-such-folder")


def test_logits_that_are_not_finite_give_no_token(model):
    weight = model.network.language_model.model.norm.weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[0] = float("nan")
        with pytest.raises(ValueError, match="row 0 of the logits holds nan"):
            model.generate("the")
    finally:
        with torch.no_grad():
            weight.copy_(before)
