"""Balancing over processes and micro-batches is that of one process and one batch, bit for bit."""

from itertools import pairwise

import pytest
import torch

from tests.parallel.processes import on_processes
from tests.routers import Routers, skewed_scores
from trivium.lab.baselines import NoBalancing, SignRule
from trivium.ops.balance import quantile_balance_
from trivium.parallel.world import ALONE
from trivium.train.balance import QuantileBalancer

NUM_LAYERS, NUM_EXPERTS, NUM_ACTIVE, NUM_STEPS = 2, 12, 3, 3
# Tokens of four micro-batches on each of four processes: 1 to 61, and the last process's do not count.
BOUNDS = (0, 61, 62, 90, 120, 121, 160, 163, 200, 240, 259, 260, 301, 320, 340, 341, 380)
NUM_COUNTED = BOUNDS[12]
BALANCERS = {
    "exact": lambda world: QuantileBalancer(world, method="exact"),
    "histogram": lambda world: QuantileBalancer(world, method="histogram"),
    "average": lambda world: QuantileBalancer(world, method="histogram", ema=0.4),
    "sign": lambda world: SignRule(0.01, world),
    "none": lambda world: NoBalancing(world),
}


def step_scores(step):
    generator = torch.Generator().manual_seed(step)
    skew_E = torch.linspace(-1.5, 1.5, NUM_EXPERTS)
    return torch.stack([skewed_scores(BOUNDS[-1], skew_E.roll(layer), generator) for layer in range(NUM_LAYERS)])


def run(world):
    """Three steps under every balancer; the biases and gauges behind each."""
    results = {}
    first = world.rank * 4
    bounds = BOUNDS[first : first + 5] if world.size > 1 else BOUNDS
    for name, build in BALANCERS.items():
        model, balancer = Routers(NUM_LAYERS, NUM_EXPERTS, NUM_ACTIVE), build(world)
        results[name] = []
        for step in range(NUM_STEPS):
            scores_LTE = step_scores(step)
            for start, end in pairwise(bounds):
                model.forward(scores_LTE[:, start:end].clone())
                balancer.observe(model, torch.arange(start, end) < NUM_COUNTED)
            gauges = balancer.update_(model)
            results[name].append((model.bias_LE.tolist(), gauges))
    return results


@pytest.fixture(scope="module")
def alone():
    return run(ALONE)


@pytest.mark.parametrize("size", [1, 4])
def test_the_bias_is_that_of_one_process_bit_for_bit(size, alone):
    """Accumulation over four micro-batches, uneven tokens, a process without any; and a group of one process.

    Counts are whole numbers and scores are gathered whole, so no sum depends on its order. The same holds of whatever
    else is reduced here: the gauges, and the loads of the sign rule.
    """
    for rank, results in enumerate(on_processes(size, run)):
        for name, steps in results.items():
            for (bias_LE, gauges), (want_LE, want) in zip(steps, alone[name], strict=True):
                assert bias_LE == want_LE, (rank, name)
                assert gauges == want, (rank, name)


def test_it_is_the_bias_of_all_tokens_at_once(alone):
    want_LE = torch.zeros(NUM_LAYERS, NUM_EXPERTS)
    for step, (got_LE, _) in enumerate(alone["exact"]):
        for bias_E, score_NE in zip(want_LE, step_scores(step)[:, :NUM_COUNTED], strict=True):
            quantile_balance_(bias_E, score_NE, NUM_ACTIVE)
        assert got_LE == want_LE.tolist()
    gauges = alone["exact"][-1][1]
    assert gauges.max_vio < 0.6 and gauges.idle_experts == 0
    assert alone["none"][-1][1].max_vio > 1 and alone["none"][-1][0] == [[0.0] * NUM_EXPERTS] * NUM_LAYERS


def test_the_mean_of_local_quantiles_is_another_bias(alone):
    """What a layout without its own reduction would do: each process by its own tokens, then the mean."""
    want_LE = torch.tensor(alone["exact"][0][0])
    local = []
    for rank in range(3):  # those with tokens that count
        bias_LE = torch.zeros(NUM_LAYERS, NUM_EXPERTS)
        for bias_E, score_NE in zip(bias_LE, step_scores(0)[:, BOUNDS[4 * rank] : BOUNDS[4 * rank + 4]], strict=True):
            quantile_balance_(bias_E, score_NE, NUM_ACTIVE)
        local.append(bias_LE)
    mean_LE = torch.stack(local).mean(0)
    weights = torch.tensor([float(BOUNDS[4 * rank + 4] - BOUNDS[4 * rank]) for rank in range(3)])
    weighted_LE = torch.einsum("r,rle->le", weights / weights.sum(), torch.stack(local))
    for other_LE in (mean_LE, weighted_LE):
        assert not torch.equal(other_LE, want_LE)
        assert (other_LE - want_LE).abs().max() > 1e-3  # no matter of rounding
