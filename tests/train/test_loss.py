import math

import pytest
import torch
from torch.nn import functional as F

from trivium.ops.backend import use_backend
from trivium.ops.cross_entropy import blocks as blocks_file
from trivium.train.loss import bits_per_byte, cross_entropy, token_nll


def random_case(num_tokens, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden_TD = torch.randn(num_tokens, 6, generator=generator, dtype=dtype).requires_grad_()
    head_WD = torch.randn(11, 6, generator=generator, dtype=dtype).requires_grad_()
    targets_T = torch.randint(11, (num_tokens,), generator=generator)
    weight_T = torch.rand(num_tokens, generator=generator, dtype=dtype)
    weight_T[::3] = 0
    return hidden_TD, head_WD, targets_T, weight_T


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 13])  # on both sides of a block of 4, and more than one
def test_loss_and_gradients_are_those_of_whole_logits(num_tokens, monkeypatch):
    monkeypatch.setattr(blocks_file, "BLOCK", 4)
    hidden_TD, head_WD, targets_T, weight_T = random_case(num_tokens, torch.float32)
    with use_backend("torch"):
        got = 3 * cross_entropy(hidden_TD, head_WD, targets_T, weight_T)
    got_grads = torch.autograd.grad(got, (hidden_TD, head_WD))
    nll_T = F.cross_entropy(hidden_TD @ head_WD.T, targets_T, reduction="none")
    want = 3 * (weight_T * nll_T).sum()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)  # float32, sums in another order
    for grad, want_grad in zip(got_grads, torch.autograd.grad(want, (hidden_TD, head_WD)), strict=True):
        torch.testing.assert_close(grad, want_grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(token_nll(hidden_TD, head_WD, targets_T), nll_T.detach(), rtol=1e-5, atol=1e-6)


def test_a_frozen_head_gets_no_gradient():
    hidden_TD, head_WD, targets_T, weight_T = random_case(5, torch.float32)
    cross_entropy(hidden_TD, head_WD.detach().requires_grad_(False), targets_T, weight_T).backward()
    assert hidden_TD.grad is not None and head_WD.grad is None


def test_equal_logits_cost_the_log_of_the_vocabulary():
    nll_T = token_nll(torch.ones(3, 2), torch.ones(4096, 2), torch.tensor([0, 7, 4095]))
    assert nll_T.tolist() == pytest.approx([math.log(4096)] * 3)


def test_a_bit_for_every_bit_is_eight_bits_per_byte():
    # 256 equally likely bytes: ln 256 nats each.
    assert bits_per_byte(10 * math.log(256), 10) == pytest.approx(8)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"^loss: wanted hidden \[T, D\], .* got \(3, 2\), \(5, 4\) and \(3,\)$"):
        cross_entropy(torch.ones(3, 2), torch.ones(5, 4), torch.zeros(3, dtype=torch.int64), torch.ones(3))
    with pytest.raises(ValueError, match=r"^loss: \(2,\) weights for \(3,\) targets$"):
        cross_entropy(torch.ones(3, 2), torch.ones(5, 2), torch.zeros(3, dtype=torch.int64), torch.ones(2))
    with pytest.raises(ValueError, match="^bits per byte: wanted a text of at least one byte, got 0$"):
        bits_per_byte(1.0, 0)


def test_a_target_without_weight_may_be_any_number():
    generator = torch.Generator().manual_seed(0)
    hidden_TD, head_WD = torch.randn(4, 3, generator=generator), torch.randn(7, 3, generator=generator)
    weight_T = torch.tensor([1.0, 0.0, 2.0, 0.0])
    results = []
    for ignored in (-100, 5):
        leaves = [hidden_TD.clone().requires_grad_(), head_WD.clone().requires_grad_()]
        loss = cross_entropy(*leaves, torch.tensor([6, ignored, 0, ignored]), weight_T)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
