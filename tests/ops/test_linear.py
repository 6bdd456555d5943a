import os
import subprocess
import sys

import pytest
import torch

from trivium.ops import cpu
from trivium.ops.backend import use_backend
from trivium.ops.linear import linear

native = pytest.mark.skipif(cpu.missing is not None, reason=str(cpu.missing))
# Around the tile (6 or 14 rows, 8 to 32 columns) and the block of 512 of the inner dimension.
SHAPES = [(0, 3, 4), (1, 1, 1), (5, 33, 7), (14, 32, 512), (15, 65, 513), (37, 6, 600), (200, 1030, 16), (3, 4, 0)]


def random_case(shape):
    T, N, D = shape
    generator = torch.Generator().manual_seed(T + N + D)
    return torch.randn(T, D, generator=generator), torch.randn(N, D, generator=generator)


@native
@pytest.mark.parametrize("shape", SHAPES)
def test_native_equals_float64_with_gradients(shape):
    inputs = [x.requires_grad_() for x in random_case(shape)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    for pair in (inputs, wide):
        linear(*pair).sin().sum().backward()
    torch.testing.assert_close(linear(*inputs), linear(*wide).float(), rtol=1e-5, atol=1e-4)
    for x, want in zip(inputs, wide, strict=True):
        torch.testing.assert_close(x.grad, want.grad.float(), rtol=1e-4, atol=1e-3)  # sums of up to 1,030 terms


@native
def test_a_row_has_the_same_bits_alone_anywhere_and_on_any_number_of_threads():
    x_TD, weight = random_case((61, 300, 530))
    torch.set_num_threads(2)
    y_TN = linear(x_TD, weight)
    torch.set_num_threads(1)
    assert torch.equal(linear(x_TD, weight), y_TN)
    for t in (0, 7, 60):
        assert torch.equal(linear(x_TD[t : t + 1], weight)[0], y_TN[t])
    assert torch.equal(linear(x_TD[3:40], weight), y_TN[3:40])
    assert torch.equal(linear(x_TD, weight[17:90]), y_TN[:, 17:90])


@native
def test_weights_side_by_side_equal_each_alone_with_gradients():
    x_TD, weight = (x.requires_grad_() for x in random_case((11, 30, 17)))
    parts = weight.split([1, 20, 9])
    d_TN = torch.randn(11, 30)
    together = linear(x_TD, *parts)
    alone = torch.cat([linear(x_TD, part) for part in parts], dim=-1)
    assert torch.equal(together, alone)
    for y_TN in (together, alone):
        y_TN.backward(d_TN, retain_graph=True)
    torch.testing.assert_close(x_TD.grad, 2 * d_TN @ weight.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad, 2 * d_TN.T @ x_TD.detach(), rtol=1e-5, atol=1e-5)


@native
def test_gradients_do_not_depend_on_the_number_of_threads():
    x_TD, weight = (x.requires_grad_() for x in random_case((300, 130, 70)))
    found = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        found.append(torch.autograd.grad(linear(x_TD, weight).sin().sum(), (x_TD, weight)))
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


@native
def test_the_registration_holds():
    x_TD, weight = (x.requires_grad_() for x in random_case((5, 6, 7)))
    torch.library.opcheck(torch.ops.trivium.linear.default, (x_TD, [weight, weight]))
    compiled = torch.compile(lambda x_TD, weight: linear(x_TD, weight) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x_TD, weight), linear(x_TD, weight) * 2)


@native
@pytest.mark.parametrize("leading", [(), (2, 3), (0,)])
def test_leading_dims_and_strides_may_be_any(leading):
    x = torch.randn(7, *leading).movedim(0, -1)
    weight = torch.randn(7, 5).T
    torch.testing.assert_close(linear(x, weight), x @ weight.T, rtol=1e-5, atol=1e-5)


def test_other_dtypes_go_to_torch_and_forced_native_refuses_them():
    x, weight = torch.ones(2, 3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
    assert torch.equal(linear(x, weight), torch.full((2, 4), 3.0, dtype=torch.float64))
    with use_backend("native"), pytest.raises(ValueError, match="linear: has no 'native' backend for these tensors"):
        linear(x, weight)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.ones(2, 3), torch.ones(4, 2), r"weight \(4, 2\) wants x \[.., 2\], got \(2, 3\)"),
        (torch.ones(2, 3), torch.ones(3), r"got \(2, 3\)"),
        (torch.ones(2, 3), torch.ones(4, 3).double(), "one dtype"),
    ],
)
def test_what_does_not_fit_is_named(x, weight, message):
    with pytest.raises(ValueError, match=message):
        linear(x, weight)


@native
@pytest.mark.parametrize("isa", ["plain", "avx2"])
def test_every_instruction_set_below_the_best_can_be_asked_for(isa):
    if list(cpu.ISA_FLAGS).index(isa) < list(cpu.ISA_FLAGS).index(cpu.isa):
        pytest.skip(f"this CPU runs {cpu.isa}, not {isa}")
    code = "import torch; from trivium.ops import cpu; from trivium.ops.linear import linear; print(cpu.isa)\n"
    code += "x, w = torch.randn(37, 300), torch.randn(45, 300); torch.testing.assert_close(linear(x, w), x @ w.T, rtol=1e-5, atol=1e-4)"
    environment = {**os.environ, "TRIVIUM_ISA": isa}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, isa), done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [("TRIVIUM_NATIVE", "0", "None"), ("TRIVIUM_ISA", "mmx", "wanted one of avx512, avx2, plain, got 'mmx'")],
)
def test_the_environment_can_turn_the_kernels_off_and_a_wrong_name_is_an_error(variable, value, message):
    if variable == "TRIVIUM_ISA" and cpu.missing:
        pytest.skip(cpu.missing)
    done = subprocess.run(
        [sys.executable, "-c", "from trivium.ops import cpu; print(cpu.isa)"],
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert message in done.stdout + done.stderr
