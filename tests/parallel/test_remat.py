"""Layers run again in the backward: the same bits, less memory, counted; never a second entry in what is kept."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.parallel.processes import on_processes
from tests.tiny import tiny_config
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.model.layer import DecoderLayer
from trivium.model.step import serves
from trivium.model.trace import trace
from trivium.ops import cpu
from trivium.ops.backend import use_backend
from trivium.ops.rows import Rows
from trivium.parallel.fsdp import shard_, whole
from trivium.parallel.remat import checkpoint_layers

BACKENDS = ["torch", pytest.param("native", marks=pytest.mark.skipif(cpu.missing is not None, reason="no kernels"))]
IDS = torch.randint(0, 300, (128,), generator=torch.Generator().manual_seed(0))


def tiny(num_layers=3, **options) -> KimiK3:
    model = KimiK3(replace(tiny_config(300), num_layers=num_layers), **options)
    initialise_(model, seed=0)
    return model.train()


def loss_of(model: KimiK3) -> torch.Tensor:
    hidden_TD, _ = model(IDS, Rows.of([50, 0, 78]))
    return model.head(hidden_TD).square().mean()


def gradients(model: KimiK3) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
def test_loss_and_gradients_are_the_same_bits(compute_dtype):
    plain, again = (tiny(compute_dtype=compute_dtype) for _ in range(2))
    checkpoint_layers(again)
    losses = [loss_of(model) for model in (plain, again)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    want, got = gradients(plain), gradients(again)
    assert want.keys() == got.keys() and len(want) > 30
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name


def bytes_kept(num_layers: int, backend: str, remat: bool) -> int:
    """What a forward allocated and has not freed, its graph alive."""
    model, rows = tiny(num_layers), Rows.of([50, 78])
    if remat:
        checkpoint_layers(model)
    with use_backend(backend):
        model(IDS, rows)  # the rows' tables, made once
        # Nothing from before may be freed while it is measured: the profiler would count it, as what once lay there.
        for layer in model.moe_layers():
            layer.take_scores()
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            hidden_TD, _ = model(IDS, rows)
    assert hidden_TD.grad_fn is not None
    return sum(event.self_cpu_memory_usage for event in measured.events())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_further_layer_costs_its_input_and_no_more(backend):
    kept = {n: bytes_kept(n, backend, remat=True) for n in (3, 6)}
    rows_bytes = len(IDS) * (32 + 6) * 4  # what came in, D 32 wide, and the scores of 6 experts, kept for the balancer
    # And a few numbers a token: the last read's weights of one block more, torch's experts where their pairs lie.
    assert 3 * rows_bytes <= kept[6] - kept[3] <= 1.15 * 3 * rows_bytes
    assert bytes_kept(6, backend, remat=False) > 10 * kept[6]


def test_every_layer_is_counted_once_a_backward():
    model = tiny()
    recomputed = checkpoint_layers(model)
    assert (recomputed.num_layers, recomputed.count) == (3, 0)
    for micro_batch in (1, 2, 3):
        loss = loss_of(model)
        assert recomputed.count == 3 * (micro_batch - 1)
        loss.backward()
        assert recomputed.count == 3 * micro_batch


def test_a_forward_that_is_gone_around_shows_in_the_count(monkeypatch):
    """ReaLLM-Forge#873: a helper of Attention Residuals called what is inside the block, and nothing was run again.

    The rest of its kind: an option that does nothing (checkpointing without gradients, a clip that watches nothing, an
    exponential average of 0) either counts what it did, as here, or is refused where it is set.
    """
    model = tiny()
    recomputed = checkpoint_layers(model)
    monkeypatch.setattr(DecoderLayer, "__call__", lambda layer, *args: DecoderLayer.forward(layer, *args))
    loss_of(model).backward()
    assert recomputed.count == 0 != recomputed.num_layers


def test_scores_logits_and_traces_are_kept_once():
    plain, again = tiny(), tiny()
    checkpoint_layers(again)
    kept = []
    for model in (plain, again):
        for mla in model.mla_layers():
            mla.watch_logits = True
        with trace(model) as recorded:
            loss = loss_of(model)
            scores = [layer.take_scores() for layer in model.moe_layers()]
            largest = [mla.take_max_logit() for mla in model.mla_layers()]
            loss.backward()
        assert [len(of_layer) for of_layer in scores] == [1] * len(scores)
        assert [layer.take_scores() for layer in model.moe_layers()] == [[]] * len(scores)
        assert [mla.take_max_logit() for mla in model.mla_layers()] == [None] * len(largest)
        kept.append((recorded, scores, largest))
    (want, want_scores, want_max), (got, got_scores, got_max) = kept
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name
    torch.testing.assert_close(got_scores, want_scores, rtol=0, atol=0)
    torch.testing.assert_close(got_max, want_max, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_a_forward_without_training_is_not_wrapped(mode):
    model = tiny()
    recomputed = checkpoint_layers(model)
    if mode == "eval":
        loss_of(model.eval()).backward()
    else:
        with torch.no_grad():
            loss_of(model)
    assert recomputed.count == 0


def test_twice_is_an_error_and_undone_is_as_before():
    model = tiny()
    names, served = list(model.state_dict()), serves(model)
    recomputed = checkpoint_layers(model)
    assert list(model.state_dict()) == names and not serves(model)
    with pytest.raises(ValueError, match=r"layers\.0 has another forward"):
        checkpoint_layers(model)
    recomputed.undo()
    recomputed.undo()
    assert serves(model) == served and not any("forward" in vars(module) for module in model.modules())
    loss_of(model).backward()
    assert recomputed.count == 0
    assert checkpoint_layers(model).num_layers == 3


def test_a_copy_runs_its_own_layers():
    model = tiny()
    checkpoint_layers(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert loss_of(copied) > 0
    loss_of(copied).backward()
    assert not gradients(model) and all(gradient.isfinite().all() for gradient in gradients(copied).values())


KINDS = [(None, False), (None, True), (torch.bfloat16, False), (torch.bfloat16, True)]  # compute_dtype, again


def sharded_gradients(world):
    results = []
    for compute_dtype, remat in KINDS:
        model = tiny(compute_dtype=compute_dtype)
        recomputed = checkpoint_layers(model) if remat else None
        shard_(model, world)
        loss_of(model).backward()
        found = {name: whole(gradient).numpy() for name, gradient in gradients(model).items()}
        results.append((found, recomputed and recomputed.count))
    return results


def test_sharded_layers_are_run_again_and_in_bfloat16_too():
    wanted = []
    for compute_dtype, _ in KINDS:
        one = tiny(compute_dtype=compute_dtype)
        loss_of(one).backward()
        wanted.append(gradients(one))
    for process in on_processes(2, sharded_gradients):
        assert [count for _, count in process] == [None, 3, None, 3]
        for (found, _), want in zip(process, wanted, strict=True):
            assert found.keys() == want.keys()
            for name, gradient in found.items():
                # Both processes have the same tokens, so that the sum is twice the gradient.
                torch.testing.assert_close(torch.from_numpy(gradient), 2 * want[name], rtol=1e-5, atol=1e-7)
        for plain, again in zip(process[::2], process[1::2], strict=True):
            assert all((plain[0][name] == again[0][name]).all() for name in plain[0])
