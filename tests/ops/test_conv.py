"""The short convolution: its definition, its borders, its window, and its gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.backend import use_backend
from trivium.ops.conv import short_conv
from trivium.ops.conv.extended import BLOCK_NUMEL
from trivium.ops.rows import Rows

NATIVE = pytest.param("native", marks=pytest.mark.skipif(cpu.missing is not None, reason=str(cpu.missing)))
BACKENDS = ("reference", "torch", NATIVE)
MIXTURES = [(17,), (4, 0, 1, 3, 2), (0, 0, 5), (1, 1, 1, 1), (2, 17, 3, 0, 4, 1), (0,), ()]


def case(lengths, width: int = 5, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and window; channels wide enough apart that a mixed-up one shows."""
    draw = torch.Generator().manual_seed(seed)
    x_TX = 2 * torch.randn(sum(lengths), width, generator=draw, dtype=torch.float64)
    window_S3X = 2 * torch.randn(len(lengths), 3, width, generator=draw, dtype=torch.float64)
    weight_X14 = torch.randn(width, 1, 4, generator=draw, dtype=torch.float64)
    return x_TX.to(dtype), weight_X14.to(torch.promote_types(dtype, torch.float32)), window_S3X.to(dtype)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_tap_3_meets_the_current_token_by_hand(backend):
    weight_X14 = torch.tensor([[[1000.0, 100.0, 10.0, 1.0]]]) / 1000
    x_TX = torch.tensor([[1.0], [2.0], [3.0], [4.0], [7.0]])
    with use_backend(backend):
        y_TX, window_S3X = short_conv(x_TX, weight_X14, Rows.of([4, 1]))
    want = [silu(v) for v in (0.001, 0.012, 0.123, 1.234, 0.007)]
    torch.testing.assert_close(y_TX[:, 0], torch.tensor(want))
    assert window_S3X[:, :, 0].tolist() == [[2.0, 3.0, 4.0], [0.0, 0.0, 7.0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_short_sequence_keeps_the_rest_of_its_window(backend):
    window_S3X = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]])[:, :, None]
    x_TX = torch.tensor([20.0, 30, 31, 40, 41, 42])[:, None]
    with use_backend(backend):
        _, after_S3X = short_conv(x_TX, torch.ones(1, 1, 4), Rows.of([0, 1, 2, 3]), window_S3X)
    assert after_S3X[:, :, 0].tolist() == [[1.0, 2, 3], [5, 6, 20], [9, 30, 31], [40, 41, 42]]


@pytest.mark.parametrize("lengths", [*MIXTURES, (63,), (64,), (65, 130), (67, 1, 64)])  # the kernel's blocks are of 64
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_equals_the_loop_with_all_gradients(lengths, carried, backend):
    x_TX, weight_X14, window_S3X = case(lengths)
    inputs = [x_TX.requires_grad_(), weight_X14.requires_grad_()]
    inputs += [window_S3X.requires_grad_()] if carried else []
    results = []
    for name in ("reference", backend):
        with use_backend(name):
            y_TX, after_S3X = short_conv(x_TX, weight_X14, Rows.of(lengths), window_S3X if carried else None)
        loss = (y_TX * torch.linspace(1.0, 100.0, y_TX.numel()).view_as(y_TX)).sum() + (after_S3X**2).sum()
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        results.append((y_TX, after_S3X, *gradients))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(want, got, rtol=1e-5, atol=2e-4)  # float32; the loss weighs tokens up to 100


@pytest.mark.parametrize("backend", BACKENDS[:2])  # the kernel serves float32
def test_equals_the_frameworks_convolution(backend):
    x_TX, weight_X14, _ = case([40], width=7, dtype=torch.float64)
    want_TX = F.silu(F.conv1d(F.pad(x_TX.T, (3, 0))[None], weight_X14, groups=7))[0].T
    with use_backend(backend):
        torch.testing.assert_close(short_conv(x_TX, weight_X14, Rows.one(40))[0], want_TX)


