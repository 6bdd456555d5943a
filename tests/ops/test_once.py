import pytest
import torch

from trivium.ops.once import once_differentiable


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x)
        return x**3 + y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad, None


def test_first_derivatives_are_as_ever_and_second_ones_raise():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (grad,) = torch.autograd.grad(_Cube.apply(x, x.detach()).sum(), x)
    assert grad.tolist() == [3.0, 12.0] and not grad.requires_grad
    (grad,) = torch.autograd.grad(_Cube.apply(x, x.detach()).sum(), x, create_graph=True)
    assert grad.tolist() == [3.0, 12.0]
    with pytest.raises(RuntimeError, match="^Cube: its gradient has no gradient, a second derivative was asked for$"):
        (grad.square().sum() + x.sum()).backward()
