"""Cross-entropy from hidden rows and a head: the definition with its gradients on every backend, and its bits."""

import math

import pytest
import torch

from trivium.ops import cpu
from trivium.ops.backend import use_backend
from trivium.ops.cross_entropy import blocks, cross_entropy, cross_entropy_sum, native

built = pytest.mark.skipif(cpu.missing is not None, reason=str(cpu.missing))
BOTH = ["torch", pytest.param("native", marks=built)]
ALL = ["reference", *BOTH]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 4)
    monkeypatch.setattr(native, "MIN_TOKENS", 1)
    monkeypatch.setattr(native, "MAX_TOKENS", 4)


def case(num_tokens, num_words=11, D=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_tokens)
    hidden_TD = torch.randn(num_tokens, D, generator=generator, dtype=torch.float64)
    weight_WD = torch.randn(num_words, D, generator=generator, dtype=torch.float64)
    targets_T = torch.randint(num_words, (num_tokens,), generator=generator)
    scale_T = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    return hidden_TD.to(dtype).requires_grad_(), weight_WD.to(dtype).requires_grad_(), targets_T, scale_T.to(dtype)


def whole(hidden_TD, weight_WD, targets_T, scale_T):
    """nll_T and both gradients of scale · nll, float64 and from all logits at once."""
    leaves = [x.detach().double().requires_grad_() for x in (hidden_TD, weight_WD)]
    with use_backend("reference"):
        nll_T = cross_entropy(*leaves, targets_T)
    return nll_T.detach(), *torch.autograd.grad(nll_T, leaves, scale_T.double())


@pytest.mark.parametrize("backend", ALL)
def test_two_words_by_hand(backend):
    # logits 0 and ln 3: -log(1/4) and -log(3/4)
    hidden_TD, weight_WD = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3)]])
    with use_backend(backend):
        nll_T = cross_entropy(hidden_TD, weight_WD, torch.tensor([0, 1]))
        total = cross_entropy_sum(hidden_TD, weight_WD, torch.tensor([0, 1]), torch.tensor([1.0, 10.0]))
    torch.testing.assert_close(nll_T, torch.tensor([math.log(4), math.log(4 / 3)]))
    torch.testing.assert_close(total, nll_T[0] + 10 * nll_T[1])


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("size", [(0, 11, 6), (1, 1, 1), (4, 7, 3), (5, 8, 8), (13, 300, 33), (9, 1030, 5)])
def test_both_forms_are_the_definition_with_its_gradients(size, backend):
    hidden_TD, weight_WD, targets_T, scale_T = case(*size)
    want = whole(hidden_TD, weight_WD, targets_T, scale_T)
    leaves = (hidden_TD, weight_WD)
    with use_backend(backend):
        nll_T = cross_entropy(*leaves, targets_T)
        total = cross_entropy_sum(*leaves, targets_T, scale_T)
        by_token = torch.autograd.grad(nll_T, leaves, scale_T)
        by_sum = torch.autograd.grad(3 * total, leaves)
    close = {"rtol": 2e-5, "atol": 2e-6}  # float32, sums in another order
    torch.testing.assert_close(nll_T, want[0].float(), **close)
    torch.testing.assert_close(total, (want[0] @ scale_T.double()).float(), **close)
    for one, summed, wanted in zip(by_token, by_sum, want[1:], strict=True):
        torch.testing.assert_close(one, wanted.float(), **close)
        torch.testing.assert_close(summed, 3 * wanted.float(), **close)


@pytest.mark.parametrize("backend", BOTH)
def test_large_logits_stay_finite(backend):
    hidden_TD = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight_WD = torch.tensor([[1.0], [0.0], [-1.0]])
    with use_backend(backend):
        nll_T = cross_entropy(hidden_TD, weight_WD, torch.tensor([0, 0]))
        nll_T.sum().backward()
    assert nll_T.tolist() == [0.0, 2e4]
    assert hidden_TD.grad.tolist() == [[0.0], [-2.0]]


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("form", ["by token", "sum"])
def test_a_frozen_factor_gets_no_gradient(form, backend):
    for frozen in (0, 1):
        hidden_TD, weight_WD, targets_T, scale_T = case(5)
        (hidden_TD, weight_WD)[frozen].requires_grad_(False)
        with use_backend(backend):
            if form == "sum":
                cross_entropy_sum(hidden_TD, weight_WD, targets_T, scale_T).backward()
            else:
                cross_entropy(hidden_TD, weight_WD, targets_T).sum().backward()
        assert [x.grad is None for x in (hidden_TD, weight_WD)] == [frozen == 0, frozen == 1]


@built
def test_bits_do_not_depend_on_other_tokens_nor_on_threads():
    args = case(40, 500, 24)
    leaves, results = args[:2], []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        total = cross_entropy_sum(*args)
        results.append((cross_entropy(*args[:3]), total, *torch.autograd.grad(total, leaves)))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    for token in (0, 3, 39):
        alone = slice(token, token + 1)
        assert torch.equal(cross_entropy(args[0][alone], args[1], args[2][alone])[0], results[0][0][token])


@built
def test_native_is_registered_whole():
    hidden_TD, weight_WD, targets_T, scale_T = case(5)
    torch.library.opcheck(native.cross_entropy_native.registered, (hidden_TD, weight_WD, targets_T))
    # Its gradients are made in the forward: that they are constants there is what two of the four checks do not know.
    checks = ("test_schema", "test_faketensor")
    args = (hidden_TD, weight_WD, targets_T, scale_T, True, True)
    torch.library.opcheck(native._cross_entropy_sum.registered, args, test_utils=checks)


@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("penalty", ["of the loss", "apart"])
def test_a_second_derivative_is_refused_and_not_wrong(backend, penalty):
    hidden_TD, weight_WD, targets_T, scale_T = case(5)
    hidden_TD.requires_grad_()
    with use_backend(backend):
        total = cross_entropy_sum(hidden_TD, weight_WD, targets_T, scale_T)
        (grad,) = torch.autograd.grad(total**2 if penalty == "of the loss" else total, hidden_TD, create_graph=True)
        with pytest.raises(RuntimeError):
            (grad.square().sum() + total).backward()


def test_what_does_not_fit_is_named():
    hidden_TD, weight_WD, targets_T, scale_T = case(3)
    with pytest.raises(ValueError, match=r"^loss: wanted hidden \[T, D\], .* got \(3, 5\), \(11, 6\) and \(3,\)$"):
        cross_entropy(hidden_TD[:, :5], weight_WD, targets_T)
    with pytest.raises(ValueError, match=r"^loss: \(2,\) weights for \(3,\) targets$"):
        cross_entropy_sum(hidden_TD, weight_WD, targets_T, scale_T[:2])
    with pytest.raises(ValueError, match="^loss: targets want ids from 0 to 10, got 4 to 11$"):
        cross_entropy(hidden_TD, weight_WD, torch.tensor([4, 11, 5]))
    with pytest.raises(ValueError, match="^loss: targets want dtype torch.int64, got torch.int32$"):
        cross_entropy(hidden_TD, weight_WD, targets_T.int())