def test_gradients_in_float64():
    lengths = (4, 0, 1, 2, 6)
    inputs = [x.requires_grad_() for x in case(lengths, width=3, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda x, w, s: short_conv(x, w, Rows.of(lengths), s), inputs)


@pytest.mark.parametrize("num_tokens", [BLOCK_NUMEL // 4096 + shift for shift in (-4, -3, -2, 0, 1, 40)])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_blocks_leave_no_seam(num_tokens, backend):
    with use_backend(backend):
        _check_seams(num_tokens)


def _check_seams(num_tokens):
    x_TX, weight_X14, window_S3X = (x.requires_grad_() for x in case([num_tokens], width=4096))
    whole = short_conv(x_TX, weight_X14, Rows.one(num_tokens), window_S3X)
    d_whole = torch.autograd.grad(whole[0].square().sum(), (x_TX, weight_X14, window_S3X))
    y, d_weight, d_first = [], torch.zeros_like(weight_X14), []
    for channel in torch.arange(4096).split(1024):  # four narrow ones, each in a single block
        some = [x.detach()[..., channel].requires_grad_() for x in (x_TX, window_S3X)]
        weight = weight_X14.detach()[channel].requires_grad_()
        part_TX, _ = short_conv(some[0], weight, Rows.one(num_tokens), some[1])
        d_x, d_weight[channel], d_window = torch.autograd.grad(part_TX.square().sum(), (some[0], weight, some[1]))
        y.append(part_TX)
        d_first.append(torch.cat([d_window[0], d_x]))
    assert torch.equal(torch.cat(y, 1), whole[0])
    torch.testing.assert_close(torch.cat(d_first, 1), torch.cat([d_whole[2][0], d_whole[0]]))
    torch.testing.assert_close(d_weight, d_whole[1], rtol=1e-5, atol=1e-3)  # float32 sums over other blocks


@pytest.mark.parametrize("width", [5, 32, 37, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_cut_with_the_carried_window_equals_the_whole_bitwise(width, dtype):
    x_TX, weight_X14, window_S3X = case([61], width=width, dtype=dtype)
    whole_TX, last_S3X = short_conv(x_TX, weight_X14, Rows.one(61), window_S3X)
    for cuts in ([1] * 61, [1, 2, 3, 0, 4, 17, 34], [60, 1], [30, 31]):
        carried_S3X, pieces = window_S3X, []
        for piece_TX in x_TX.split(cuts):
            y_TX, carried_S3X = short_conv(piece_TX, weight_X14, Rows.one(len(piece_TX)), carried_S3X)
            pieces.append(y_TX)
        assert torch.equal(torch.cat(pieces), whole_TX)
        assert torch.equal(carried_S3X, last_S3X)
    assert whole_TX.dtype == last_S3X.dtype == dtype


@pytest.mark.parametrize("lengths", MIXTURES[:-1])
@pytest.mark.parametrize("width", [5, 37, 192])
def test_packed_equals_alone_bitwise(lengths, width):
    x_TX, weight_X14, window_S3X = case(lengths, width=width)
    y_TX, after_S3X = short_conv(x_TX, weight_X14, Rows.of(lengths), window_S3X)
    for s, part_TX in enumerate(x_TX.split(lengths)):
        alone = short_conv(part_TX, weight_X14, Rows.one(lengths[s]), window_S3X[s : s + 1])
        assert torch.equal(alone[0], y_TX.split(lengths)[s])
        assert torch.equal(alone[1][0], after_S3X[s])


@pytest.mark.skipif(cpu.missing is not None, reason=str(cpu.missing))
@pytest.mark.parametrize("width", [5, 300])
def test_one_thread_and_two_give_the_same_bits(width):
    x_TX, weight_X14, window_S3X = (x.requires_grad_() for x in case((200, 0, 1, 90), width=width))
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        outputs = short_conv(x_TX, weight_X14, Rows.of((200, 0, 1, 90)), window_S3X)
        loss = sum(y.square().sum() for y in outputs)
        results.append((*outputs, *torch.autograd.grad(loss, (x_TX, weight_X14, window_S3X))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.skipif(cpu.missing is not None, reason=str(cpu.missing))
def test_the_custom_op_keeps_torchs_rules():
    torch.library.opcheck(torch.ops.trivium.short_conv, (*(x.requires_grad_() for x in case((4, 0, 2))), (0, 4, 4, 6)))


def test_nothing_reaches_back_or_across():
    x_TX, weight_X14, window_S3X = case((6, 7), width=9)
    rows = Rows.of((6, 7))
    y_TX, _ = short_conv(x_TX, weight_X14, rows, window_S3X)
    for t in range(13):
        other_TX = x_TX.clone()
        other_TX[t] = math.nan
        changed_T = (short_conv(other_TX, weight_X14, rows, window_S3X)[0] != y_TX).any(1)
        end = 6 if t < 6 else 13
        assert changed_T.nonzero()[:, 0].tolist() == list(range(t, min(t + 4, end)))


def test_inputs_far_below_zero_stay_finite():
    x_TX = torch.full((5, 2), -3e4, requires_grad=True)
    y_TX, _ = short_conv(x_TX, torch.ones(2, 1, 4), Rows.one(5))
    (d_x_TX,) = torch.autograd.grad(y_TX.sum(), x_TX)
    assert (y_TX == 0).all() and (d_x_TX == 0).all()


def test_saves_its_inputs_only():
    x_TX, weight_X14, window_S3X = (x.requires_grad_() for x in case((5, 4), width=64))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        short_conv(x_TX, weight_X14, Rows.of((5, 4)), window_S3X)
    floats = {x.data_ptr() for x in saved if x.is_floating_point()}
    assert floats == {x_TX.data_ptr(), weight_X14.data_ptr(), window_S3X.data_ptr()}


def test_bad_input_is_named():
    x_TX, weight_X14, window_S3X = case((4, 3))
    with pytest.raises(ValueError, match="short_conv: x has 7 tokens, rows 6"):
        short_conv(x_TX, weight_X14, Rows.of((3, 3)))
    with pytest.raises(ValueError, match=r"short_conv: weight is \(5, 1, 4\), got \(5, 4\)"):
        short_conv(x_TX, weight_X14[:, 0], Rows.of((4, 3)))
    with pytest.raises(ValueError, match=r"short_conv: window is \(2, 3, 5\), got \(1, 3, 5\)"):
        short_conv(x_TX, weight_X14, Rows.of((4, 3)), window_S3X[:1])
    with pytest.raises(ValueError, match=r"one floating dtype, got torch.float32 and torch.bfloat16"):
        short_conv(x_TX, weight_X14, Rows.of((4, 3)), window_S3X.bfloat16())
