"""The baselines that quantile balancing is measured against: what moves, by how much, and what the gauges say."""

from dataclasses import replace

import pytest
import torch

from tests.routers import Routers, skewed_scores
from tests.tiny import tiny_config
from tests.train.test_pretrain import TEXTS, new_model, new_optimisers, stream_of
from trivium.data.pack import make_batch, pieces
from trivium.lab.baselines import AuxiliaryLoss, NoBalancing, SignRule
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.ops.rows import Rows
from trivium.train import step as step_file
from trivium.train.balance import Balance
from trivium.train.step import train_step

# 4 tokens, 4 experts, top-1: experts 0, 0, 0 and 2 are taken.
SCORES = torch.tensor([[[0.8, 0.1, 0.1, 0.0], [0.6, 0.2, 0.1, 0.1], [0.4, 0.2, 0.2, 0.2], [0.1, 0.1, 0.4, 0.2]]])
EVERY = torch.ones(4, dtype=torch.bool)


def step(balancer, scores_LTE=SCORES):
    model = Routers(*scores_LTE.shape[::2], 1)
    model.forward(scores_LTE)
    loss = balancer.observe(model, torch.ones(scores_LTE.shape[1], dtype=torch.bool))
    return model, loss, balancer.update_(model)


def test_without_balancing_the_gauges_are_live():
    model, loss, balance = step(NoBalancing())
    assert loss is None and not model.bias_LE.any()
    assert balance == Balance(max_vio=2.0, idle_experts=2)  # 3 over a mean of 1; experts 1 and 3


def test_the_sign_rule_steps_towards_the_mean():
    model, loss, balance = step(SignRule(0.125))
    assert loss is None and balance == Balance(max_vio=2.0, idle_experts=2)
    assert model.bias_LE.tolist() == [[-0.125, 0.125, 0.0, 0.125]]  # loads 3, 0, 1, 0 about a mean of 1
    assert step(SignRule())[0].bias_LE.abs().max() == pytest.approx(1e-3)


def test_the_sign_rule_gets_there_in_the_end():
    generator = torch.Generator().manual_seed(0)
    skew_E = torch.linspace(-1, 1, 16)
    model, balancer = Routers(1, 16, 2), SignRule(0.02)
    for _ in range(60):
        model.forward(skewed_scores(512, skew_E, generator)[None])
        balancer.observe(model, torch.ones(512, dtype=torch.bool))
        balance = balancer.update_(model)
    assert balance.max_vio < 1 and balance.idle_experts == 0


def test_the_auxiliary_loss_by_hand():
    # f = (3, 0, 1, 0) / 4. P: the mean of the rows over their sums: rows sum to 1, 1, 1 and 0.8.
    # P_0 = (0.8 + 0.6 + 0.4 + 0.125) / 4, P_2 = (0.1 + 0.1 + 0.2 + 0.5) / 4. Loss = 4 (3/4 P_0 + 1/4 P_2) · weight.
    model, loss, balance = step(AuxiliaryLoss(0.5))
    assert float(loss) == pytest.approx(0.5 * (3 * 1.925 + 0.9) / 4)
    assert not model.bias_LE.any() and balance == Balance(max_vio=2.0, idle_experts=2)
    _, both, _ = step(AuxiliaryLoss(0.5), SCORES.repeat(3, 1, 1))
    assert float(both) == pytest.approx(3 * float(loss))  # a sum over layers


def test_even_loads_and_equal_scores_cost_one_a_layer_and_a_collapse_n():
    even = torch.eye(4)[None] * 1e-3 + 0.5
    assert float(step(AuxiliaryLoss(1.0), even)[1]) == pytest.approx(1, rel=1e-3)
    collapsed = torch.tensor([[[1.0, 0, 0, 0]] * 4])
    assert float(step(AuxiliaryLoss(1.0), collapsed)[1]) == pytest.approx(4)


def test_tokens_without_weight_cost_nothing():
    model, balancer = Routers(1, 4, 1), AuxiliaryLoss(0.5)
    model.forward(torch.cat([SCORES, torch.rand(1, 3, 4)], dim=1))
    got = balancer.observe(model, torch.tensor([True] * 4 + [False] * 3))
    torch.testing.assert_close(got, step(AuxiliaryLoss(0.5))[1])
    model.forward(SCORES)
    assert balancer.observe(model, ~EVERY) is None


def test_the_auxiliary_losss_gradient_lifts_the_idle():
    """Through P alone: the gradient of the logits is larger for the busy than for the idle, and reaches the router."""
    logit_TE = SCORES[0].clamp(0.01, 0.99).logit().requires_grad_()
    model = Routers(1, 4, 1)
    model.forward(logit_TE.sigmoid()[None])
    AuxiliaryLoss(1.0).observe(model, EVERY).backward()
    assert (logit_TE.grad[:, 0] > 0).all() and (logit_TE.grad[:, [1, 3]] < 0).all()

    config = tiny_config(64)
    network = KimiK3(config)
    initialise_(network, 0)
    network.train()
    balancer = AuxiliaryLoss(1.0)
    network(torch.arange(40), Rows.one(40))
    with pytest.raises(ValueError, match="the scores came without their graph"):
        balancer.observe(network, torch.ones(40, dtype=torch.bool))
    balancer.forget(network)
    network(torch.arange(40), Rows.one(40))
    balancer.observe(network, torch.ones(40, dtype=torch.bool)).backward()
    for layer in network.moe_layers():
        assert layer.gate.weight.grad.abs().max() > 0


def test_options_that_do_nothing_are_errors():
    with pytest.raises(ValueError, match="sign rule: step is above 0, got 0"):
        SignRule(0)
    with pytest.raises(ValueError, match="auxiliary loss: weight is above 0, got 0"):
        AuxiliaryLoss(0)


def test_the_auxiliary_loss_of_a_step_is_the_mean_of_its_micro_batches_by_weight(monkeypatch):
    """Gradients of the penalty alone: the loss itself is made zero."""
    monkeypatch.setattr(step_file, "cross_entropy", lambda hidden_TD, *_: 0 * hidden_TD.sum())
    stream = stream_of(TEXTS[:8])
    spans = [(first, end) for first, end in pieces(stream, 40) if end - first == 40]
    light, heavy = (make_batch(stream, [span], "test") for span in spans[:2])
    heavy = replace(heavy, weight_T=3 * heavy.weight_T)

    def grads_of(*batches):
        model = new_model()
        found = {}
        train_step(
            model,
            batches,
            new_optimisers(model),
            balancer=AuxiliaryLoss(0.5),
            look=lambda model: found.update(
                {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            ),
        )
        return found

    both, one, other = grads_of(light, heavy), grads_of(light), grads_of(heavy)
    moved = [name for name, grad in both.items() if name.endswith("gate.weight") and grad.abs().max() > 1e-6]
    assert moved
    for name in moved:
        torch.testing.assert_close(both[name], one[name] / 4 + 3 * other[name] / 4, rtol=1e-4, atol=1e-8)
