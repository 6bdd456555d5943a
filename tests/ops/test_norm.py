"""RMSNorm, RMSNorm with a gate, a gate alone: by hand, against the reference with all gradients, and their bits."""

import math

import pytest
import torch

from trivium.ops import cpu
from trivium.ops.backend import use_backend
from trivium.ops.norm import gated_rms_norm, rms_norm, sigmoid_gate
from trivium.ops.norm.native import gated_rms_norm_native, rms_norm_native, sigmoid_gate_native

native = pytest.mark.skipif(cpu.missing is not None, reason=str(cpu.missing))
ALL = ["reference", "torch", pytest.param("native", marks=native)]
OPS = {
    "rms_norm": lambda x, gate, weight: rms_norm(x, weight, 1e-5),
    "gated_rms_norm": lambda x, gate, weight: gated_rms_norm(x, gate, weight, 1e-5),
    "sigmoid_gate": lambda x, gate, weight: sigmoid_gate(x, gate),
}


def case(shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    gate = 20 * torch.randn(*shape, generator=generator, dtype=torch.float64)  # shut, open, and in between
    weight = torch.randn(shape[-1], generator=generator, dtype=torch.float64)
    return [t.to(dtype).requires_grad_() for t in (x, gate, weight)]


@pytest.mark.parametrize("backend", ALL)
def test_rms_norm_by_hand(backend):
    # mean square 12.5, and eps as much: the root of 25 is 5
    with use_backend(backend):
        y = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, -1.0]), 12.5)
    torch.testing.assert_close(y, torch.tensor([[1.2, -0.8]]))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_rms_norm_rounds_before_the_weight(backend):
    # 4 / sqrt(12.5) = 1.13137 is 1.1328125 in bfloat16; 7 times that is 7.9297, between 7.90625 and 7.9375.
    # Seven times 1.13137 is 7.9196 and would round to 7.90625.
    with use_backend(backend):
        y = rms_norm(torch.tensor([4.0, 3.0]).bfloat16(), torch.tensor([7.0, 1.0]).bfloat16(), 1e-5)
    assert y[0].item() == 7.9375


@pytest.mark.parametrize("backend", ALL)
def test_gated_rms_norm_by_hand(backend):
    # two heads normed apart, each (3, 4) / 5 and (4, 3) / 5 at eps 12.5; sigmoid(ln 3) = 3/4, sigmoid(-ln 3) = 1/4
    o_THV = torch.tensor([[[3.0, 4.0], [8.0, 6.0]]])
    gate_THV = math.log(3) * torch.tensor([[[1.0, -1.0], [-1.0, 1.0]]])
    with use_backend(backend):
        y_THV = gated_rms_norm(o_THV, gate_THV, torch.tensor([10.0, 20.0]), 12.5)
    root = math.sqrt(62.5)
    want = [[[6.0 * 0.75, 16.0 * 0.25], [80 / root * 0.25, 120 / root * 0.75]]]
    torch.testing.assert_close(y_THV, torch.tensor(want))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_the_gated_norm_rounds_once_at_the_end(backend):
    # float32 throughout: in bfloat16 the norm alone would be 1.1328125, and times 7 and 1/2 be 3.96875
    o = torch.tensor([[[4.0, 3.0]]]).bfloat16()
    with use_backend(backend):
        y = gated_rms_norm(o, torch.zeros(1, 1, 2).bfloat16(), torch.tensor([7.0, 1.0]), 0.0)
    assert y.dtype == torch.bfloat16 and y[0, 0, 0].item() == 3.953125  # 3.95980 between 3.953125 and 3.96875


@pytest.mark.parametrize("backend", ALL)
def test_the_gate_by_hand(backend):
    with use_backend(backend):
        y = sigmoid_gate(torch.tensor([8.0, 8.0]), math.log(3) * torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(y, torch.tensor([6.0, 2.0]))


@pytest.mark.parametrize("op", OPS)
def test_torch_is_the_reference_with_its_gradients(op):
    args = case((3, 2, 5), dtype=torch.float64)
    with use_backend("reference"):
        want = OPS[op](*args)
    torch.testing.assert_close(OPS[op](*args), want)
    assert torch.autograd.gradcheck(OPS[op], args)


@native
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 5), (7, 3, 64), (300, 192), (65, 512), (2, 3, 0)])
def test_native_is_the_reference_with_its_gradients(op, shape):
    results = []
    for backend, dtype in (("reference", torch.float64), ("native", torch.float32)):
        args = [x.detach().to(dtype).requires_grad_() for x in case(shape)]
        with use_backend(backend):
            y = OPS[op](*args)
        direction = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        results.append([y.detach(), *torch.autograd.grad(y, args, direction, allow_unused=True)])
    for want, got in zip(*results, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)  # sums of up to 300 rows


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("op", ["gated_rms_norm", "sigmoid_gate"])
def test_a_saturated_gate_keeps_its_gradient(op, backend):
    # sigmoid'(40) = e^-40 = 4.2e-18, where y (1 - y) is 0; torch.sigmoid's own backward is y (1 - y)
    x, gate, weight = torch.full((1, 1), 2.0), torch.full((1, 1), 40.0, requires_grad=True), torch.ones(1)
    with use_backend(backend):
        OPS[op](x, gate, weight).sum().backward()
    if backend == "reference":
        assert gate.grad.item() == 0.0
    else:
        assert gate.grad.item() == pytest.approx((1 if op == "gated_rms_norm" else 2) * math.exp(-40), rel=1e-5)


@native
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("D", [7, 64, 200])
def test_bits_do_not_depend_on_other_rows_nor_on_threads(op, D):
    args = case((1500, D))
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        with use_backend("native"):
            y = OPS[op](*args)
            results.append([y, *torch.autograd.grad(y, args, args[0].detach(), allow_unused=True)])
    assert all(one is two or torch.equal(one, two) for one, two in zip(*results, strict=True))
    for row in (0, 1, 1499):
        with use_backend("native"):
            alone = OPS[op](*(x[row : row + 1] for x in args[:2]), args[2])
        assert torch.equal(alone[0], results[0][0][row])


@native
def test_native_is_registered_whole():
    x, gate, weight = case((5, 7))
    torch.library.opcheck(rms_norm_native.registered, (x, weight, 1e-5))
    torch.library.opcheck(gated_rms_norm_native.registered, (x, gate, weight, 1e-5))
    torch.library.opcheck(sigmoid_gate_native.registered, (x, gate))


def test_wrong_shapes_are_named():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"rms_norm: weight wants shape \(3,\), got \(4,\)"):
        rms_norm(x, torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match=r"gated_rms_norm: gate wants shape \(2, 3\), got \(3,\)"):
        gated_rms_norm(x, torch.ones(3), torch.ones(3), 1e-5)
    with pytest.raises(ValueError, match=r"sigmoid_gate: gate wants shape \(2, 3\), got \(2, 1\)"):
        sigmoid_gate(x, torch.ones(2, 1))


@pytest.mark.skipif(cpu.missing is not None, reason=str(cpu.missing))
def test_torchs_default_dtype_is_not_ours():
    x_TD, weight_D = torch.randn(5, 9), torch.randn(9)
    want_TD = rms_norm(x_TD, weight_D, 1e-5)
    torch.set_default_dtype(torch.float64)
    try:
        got_TD = rms_norm(x_TD, weight_D, 1e-5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got_TD.dtype == torch.float32 and torch.equal(got_TD, want_TD)
