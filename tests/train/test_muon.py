import math

import pytest
import torch

from tests.tiny import tiny_config
from trivium.model.heads import Blocks, head_blocks
from trivium.model.kimi_k3 import KimiK3
from trivium.ops.newton_schulz import orthogonalise
from trivium.train.muon import Muon, update_scale


def random_weights(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def muon(weights, lr=0.1, **given):
    return Muon([(f"w{i}", weight) for i, weight in enumerate(weights)], lr, **given)


def run(optimiser, weights, num_steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimiser.step()
    return [weight.detach().clone() for weight in weights]


def update_of(grad, **given):
    """What one step of rate 1 without momentum takes from a weight of zeros."""
    weight = torch.zeros_like(grad).requires_grad_()
    weight.grad = grad.clone()
    Muon([("w", weight)], 1.0, momentum=0.0, **given).step()
    return -weight.detach()


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (24, 6)])
def test_five_steps_are_those_of_torch(shape, monkeypatch):
    # But for Newton-Schulz, where theirs keeps Jordan's coefficients: both take the exact polar factor here.
    def exact(stack):
        u, _, v = torch.linalg.svd(stack.float(), full_matrices=False)
        return (u @ v).to(stack.dtype)

    monkeypatch.setattr("trivium.train.muon.orthogonalise", exact)
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", lambda grad, *_: exact(grad))
    ours, theirs = random_weights(shape), random_weights(shape)
    start = ours[0].detach().clone()
    got = run(muon(ours, weight_decay=0.01), ours, 5)[0]
    want = run(torch.optim.Muon(theirs, lr=0.1, weight_decay=0.01, momentum=0.95), theirs, 5)[0]
    torch.testing.assert_close(got - start, want - start, rtol=1e-4, atol=1e-5)


def test_two_steps_by_hand():
    # 2 x 2 diagonals: NS keeps the vectors and brings every value to 1, to within the 2.75% of five steps.
    weight = torch.eye(2).requires_grad_()
    optimiser = muon([weight], 0.1, momentum=0.5, weight_decay=0.1)
    weight.grad = torch.diag(torch.tensor([3.0, 1.0]))
    optimiser.step()
    assert torch.equal(optimiser.state[weight]["momentum_buffer"], torch.diag(torch.tensor([1.5, 0.5])))
    torch.testing.assert_close(weight.detach(), 0.89 * torch.eye(2), rtol=0, atol=0.00275)
    weight.grad = torch.diag(torch.tensor([-3.0, 1.0]))
    before = weight.detach().clone()
    optimiser.step()
    # m = (−0.75, 0.75), u = (−1.5 − 0.375, 0.5 + 0.375): one up, one down.
    want = 0.99 * before + 0.1 * torch.diag(torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(weight.detach(), want, rtol=0, atol=0.00275)


def test_a_stack_is_its_matrices_one_by_one():
    stack = random_weights((3, 6, 4))[0]
    alone = [matrix.clone().requires_grad_() for matrix in stack.detach()]
    optimisers = [muon([stack]), *(muon([matrix]) for matrix in alone)]
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
    run(muon(together), together, 2)
    generator = torch.Generator().manual_seed(1)
    optimisers = [muon([weight]) for weight in alone]
    for _ in range(2):
        for weight, optimiser in zip(alone, optimisers, strict=True):
            weight.grad = torch.randn(weight.shape, generator=generator)
            optimiser.step()
    for got, want in zip(together, alone, strict=True):
        torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-5, atol=1e-6)


