"""KDA's laws: the chunk form is the recurrence, the recurrence is the delta rule, and nothing leaks."""

import math
from contextlib import nullcontext

import pytest
import torch
from measure import relative_error

from trivium.ops import cpu
from trivium.ops.backend import use_backend
from trivium.ops.kda import kda, kda_chunk_terms, kda_gate, kda_recurrent, l2_norm
from trivium.ops.rows import Rows

H, K, V = 2, 29, 23  # K and V differ, so that a transposed state cannot pass, and fill no vector register
NAMES = ("o", "state", "q", "k", "v", "decay_in", "beta_in", "A_log", "dt_bias", "state_in")
HAS_NATIVE = pytest.mark.skipif(cpu.missing is not None, reason=str(cpu.missing))
BACKENDS = ["torch", pytest.param("native", marks=HAS_NATIVE)]
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 257]  # both sides of a tile of 16 and of a chunk of 64


@pytest.fixture(params=BACKENDS)
def each_backend(request):
    with use_backend(request.param):
        yield request.param


def inputs(lengths, *, seed=0, gate_at=-4.0, past=(), **changes):
    """Raw float64 inputs with a state; dt_bias near `gate_at` sets how much is forgotten."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = Rows.of(lengths, past=past)
    T = rows.num_tokens
    case = {
        "q": normal(T, H, K),
        "k": normal(T, H, K),
        "v": normal(T, H, V),
        "decay_in": normal(T, H, K),
        "beta_in": normal(T, H),
        "A_log": 0.3 * normal(H),
        "dt_bias": normal(H, K) + gate_at,
        "state": normal(rows.num_sequences, H, K, V),
    }
    return case | changes, rows


def run(case, rows, dtype=torch.float32, backend="torch", **options):
    """Outputs and the gradients of a fixed random sum of them, by name; backend None is the one in use."""
    leaves = [x.to(dtype).requires_grad_() for x in case.values()]
    with use_backend(backend) if backend else nullcontext():
        outputs = kda(*leaves[:7], rows, leaves[7], **options)
    generator = torch.Generator().manual_seed(7)
    loss = sum((x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in outputs)
    return dict(zip(NAMES, (*outputs[:2], *torch.autograd.grad(loss, leaves)), strict=True))


def parallel_keys(T, noise):
    generator = torch.Generator().manual_seed(5)
    one = torch.randn(1, H, K, generator=generator, dtype=torch.float64)
    return one + noise * torch.randn(T, H, K, generator=generator, dtype=torch.float64)


def in_turn(T):
    """Channels that forget in turn: at each token one half of them is at the bound, the other keeps all."""
    half_TK = (torch.arange(T)[:, None] + torch.arange(K)[None]) % 2 == 0
    return torch.where(half_TK[:, None].expand(T, H, K), 60.0, -60.0).double()


REGIMES = {
    "ordinary": lambda T: {},
    "slow": lambda T: {"dt_bias": torch.full((H, K), -8.0, dtype=torch.float64)},
    "gate at the bound": lambda T: {"decay_in": torch.full((T, H, K), 40.0, dtype=torch.float64)},
    "gate near the bound": lambda T: {"dt_bias": torch.full((H, K), 8.0, dtype=torch.float64)},
    "gate open": lambda T: {"decay_in": torch.full((T, H, K), -60.0, dtype=torch.float64)},
    "one key, beta .98, no decay": lambda T: {
        "k": parallel_keys(T, 0.0),
        "beta_in": torch.full((T, H), math.log(0.98 / 0.02), dtype=torch.float64),
        "decay_in": torch.full((T, H, K), -60.0, dtype=torch.float64),
    },
    "nearly one key, beta .98, no decay": lambda T: {
        "k": parallel_keys(T, 0.05),
        "beta_in": torch.full((T, H), math.log(0.98 / 0.02), dtype=torch.float64),
        "decay_in": torch.full((T, H, K), -60.0, dtype=torch.float64),
    },
    "channels forget in turn": lambda T: {"decay_in": in_turn(T), "dt_bias": torch.zeros(H, K, dtype=torch.float64)},
}

SATURATED = set(REGIMES) - {"ordinary", "slow", "gate near the bound"}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("T", LENGTHS)
def test_chunks_equal_the_recurrence(T, regime):
    case, rows = inputs([T], seed=T, **REGIMES[regime](T))
    want = run(case, rows, torch.float64, "reference")
    exact = run(case, rows, torch.float64)
    for name in NAMES:
        assert relative_error(exact[name], want[name]) < 1e-11, name
    for backend in ("torch",) if cpu.missing else ("torch", "native"):
        single = run(case, rows, torch.float32, backend)
        for name in NAMES:
            # The gate's gradient where it saturates: down to 1e-19, a sum over tokens of numbers that nearly cancel.
            bound = 1e-4 if name == "A_log" and regime in SATURATED else 1e-5
            error = relative_error(single[name], want[name])
            assert error < bound, (backend, name, error)


def test_packed_sequences_equal_the_recurrence_with_their_maps():
    case, rows = inputs([5, 0, 70, 16, 130])
    with use_backend("reference"):
        want = kda(*list(case.values())[:7], rows, case["state"], with_map=True)
    got = kda(*list(case.values())[:7], rows, case["state"], with_map=True)
    single = kda(*(x.float() for x in list(case.values())[:7]), rows, case["state"].float(), with_map=True)
    for a, b, c in zip(got, want, single, strict=True):
        assert relative_error(a, b) < 1e-12
        assert relative_error(c, b) < 1e-6
    _, state, A, B = got
    torch.testing.assert_close(A @ case["state"] + B, state)  # S_out = A S_in + B, an empty sequence's A is I
    torch.testing.assert_close(A[1], torch.eye(K, dtype=A.dtype).expand(H, K, K))


def test_maps_of_two_segments_compose():
    case, rows = inputs([100])
    first = {name: x[:37] if x.shape[0] == 100 else x for name, x in case.items()}
    second = {name: x[37:] if x.shape[0] == 100 else x for name, x in case.items()}
    maps = [kda(*list(part.values())[:7], Rows.one(n), with_map=True)[2:] for part, n in ((first, 37), (second, 63))]
    (A1, B1), (A2, B2) = maps
    _, state = kda(*list(case.values())[:7], rows, case["state"])
    torch.testing.assert_close(A2 @ (A1 @ case["state"] + B1) + B2, state)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("lengths", [[3], [70], [2, 0, 65]])
def test_gradients_are_those_of_finite_differences(lengths, backend):
    case, rows = inputs(lengths, gate_at=-1.0)
    leaves = [x[..., :3] if x.shape[-1] in (K, V) else x for x in case.values()]
    leaves[7] = leaves[7][:, :, :3]
    leaves = [x.contiguous().requires_grad_() for x in leaves]
    with use_backend(backend):
        assert torch.autograd.gradcheck(lambda *x: kda(*x[:7], rows, x[7]), leaves, fast_mode=True)


def test_the_step_is_a_gradient_step_on_the_miss():
    # S <- S - beta * d/dS of 1/2 |S^T k - v|^2, taken at the decayed state
    case, rows = inputs([1])
    k, g = l2_norm(case["k"]), kda_gate(case["decay_in"], case["A_log"], case["dt_bias"])
    beta = case["beta_in"].sigmoid()
    decayed = (case["state"][0] * g[0].exp()[..., None]).requires_grad_()
    miss = 0.5 * (torch.einsum("hkv,hk->hv", decayed, k[0]) - case["v"][0]).square().sum()
    (gradient,) = torch.autograd.grad(miss, decayed)
    _, state = kda(*list(case.values())[:7], rows, case["state"])
    torch.testing.assert_close(state[0], decayed - beta[0][:, None, None] * gradient)


def test_full_beta_with_a_unit_key_replaces_and_zero_beta_keeps():
    case, rows = inputs([1])
    k = case["k"] / case["k"].norm(dim=-1, keepdim=True)
    no_decay = torch.zeros(1, H, K, dtype=torch.float64)
    ones = torch.ones(1, H, dtype=torch.float64)
    _, stored = kda_recurrent(k, k, case["v"], no_decay, ones, rows, case["state"])
    torch.testing.assert_close(torch.einsum("hkv,hk->hv", stored[0], k[0]), case["v"][0])
    _, erased = kda_recurrent(k, k, torch.zeros_like(case["v"]), no_decay, ones, rows, stored)
    _, never = kda_recurrent(k, k, torch.zeros_like(case["v"]), no_decay, ones, rows, case["state"])
    torch.testing.assert_close(erased, never)  # whatever v was stored under k is gone
    _, kept = kda_recurrent(k, k, case["v"], no_decay, 0 * ones, rows, case["state"])
    assert torch.equal(kept, case["state"])


def test_two_channels_by_hand():
    # One head, K = 2, V = 1, S = (2, 4), decay (1/2, 1), k = (1, 0), beta = 1/2, v = 3:
    # decayed (1, 4); read 1; miss 2; write 1/2 * 2 under k: (2, 4); q = (1, 1) reads 6.
    rows = Rows.one(1)
    double = {"dtype": torch.float64}
    o, state = kda_recurrent(
        torch.tensor([[[1.0, 1.0]]], **double),
        torch.tensor([[[1.0, 0.0]]], **double),
        torch.tensor([[[3.0]]], **double),
        torch.tensor([[[math.log(0.5), 0.0]]], **double),
        torch.tensor([[0.5]], **double),
        rows,
        torch.tensor([[[[2.0], [4.0]]]], **double),
    )
    torch.testing.assert_close(state.flatten(), torch.tensor([2.0, 4.0], **double))
    torch.testing.assert_close(o.flatten(), torch.tensor([6.0], **double))


def test_the_gate_by_hand():
    # g = -5 sigmoid(exp(A_log) (z + dt_bias)): A_log ln 2, z 1, dt_bias -1 -> -2.5; z 2 -> -5 sigmoid(2)
    g = kda_gate(torch.tensor([[[1.0, 2.0]]]), torch.tensor([math.log(2)]), torch.tensor([[-1.0, -1.0]]))
    torch.testing.assert_close(g.flatten(), torch.tensor([-2.5, -5 / (1 + math.exp(-2))]))


def test_the_l2_norm_by_hand():
    # sum of squares 9e-6 + 16e-6 = 25e-6; with 1e-6 more under the root it is sqrt(26) e-3, no longer 5e-3
    x = torch.tensor([[[3e-3, 4e-3]]], dtype=torch.float64)
    want = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64) / math.sqrt(26)
    torch.testing.assert_close(l2_norm(x), want, rtol=1e-9, atol=0)


def test_published_terms_are_those_of_the_recurrence():
    C = 20
    case, rows = inputs([C])
    q, k = l2_norm(case["q"]) * K**-0.5, l2_norm(case["k"])
    g, beta = kda_gate(case["decay_in"], case["A_log"], case["dt_bias"]), case["beta_in"].sigmoid()
    o, state = kda_recurrent(q, k, case["v"], g, beta, rows, case["state"])
    for h in range(H):
        terms = kda_chunk_terms(q[:, h], k[:, h], case["v"][:, h], g[:, h], beta[:, h], case["state"][0, h])
        torch.testing.assert_close(terms.O, o[:, h])
        torch.testing.assert_close(terms.S, state[0, h])
        torch.testing.assert_close(terms.W, terms.M @ (terms.Gamma * k[:, h]))
        inverse = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + terms.A_kk) @ torch.diag(beta[:, h])
        torch.testing.assert_close(terms.M, inverse)


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 130])
@pytest.mark.usefixtures("each_backend")
def test_a_later_token_changes_no_earlier_bit(T):
    case, rows = inputs([200])
    single = [x.float() for x in case.values()]
    whole, _ = kda(*single[:7], rows, single[7])
    head = [x[:T] if x.shape[0] == 200 else x for x in single]
    alone, _ = kda(*head[:7], Rows.one(T), head[7])
    assert torch.equal(alone, whole[:T])
    changed = [torch.cat([x[:T], 100 * torch.randn_like(x[T:])]) if x.shape[0] == 200 else x for x in single]
    assert torch.equal(kda(*changed[:7], rows, changed[7])[0][:T], whole[:T])


@pytest.mark.parametrize("cut", [1, 16, 37, 64, 99])
def test_any_cut_with_the_state_carried_equals_the_whole(cut, each_backend):
    case, rows = inputs([100])
    single = [x.float() for x in case.values()]
    want_o, want_state = kda(*single[:7], rows, single[7])
    head = [x[:cut] if x.shape[0] == 100 else x for x in single]
    tail = [x[cut:] if x.shape[0] == 100 else x for x in single]
    o1, state = kda(*head[:7], Rows.one(cut), head[7])
    o2, state = kda(*tail[:7], Rows.one(100 - cut, past=cut), state)
    tolerance = 0 if each_backend == "native" else 1e-5  # float32, other chunks; the recurrence has none
    torch.testing.assert_close(torch.cat([o1, o2]), want_o, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state, want_state, rtol=tolerance, atol=tolerance)


def test_decode_equals_prefill(each_backend):
    case, rows = inputs([70, 70], past=())
    single = [x.float() for x in case.values()]
    want, want_state = kda(*single[:7], rows, single[7])
    state, got = single[7], []
    for t in range(70):
        token = [x[[t, 70 + t]] if x.shape[0] == 140 else x for x in single]
        o, state = kda(*token[:7], Rows.of([1, 1], past=(t, t)), state)
        got.append(o)
    tolerance = 0 if each_backend == "native" else 1e-5
    torch.testing.assert_close(torch.stack(got, 1).flatten(0, 1), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state, want_state, rtol=tolerance, atol=tolerance)


def test_a_step_leaves_sequences_without_a_token_alone():
    case, rows = inputs([1, 0, 1], past=(4, 9, 2))
    got = kda(*list(case.values())[:7], rows, case["state"])
    with use_backend("reference"):
        want = kda(*list(case.values())[:7], rows, case["state"])
    torch.testing.assert_close(got, want)
    assert torch.equal(got[1][1], case["state"][1])


@pytest.mark.usefixtures("each_backend")
def test_packed_equals_alone_bit_for_bit():
    lengths = [5, 0, 70, 16, 130]
    case, rows = inputs(lengths)
    single = [x.float() for x in case.values()]
    packed, states = kda(*single[:7], rows, single[7])
    for s, length in enumerate(lengths):
        own = slice(rows.starts[s], rows.starts[s + 1])
        part = [x[own] if x.shape[0] == rows.num_tokens else x for x in single]
        o, state = kda(*part[:7], Rows.one(length), single[7][s : s + 1])
        assert torch.equal(o, packed[own])
        assert torch.equal(state[0], states[s])


def test_backward_keeps_tokens_and_one_state_a_chunk(each_backend):
    T = 640
    case, rows = inputs([T])
    leaves = [x.float().requires_grad_() for x in case.values()]
    saved = {}

    def pack(x):
        saved[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kda(*leaves[:7], rows, leaves[7])
    inputs_of_a_token = H * (3 * K + 1 + (V if each_backend == "torch" else 0))
    per_token = inputs_of_a_token + H * V  # and each token's new value, or what it missed
    num_states = T // (64 if each_backend == "torch" else 32)
    assert sum(saved.values()) <= T * per_token + num_states * H * K * V + H * K + H


def test_nothing_is_kept_or_allocated_per_chunk_without_gradients():
    case, rows = inputs([64])
    out, _ = kda(*[x.requires_grad_() for x in list(case.values())[:7]], rows, case["state"])
    assert out.grad_fn is not None
    with torch.no_grad():
        out, _ = kda(*list(case.values())[:7], rows, case["state"])
    assert out.grad_fn is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_tokens(dtype):
    case, rows = inputs([0, 0])
    case = {name: x.to(dtype) for name, x in case.items()}
    o, state = kda(*list(case.values())[:7], rows, case["state"])
    assert o.shape == (0, H, V) and torch.equal(state, case["state"])


def test_bfloat16_inputs_keep_a_float32_state():
    case, rows = inputs([70])
    half = [x.to(torch.bfloat16) for x in case.values()]
    o, state = kda(*half[:5], *(x.float() for x in half[5:7]), rows)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    wide = [x.double() for x in half]
    want, _ = kda(*wide[:7], rows)
    assert relative_error(o, want) < 4e-3  # one rounding to 8 bits


def test_wrong_shapes_and_bounds_are_named():
    case, rows = inputs([4])
    args = list(case.values())
    with pytest.raises(ValueError, match=r"kda: v wants shape \(4, 2, 23\), got \(3, 2, 23\)"):
        kda(*args[:2], args[2][:3], *args[3:7], rows)
    with pytest.raises(ValueError, match="kda: wanted at least one head, key and value dimension, got H=2, K=29, V=0"):
        kda(*args[:2], args[2][..., :0], *args[3:7], rows)
    with pytest.raises(ValueError, match=r"kda: state wants shape \(1, 2, 29, 23\), got \(1, 2, 23, 29\)"):
        kda(*args[:7], rows, args[7].transpose(2, 3))
    with pytest.raises(ValueError, match=r"kda: lower_bound -6.0 is outside \[-5.8, 0\)"):
        kda(*args[:7], rows, lower_bound=-6.0)
    with pytest.raises(ValueError, match="rows hold 3 tokens, q holds 4"):
        kda(*args[:7], Rows.one(3))


@pytest.mark.usefixtures("each_backend")
def test_the_lowest_bound_allowed_is_finite():
    case, rows = inputs([64], decay_in=torch.full((64, H, K), 60.0, dtype=torch.float64))
    got = run(case, rows, torch.float32, None, lower_bound=-5.8)
    want = run(case, rows, torch.float64, "reference", lower_bound=-5.8)
    assert all(x.isfinite().all() for x in got.values())
    assert relative_error(got["o"], want["o"]) < 1e-5


@HAS_NATIVE
@pytest.mark.parametrize("lengths", [[40], [5, 0, 70, 33]])
@pytest.mark.parametrize("shape", [(3, 7, 70), (3, 64, 64), (1, 40, 33), (5, 1, 1)])
def test_one_thread_and_more_give_the_same_bits(shape, lengths):
    heads, k, v = shape  # with 3 heads of more than one block of columns, threads share a head's blocks
    generator = torch.Generator().manual_seed(3)
    rows = Rows.of(lengths)
    T, S = rows.num_tokens, rows.num_sequences
    sizes = [
        (T, heads, k),
        (T, heads, k),
        (T, heads, v),
        (T, heads, k),
        (T, heads),
        (heads,),
        (heads, k),
        (S, heads, k, v),
    ]
    leaves = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
    weights = [torch.randn(size, generator=generator) for size in (sizes[2], sizes[7])]
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        outputs = kda(*leaves[:7], rows, leaves[7])
        loss = sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))
        results.append((*outputs, *torch.autograd.grad(loss, leaves)))
    with use_backend("reference"):
        outputs = kda(*leaves[:7], rows, leaves[7])
    loss = sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))
    want = (*outputs, *torch.autograd.grad(loss, leaves))
    for name, one, two, five, reference in zip(NAMES, *results, want, strict=True):
        assert torch.equal(one, two) and torch.equal(one, five), name
        torch.testing.assert_close(one, reference, rtol=1e-4, atol=1e-4)  # float32 on both sides


@HAS_NATIVE
def test_parts_of_joined_projections_need_no_copy_and_change_no_bit():
    case, rows = inputs([40])
    single = [x.float() for x in case.values()]
    joined = torch.cat([x.flatten(1) for x in single[:3]], dim=-1)
    parts = joined.split([H * K, H * K, H * V], dim=-1)
    views = [x.unflatten(-1, (H, -1)) for x in parts]
    torch.testing.assert_close(kda(*views, *single[3:7], rows), kda(*single[:7], rows), rtol=0, atol=0)


@HAS_NATIVE
def test_a_token_that_is_nan_reaches_no_earlier_one():
    case, rows = inputs([40, 3])
    single = [x.float() for x in case.values()]
    single[2][20] = math.nan
    o, state = kda(*single[:7], rows, single[7])
    assert o[:20].isfinite().all() and o[40:].isfinite().all() and state[1].isfinite().all()
    assert o[20:40].isnan().all() and state[0].isnan().all()


@HAS_NATIVE
def test_the_custom_op_keeps_torchs_rules():
    case, rows = inputs([5, 0, 2])
    leaves = [x.float().requires_grad_() for x in case.values()]
    torch.library.opcheck(torch.ops.trivium.kda, (*leaves, rows.starts, -5.0, True))
