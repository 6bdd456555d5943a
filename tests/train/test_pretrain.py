"""A whole run, small: everything but the size is as in the quickstart."""

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from tests.tiny import tiny_config
from trivium.api import load
from trivium.chat.tokenizer import train_tokenizer
from trivium.data.pack import make_batch, pack, pieces, tokenize
from trivium.data.source import Document
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.ops.balance import quantile_balance_
from trivium.train.groups import build_optimisers, parameter_groups
from trivium.train.heldout import score
from trivium.train.loop import Length
from trivium.train.loss import token_nll
from trivium.train.pretrain import PretrainConfig, pretrain
from trivium.train.step import train_step

NUM_RANKS = 300
TEXTS = [f"def f{idx}(x):\n    return x + {idx}  # adds {idx}\n" * 4 for idx in range(40)]
TOKENIZER = train_tokenizer(TEXTS, NUM_RANKS)
CONFIG = tiny_config(NUM_RANKS)


def stream_of(texts):
    documents = [Document(source=str(idx), path=f"{idx}.py", text=text) for idx, text in enumerate(texts)]
    num_bytes_W = torch.tensor([len(token) for token in TOKENIZER.vocabulary.ranks] + [0] * 256)
    return tokenize(documents, TOKENIZER.encode, bos_id=TOKENIZER.bos_id, num_bytes_W=num_bytes_W)


def new_model(seed=0):
    model = KimiK3(CONFIG)
    initialise_(model, seed)
    return model


def new_optimisers(model):
    return build_optimisers(parameter_groups(model.named_parameters(), muon_lr=0.02, adamw_lr=0.003))


def full_spans():
    """Four pieces of 40 tokens, of several documents."""
    return [(first, end) for first, end in pieces(stream_of(TEXTS[:8]), 40) if end - first == 40][:4]


def full_batch():
    """The four in one batch of 160, with weights of every size."""
    batch = make_batch(stream_of(TEXTS[:8]), full_spans(), "test")
    return replace(batch, weight_T=torch.rand(160, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = PretrainConfig(
        recipe="test",
        model=CONFIG,
        length=Length(seconds=60, num_steps=40),
        batch_tokens=256,
        max_len=64,
        eval_tokens=128,
        num_evals=4,
    )
    console = Console(record=True, width=120, file=io.StringIO())
    result = pretrain(
        config, stream_of(TEXTS[:36]), stream_of(TEXTS[36:]), TOKENIZER, folder, data={"what": "test"}, console=console
    )
    return folder, result, console.export_text()


def test_the_held_out_loss_starts_at_the_log_of_the_vocabulary_and_falls(run):
    _, result, _ = run
    assert result.first.loss == pytest.approx(torch.tensor(CONFIG.vocab_size).log().item(), abs=0.1)
    assert result.last.loss < 0.5 * result.first.loss
    assert result.last.num_bytes == sum(len(text) for text in TEXTS[36:])


def test_the_run_folder_holds_what_it_should(run):
    folder, result, _ = run
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "metrics.jsonl",
        "model.safetensors",
        "run.json",
        "tiktoken.model",
        "tokenizer_config.json",
    }
    about = json.loads((folder / "run.json").read_text())
    assert (about["recipe"], about["seed"], about["planned_steps"], about["chat_format"]) == ("test", 0, 40, None)
    assert about["heldout"]["after"]["bpb"] == result.last.bpb
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(1, 41))
    assert [line["step"] for line in metrics if line["heldout_bpb"] is not None] == [10, 20, 30]
    assert all(line["idle_experts"] == 0 for line in metrics[5:])


def test_the_saved_run_is_the_trained_model(run):
    folder, result, _ = run
    model = load(folder)
    heldout = stream_of(TEXTS[36:])
    got = score(model.network, pack(heldout, pieces(heldout, 64), 256, "heldout"))
    assert got == result.last
    text = model.generate("def f", max_tokens=8, temperature=0).text
    assert text == "".join(piece.text for piece in model.stream("def f", max_tokens=8, temperature=0)) != ""


def test_the_table_of_who_got_what_is_printed_once(run):
    _, _, out = run
    assert out.count("parameters by optimiser") == 1
    assert "0.03 × s " in out and "s = sqrt(max(1, out/in)) of each matrix" in out


def test_a_config_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match="^max_len: wanted at least 1, got 0$"):
        PretrainConfig(recipe="test", model=CONFIG, length=Length(seconds=60), max_len=0)
    with pytest.raises(ValueError, match="^muon_lr: wanted a number above 0, got 0$"):
        PretrainConfig(recipe="test", model=CONFIG, length=Length(seconds=60), muon_lr=0)


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    config = PretrainConfig(recipe="test", model=replace(CONFIG, vocab_size=1000), length=Length(seconds=60))
    with pytest.raises(ValueError, match="^tokenizer: 556 ids, but vocab_size is 1000$"):
        pretrain(config, stream_of(TEXTS), stream_of(TEXTS), TOKENIZER, tmp_path, data={}, console=Console(quiet=True))