CUTS = [
    ((12, 10), Blocks(rows=(4, 4, 4))),
    ((10, 12), Blocks(columns=(4, 4, 4))),
    ((14, 10), Blocks(rows=(11, 3))),
    ((15, 10), Blocks(rows=(3, 2, 3, 2, 3, 2))),
    ((9, 8), Blocks(rows=(2, 4, 3), columns=(5, 3))),
    ((6, 8), Blocks(rows=(3, 3), columns=(4, 4))),
    ((11, 10), Blocks(rows=(3, 2, 3, 3))),  # three of one height, at unequal distances
    ((3, 8, 6), Blocks(rows=(4, 4))),
    ((2, 3, 4, 6), Blocks(columns=(2, 1, 3))),
    ((6, 4), Blocks(rows=(1,) * 6)),
]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("shape", "cut"), CUTS)
def test_every_block_is_made_orthogonal_by_itself(shape, cut, dtype):
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    want = torch.empty_like(grad)
    for matrix, into in zip(grad.view(-1, *shape[-2:]), want.view(-1, *shape[-2:]), strict=True):
        for top, bottom, left, right in cut.rectangles(*shape[-2:]):
            block = matrix[top:bottom, left:right].to(dtype or torch.float32)
            tall = block.shape[0] > block.shape[1]
            made = orthogonalise((block.T if tall else block)[None])[0]
            into[top:bottom, left:right] = (made.T if tall else made) * update_scale(*shape[-2:], cut)
    # The kernels' other threads and places change nothing; torch's batched products in bfloat16 may round otherwise.
    tolerance = 0.05 if dtype else 1e-5
    torch.testing.assert_close(update_of(grad, blocks={"w": cut}, ns_dtype=dtype), want, rtol=0, atol=tolerance)


def test_memory_of_the_gradient_in_any_order():
    grad = torch.randn(10, 12, generator=torch.Generator().manual_seed(0))
    blocks = {"w": Blocks(columns=(4, 4, 4))}
    weight = torch.zeros(10, 12).requires_grad_()
    weight.grad = grad.T.contiguous().T
    Muon([("w", weight)], 1.0, momentum=0.0, blocks=blocks).step()
    torch.testing.assert_close(-weight.detach(), update_of(grad, blocks=blocks))


# dion#122: per head the rate silently changed by 1/sqrt(heads). Of the kind: any cut, tall, wide, fused or column-wise.
@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        ((192, 192), Blocks(rows=(64,) * 3)),
        ((192, 192), Blocks(columns=(64,) * 3)),
        ((256, 256), Blocks(rows=(32,) * 8)),
        ((512, 192), Blocks(rows=(64,) * 8)),
        ((192, 512), Blocks(columns=(64,) * 8)),
        ((96, 64), Blocks(rows=(24,) * 4)),
        ((384, 48), Blocks(rows=(32, 32) * 6)),
        ((64, 192), Blocks(rows=(48, 16))),
        ((576, 128), Blocks(rows=(64,) * 9)),
    ],
)
def test_the_rms_of_the_update_is_that_of_the_whole_matrix(shape, cut):
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole, by_heads = update_of(grad), update_of(grad, blocks={"w": cut})
    assert by_heads.norm() / whole.norm() == pytest.approx(1, abs=0.02)
    want = math.sqrt(max(1, shape[0] / shape[1]) * min(shape) / (shape[0] * shape[1]))
    assert by_heads.square().mean().sqrt() == pytest.approx(want, rel=0.02)


@pytest.mark.parametrize("side", [0, 1])
def test_one_loud_head_takes_nothing_from_the_others(side):
    # 8 heads of 32, one head's gradient x100; whole, the loud head's update is larger than the rest (DeepSpeed#8367:
    # 1.266). Of the kind: a head that is silent, and one that is no number, below.
    grad = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    grad.narrow(side, 96, 32).mul_(100)
    cut = Blocks(rows=(32,) * 8) if side == 0 else Blocks(columns=(32,) * 8)

    def spread(update):
        norms = [head.norm() for head in update.split(32, side)]
        return max(norms) / min(norms)

    assert spread(update_of(grad, blocks={"w": cut})) <= 1.02  # 1.005 measured
    assert spread(update_of(grad)) > 1.1


def test_a_silent_head_stays_and_a_head_of_nan_spoils_no_other():
    weight = random_weights((12, 6))[0]
    before = weight.detach().clone()
    weight.grad = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    weight.grad[:4] = 0
    weight.grad[8, 2] = torch.nan
    muon([weight], blocks={"w0": Blocks(rows=(4, 4, 4))}).step()
    first, second, third = weight.detach().split(4)
    assert torch.equal(first, before[:4])
    assert second.isfinite().all() and not torch.equal(second, before[4:8])
    assert third.isnan().all()


def test_a_zero_gradient_moves_nothing():
    weight = random_weights((2, 4, 3))[0]
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    weight.grad[1] = 1.0
    muon([weight]).step()
    assert torch.equal(weight[0], before[0]) and not torch.equal(weight[1], before[1])


