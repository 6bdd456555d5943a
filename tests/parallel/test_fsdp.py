"""A run spread over processes is the run of one process: loss, gradients, weights and balance, step by step."""

from dataclasses import replace

import pytest
import torch

from tests.measure import relative_error
from tests.parallel.processes import on_processes
from tests.tiny import tiny_config
from trivium.data.loader import Loader
from trivium.data.pack import TokenStream
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.parallel.fsdp import gather_model, shard_, share_of, whole
from trivium.parallel.remat import checkpoint_layers
from trivium.parallel.world import ALONE
from trivium.train.balance import QuantileBalancer
from trivium.train.groups import build_optimisers, parameter_groups
from trivium.train.step import train_step

NUM_RANKS = 64
CONFIG = tiny_config(NUM_RANKS)


def stream_of(num_documents=60):
    """Documents of a language in which a token depends on the two before it."""
    generator = torch.Generator().manual_seed(0)
    ids, starts = [], [0]
    for _ in range(num_documents):
        document = [NUM_RANKS, *torch.randint(NUM_RANKS, (2,), generator=generator).tolist()]
        for noise in torch.randint(4, (int(torch.randint(5, 90, (1,), generator=generator)),), generator=generator):
            document.append((3 * document[-1] + document[-2] + int(noise)) % NUM_RANKS)
        ids += document
        starts.append(len(ids))
    num_bytes_W = torch.ones(CONFIG.vocab_size, dtype=torch.int64)
    return TokenStream(ids_T=torch.tensor(ids, dtype=torch.int32), starts=tuple(starts), num_bytes_W=num_bytes_W)


class Course:
    """A tiny run of four micro-batches a step, on however many processes."""

    def __init__(self, world, *, method="histogram", recompute=False):
        self.world = world
        with torch.device("meta"):
            self.model = KimiK3(CONFIG)
        self.recomputed = checkpoint_layers(self.model) if recompute else None
        shard_(self.model, world)
        self.model.to_empty(device="cpu")
        initialise_(self.model, 0, place=share_of)
        self.optimisers = build_optimisers(parameter_groups(self.model, muon_lr=0.005, adamw_lr=0.001))
        self.balancer = QuantileBalancer(world, method=method)
        self.loader = Loader(
            stream_of(),
            max_len=32,
            micro_tokens=64,
            num_micro=4,
            seed=0,
            source="test",
            rank=world.rank,
            num_ranks=world.size,
        )
        self.grads = {}

    def look(self, model):
        named = ((name, parameter.grad) for name, parameter in model.named_parameters())
        self.grads = {name: whole(grad).clone() for name, grad in named if grad is not None}

    def step(self):
        return train_step(
            self.model,
            next(self.loader),
            self.optimisers,
            balancer=self.balancer,
            world=self.world,
            clip_norm=1.0,
            logit_limit=100.0,
            recomputed=self.recomputed,
            look=self.look,
        )


def course_of(world, num_steps, recompute=False):
    """(results, gradients of each step, the model at the end)"""
    course = Course(world, recompute=recompute)
    results, grads = [], []
    for _ in range(num_steps):
        results.append(course.step())
        grads.append(course.grads)
    one = gather_model(course.model, world)
    return results, grads, None if one is None else one.state_dict()


@pytest.fixture(scope="module")
def alone():
    return course_of(ALONE, 20)


@pytest.mark.parametrize("size", [2, 4])
def test_twenty_steps_are_those_of_one_process(alone, size):
    """pytorch#160285 and Megatron#6660 doubled gradients while the loss looked fine: so every gradient is compared."""
    (results, grads, state), *others = on_processes(size, course_of, 20)
    want_results, want_grads, want_state = alone
    for got, want in zip(results, want_results, strict=True):
        assert got.loss == pytest.approx(want.loss, rel=1e-5)
        assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-5)
        assert (got.num_tokens, got.num_bytes) == (want.num_tokens, want.num_bytes) == (256, 256)
    for got, want in zip(grads, want_grads, strict=True):
        assert got.keys() == want.keys()
        for name in want:
            assert relative_error(got[name], want[name]) < 1e-5, name
    for name, want in want_state.items():
        torch.testing.assert_close(state[name], want, rtol=1e-4, atol=1e-5)  # what 20 steps make of it
    for other_results, *_ in others:
        assert other_results == results  # every process says the same