def test_a_step_in_parts_is_the_step_as_a_whole():
    whole = full_batch()
    stream, spans = stream_of(TEXTS[:8]), full_spans()
    parts = [
        replace(make_batch(stream, [span], "test"), weight_T=weight_T)
        for span, weight_T in zip(spans, whole.weight_T.split(40), strict=True)
    ]
    models = [new_model(), new_model()]
    want, got = (
        train_step(model, batches, new_optimisers(model))
        for model, batches in zip(models, ([whole], parts), strict=True)
    )
    assert got.loss == pytest.approx(want.loss, rel=1e-5)  # float32, sums in another order
    assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-4)
    assert (got.num_tokens, got.num_bytes, got.balance) == (want.num_tokens, want.num_bytes, want.balance)
    for layer, other in zip(models[0].moe_layers(), models[1].moe_layers(), strict=True):
        torch.testing.assert_close(
            layer.gate.e_score_correction_bias, other.gate.e_score_correction_bias, rtol=0, atol=1e-5
        )


def test_the_loss_is_the_weighted_mean():
    batch, model = full_batch(), new_model()
    hidden_TD, _ = model(batch.ids_T, batch.rows)
    nll_T = token_nll(hidden_TD.detach(), model.language_model.lm_head.weight, batch.targets_T)
    want = float((batch.weight_T * nll_T).sum() / batch.weight_T.sum())
    assert train_step(model, [batch], new_optimisers(model)).loss == pytest.approx(want, rel=1e-5)


def test_only_tokens_with_a_weight_balance_the_experts():
    batch, model = full_batch(), new_model()
    weight_T = torch.ones(160)
    weight_T[100:] = 0
    model.train()
    with torch.enable_grad():
        model(batch.ids_T, batch.rows)
    wanted = []
    for layer in model.moe_layers():
        bias_E = torch.zeros(CONFIG.moe.num_experts)
        quantile_balance_(bias_E, layer.take_scores()[0][:100], CONFIG.moe.num_experts_per_token)
        wanted.append(bias_E)
    train_step(model, [replace(batch, weight_T=weight_T)], new_optimisers(model))
    for layer, want in zip(model.moe_layers(), wanted, strict=True):
        assert torch.equal(layer.gate.e_score_correction_bias, want) and want.abs().max() > 0


def test_a_step_without_weight_or_with_a_broken_loss_moves_nothing():
    stream = stream_of(TEXTS[:2])
    batch = next(pack(stream, pieces(stream, 40), 40, "test"))
    model = new_model()
    with pytest.raises(
        ValueError, match="^step: wanted tokens with a weight above 0, the weights of 1 batches sum to 0$"
    ):
        train_step(model, [replace(batch, weight_T=torch.zeros(40))], new_optimisers(model))
    with torch.no_grad():
        model.language_model.lm_head.weight[0, 0] = torch.nan
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        FloatingPointError, match="^step: the loss is nan and the gradient's norm nan, wanted finite ones$"
    ):
        train_step(model, [batch], new_optimisers(model))
    for name, value in model.state_dict().items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num())


def test_a_step_behind_a_broken_one_is_as_if_it_were_the_first():
    stream = stream_of(TEXTS[:2])
    batch = next(pack(stream, pieces(stream, 40), 40, "test"))
    model, other = new_model(), new_model()
    weight = model.language_model.model.norm.weight
    with torch.no_grad():
        weight[0] = torch.nan
    with pytest.raises(FloatingPointError):
        train_step(model, [batch], new_optimisers(model))
    with torch.no_grad():
        weight[0] = 1.0
    train_step(model, [batch], new_optimisers(model))
    train_step(other, [batch], new_optimisers(other))
    for (name, got), want in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(got, want), name


def test_what_the_loss_does_not_read_is_refused():
    stream = stream_of(TEXTS[:2])
    batch = next(pack(stream, pieces(stream, 40), 40, "test"))
    with pytest.raises(ValueError, match="logprobs_T and advantage_T are not read by this loss"):
        train_step(new_model(), [replace(batch, advantage_T=torch.ones(40))], new_optimisers(new_model()))


def test_scoring_changes_nothing():
    stream = stream_of(TEXTS[:4])
    model = new_model()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    spans = pieces(stream, 40)
    together = score(model, [make_batch(stream, spans, "heldout")])
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(not layer.take_scores() for layer in model.moe_layers())
    alone = score(model, [make_batch(stream, [span], "heldout") for span in spans])
    assert alone.loss == pytest.approx(together.loss, rel=1e-5)  # float32, products of other sizes
    assert (alone.num_tokens, alone.num_bytes) == (together.num_tokens, together.num_bytes)
