"""Latent attention: expanded, absorbed and by definition are one thing."""

import pytest
import torch
from measure import relative_error

from trivium.ops import cpu
from trivium.ops.attention import latent_absorbed, latent_attention, latent_expanded, latent_native
from trivium.ops.attention.native import latent_attention_native
from trivium.ops.backend import use_backend
from trivium.ops.rows import Rows, Tile

H, K, J, V, R = 3, 20, 12, 28, 24
CASES = [
    ([1], ()),
    ([63], ()),
    ([64], ()),
    ([65], ()),
    ([5, 0, 130, 64], ()),
    ([1, 1, 1], (0, 70, 3)),
    ([3, 17, 0], (100, 64, 5)),
    ([1, 1], (63, 64)),
    ([200], (33,)),
]


def inputs(lengths, past=(), dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = Rows.of(lengths, past=past)
    T, U = rows.num_tokens, rows.num_tokens + sum(rows.past)
    shapes = ((T, H, K), (T, H, J), (U, R), (U, J), (H, K + V, R))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes], rows


def run(form, args, rows):
    leaves = [x.clone().requires_grad_() for x in args]
    o = form(*leaves, rows)
    direction = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(o.dtype)
    return o, *torch.autograd.grad((o * direction).sum(), leaves)


def reference(*args):
    with use_backend("reference"):
        return latent_attention(*args)


@pytest.mark.parametrize("form", [latent_expanded, latent_absorbed, latent_attention])
@pytest.mark.parametrize(("lengths", "past"), CASES)
def test_every_form_is_the_definition_with_its_gradients(form, lengths, past):
    args, rows = inputs(lengths, past)
    want = run(reference, args, rows)
    torch.testing.assert_close(run(form, args, rows), want, rtol=1e-10, atol=1e-12)
    single = run(form, [x.float() for x in args], rows)
    for got, exact in zip(single, want, strict=True):
        if exact.norm() > 1e-9:  # one key alone has weight 1: its scores have no gradient
            assert relative_error(got, exact) < 5e-6


def test_one_key_gives_its_value_and_two_equal_keys_the_mean():
    kv_b = torch.cat([torch.zeros(1, 1, 2), torch.eye(2)[None]], dim=1)  # K = 1 key row of zeros, V = 2: the latent
    latent = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    q = torch.ones(2, 1, 1)
    o = latent_attention(q, q, latent, torch.zeros(2, 1), kv_b, Rows.one(2))
    torch.testing.assert_close(o[:, 0], torch.tensor([[1.0, 3.0], [3.0, 5.0]]))


def test_the_scale_counts_both_parts_of_the_key():
    # q = (1 | 1), keys (a | r): scores (a + r) / sqrt 2, values are the latent itself
    kv_b = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])  # key: first latent channel, value: second
    latent = torch.tensor([[0.0, 0.0], [3.0, 1.0]])
    q = torch.ones(2, 1, 1)
    o = latent_attention(q, q, latent, torch.tensor([[0.0], [1.0]]), kv_b, Rows.one(2))
    torch.testing.assert_close(o[1, 0, 0], torch.sigmoid(torch.tensor(4 / 2**0.5)))


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 130])
def test_a_later_token_changes_no_earlier_bit(T):
    args, rows = inputs([200], dtype=torch.float32)
    whole = latent_attention(*args, rows)
    head = [x[:T] if len(x) == 200 else x for x in args]
    assert torch.equal(latent_attention(*head, Rows.one(T)), whole[:T])
    changed = [torch.cat([x[:T], 100 * torch.randn_like(x[T:])]) if len(x) == 200 else x for x in args]
    assert torch.equal(latent_attention(*changed, rows)[:T], whole[:T])


@pytest.mark.parametrize("cut", [1, 63, 64, 100, 199])
def test_any_cut_equals_the_whole(cut):
    args, rows = inputs([200], dtype=torch.float32)
    q, rest, latent, key, kv_b = args
    tail = latent_attention(q[cut:], rest[cut:], latent, key, kv_b, Rows.one(200 - cut, past=cut))
    assert relative_error(tail, latent_attention(*args, rows)[cut:]) < 5e-6  # float32, another order


def test_packed_equals_alone_bit_for_bit():
    args, rows = inputs([5, 0, 130, 64], dtype=torch.float32)
    packed = latent_attention(*args, rows)
    for s, length in enumerate(rows.lengths):
        own = slice(rows.starts[s], rows.starts[s + 1])
        alone = latent_attention(*[x[own] for x in args[:4]], args[4], Rows.one(length))
        assert torch.equal(alone, packed[own])


def test_scores_of_any_size_stay_finite():
    args, rows = inputs([100], dtype=torch.float32)
    args[0] = 1e18 * args[0]
    got = run(latent_attention, args, rows)
    assert all(x.isfinite().all() for x in got)


