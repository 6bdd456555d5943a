import pytest
import torch

from trivium.ops.newton_schulz import orthogonalise
from trivium.train.muon import Muon, update_scale


def random_weights(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def run(optimiser, weights, num_steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimiser.step()
    return [weight.detach().clone() for weight in weights]


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (24, 6)])
def test_five_steps_are_those_of_torch(shape):
    ours, theirs = random_weights(shape), random_weights(shape)
    start = ours[0].detach().clone()
    got = run(Muon(ours, 0.1, weight_decay=0.01, ns_dtype=torch.bfloat16), ours, 5)[0]
    want = run(torch.optim.Muon(theirs, lr=0.1, weight_decay=0.01, momentum=0.95), theirs, 5)[0]
    # Both in bfloat16 (8 bits), products summed in another order: measured up to 6e-3 of the way gone.
    assert (got - want).norm() <= 2e-2 * (want - start).norm()


def test_a_stack_is_its_matrices_one_by_one():
    stack = random_weights((3, 6, 4))[0]
    alone = [matrix.clone().requires_grad_() for matrix in stack.detach()]
    optimisers = [Muon([stack], 0.1), *(Muon([matrix], 0.1) for matrix in alone)]
    for grad in torch.randn(3, 3, 6, 4, generator=torch.Generator().manual_seed(1)):
        stack.grad = grad
        for matrix, matrix_grad in zip(alone, grad, strict=True):
            matrix.grad = matrix_grad.clone()
        for optimiser in optimisers:
            optimiser.step()
    torch.testing.assert_close(stack.detach(), torch.stack(alone).detach(), rtol=1e-5, atol=1e-6)


def test_shapes_in_one_batch_do_not_touch_one_another():
    shapes = [(6, 4), (4, 6), (2, 6, 4), (5, 5), (6, 4)]
    together = random_weights(*shapes)
    alone = random_weights(*shapes)
    run(Muon(together, 0.1), together, 2)
    generator = torch.Generator().manual_seed(1)
    optimisers = [Muon([weight], 0.1) for weight in alone]
    for _ in range(2):
        for weight, optimiser in zip(alone, optimisers, strict=True):
            weight.grad = torch.randn(weight.shape, generator=generator)
            optimiser.step()
    for got, want in zip(together, alone, strict=True):
        torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-5, atol=1e-6)


def test_singular_values_end_near_one_and_vectors_stay():
    u, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
    v, _ = torch.linalg.qr(torch.randn(9, 9, generator=torch.Generator().manual_seed(1)))
    stretched = u @ torch.diag(torch.tensor([5.0, 1.0, 0.2, 0.05])) @ v[:4]
    turned = u.T @ orthogonalise(stretched[None])[0] @ v[:4].T
    values = turned.diagonal()
    assert ((values > 0.65) & (values < 1.25)).all()
    torch.testing.assert_close(turned, torch.diag(values), rtol=0, atol=1e-5)


def test_a_zero_gradient_moves_nothing():
    weight = random_weights((2, 4, 3))[0]
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    weight.grad[1] = 1.0
    Muon([weight], 0.1).step()
    assert torch.equal(weight[0], before[0]) and not torch.equal(weight[1], before[1])


def test_the_scale_is_that_of_the_whole_matrix():
    assert [update_scale(64, 256), update_scale(256, 256), update_scale(1024, 256)] == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("shape", [(7,), (1, 7), (7, 1), (7, 1, 4)])
def test_vectors_are_refused(shape):
    with pytest.raises(ValueError, match="^muon: wanted matrices .* with both sides above 1, got "):
        Muon(random_weights(shape))