def test_no_gradient_no_decay_and_no_momentum():
    weights = random_weights((4, 3), (4, 3))
    before = weights[0].detach().clone()
    weights[1].grad = torch.ones(4, 3)
    optimiser = muon(weights, weight_decay=0.1)
    optimiser.step()
    assert torch.equal(weights[0].detach(), before) and weights[0] not in optimiser.state
    weights[0].grad = torch.ones(4, 3)  # another set of parameters than in the step before
    optimiser.step()
    assert not torch.equal(weights[0].detach(), before)


def test_the_order_of_heads_means_nothing():
    with torch.device("meta"):
        model = KimiK3(tiny_config(44))
    checked = set()
    for name, cut in head_blocks(model).items():
        shape = model.get_parameter(name).shape
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        side, spans = (0, cut.rows) if cut.rows else (1, cut.columns)
        order = torch.randperm(len(spans), generator=torch.Generator().manual_seed(0)).tolist()

        def shuffled(matrix, side=side, spans=spans, order=order):
            parts = matrix.split(spans, side)
            return torch.cat([parts[i] for i in order], side)

        # Rows, and columns, among themselves are of no order at all; blocks are moved whole.
        got = update_of(shuffled(grad), blocks={"w": Blocks(**{("rows", "columns")[side]: [spans[i] for i in order]})})
        torch.testing.assert_close(got, shuffled(update_of(grad, blocks={"w": cut})), rtol=0, atol=1e-4)
        checked.add(name.rpartition("self_attn.")[2])
    assert len(checked) == 9  # KDA's 6 and MLA's 5, of which g_proj and o_proj are in both


@pytest.mark.parametrize(
    ("shape", "cut", "want"),
    [
        ((64, 256), Blocks(), 1.0),
        ((256, 256), Blocks(), 1.0),
        ((1024, 256), Blocks(), 2.0),
        # four heads of 64 rows: 256 in all, as much as the whole
        ((256, 256), Blocks(rows=(64,) * 4), 1.0),
        # 16 heads of 64 rows: 1,024 instead of 256 singular values of 1, so half the size, times 2
        ((1024, 256), Blocks(rows=(64,) * 16), 1.0),
        ((256, 1024), Blocks(columns=(64,) * 16), 0.5),
        # a latent of 12 rows and a key of 4 beside it: 16, as the whole
        ((16, 64), Blocks(rows=(12, 4)), 1.0),
    ],
)
def test_the_scale_by_hand(shape, cut, want):
    assert update_scale(*shape, cut) == pytest.approx(want)


def test_micro_batches_are_one_batch():
    # Accumulated as autograd does: the mean over 12 rows is the sum of four micro-batches' shares of it.
    x_TD = torch.randn(12, 6, generator=torch.Generator().manual_seed(3))
    ends = []
    for num_micro in (1, 4):
        weight = random_weights((8, 6))[0]
        optimiser = muon([weight], blocks={"w0": Blocks(rows=(4, 4))}, weight_decay=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            for rows in x_TD.chunk(num_micro):
                ((rows @ weight.T).tanh().square().sum() / 12).backward()
            optimiser.step()
        ends.append(weight.detach())
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(7,), (1, 7), (7, 1), (7, 1, 4)])
def test_vectors_are_refused(shape):
    with pytest.raises(ValueError, match="^muon: w0: wanted matrices .* with both sides above 1, got "):
        muon(random_weights(shape))


@pytest.mark.parametrize(
    ("weight", "blocks", "error"),
    [
        (torch.ones(6, 4), {"v": Blocks()}, "muon: blocks of v, which is none of these parameters"),
        (torch.ones(6, 4), {"w0": Blocks(rows=(4, 4))}, "muon: w0: blocks: wanted rows that add up to 6, got 8"),
        (torch.ones(4, 6).T, {}, r"muon: w0: wanted contiguous memory, got strides \(1, 6\)"),
    ],
)
def test_what_does_not_fit_is_refused_when_built(weight, blocks, error):
    with pytest.raises(ValueError, match=error):
        muon([weight], blocks=blocks)


def test_a_step_asks_a_closure_for_its_loss():
    weight = random_weights((3, 3))[0]

    def closure():
        loss = weight.square().sum()
        loss.backward()
        return loss

    want = float(weight.detach().square().sum())
    assert float(muon([weight]).step(closure).detach()) == want
