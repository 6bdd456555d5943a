"""What a step looks like layer by layer: every number against one worked out by hand or by another way."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.parallel.processes import on_processes
from tests.tiny import tiny_config
from trivium.data.batch import Batch
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.ops.rows import Rows
from trivium.parallel.fsdp import shard_
from trivium.train.probe import GradNorms, Layers, grad_norms, look

CONFIG = tiny_config(64)  # layers 0 and 1 are KDA, 2 is MLA; blocks of two layers; layer 0 is dense
GRADS = GradNorms(layers=(1.0, 2.0, 3.0), embedding=4.0, head=5.0, rest=6.0)


def fresh(seed=3):
    model = KimiK3(CONFIG)
    initialise_(model, seed)
    return model


def a_batch(lengths=(9, 1, 14)):
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(lengths)
    ids_T = torch.randint(0, 64, (num_tokens,), generator=generator)
    return Batch(
        ids_T=ids_T,
        targets_T=ids_T,
        weight_T=torch.ones(num_tokens),
        rows=Rows.of(lengths),
        num_bytes=num_tokens,
        source="test",
    )


def looked(model, batch=None):
    return look(model, batch or a_batch(), step=7, tokens=70, grads=GRADS)


def backward(model, batch):
    hidden_TD, _ = model(batch.ids_T, batch.rows)
    (hidden_TD @ model.language_model.lm_head.weight.T).square().mean().backward()


# --- Gradients -----------------------------------------------------------------------------------------------------


def test_every_gradient_is_in_one_norm():
    model = fresh()
    backward(model, a_batch())
    got = grad_norms(model)
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    total = math.sqrt(sum(norm**2 for norm in (*got.layers, got.embedding, got.head, got.rest)))
    assert total == pytest.approx(float(torch.nn.utils.get_total_norm(grads)), rel=1e-6)  # float32 there


def test_the_norms_by_hand():
    # A gradient of c in n places has the norm c sqrt(n); what has none, such as layer 0's first query, counts as 0.
    model = fresh()
    text = model.language_model
    for parameter in model.parameters():
        parameter.grad = None
    layer = text.model.layers[1]
    layer.self_attn.q_proj.weight.grad = torch.full((32, 32), 3.0)
    layer.input_layernorm.weight.grad = torch.full((32,), 5.0)
    text.model.embed_tokens.weight.grad = torch.full((320, 32), 0.5)
    text.model.norm.weight.grad = torch.full((32,), 2.0)
    got = grad_norms(model)
    assert got.layers == pytest.approx((0.0, math.sqrt(9 * 1024 + 25 * 32), 0.0))
    assert (got.embedding, got.head, got.rest) == pytest.approx((0.5 * math.sqrt(320 * 32), 0.0, 2 * math.sqrt(32)))


def test_a_gradient_that_is_not_finite_is_seen_in_its_layer_alone():
    model = fresh()
    backward(model, a_batch())
    model.language_model.model.layers[2].self_attn.o_proj.weight.grad[0, 0] = math.inf
    got = grad_norms(model)
    assert not math.isfinite(got.layers[2]) and all(map(math.isfinite, (*got.layers[:2], got.head, got.rest)))


def shares(world):
    """(gradient norms, the look) of a process: each has a batch of its own, and all look at the same one.

    The model's gradients are DTensors, its last norm's as it would be were it not sharded: whole on every process.
    """
    model = fresh()
    shard_(model, world)
    weight = 1 / world.size
    batch = a_batch() if world.is_first else a_batch((5, 5))
    hidden_TD, _ = model(batch.ids_T, batch.rows)
    (weight * (hidden_TD @ model.language_model.lm_head.weight.T).square().mean()).backward()
    spread = grad_norms(model, world)
    norm = model.language_model.model.norm
    held = norm.weight.grad.full_tensor()
    norm._parameters["weight"] = nn.Parameter(torch.zeros_like(held))
    norm.weight.grad = held
    return spread, grad_norms(model, world), looked_sharded(world)


def looked_sharded(world):
    model = fresh()
    shard_(model, world)
    return looked(model)


def test_sharded_norms_and_looks_are_those_of_one_process():
    """Of two shards, the second one empty where a tensor has a single row; and of tensors that are not sharded.

    The rest of its kind: a norm of local shards, a mean of the processes' norms, a whole gradient counted on each.
    """
    model = fresh()
    for batch in (a_batch(), a_batch((5, 5))):
        hidden_TD, _ = model(batch.ids_T, batch.rows)
        (0.5 * (hidden_TD @ model.language_model.lm_head.weight.T).square().mean()).backward()
    want = flat(grad_norms(model))
    answers = on_processes(2, shares)
    for sharded, mixed, seen in answers:
        assert flat(sharded) == pytest.approx(want, rel=1e-5)  # float32, gradients summed in another order
        assert flat(mixed) == pytest.approx(want, rel=1e-5)
        assert numbers(seen.to_json()) == pytest.approx(numbers(looked(model).to_json()), rel=1e-5)
    assert answers[0] == answers[1]


def flat(norms):
    return [*norms.layers, norms.embedding, norms.head, norms.rest]


def numbers(content):
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list):
        return [number for part in content for number in numbers(part)]
    return [] if content is None else [content]


# --- Looking -------------------------------------------------------------------------------------------------------


def test_a_fresh_model_reads_every_source_alike():
    """Queries start at 0, so each of n sources has 1/n; how many there are is the figure in the paper."""
    seen = looked(fresh())
    assert (seen.step, seen.tokens, seen.grad_norm, seen.num_layers) == (7, 70, GRADS, 3)
    # The embedding is a block from layer 0's mixer on; layers 0 and 1 are one from layer 2's mixer on.
    assert [len(read) for read in seen.mixer_read] == [1, 2, 2]
    assert [len(read) for read in seen.ffn_read] == [2, 2, 3]
    for read in (*seen.mixer_read, *seen.ffn_read, seen.output_read):
        assert read == pytest.approx([1 / len(read)] * len(read))


def test_a_read_that_prefers_a_source_shows_it():
    model, batch = fresh(), a_batch()
    layer = model.language_model.model.layers[2]
    with torch.no_grad():  # a query that grows towards the embeddings' common direction finds them
        embed_TD = model.embed(batch.ids_T)
        layer.mlp_res_proj.weight.copy_(3 * embed_TD.mean(dim=0, keepdim=True))
    read = looked(model, batch).ffn_read[2]
    assert sum(read) == pytest.approx(1) and read[0] > 0.5 > read[1] + read[2]


def test_half_lives_by_hand():
    # With f_b = 0 and A_log = 0 the decay a token is exp(-5 sigmoid(dt_bias)), whatever the text is.
    model = fresh()
    mixer = model.language_model.model.layers[0].self_attn
    rate_HK = torch.full((2, 16), 0.1)
    rate_HK[1, :9] = 0.01  # nine channels of sixteen: the median
    rate_HK[1, 9:] = 4.0
    with torch.no_grad():
        mixer.f_b_proj.weight.zero_()
        mixer.A_log.zero_()
        mixer.dt_bias.copy_((rate_HK / 5).logit().flatten())
    got = looked(model).half_life_tokens
    assert got[0] == pytest.approx(
        (math.log(2) / 0.1, math.log(2) / 0.01), rel=1e-4
    )  # 1 - decay in float32: 6e-8 / 0.01
    assert len(got[1]) == 2 and got[2] is None
    with torch.no_grad():
        mixer.dt_bias.fill_(-60.0)  # the decay is 1 in float32
    assert looked(model).half_life_tokens[0] == pytest.approx((math.log(2) * 2**24,) * 2)


def test_the_running_sum_is_what_the_sublayers_added():
    model = fresh()
    layers = model.language_model.model.layers
    with torch.no_grad():
        layers[0].self_attn.o_proj.weight.zero_()
        layers[2].mlp_res_norm.weight.zero_()
    seen = looked(model)
    # Layer 0 opens a block, so its sum begins with the mixer's output, which is 0.
    assert seen.mixer_rms[0] == 0 and seen.stream_rms[0] == seen.ffn_rms[0] > 0
    assert all(rms > 0 for rms in (*seen.mixer_rms[1:], *seen.ffn_rms, *seen.stream_rms))


def test_an_output_three_times_as_large_is_seen():
    model = fresh()
    before = looked(model)
    with torch.no_grad():
        model.language_model.model.layers[0].mlp.down_proj.weight.mul_(3)
    after = looked(model)
    assert after.ffn_rms[0] == pytest.approx(3 * before.ffn_rms[0]) and after.mixer_rms[0] == before.mixer_rms[0]


@pytest.mark.parametrize("training", [True, False])
def test_looking_changes_nothing(training):
    model = fresh().train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    assert looked(model) == looked(model)
    assert all(module.training is training and not module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(not layer.take_scores() for layer in model.moe_layers())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_look_that_fails_leaves_the_model_as_it_was():
    model = fresh().train()
    mixer = model.language_model.model.layers[1].self_attn
    mixer.num_heads = 5
    with pytest.raises(RuntimeError):
        looked(model)
    assert model.training and not any(module._forward_hooks for module in model.modules())
    mixer.num_heads = 2
    looked(model)  # no trace is left running


# --- The line ------------------------------------------------------------------------------------------------------


def test_a_line_is_json_and_says_the_same_again():
    seen = looked(fresh())
    assert Layers.from_json(json.loads(json.dumps(seen.to_json(), allow_nan=False))) == seen


def test_what_is_not_finite_is_null_and_comes_back_as_nan():
    seen = replace(looked(fresh()), grad_norm=replace(GRADS, layers=(1.0, math.nan, math.inf), head=math.inf))
    content = json.loads(json.dumps(seen.to_json(), allow_nan=False))
    assert content["grad_norm"]["layers"] == [1.0, None, None] and content["grad_norm"]["head"] is None
    again = Layers.from_json(content).grad_norm
    assert (
        again.layers[0] == 1 and math.isnan(again.layers[1]) and math.isnan(again.layers[2]) and math.isnan(again.head)
    )
    assert content["half_life_tokens"][2] is None and Layers.from_json(content).half_life_tokens[2] is None


CHANGES = [
    (lambda line: line.pop("output_read"), "output_read is missing"),
    (lambda line: line["grad_norm"].pop("rest"), "grad_norm.rest is missing"),
    (lambda line: line.update(grad_norm=[1]), "grad_norm: wanted a JSON object, got [1]"),
    (lambda line: line.update(step=True), "step: wanted a whole number, got true"),
    (lambda line: line.update(step=0), "step: wanted at least 1, got 0"),
    (lambda line: line.update(stream_rms=[1, "2", 3]), 'stream_rms: wanted a number or null, got "2"'),
    (lambda line: line.update(stream_rms=3), "stream_rms: wanted a list of numbers, got 3"),
    (lambda line: line.update(mixer_read=[None, [1], [1]]), "mixer_read: wanted a list of numbers, got null"),
    (lambda line: line.update(ffn_read={}), "ffn_read: wanted a list of lists, got {}"),
    (lambda line: line["ffn_rms"].pop(), "ffn_rms: wanted 3 layers, as many as stream_rms has, got 2"),
    (
        lambda line: line["grad_norm"]["layers"].pop(),
        "grad_norm.layers: wanted 3 layers, as many as stream_rms has, got 2",
    ),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[message for _, message in CHANGES])
def test_a_line_that_is_none_is_refused(change, message):
    line = json.loads(json.dumps(looked(fresh()).to_json()))
    change(line)
    with pytest.raises(ValueError) as raised:
        Layers.from_json(line)
    assert str(raised.value) == message


def test_a_line_that_is_no_object_is_refused():
    with pytest.raises(ValueError, match="^layers: wanted a JSON object, got 5$"):
        Layers.from_json(5)