def test_memory_is_linear_in_tokens():
    def numel(T):
        args, rows = inputs([T], dtype=torch.float32)
        sizes = {}

        def pack(x):
            sizes[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), use_backend("torch"):
            latent_attention(*[x.requires_grad_() for x in args], rows)
        table = rows.table(("attention", 64), lambda: pytest.fail("the op made no such table"))
        # one number for each pair of a query block and a key block: T^2 / 4096, where a mask would be T^2
        indices = sum(x.numel() for step in table.steps for x in (step.query_at, step.key_at, step.edge_at))
        return sum(sizes.values()), indices

    saved, indices = zip(*(numel(T) for T in (512, 1024)), strict=True)
    assert saved[1] < 2.1 * saved[0]
    assert indices[1] < 2 * 1024**2 / 4096 + 1024


@pytest.mark.parametrize("t", [1, 3, 16])
def test_a_later_token_changes_no_earlier_bit_behind_a_past(t):
    args, rows = inputs([20], past=(70,), dtype=torch.float32)
    q, rest, latent, key, kv_b = args

    def changed(x, kept):
        return torch.cat([x[:kept], 100 * torch.randn_like(x[kept:])])

    other = [changed(q, t), changed(rest, t), changed(latent, 70 + t), changed(key, 70 + t), kv_b]
    assert torch.equal(latent_attention(*other, rows)[:t], latent_attention(*args, rows)[:t])


native = pytest.mark.skipif(cpu.missing is not None, reason=cpu.missing or "")


@native
@pytest.mark.parametrize("absorb", [False, True])
@pytest.mark.parametrize(("lengths", "past"), [*CASES, ([9], (600,)), ([300, 2], (0, 255))])
def test_native_forms_are_the_definition_with_their_gradients(absorb, lengths, past):
    args, rows = inputs(lengths, past)
    want = run(reference, args, rows)
    got = run(lambda *leaves: latent_native(*leaves, absorb=absorb), [x.float() for x in args], rows)
    for x, exact in zip(got, want, strict=True):
        if exact.norm() > 1e-9:
            assert relative_error(x, exact) < 5e-6


@native
@pytest.mark.parametrize("absorb", [False, True])
def test_native_bits_depend_on_neither_threads_nor_cut(absorb):
    args, rows = inputs([330, 5], dtype=torch.float32)

    def form(*leaves):
        return latent_native(*leaves, absorb=absorb)

    torch.set_num_threads(1)
    whole = run(form, args, rows)
    torch.set_num_threads(3)
    assert all(torch.equal(one, three) for one, three in zip(whole, run(form, args, rows), strict=True))
    q, rest, latent, key, kv_b = args
    for first, last in ((0, 1), (100, 101), (63, 80), (257, 330)):  # keys and queries that were not there change no bit
        own = slice(first, last)
        part = form(q[own], rest[own], latent[:last], key[:last], kv_b, Rows.one(last - first, past=first))
        assert torch.equal(part, whole[0][own])


@native
def test_native_rows_merge_over_many_tiles_as_over_few():
    # 70 sequences of one token: tiles go through their splits themselves, as a single one's do not
    args, rows = inputs([1] * 70, past=[600] * 70, dtype=torch.float32)
    q, rest, latent, key, kv_b = args
    many = latent_native(*args, rows, absorb=True)
    for s in (0, 69):
        own, keys = slice(s, s + 1), slice(601 * s, 601 * (s + 1))
        alone = latent_native(q[own], rest[own], latent[keys], key[keys], kv_b, Rows.one(1, past=600), absorb=True)
        assert torch.equal(alone, many[own])


@native
def test_a_tile_has_the_bits_of_its_tokens_whatever_stands_behind():
    args, _ = inputs([16], past=(304,), dtype=torch.float32)
    q, rest, latent, key, kv_b = args
    tile = latent_attention(*args, Tile.at(304, 0, 16))
    later = [torch.cat([x[:-9], torch.zeros_like(x[-9:])]) for x in (q, rest, latent, key)]
    assert torch.equal(latent_attention(*later, kv_b, Tile.at(304, 0, 7))[:7], tile[:7])


@native
@pytest.mark.parametrize("absorb", [False, True])
def test_native_op_is_well_formed(absorb):
    args, rows = inputs([5, 66], past=(3, 0), dtype=torch.float32)
    torch.library.opcheck(
        latent_attention_native.registered, (*[x.requires_grad_() for x in args], rows.starts, rows.past, absorb)
    )


@native
def test_native_saves_its_inputs_and_outputs():
    args, rows = inputs([128], dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        o = latent_native(*[x.requires_grad_() for x in args], rows, absorb=False)
    assert sum(saved) == sum(x.numel() for x in args) + o.numel() + 128 * H


def test_no_tokens():
    args, rows = inputs([0, 0])
    assert latent_attention(*args, rows).shape == (0, H, V)


def test_wrong_shapes_are_named():
    args, rows = inputs([4], past=(3,))
    with pytest.raises(ValueError, match=r"latent wants shape \(7, 24\), got \(4, 24\)"):
        latent_attention(args[0], args[1], args[2][:4], args[3], args[4], rows)
    with pytest.raises(ValueError, match="kv_b wants more than 20 rows a head, got 20"):
        latent_attention(*args[:4], args[4][:, :20], rows)
