"""What a balancer looks at, what it does with it at the end of a step, and that the bias it leaves is all there is."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.routers import Routers, skewed_scores
from tests.tiny import tiny_config
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.model.recompute import recomputing
from trivium.model.trace import trace
from trivium.ops.balance import count_experts, quantile_balance_
from trivium.ops.balance.histogram import BIN_WIDTH, NUM_COUNTS
from trivium.ops.rows import Rows
from trivium.train.balance import Balance, LoadGauge, QuantileBalancer

METHODS = ("exact", "histogram")
CONFIG = tiny_config(64)
EVERY = torch.ones(40, dtype=torch.bool)


def network(seed=0):
    model = KimiK3(CONFIG)
    initialise_(model, seed)
    return model.train()


def tokens(count, seed=0):
    return torch.randint(CONFIG.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def forward(model, ids_T):
    return model(ids_T, Rows.one(len(ids_T)))


def biases(model):
    return torch.stack([layer.gate.e_score_correction_bias.clone() for layer in model.moe_layers()])


def scores(num_layers, num_tokens, num_experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [skewed_scores(num_tokens, torch.randn(num_experts, generator=generator), generator) for _ in range(num_layers)]
    )


def seen(model, scores_LTE, balancer, counts_T=None):
    model.forward(scores_LTE)
    return balancer.observe(model, torch.ones(scores_LTE.shape[1], dtype=torch.bool) if counts_T is None else counts_T)


@pytest.mark.parametrize("method", METHODS)
def test_only_tokens_that_count_do_and_all_micro_batches_are_one(method):
    scores_LTE = scores(3, 90, 8)
    counts_T = torch.rand(90, generator=torch.Generator().manual_seed(1)) < 0.7
    model, want = Routers(3, 8, 2), Routers(3, 8, 2)
    balancer = QuantileBalancer(method=method)
    for part in (slice(0, 31), slice(31, 32), slice(32, 90)):
        assert seen(model, scores_LTE[:, part], balancer, counts_T[part]) is None
    whole = QuantileBalancer(method=method)
    seen(want, scores_LTE[:, counts_T], whole)
    assert balancer.update_(model) == whole.update_(want)
    assert torch.equal(model.bias_LE, want.bias_LE)
    for bias_E, score_NE in zip(model.bias_LE, scores_LTE[:, counts_T], strict=True):
        exact_E = torch.zeros(8)
        quantile_balance_(exact_E, score_NE, 2)
        assert exact_E.abs().max() > 0.05
        assert (bias_E - exact_E).abs().max() <= (0 if method == "exact" else 2 * BIN_WIDTH)


@pytest.mark.parametrize("method", METHODS)
def test_gauges_are_of_the_routes_as_they_were_taken(method):
    # 4 experts, top-1, 4 tokens a layer. Layer 0: all to expert 0, 4 over a mean of 1. Layer 1: 2, 1, 1, 0.
    first = [0.9, 0.1, 0.2, 0.3]
    scores_LTE = torch.tensor([[first] * 4, [first, first, [0.1, 0.9, 0.2, 0.3], [0.1, 0.2, 0.9, 0.3]]])
    model, balancer = Routers(2, 4, 1), QuantileBalancer(method=method)
    seen(model, scores_LTE[:, :1], balancer)
    seen(model, scores_LTE[:, 1:], balancer)
    assert balancer.update_(model) == Balance(max_vio=3.0, idle_experts=3 + 1, out_of_range=0)


def test_margins_out_of_range_are_reported():
    model, balancer = Routers(1, 3, 1), QuantileBalancer(method="histogram")
    seen(model, torch.tensor([[[3.0, 0.2, 0.1], [0.5, 0.2, -9.0], [0.5, 0.2, 0.1]]]), balancer)
    assert balancer.update_(model).out_of_range == 2


@pytest.mark.parametrize("method", METHODS)
def test_an_average_moves_a_part_of_the_way(method):
    scores_LTE, start_LE = scores(2, 60, 8), torch.linspace(-0.2, 0.2, 16).view(2, 8)
    model, full = Routers(2, 8, 3, start_LE), Routers(2, 8, 3, start_LE)
    for routers, ema in ((model, 0.75), (full, 0.0)):
        balancer = QuantileBalancer(method=method, ema=ema)
        seen(routers, scores_LTE, balancer)
        balancer.update_(routers)
    torch.testing.assert_close(model.bias_LE, 0.75 * start_LE + 0.25 * full.bias_LE, rtol=0, atol=1e-7)
    # Too few tokens leave the bias, to the bit: 2 · 3 < 8.
    before_LE = model.bias_LE
    balancer = QuantileBalancer(method=method, ema=0.3)
    seen(model, scores_LTE[:, :2], balancer)
    balancer.update_(model)
    assert torch.equal(model.bias_LE, before_LE)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_given_up_leaves_no_trace(method):
    model, other = Routers(2, 8, 2), Routers(2, 8, 2)
    balancer, fresh = QuantileBalancer(method=method), QuantileBalancer(method=method)
    seen(model, scores(2, 50, 8, seed=1), balancer)
    model.forward(scores(2, 50, 8, seed=2))  # a forward that was never looked at
    balancer.forget(model)
    seen(model, scores(2, 50, 8, seed=3), balancer)
    seen(other, scores(2, 50, 8, seed=3), fresh)
    assert balancer.update_(model) == fresh.update_(other)
    assert torch.equal(model.bias_LE, other.bias_LE)
    before_LE = model.bias_LE
    balancer.update_(model)  # of no tokens, nor of the step before
    assert torch.equal(model.bias_LE, before_LE)


def test_a_histogram_keeps_no_scores():
    model, balancer = Routers(1, 8, 2), QuantileBalancer(method="histogram")
    sizes = []
    for seed in range(5):
        seen(model, scores(1, 50, 8, seed), balancer)
        sizes.append((balancer._tally.flat_Y.numel(), len(balancer._kept)))
    assert set(sizes) == {(8 * (NUM_COUNTS + 1), 0)}


@pytest.mark.parametrize("method", METHODS)
def test_only_training_forwards_are_looked_at(method):
    """Evaluation, forwards without gradients, and those run again for their gradients move nothing: none of its kind."""
    model, other = network(), network()
    balancer, fresh = QuantileBalancer(method=method), QuantileBalancer(method=method)
    forward(model.eval(), tokens(40, seed=1))
    with torch.no_grad():
        forward(model.train(), tokens(40, seed=2))
    with recomputing():
        forward(model, tokens(40, seed=3))
    for network_, balancer_ in ((model, balancer), (other, fresh)):
        forward(network_, tokens(40, seed=4))
        balancer_.observe(network_, EVERY)
    forward(model.eval(), tokens(40, seed=5))
    assert balancer.update_(model) == fresh.update_(other)
    assert torch.equal(biases(model), biases(other)) and biases(model).abs().max() > 0


def test_scores_are_of_the_last_forward_and_come_with_their_graph_where_that_is_asked_for():
    """A graph that nobody takes would be held for ever."""
    model, balancer = network(), LoadGauge()
    forward(model, tokens(40))
    assert not model.moe_layers()[0].take_scores()[0].requires_grad
    model.moe_layers()[0].keep_graph = True
    forward(model, tokens(40))
    scores_TE = model.moe_layers()[0].take_scores()[0]
    (grad,) = torch.autograd.grad(scores_TE.sum(), model.moe_layers()[0].gate.weight)
    assert grad.abs().max() > 0
    with pytest.raises(ValueError, match=r"of one training forward of 40 tokens, got 0 forwards of \[\] tokens"):
        balancer.observe(model, EVERY)
    balancer.forget(model)
    forward(model, tokens(40)), forward(model, tokens(7))
    with pytest.raises(ValueError, match=r"of 40 tokens, got 1 forwards of \[7\] tokens"):
        balancer.observe(model, EVERY)


def test_the_bias_is_moved_in_place_and_goes_into_the_state_dict():
    """A buffer bound anew trains and is saved as zeros: what an optimiser, a compiled graph or FSDP holds is the memory."""
    model, balancer = network(), QuantileBalancer(method="histogram", ema=0.5)
    held = [layer.gate.e_score_correction_bias for layer in model.moe_layers()]
    places = [bias_E.data_ptr() for bias_E in held]
    forward(model, tokens(40))
    balancer.observe(model, EVERY)
    balancer.update_(model)
    saved = {name: value for name, value in model.state_dict().items() if name.endswith("e_score_correction_bias")}
    assert len(saved) == len(held) > 0
    for layer, bias_E, place, value in zip(model.moe_layers(), held, places, saved.values(), strict=True):
        assert layer.gate.e_score_correction_bias is bias_E and bias_E.data_ptr() == value.data_ptr() == place
        assert value.dtype == torch.float32 and value.abs().max() > 0


GO_ON = """
import sys, torch
from tests.train.test_balance import go_on, network
torch.set_num_threads(1)
model = network(seed=1)
model.load_state_dict(torch.load(sys.argv[1]))
torch.save(go_on(model), sys.argv[2])
"""


def go_on(model):
    """The next two steps' routes, and the biases behind them, with a balancer of its own."""
    balancer, routes = QuantileBalancer(method="histogram", ema=0.25), []
    for seed in (7, 8):
        with trace(model, ["*.moe.experts"]) as seen:
            forward(model, tokens(40, seed))
        balancer.observe(model, EVERY)
        balancer.update_(model)
        routes += list(seen.values())
    return {"routes": torch.stack(routes), "biases": biases(model)}


