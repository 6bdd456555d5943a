import math

import numpy as np
import pytest
import torch

from trivium.ops import cpu
from trivium.ops.backend import use_backend
from trivium.ops.newton_schulz import orthogonalise
from trivium.ops.newton_schulz.reference import COEFFICIENTS

BACKENDS = ["torch", pytest.param("native", marks=pytest.mark.skipif(cpu.missing is not None, reason=str(cpu.missing)))]
ALL_BACKENDS = ["reference", *BACKENDS]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 2, 3), (1, 1, 1), (3, 7, 7), (2, 5, 33), (1, 70, 131)])
def test_equals_the_reference(backend, shape):
    stack_NOI = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with use_backend("reference"):
        want_NOI = orthogonalise(stack_NOI)
    with use_backend(backend):
        got_NOI = orthogonalise(stack_NOI)
    torch.testing.assert_close(got_NOI, want_NOI, rtol=0, atol=1e-4)  # roundings of 1e-7 grow up to 690 times


def best_quintic(low, high):
    """(a, b, c) whose largest |a·x + b·x³ + c·x⁵ − 1| on [low, high] is smallest: Remez, equal errors at four points."""
    inner, error = np.array([(3 * low + high) / 4, (low + 3 * high) / 4]), math.inf
    while True:
        x = np.array([low, *inner, high])
        before = error
        a, b, c, error = np.linalg.solve(np.stack([x, x**3, x**5, np.array([1, -1, 1, -1])], axis=1), np.ones(4))
        if abs(error - before) < 1e-15:
            return a, b, c
        inner = np.sqrt((-3 * b + np.array([-1, 1]) * math.sqrt(9 * b * b - 20 * a * c)) / (10 * c))


def test_the_steps_are_the_greedy_best_of_their_ranges():
    low, high = 2e-3, 1.0
    for step in COEFFICIENTS:
        a, b, c = best_quintic(max(low, 0.02 * high), 1.01 * high)
        flat = [x for x in np.sqrt(np.roots([5 * c, 3 * b, a])) if low < x < high]
        made = [a * x + b * x**3 + c * x**5 for x in (low, high, *flat)]
        even = 2 / (min(made) + max(made))
        assert step == pytest.approx((even * a, even * b, even * c), rel=1e-9)
        low, high = even * min(made), even * max(made)
    assert (low, high) == pytest.approx((0.97259, 1.02741), abs=1e-5)
    assert math.prod(a for a, _, _ in COEFFICIENTS) < 690


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_singular_values_end_where_promised(backend):
    values = torch.tensor([0.9, 0.4, 0.17, 0.05, 0.013, 0.004, 0.0021, 0.0005, 0.0])  # norm 1.0004
    u, _ = torch.linalg.qr(torch.randn(9, 9, generator=torch.Generator().manual_seed(0)))
    v, _ = torch.linalg.qr(torch.randn(20, 20, generator=torch.Generator().manual_seed(1)))
    with use_backend(backend):
        turned = u.T @ orthogonalise((u @ torch.diag(values) @ v[:9])[None])[0] @ v[:9].T
    ends = turned.diagonal()
    assert ((ends[:7] > 0.9725) & (ends[:7] < 1.0275)).all()
    assert 0.25 < ends[7] < 0.345  # 0.0005 · 690
    torch.testing.assert_close(turned, torch.diag(ends), rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1), (3, 29), (16, 16), (17, 40), (33, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_of_rank_one_does_not_run_away(shape, dtype):
    # Its one singular value is the whole norm, where a quintic made for [0, 1] alone is at its end: one rounding above it
    # and five steps gave inf. With all entries alike the roundings all point one way. Of the kind: low ranks, below.
    ramps = torch.outer(torch.arange(1.0, shape[0] + 1), torch.arange(1.0, shape[1] + 1))
    for matrix in (torch.ones(shape), ramps):
        for backend in ("reference", "torch"):
            with use_backend(backend):
                made = orthogonalise(matrix.to(dtype)[None])[0].float()
            largest = torch.linalg.matrix_norm(made, 2)
            assert 0.95 < largest < 1.04, (backend, largest)  # ones: 0.963 to 1.033 over all shapes up to 33 x 65


def test_low_ranks_in_bfloat16_stay_near_one():
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        num_out, rank = 2 + seed, 1 + seed % 2
        factors = torch.randn(num_out, rank, generator=generator), torch.randn(rank, 2 * num_out, generator=generator)
        made = orthogonalise((factors[0] @ factors[1]).bfloat16()[None])[0].float()
        assert torch.linalg.matrix_norm(made, 2) < 1.04


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_stays_zero_and_a_turned_stack_is_not_changed(backend):
    stack_NIO = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))
    stack_NIO[1] = 0
    before_NIO = stack_NIO.clone()
    with use_backend(backend):
        out_NOI = orthogonalise(stack_NIO.mT)
    assert torch.equal(stack_NIO, before_NIO)
    assert torch.equal(out_NOI[1], torch.zeros(4, 6))
    assert float(torch.linalg.matrix_norm(out_NOI[0], 2)) < 1.0275


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_matrix_that_is_not_finite_spoils_no_other(backend, bad):
    stack_NOI = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(3))
    with use_backend(backend):
        want_NOI = orthogonalise(stack_NOI)
        stack_NOI[1, 2, 3] = bad
        got_NOI = orthogonalise(stack_NOI)
    assert torch.equal(got_NOI[::2], want_NOI[::2]) and not got_NOI[1].isfinite().all()


@pytest.mark.skipif(cpu.missing is not None, reason=str(cpu.missing))
def test_threads_and_the_place_in_the_stack_change_no_bit():
    stack_NOI = torch.randn(5, 20, 50, generator=torch.Generator().manual_seed(2))
    torch.set_num_threads(2)
    out_NOI = orthogonalise(stack_NOI)
    torch.set_num_threads(1)
    assert torch.equal(orthogonalise(stack_NOI), out_NOI)
    assert torch.equal(orthogonalise(stack_NOI[3:4])[0], out_NOI[3])
    torch.library.opcheck(torch.ops.trivium.newton_schulz.default, (stack_NOI,))


def test_a_tall_matrix_is_refused():
    with pytest.raises(ValueError, match=r"newton_schulz: .* got \(1, 3, 2\)"):
        orthogonalise(torch.zeros(1, 3, 2))
