import pytest
import torch

from trivium.ops import cpu
from trivium.ops.backend import use_backend
from trivium.ops.newton_schulz import orthogonalise

BACKENDS = ["torch", pytest.param("native", marks=pytest.mark.skipif(cpu.missing is not None, reason=str(cpu.missing)))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 2, 3), (1, 1, 1), (3, 7, 7), (2, 5, 33), (1, 70, 131)])
def test_equals_the_reference(backend, shape):
    stack_NOI = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with use_backend("reference"):
        want_NOI = orthogonalise(stack_NOI)
    with use_backend(backend):
        got_NOI = orthogonalise(stack_NOI)
    torch.testing.assert_close(got_NOI, want_NOI, rtol=0, atol=2e-5)  # five steps of other roundings, values below 1.2


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_stays_zero_and_a_turned_stack_is_not_changed(backend):
    stack_NIO = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))
    stack_NIO[1] = 0
    before_NIO = stack_NIO.clone()
    with use_backend(backend):
        out_NOI = orthogonalise(stack_NIO.mT)
    assert torch.equal(stack_NIO, before_NIO)
    assert torch.equal(out_NOI[1], torch.zeros(4, 6))
    assert float(torch.linalg.matrix_norm(out_NOI[0], 2)) < 1.25


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
