"""The products of the decode step: a weight in each of its three forms times one vector."""

import pytest
import torch

from trivium.ops import cpu, mxfp4
from trivium.ops.decode.native import product

pytestmark = pytest.mark.skipif(cpu.missing is not None, reason=str(cpu.missing))


def weight_of(kind, N, K):
    generator = torch.Generator().manual_seed(N * K)
    weight = torch.randn(N, K, generator=generator)
    if kind != "mxfp4":
        return weight.to(getattr(torch, kind))
    packed = torch.randint(256, (1, N, K // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(118, 134, (1, N, K // 32), dtype=torch.uint8, generator=generator)
    return mxfp4.PackedWeight(packed=packed, scale=scale, dtype=torch.float32)


def numbers(weight):
    return weight.expert(0) if isinstance(weight, mxfp4.PackedWeight) else weight


SHAPES = [(kind, N, K) for N in (1, 3, 4, 37) for kind in ("float32", "bfloat16") for K in (1, 7, 8, 24, 41, 96, 515)]
SHAPES += [("mxfp4", N, K) for N in (1, 3, 4, 37) for K in (32, 96, 512)]


@pytest.mark.parametrize(("kind", "N", "K"), SHAPES)
def test_a_product_is_that_of_the_numbers(kind, N, K):
    weight, x_K = weight_of(kind, N, K), torch.randn(K, generator=torch.Generator().manual_seed(1))
    exact_N = numbers(weight).double() @ x_K.double()
    size_N = numbers(weight).double().abs() @ x_K.double().abs()
    assert bool(((product(weight, x_K, 0, N) - exact_N).abs() <= 2e-7 * (2 + K**0.5) * size_N).all())


@pytest.mark.parametrize(("kind", "K"), [("float32", 41), ("float32", 512), ("bfloat16", 515), ("mxfp4", 96)])
def test_a_row_has_the_same_bits_whichever_rows_are_beside_it(kind, K):
    weight, x_K = weight_of(kind, 37, K), torch.randn(K, generator=torch.Generator().manual_seed(2))
    whole_N = product(weight, x_K, 0, 37)
    for first, last in ((0, 1), (3, 20), (11, 37), (36, 37), (5, 5)):
        assert torch.equal(product(weight, x_K, first, last), whole_N[first:last])


def test_every_code_and_scale_of_mxfp4():
    """One column at a time, so that the product is the number: all 16 codes at each place, and all 256 scales."""
    K = 32
    packed = torch.arange(16, dtype=torch.uint8)[:, None].repeat(1, K // 2)[None]
    packed = packed | packed << 4
    for scale in (*range(0, 256, 15), 1, 254):
        scales = torch.full((1, 16, 1), scale, dtype=torch.uint8)
        weight = mxfp4.PackedWeight(packed=packed, scale=scales, dtype=torch.float32)
        want = weight.expert(0)
        for column in range(K):
            x_K = torch.zeros(K)
            x_K[column] = 1.0
            torch.testing.assert_close(product(weight, x_K, 0, 16), want[:, column], rtol=0, atol=0, equal_nan=True)


def test_columns_of_mxfp4_meet_their_own_numbers():
    packed = torch.arange(16, dtype=torch.uint8).repeat(4).view(1, 2, 32)
    weight = mxfp4.PackedWeight(
        packed=packed | packed << 4 ^ 0x50, scale=torch.full((1, 2, 2), 127, dtype=torch.uint8), dtype=torch.float32
    )
    got = torch.stack([product(weight, x_K, 0, 2) for x_K in torch.eye(64)], dim=1)
    assert torch.equal(got, weight.expert(0))
