"""SiTU: its definition, its bound, its slope at zero, its limit SwiGLU, and its gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.backend import use_backend
from trivium.ops.sigmoid import sigmoid
from trivium.ops.situ import situ
from trivium.ops.situ.native import situ_backward, situ_native

BACKENDS = ("reference", "torch")
BUILT = pytest.mark.skipif(cpu.missing is not None, reason=f"native: {cpu.missing}")
FAST = ("torch", pytest.param("native", marks=BUILT))
ALL = ("reference", *FAST)


def gate_and_up(*shape: int, seed: int = 0, spread: float = 6.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [(spread * torch.randn(shape, generator=draw, dtype=torch.float64)).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("backend", ALL)
def test_one_value_by_hand(backend):
    # gate 4, up 25: 4·tanh(1)·sigmoid(4) · 25·tanh(1)
    want = 4 * math.tanh(1) * (1 / (1 + math.exp(-4))) * 25 * math.tanh(1)
    with use_backend(backend):
        assert situ(torch.tensor([4.0]), torch.tensor([25.0])).item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 33), (0, 4)])
def test_fused_equals_the_definition_with_its_gradients(shape, fast):
    weight = torch.linspace(0.5, 1.5, math.prod(shape), dtype=torch.float64).reshape(shape)
    results = []
    for backend, dtype in (("reference", torch.float64), (fast, torch.float32)):
        gate, up = (x.to(dtype).requires_grad_() for x in gate_and_up(*shape))
        with use_backend(backend):
            y = situ(gate, up, bound=3.0, up_bound=11.0)
        results.append((y, *torch.autograd.grad((y * weight).sum(), (gate, up))))
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-5)  # 1 - tanh² cancels near the bound


@BUILT
def test_native_keeps_the_digits_where_the_activation_saturates():
    # gates on both sides of where exp(-|x|) is 0 in float32 (87.3), ups on both sides of the polynomial's end (15.6)
    gate, up = torch.cartesian_prod(torch.linspace(-80, 80, 641), torch.linspace(-70, 70, 281)).unbind(1)
    a, s, c = torch.tanh(gate.double() / 4), torch.sigmoid(gate.double()), torch.tanh(up.double() / 25)
    a_slope, c_slope = (1 / torch.cosh(x.double()) ** 2 for x in (gate / 4, up / 25))
    rest = torch.sigmoid(-gate.double())
    want = [100 * a * s * c, 25 * c * s * (a_slope + 4 * a * rest), 4 * a * s * c_slope]
    got = [situ_native(gate, up, 4.0, 25.0), *situ_backward(torch.ones_like(gate), gate, up, 4.0, 25.0)]
    for mine, exact in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=5e-6, atol=1e-30)  # float32, some roundings


@BUILT
def test_native_bits_depend_on_the_element_alone():
    gate, up = gate_and_up(20000)
    d_gate, d_up = situ_backward(gate, gate, up, 4.0, 25.0)
    y = situ_native(gate, up, 4.0, 25.0)
    torch.set_num_threads(2)
    assert torch.equal(situ_native(gate, up, 4.0, 25.0), y)
    for start, length in ((0, 1), (3, 5), (17, 33), (8190, 100)):
        part = slice(start, start + length)
        assert torch.equal(situ_native(gate[part], up[part], 4.0, 25.0), y[part])
        parts = situ_backward(gate[part], gate[part], up[part], 4.0, 25.0)
        assert torch.equal(parts[0], d_gate[part]) and torch.equal(parts[1], d_up[part])


@BUILT
def test_the_custom_ops_hold_to_their_contract():
    gate, up = (x.requires_grad_() for x in gate_and_up(3, 7))
    torch.library.opcheck(situ_native.registered, (gate, up, 4.0, 25.0))
    torch.library.opcheck(situ_backward.registered, (up.detach(), gate.detach(), up.detach(), 4.0, 25.0))


def test_gradients_in_float64():
    gate, up = (x.requires_grad_() for x in gate_and_up(4, 5, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda g, u: situ(g, u, bound=2.0, up_bound=5.0), (gate, up))


@pytest.mark.parametrize("backend", ALL)
def test_never_above_the_product_of_the_bounds(backend):
    gate, up = gate_and_up(4096, spread=200.0)
    with use_backend(backend):
        y = situ(gate, up, bound=4.0, up_bound=25.0)
    assert y.abs().max() <= 100.0
    assert y.max() > 99.9 and y.min() < -99.9  # and both ends are reached
    assert situ(torch.tensor([-1e30]), torch.tensor([1.0])).item() == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_slope_at_zero_is_one_half(backend):
    gate = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    up = torch.ones(1, dtype=torch.float64)
    with use_backend(backend):
        (slope,) = torch.autograd.grad(situ(gate, up), gate)
    # d/dgate at 0 = bound·(1/bound)·sigmoid(0) · 25·tanh(1/25)
    assert slope.item() == pytest.approx(0.5 * 25 * math.tanh(1 / 25), rel=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_bounds_give_swiglu(backend):
    gate, up = gate_and_up(300, spread=3.0, dtype=torch.float64)
    with use_backend(backend):
        y = situ(gate, up, bound=1e6, up_bound=1e6)
    torch.testing.assert_close(y, F.silu(gate) * up, rtol=1e-9, atol=1e-12)  # tanh(x/b)·b = x - x³/3b²


@pytest.mark.parametrize("backend", BACKENDS)
def test_sigmoid_sees_the_raw_gate(backend):
    with use_backend(backend):
        low = situ(torch.tensor([-40.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64))
    # a capped sigmoid would leave -4·sigmoid(-4) = -0.07
    assert -4e-17 < low.item() < 0


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("size", [1e4, 1e30, 3e38])
def test_huge_inputs_stay_finite_with_their_gradients(backend, size):
    gate = torch.tensor([size, size, -size, -size, 0.0], requires_grad=True)
    up = torch.tensor([size, -size, size, -size, size], requires_grad=True)
    with use_backend(backend):
        y = situ(gate, up)
    d_gate, d_up = torch.autograd.grad(y.sum(), (gate, up))
    assert y.tolist() == [100.0, -100.0, 0.0, 0.0, 0.0]
    assert d_gate.isfinite().all() and d_up.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_computed_in_float32(dtype):
    gate, up = gate_and_up(257, dtype=dtype)
    y = situ(gate, up)
    assert y.dtype == dtype
    torch.testing.assert_close(y, situ(gate.float(), up.float()).to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("backend", FAST)
def test_saves_gate_and_up_only(backend):
    gate, up = (x.requires_grad_() for x in gate_and_up(8, 16))
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    with use_backend(backend), hooks:
        situ(gate, up)
    assert sorted(x.data_ptr() for x in saved) == sorted([gate.data_ptr(), up.data_ptr()])


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 64])
def test_a_rows_bits_do_not_depend_on_the_other_rows(num_rows, backend):
    gate, up = gate_and_up(64, 37)
    with use_backend(backend):
        alone = torch.cat([situ(g, u) for g, u in zip(gate.split(num_rows), up.split(num_rows), strict=True)])
        assert torch.equal(alone, situ(gate, up))


@pytest.mark.parametrize("num_elements", [1, 3, 15, 17, 33])
def test_sigmoids_bits_depend_on_the_element_alone(num_elements):
    x = gate_and_up(4000, spread=5.0)[0]
    assert torch.equal(torch.cat([sigmoid(part.clone()) for part in x.split(num_elements)]), sigmoid(x))
    torch.testing.assert_close(sigmoid(x), torch.sigmoid(x), rtol=4e-7, atol=0)


def test_sigmoids_gradient_is_exact_where_it_saturates():
    x = torch.tensor([-1e4, -200.0, -60.0, 0.0, 60.0, 200.0], requires_grad=True)
    y = sigmoid(x)
    assert y[0] == 0.0 and y[-1] == 1.0
    (slope,) = torch.autograd.grad(y.sum(), x)
    want = [0.0, 0.0, math.exp(-60), 0.25, math.exp(-60), 0.0]
    torch.testing.assert_close(slope, torch.tensor(want), rtol=1e-5, atol=0)
    assert torch.autograd.gradcheck(sigmoid, torch.linspace(-9, 9, 7, dtype=torch.float64, requires_grad=True))


def test_bad_input_is_named():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"situ: gate and up want one shape, got \(2, 3\) and \(3, 2\)"):
        situ(x, x.T)
    with pytest.raises(
        ValueError, match=r"situ: gate and up want one floating dtype, got torch.float32 and .*bfloat16"
    ):
        situ(x, x.bfloat16())
    with pytest.raises(ValueError, match=r"situ: bounds are positive, got 0.0 and 25.0"):
        situ(x, x, bound=0.0)
