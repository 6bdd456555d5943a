"""Attention Residuals: one read, its two phases, and blocks of one sublayer."""

import math

import pytest
import torch

from trivium.model.layers import Linear, RMSNorm
from trivium.model.residual import ResidualStream, read
from trivium.ops import cpu
from trivium.ops.attnres import attnres, attnres_full, attnres_weights, merge_sum, read_blocks
from trivium.ops.attnres.native import _attnres
from trivium.ops.backend import use_backend

D = 40

native = pytest.mark.skipif(cpu.missing is not None, reason=str(cpu.missing))
BOTH = ["torch", pytest.param("native", marks=native)]


def sources(N, T=7, seed=0, dtype=torch.float64, D=D):
    generator = torch.Generator().manual_seed(seed)
    *blocks, total = torch.randn(N + 1, T, D, generator=generator, dtype=torch.float64).to(dtype).unbind()
    return tuple(blocks), total, torch.randn(D, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("N", [0, 1, 3, 8])
def test_fused_is_the_reference_with_its_gradients(N):
    blocks, *rest = sources(N)
    args = [x.requires_grad_() for x in (*blocks, *rest)]

    def read_of(*args):
        return attnres(args[:N], *args[N:])

    with use_backend("reference"):
        want = read_of(*args)
    torch.testing.assert_close(read_of(*args), want)
    assert torch.autograd.gradcheck(read_of, args)


@native
@pytest.mark.parametrize(("N", "T", "D"), [(0, 3, 5), (1, 1, 8), (2, 0, 40), (3, 70, 512), (5, 33, 19), (20, 4, 3)])
def test_native_is_the_reference_with_its_gradients(N, T, D):
    results = []
    for backend, dtype in (("reference", torch.float64), ("native", torch.float32)):
        blocks, total, query = sources(N, T, dtype=dtype, D=D)
        leaves = [x.clone().requires_grad_() for x in (*blocks, total, query / D**0.5)]  # scores of size 1
        with use_backend(backend):
            x_TD = attnres(leaves[:N], *leaves[N:])
            results.append((x_TD.detach(), *torch.autograd.grad(x_TD, leaves, total.sin())))
    for want, got in zip(*results, strict=True):
        assert (got - want).norm() <= 2e-6 * want.norm()  # 3e-7 was the largest seen


@native
def test_native_is_registered_whole():
    blocks, total, query = sources(2, dtype=torch.float32)
    args = [x.clone().requires_grad_() for x in (*blocks, total, query)]
    torch.library.opcheck(_attnres.registered, (args[:3], args[3], 1e-5))


def test_one_source_is_the_identity_bit_for_bit():
    blocks, total, query = sources(0, dtype=torch.float32)
    assert torch.equal(attnres(blocks, total, query), total)


def test_a_read_by_hand():
    # D = 2, eps 0: v1 = (3, 4) has key (3, 4) / sqrt(12.5), v2 = (0, 1) has key (0, sqrt 2); query (ln 2 / sqrt 2, 0)
    query = torch.tensor([math.sqrt(12.5) / 3 * math.log(2), 0.0], dtype=torch.float64)
    blocks = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    total = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    # scores ln 2 and 0: weights 2/3 and 1/3, of the raw values
    torch.testing.assert_close(
        attnres(blocks.unbind(), total, query, 0.0), torch.tensor([[2.0, 3.0]], dtype=torch.float64)
    )


def test_eps_stands_inside_the_root_by_hand():
    # mean(v^2) is 12.5 and so is eps: the key of (3, 4) is (3, 4) / 5, its score with query (5, 0) 3; that of 0 is 0
    query = torch.tensor([5.0, 0.0], dtype=torch.float64)
    blocks = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    weight = 1 / (1 + math.exp(-3))
    for backend in ("reference", "torch"):
        with use_backend(backend):
            read_TD = attnres(blocks.unbind(), torch.zeros(1, 2, dtype=torch.float64), query, 12.5)
        torch.testing.assert_close(read_TD, weight * blocks[0])


@pytest.mark.parametrize("N", [1, 2, 8])
def test_two_phases_equal_the_direct_read(N):
    blocks, total, _ = sources(N, dtype=torch.float32)
    queries = torch.randn(5, D, generator=torch.Generator().manual_seed(3))
    mix, log = read_blocks(blocks, queries)
    for q, query in enumerate(queries):
        torch.testing.assert_close(merge_sum(mix[q], log[q], total, query), attnres(blocks, total, query))


def test_two_phases_with_far_apart_scores_stay_finite():
    blocks, total, query = sources(2, dtype=torch.float32)
    for sign in (1, -1):
        big = sign * 1e4 * query
        mix, log = read_blocks(blocks, big[None])
        merged = merge_sum(mix[0], log[0], total, big)
        assert merged.isfinite().all()
        torch.testing.assert_close(merged, attnres(blocks, total, big))


def test_full_form_is_the_block_form_with_blocks_of_one_sublayer():
    torch.manual_seed(0)
    outputs = [torch.randn(6, D, dtype=torch.float64)]  # the embedding, then one sublayer after another
    stream = ResidualStream.start(outputs[0])
    for sublayer in range(7):
        norm, proj = RMSNorm(D, 1e-5).double(), Linear(D, 1).double()
        torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(proj.weight)
        x = read(stream, norm, proj, f"{sublayer}")
        query = norm.weight * proj.weight[0]
        torch.testing.assert_close(x, attnres_full(outputs, query))
        outputs.append(torch.tanh(x @ torch.randn(D, D, dtype=torch.float64)))
        stream = stream.close_block().add(outputs[-1])


def test_blocks_of_several_sublayers_sum_what_they_hold():
    a, b, c, d = torch.randn(4, 3, D)
    stream = ResidualStream.start(a).close_block().add(b).add(c).close_block().add(d)
    assert torch.equal(torch.stack(stream.blocks), torch.stack([a, b + c]))
    assert torch.equal(stream.sum_TD, d)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("T", [1, 2, 5, 16, 33])
def test_a_later_token_changes_no_earlier_bit(T, num_threads, backend):
    blocks, total, query = sources(3, T=900, dtype=torch.float32)
    torch.set_num_threads(num_threads)  # two share the tokens out
    with use_backend(backend):
        whole = attnres(blocks, total, query)
        assert torch.equal(attnres([block_TD[:T] for block_TD in blocks], total[:T], query), whole[:T])


@native
def test_gradients_have_the_same_bits_on_any_number_of_threads():
    blocks, total, query = sources(3, T=900, dtype=torch.float32)
    leaves = [x.clone().requires_grad_() for x in (*blocks, total, query)]
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        with use_backend("native"):
            results.append(torch.autograd.grad(attnres(leaves[:3], *leaves[3:]), leaves, total))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("backend", BOTH)
def test_backward_saves_one_copy_of_its_inputs_at_most(backend):
    blocks, total, query = sources(5, T=64, dtype=torch.float32)
    inputs = sum(x.requires_grad_().numel() for x in (*blocks, total, query))
    saved = {}

    def pack(x):
        saved[x.data_ptr()] = x.numel()
        return x

    with use_backend(backend), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attnres(blocks, total, query)
    assert sum(saved.values()) <= inputs + 3 * 6 * 64  # and three numbers a source and token


def test_weights_sum_to_one_and_are_uniform_for_a_zero_query():
    blocks, total, query = sources(3)
    every = torch.stack([*blocks, total])
    torch.testing.assert_close(attnres_weights(every, query).sum(0), torch.ones(7, dtype=torch.float64))
    torch.testing.assert_close(attnres(blocks, total, 0 * query), every.mean(0))


def test_wrong_shapes_are_named():
    blocks, total, query = sources(2)
    with pytest.raises(ValueError, match=r"blocks want shape \(7, 40\), got \(6, 40\)"):
        attnres([blocks[0], blocks[1][:6]], total, query)
    with pytest.raises(ValueError, match=r"query wants shape \(40,\), got \(39,\)"):
        attnres(blocks, total, query[:39])