def test_a_fresh_process_goes_on_with_the_same_routes(tmp_path):
    """The balancer has no state of its own (no range, step or average), so what is saved is what there is."""
    torch.set_num_threads(1)
    model, balancer = network(), QuantileBalancer(method="histogram", ema=0.25)
    for seed in range(5):
        forward(model, tokens(40, seed))
        balancer.observe(model, EVERY)
        balancer.update_(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    paths = [str(tmp_path / "model.pt"), str(tmp_path / "after.pt")]
    subprocess.run([sys.executable, "-c", GO_ON, *paths], check=True, cwd=Path(__file__).parents[2], timeout=120)
    got, want = torch.load(tmp_path / "after.pt"), go_on(model)
    assert torch.equal(got["routes"], want["routes"]) and torch.equal(got["biases"], want["biases"])
    plain = network()  # the same weights with the bias lost: the routes tell
    plain.load_state_dict(torch.load(tmp_path / "model.pt"))
    for layer in plain.moe_layers():
        layer.gate.e_score_correction_bias.zero_()
    assert not torch.equal(go_on(plain)["routes"], want["routes"])


@pytest.mark.parametrize("size", [0.3, -0.3])
def test_training_and_decoding_choose_the_same_experts(size):
    """A bias that is added in training and subtracted in decoding (Megatron-LM#6802): the kind is one rule in two places.

    One function adds the bias, for all of them; with the other sign in one place these sets would be others.

    The compiled decode step adds it in a kernel: test_step.py holds its logits to the forward's, with such biases.
    """
    model = network()
    for idx, layer in enumerate(model.moe_layers()):
        generator = torch.Generator().manual_seed(idx)
        layer.gate.e_score_correction_bias.copy_(size * torch.randn(CONFIG.moe.num_experts, generator=generator))
    ids_T = tokens(20)
    with trace(model, ["*.moe.experts"]) as trained:
        forward(model, ids_T)
    scores_NE = model.moe_layers()[0].take_scores()[0]
    bias_E = model.moe_layers()[0].gate.e_score_correction_bias
    k = CONFIG.moe.num_experts_per_token
    assert not torch.equal(count_experts(scores_NE, bias_E, k), count_experts(scores_NE, -bias_E, k))
    state = model.eval().empty_state(1)
    with torch.no_grad(), trace(model, ["*.moe.experts"]) as decoded:
        for idx in range(20):
            _, state = model(ids_T[idx : idx + 1], Rows.one(1, past=idx), state)
    assert list(trained) == list(decoded)
    for name, want_TA in trained.items():
        assert torch.equal(decoded[name], want_TA)


def test_options_that_do_nothing_are_errors():
    with pytest.raises(ValueError, match="balancer: method is one of exact, histogram, got 'quantile'"):
        QuantileBalancer(method="quantile")
    for ema in (-0.1, 1.0, float("nan")):  # 1 would never move the bias
        with pytest.raises(ValueError, match="balancer: ema is at least 0 and below 1, got"):
            QuantileBalancer(ema=ema)


def test_a_model_without_experts_is_balanced():
    assert QuantileBalancer(method="histogram").update_(Routers(0, 1, 1, torch.zeros(0, 1))) == Balance(
        max_vio=0.0, idle_experts=0
    )
