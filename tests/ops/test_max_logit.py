"""The largest score of each head: the definition, packed and in blocks."""

import pytest
import torch

from trivium.ops.attention import latent_attention, max_logit
from trivium.ops.backend import use_backend
from trivium.ops.rows import Rows

H, K, J, V, R = 3, 20, 12, 28, 24
CASES = [
    ([1], ()),
    ([64], ()),
    ([65], ()),
    ([5, 0, 130, 64], ()),
    ([3, 17, 0], (100, 64, 300)),
]


def inputs(lengths, past=(), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    rows = Rows.of(lengths, past=past)
    T, U = rows.num_tokens, rows.num_tokens + sum(rows.past)
    shapes = ((T, H, K), (T, H, J), (U, R), (U, J), (H, K + V, R))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes], rows


@pytest.mark.parametrize(("lengths", "past"), CASES)
@pytest.mark.parametrize("sign", [1, -1])
def test_blocks_are_the_definition(lengths, past, sign):
    args, rows = inputs(lengths, past)
    args[0], args[1] = sign * args[0], sign * args[1]
    with use_backend("reference"):
        want_H = max_logit(*args, rows)
    assert want_H.dtype == torch.float64
    torch.testing.assert_close(max_logit(*args, rows), want_H, rtol=1e-12, atol=1e-12)
    single_H = max_logit(*(x.float() for x in args), rows)
    torch.testing.assert_close(single_H, want_H.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_later_key_another_sequence_and_a_pad_count_for_nothing(backend):
    # Keys 1 | r, scores (q · 1 + 0) / sqrt 2: token 0 asks with -3 and token 1 with -2 of keys 1 and 8; the second
    # sequence asks with -1 of its own key 5. All scores are below the 0 of a pad.
    q = torch.tensor([-3.0, -2.0, -1.0])[:, None, None]
    latent = torch.tensor([1.0, 8.0, 5.0])[:, None]
    kv_b = torch.ones(1, 2, 1)
    with use_backend(backend):
        max_H = max_logit(q, torch.zeros(3, 1, 1), latent, torch.ones(3, 1), kv_b, Rows.of([2, 1]))
    torch.testing.assert_close(max_H, torch.tensor([-2.0 / 2**0.5]))  # token 1 and key 0; of key 1 it would be -16


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_both_parts_of_a_key_count_and_heads_are_apart(backend):
    q, rest = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[3.0], [-1.0]]])
    kv_b = torch.tensor([[[5.0], [99.0]], [[7.0], [99.0]]])  # K = 1 key row a head, then its value row
    with use_backend(backend):
        max_H = max_logit(q, rest, torch.tensor([[2.0]]), torch.tensor([[10.0]]), kv_b, Rows.one(1))
    torch.testing.assert_close(max_H, torch.tensor([1 * 5 * 2 + 3 * 10, 2 * 7 * 2 - 1 * 10]) / 2**0.5)


def test_softmax_of_attention_is_at_that_logit():
    """One head, one large score: attention gives the value of the key that made it."""
    args, rows = inputs([40], dtype=torch.float32)
    args[0] = args[0] * 1e3
    o_THV = latent_attention(*args, rows)
    v_UHV = torch.einsum("ur,hvr->uhv", args[2], args[4][:, K:])
    score_HTU = torch.einsum("thk,hkr,ur->htu", args[0], args[4][:, :K], args[2])
    score_HTU = (score_HTU + torch.einsum("thj,uj->htu", args[1], args[3])) * (K + J) ** -0.5
    score_HTU = score_HTU.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(max_logit(*args, rows), score_HTU.amax((1, 2)))
    for h in range(H):
        t, u = divmod(int(score_HTU[h].argmax()), 40)
        torch.testing.assert_close(o_THV[t, h], v_UHV[u, h], rtol=1e-3, atol=1e-3)


def test_bfloat16_comes_out_in_float32_and_without_gradient():
    args, rows = inputs([70], dtype=torch.bfloat16)
    max_H = max_logit(*(x.requires_grad_() for x in args), rows)
    assert max_H.dtype == torch.float32 and not max_H.requires_grad
    want_H = max_logit(*(x.double() for x in args), rows)
    torch.testing.assert_close(max_H, want_H.float(), rtol=2**-7, atol=0)  # keys are rounded as attention's are


def test_no_token_has_no_logit():
    args, rows = inputs([0, 0])
    assert max_logit(*args, rows).tolist() == [-torch.inf] * H


def test_what_does_not_fit_is_refused():
    args, rows = inputs([5])
    with pytest.raises(ValueError, match=r"max_logit: latent wants shape \(5, 24\), got \(4, 24\)"):
        max_logit(args[0], args[1], args[2][:4], args[3], args[4], rows)
    with pytest.raises(ValueError, match="max_logit: rows hold 4 tokens, q holds 5"):
        max_logit(args[0], args[1], args[2][:4], args[3][:4], args[4], Rows.one(4))
    with use_backend("native"), pytest.raises(ValueError, match="max_logit: has no 'native' backend"):
        max_logit(*args, rows)
