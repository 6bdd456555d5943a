"""The routed experts: their definition, their gradients, idle experts, packed ones, and the tile's bits."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.backend import use_backend
from trivium.ops.balance import route
from trivium.ops.experts import experts, experts_tile, grouped
from trivium.ops.experts.grouped import MOST_PADDING
from trivium.ops.experts.native import _experts, _experts_backward
from trivium.ops.mxfp4 import PackedWeight, pack, unpack

BACKENDS = ("reference", "torch")
BUILT = pytest.mark.skipif(cpu.missing is not None, reason=f"native: {cpu.missing}")
FAST = ("torch", pytest.param("native", marks=BUILT))
ALL = ("reference", *FAST)
LAYOUTS = {"padded": 1e9, "one by one": 0.0, "chosen": MOST_PADDING}
NUM_EXPERTS, L, FF = 7, 5, 6


@pytest.fixture(params=LAYOUTS)
def layout(request, monkeypatch):
    """Both ways to multiply, whatever the counts."""
    monkeypatch.setattr(grouped, "MOST_PADDING", LAYOUTS[request.param])


def case(
    num_tokens: int, num_active: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0, sizes=(NUM_EXPERTS, L, FF)
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """latent, experts (id 2 never chosen, id 0 often), and weights, w1, w3, w2."""
    num_experts, latent, feed_forward = sizes
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    score_TE = normal(num_tokens, num_experts)
    score_TE[:, 0] += 2
    score_TE[:, 2] = -math.inf
    experts_TA = score_TE.topk(num_active).indices.sort(1).values
    weights_TA = normal(num_tokens, num_active).abs().to(torch.promote_types(dtype, torch.float32))
    w1, w3 = normal(2, num_experts, feed_forward, latent).to(dtype).unbind(0)
    w2 = normal(num_experts, latent, feed_forward).to(dtype)
    return normal(num_tokens, latent).to(dtype), experts_TA, [weights_TA, w1, w3, w2]


def value_and_gradients(backend: str, latent_TL: Tensor, experts_TA: Tensor, rest: list[Tensor]) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in (latent_TL, *rest)]
    with use_backend(backend):
        y_TL = experts(inputs[0], experts_TA, *inputs[1:], bound=2.0, up_bound=9.0)
    loss = (y_TL.double() * torch.linspace(-1, 1, y_TL.numel()).view_as(y_TL)).sum()
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return [y_TL.detach(), *gradients]


@pytest.mark.parametrize("backend", ALL)
def test_one_token_by_hand(backend):
    # L = F = 1, wide bounds: expert e says w2·silu(w1·z)·(w3·z). z = 2; experts 0 and 2 with weights 0.25 and 0.75.
    dtype = torch.float32 if backend == "native" else torch.float64
    w1, w3, w2 = (torch.tensor(v, dtype=dtype).view(3, 1, 1) for v in ([0.5, 9, 1], [3.0, 9, -1], [1.0, 9, 2]))
    z_TL, weights_TA = torch.tensor([[2.0]], dtype=dtype), torch.tensor([[0.25, 0.75]], dtype=dtype)
    silu = {x: x / (1 + math.exp(-x)) for x in (1.0, 2.0)}
    want = 0.25 * 1 * silu[1.0] * 6 + 0.75 * 2 * silu[2.0] * -2
    bound = 1e3 if backend == "native" else 1e6  # tanh(x / bound) · bound is x - x³/3 bound²
    with use_backend(backend):
        y_TL = experts(z_TL, torch.tensor([[0, 2]]), weights_TA, w1, w3, w2, bound=bound, up_bound=bound)
    assert y_TL.item() == pytest.approx(want, rel=1e-5 if backend == "native" else 1e-9)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 9, 40])
@pytest.mark.parametrize("num_active", [1, 3])
def test_grouped_equals_the_loop_with_all_gradients(layout, num_tokens, num_active):
    inputs = case(num_tokens, num_active)
    for got, want in zip(value_and_gradients("torch", *inputs), value_and_gradients("reference", *inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)  # float32, sums of up to 40 tokens in another order


# id 0 is chosen by most tokens: 600 of 700 are two tiles of the backward, and three of the forward
@BUILT
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 9, 40, 700])
@pytest.mark.parametrize("sizes", [(NUM_EXPERTS, L, FF), (12, 96, 64), (5, 33, 47), (4, 300, 280)])
def test_native_equals_the_loop_with_all_gradients(num_tokens, sizes):
    latent_TL, experts_TA, (weights_TA, *matrices) = case(num_tokens, sizes=sizes)
    inputs = latent_TL, experts_TA, [weights_TA, *(w / w.shape[2] ** 0.5 for w in matrices)]
    wide = latent_TL.double(), experts_TA, [x.double() for x in inputs[2]]
    for got, want in zip(value_and_gradients("native", *inputs), value_and_gradients("torch", *wide), strict=True):
        scale = want.abs().max().item() if want.numel() else 1.0
        torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-6 * scale)  # float32 beside float64


@BUILT
def test_native_bits_do_not_depend_on_the_threads_or_on_what_is_kept():
    latent_TL, experts_TA, rest = case(700, sizes=(12, 96, 64))
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(value_and_gradients("native", latent_TL, experts_TA, rest))
    with torch.no_grad():  # gate and up are then not kept
        results.append([experts(latent_TL, experts_TA, *rest, bound=2.0, up_bound=9.0)])
    for other in results[1:]:
        assert all(torch.equal(got, want) for got, want in zip(other, results[0], strict=False))


@BUILT
@pytest.mark.parametrize("keep", [True, False])
def test_the_custom_ops_hold_to_their_contract(keep):
    latent_TL, experts_TA, rest = case(9)
    tensors = [x.requires_grad_() for x in (latent_TL, *rest)]
    torch.library.opcheck(_experts.registered, (*tensors, experts_TA, None, None, None, 2.0, 9.0, keep))
    with torch.no_grad():
        y_TL, gate_MF, up_MF = _experts(*tensors, experts_TA, None, None, None, 2.0, 9.0, keep)
    inputs = [x.detach() for x in (y_TL, *tensors)]
    torch.library.opcheck(
        _experts_backward.registered, (*inputs, experts_TA, None, None, None, gate_MF, up_MF, 2.0, 9.0, True, True)
    )


@BUILT
def test_gate_and_up_that_were_not_kept_are_computed_again():
    latent_TL, experts_TA, rest = case(40)
    results = []
    for keep in (True, False):
        inputs = [x.detach().requires_grad_() for x in (latent_TL, *rest)]
        y_TL, _, _ = _experts(*inputs, experts_TA, None, None, None, 2.0, 9.0, keep)
        results.append(torch.autograd.grad(y_TL.square().sum(), inputs))
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))


@pytest.mark.parametrize("num_tokens", [9, 33])
def test_float64_agrees_to_rounding(layout, num_tokens):
    inputs = case(num_tokens, dtype=torch.float64)
    for got, want in zip(value_and_gradients("torch", *inputs), value_and_gradients("reference", *inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_gradients_in_float64(layout):
    latent_TL, experts_TA, rest = case(4, 2, dtype=torch.float64, sizes=(4, 3, 2))
    inputs = [x.requires_grad_() for x in (latent_TL, *rest)]
    assert torch.autograd.gradcheck(lambda z, *more: experts(z, experts_TA, *more, bound=2.0, up_bound=5.0), inputs)


@pytest.mark.parametrize("backend", FAST)
def test_an_expert_without_tokens_has_gradients_of_exactly_zero(layout, backend):
    _, d_latent, d_weights, *d_matrices = value_and_gradients(backend, *case(20))
    for d_matrix in d_matrices:
        assert (d_matrix[2] == 0).all()
        assert all((d_matrix[e] != 0).any() for e in (0, 1, 3, 4, 5, 6))
    assert d_latent.isfinite().all() and d_weights.isfinite().all()


@pytest.mark.parametrize("backend", FAST)
def test_only_what_is_asked_for_is_computed(layout, backend):
    latent_TL, experts_TA, (weights_TA, *matrices) = case(9)
    want = value_and_gradients("reference", latent_TL, experts_TA, [weights_TA, *matrices])
    latent_TL.requires_grad_()
    with use_backend(backend):
        y_TL = experts(latent_TL, experts_TA, weights_TA, *matrices, bound=2.0, up_bound=9.0)
    (y_TL * torch.linspace(-1, 1, y_TL.numel()).view_as(y_TL)).sum().backward()
    torch.testing.assert_close(latent_TL.grad, want[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", FAST)
def test_a_token_lost_in_nan_spoils_no_other(layout, backend):
    latent_TL, experts_TA, rest = case(12)
    with use_backend(backend):
        want_TL = experts(latent_TL, experts_TA, *rest)
        latent_TL[5] = math.nan
        got_TL = experts(latent_TL, experts_TA, *rest)
    others = torch.arange(12) != 5
    torch.testing.assert_close(got_TL[others], want_TL[others])
    assert got_TL[5].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_rounds_each_experts_output_and_sums_in_float32(layout, backend):
    latent_TL, experts_TA, (_, w1, w3, w2) = case(6, 2, dtype=torch.bfloat16)
    # weights 256 and 1 of two experts: a bfloat16 sum would drop most of the second
    weights_TA = torch.tensor([[256.0, 1.0]]).expand(6, 2)
    with use_backend(backend):
        y_TL = experts(latent_TL, experts_TA, weights_TA, w1, w3, w2)
        parts = [experts(latent_TL, e[:, None], torch.ones(6, 1), w1, w3, w2).float() for e in experts_TA.unbind(1)]
    assert y_TL.dtype == torch.bfloat16
    assert torch.equal(y_TL, (256 * parts[0] + parts[1]).bfloat16())


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_outputs_are_summed_in_float32(backend):
    # 256 a + b + c: in bfloat16 the sum would be rounded behind b already
    latent_TL, experts_TA, (_, w1, w3, w2) = case(16, 3, dtype=torch.bfloat16)
    weights_TA = torch.tensor([[256.0, 1.0, 1.0]]).expand(16, 3)
    with use_backend(backend):
        got = [run(latent_TL, experts_TA, weights_TA, w1, w3, w2) for run in (experts, experts_tile)]
        a, b, c = (experts(latent_TL, e[:, None], torch.ones(16, 1), w1, w3, w2).float() for e in experts_TA.unbind(1))
    assert torch.equal(got[0], (256 * a + b + c).bfloat16()) and torch.equal(got[1], got[0])


def test_bfloat16_gradients_follow_float32(layout):
    inputs = case(40, dtype=torch.bfloat16)
    wide = (inputs[0].float(), inputs[1], [x.float() for x in inputs[2]])
    for got, want in zip(value_and_gradients("torch", *inputs), value_and_gradients("torch", *wide), strict=True):
        error = (got.float() - want).norm() / want.norm()
        assert error < 0.02  # bfloat16 rounds at 2^-9 = 0.002, a few times in a row


def packed_case(num_tokens: int) -> tuple[Tensor, Tensor, Tensor, list[PackedWeight], list[Tensor]]:
    latent_TL, experts_TA, (weights_TA, *matrices) = case(num_tokens, sizes=(NUM_EXPERTS, 32, 64))
    bytes_of = [pack(w) for w in matrices]
    packed = [PackedWeight(packed=p, scale=s, dtype=torch.float32) for p, s in bytes_of]
    return latent_TL, experts_TA, weights_TA, packed, [unpack(p, s) for p, s in bytes_of]


@pytest.mark.parametrize("backend", ALL)
def test_packed_experts_equal_unpacked_ones(backend):
    latent_TL, experts_TA, weights_TA, packed, dense = packed_case(11)
    results = []
    for matrices in (packed, dense):
        inputs = [latent_TL.detach().requires_grad_(), weights_TA.detach().requires_grad_()]
        with use_backend(backend):
            y_TL = experts(inputs[0], experts_TA, inputs[1], *matrices)
        results.append([y_TL, *torch.autograd.grad(y_TL.square().sum(), inputs)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
        assert backend != "native" or torch.equal(got, want)


@BUILT
def test_native_takes_packed_and_dense_matrices_side_by_side():
    latent_TL, experts_TA, weights_TA, packed, dense = packed_case(20)
    want_TL = experts(latent_TL, experts_TA, weights_TA, *dense)
    for mixed in ((packed[0], dense[1], dense[2]), (dense[0], packed[1], packed[2])):
        latent_TL.requires_grad_()
        y_TL = experts(latent_TL, experts_TA, weights_TA, *mixed)
        assert torch.equal(y_TL, want_TL)
        assert torch.autograd.grad(y_TL.sum(), latent_TL)[0].isfinite().all()
    learnt = (packed[0], dense[1].clone().requires_grad_(), dense[2])
    with pytest.raises(ValueError, match="a matrix beside packed ones has no gradient, got one that requires it"):
        experts(latent_TL, experts_TA, weights_TA, *learnt)


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_the_tile_equals_the_grouped_ones(kind):
    latent_TL, experts_TA, weights_TA, packed, dense = packed_case(16)
    matrices = packed if kind == "packed" else dense
    with use_backend("reference"):
        want_TL = experts_tile(latent_TL, experts_TA, weights_TA, *matrices)
    for backend in ("torch", *(["native"] if cpu.missing is None else [])):
        with use_backend(backend):
            got_TL = experts_tile(latent_TL, experts_TA, weights_TA, *matrices)
            grouped_TL = experts(latent_TL, experts_TA, weights_TA, *matrices)
        torch.testing.assert_close(got_TL, grouped_TL, rtol=1e-4, atol=1e-2)
        torch.testing.assert_close(got_TL, want_TL, rtol=1e-4, atol=1e-2)  # values near 1e3


@pytest.mark.parametrize("sizes", [(NUM_EXPERTS, L, FF), (12, 96, 64), (5, 33, 47)])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("torch", torch.float32), ("torch", torch.bfloat16), pytest.param("native", torch.float32, marks=BUILT)],
)
def test_a_tile_rows_bits_do_not_depend_on_the_other_rows(sizes, backend, dtype):
    latent_TL, experts_TA, rest = case(16, dtype=dtype, sizes=sizes)
    weights_TA, *matrices = rest
    with use_backend(backend):
        y_TL = experts_tile(latent_TL, experts_TA, *rest)
    other_TL, other_TA, (other_weights_TA, *_) = case(16, dtype=dtype, sizes=sizes, seed=1)
    for row in range(16):
        mine = torch.arange(16) == row
        changed = [torch.where(mine[:, None], a, b) for a, b in ((latent_TL, other_TL), (weights_TA, other_weights_TA))]
        for company_TA in (other_TA, torch.full_like(experts_TA, -1), experts_TA[row].expand(16, -1)):
            chosen_TA = torch.where(mine[:, None], experts_TA, company_TA)
            with use_backend(backend):
                got_TL = experts_tile(changed[0], chosen_TA, changed[1], *matrices)
            assert torch.equal(got_TL[row], y_TL[row])


def test_unused_rows_of_a_tile_are_zero_whatever_they_hold():
    latent_TL, experts_TA, (weights_TA, *matrices) = case(8)
    y_TL = experts_tile(latent_TL, experts_TA, weights_TA, *matrices)
    unused = torch.tensor([1, 6, 7])
    latent_TL[unused], weights_TA[unused], experts_TA[unused] = math.nan, math.nan, -1
    for backend in (*BACKENDS, *(["native"] if cpu.missing is None else [])):
        with use_backend(backend):
            got_TL = experts_tile(latent_TL, experts_TA, weights_TA, *matrices)
        assert (got_TL[unused] == 0).all()
        used = ~torch.isin(torch.arange(8), unused)
        torch.testing.assert_close(got_TL[used], y_TL[used], rtol=1e-4, atol=1e-4)


def test_hidden_is_situ_of_w1_as_gate_and_w3_as_up():
    latent_TL, _, (_, w1, w3, w2) = case(5, dtype=torch.float64)
    everyone = torch.zeros(5, 1, dtype=torch.int64)
    y_TL = experts(latent_TL, everyone, torch.ones(5, 1).double(), w1, w3, w2, bound=1e6, up_bound=1e6)
    want_TL = (F.silu(latent_TL @ w1[0].T) * (latent_TL @ w3[0].T)) @ w2[0].T
    torch.testing.assert_close(y_TL, want_TL, rtol=1e-8, atol=1e-8)


def test_bad_input_is_named():
    latent_TL, experts_TA, (weights_TA, w1, w3, w2) = case(4)
    with pytest.raises(ValueError, match=r"experts: w2 is \(7, 5, 6\), got \(7, 6, 5\)"):
        experts(latent_TL, experts_TA, weights_TA, w1, w3, w2.mT)
    with pytest.raises(ValueError, match="experts: w3 has the latent's dtype torch.float32, got torch.bfloat16"):
        experts(latent_TL, experts_TA, weights_TA, w1, w3.bfloat16(), w2)
    with pytest.raises(ValueError, match=r"experts: experts and weights are \(4, A\), got \(4, 3\) and \(4, 2\)"):
        experts(latent_TL, experts_TA, weights_TA[:, :2], w1, w3, w2)
    with pytest.raises(
        ValueError, match=r"experts: wanted at least one expert of each token, got \(4, 0\) of \(7, 6, 5\)"
    ):
        experts(latent_TL, experts_TA[:, :0], weights_TA[:, :0], w1, w3, w2)
    with pytest.raises(ValueError, match="experts: expert ids are int64, got torch.int32"):
        experts(latent_TL, experts_TA.int(), weights_TA, w1, w3, w2)
    with pytest.raises(ValueError, match="experts: the weights are torch.float32, got torch.bfloat16"):
        experts(latent_TL, experts_TA, weights_TA.bfloat16(), w1, w3, w2)
    for op, wrong in ((experts, -1), (experts, 7), (experts_tile, -2), (experts_tile, 7)):
        ids_TA = experts_TA.clone()
        ids_TA[2, 1] = wrong
        with pytest.raises(
            ValueError, match=f"{op.__name__}: expert ids are {'0' if op is experts else '-1'} to 6, got {wrong}"
        ):
            op(latent_TL, ids_TA, weights_TA, w1, w3, w2)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("T", [1, 2, 5, 15, 16, 17, 64, 150])
def test_a_later_token_changes_no_earlier_bit(T, backend):
    generator = torch.Generator().manual_seed(0)
    E, A, L, width = 12, 3, 40, 24

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    latent_TL, w1, w3, w2 = normal(200, L), normal(E, width, L), normal(E, width, L), normal(E, L, width)
    chosen = route(normal(200, E), torch.zeros(E), A)
    # and when all later tokens crowd onto one expert, so that another way of multiplying is taken
    crowd_TA = torch.cat([chosen.experts_TA[:T], torch.arange(A).expand(200 - T, A)])
    with use_backend(backend):
        whole = experts(latent_TL, chosen.experts_TA, chosen.weights_TA, w1, w3, w2)
        head = experts(latent_TL[:T], chosen.experts_TA[:T], chosen.weights_TA[:T], w1, w3, w2)
        crowded = experts(latent_TL, crowd_TA, chosen.weights_TA, w1, w3, w2)
    assert torch.equal(head, whole[:T])
    assert torch.equal(crowded[:T], whole[:T])


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("T", [5, 40, 400])  # segments, then padded
def test_an_expert_without_tokens_has_no_gradient_even_if_its_weights_are_nan(T, backend):
    generator = torch.Generator().manual_seed(0)
    w1, w3, w2 = (torch.randn(s, generator=generator) for s in ((6, 12, 16), (6, 12, 16), (6, 16, 12)))
    for w in (w1, w3, w2):
        w[5] = torch.nan
        w.requires_grad_()
    experts_TA = torch.rand(T, 5, generator=generator).argsort(-1)[:, :2].sort(-1).values
    latent_TL = torch.randn(T, 16, generator=generator)
    with use_backend(backend):
        y_TL = experts(latent_TL, experts_TA, torch.full((T, 2), 0.5), w1, w3, w2)
    y_TL.sum().backward()
    assert y_TL.isfinite().all()
    for w in (w1, w3, w2):
        assert (w.grad[5] == 0).all() and w.grad[:5].isfinite().all()
