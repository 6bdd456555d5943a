"""MXFP4: the format byte by byte, the round trip, the rounding of values and of scales."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from trivium.ops import cpu
from trivium.ops.backend import use_backend
from trivium.ops.mxfp4 import PackedWeight, pack, unpack
from trivium.ops.mxfp4.native import _unpack, pack_native

BACKENDS = ("reference", "torch")
BUILT = pytest.mark.skipif(cpu.missing is not None, reason=f"native: {cpu.missing}")
FAST = ("torch", pytest.param("native", marks=BUILT))
ALL = ("reference", *FAST)


def bits(x: Tensor) -> Tensor:
    """The bytes of x: unlike ==, they tell -0 from 0 and find nan equal to itself."""
    return x.contiguous().view(torch.uint8)


def every_code_and_scale() -> tuple[Tensor, Tensor]:
    """One row a scale byte 0..254, its 32 columns each of the 16 codes twice, in two orders."""
    nibble = torch.tensor([*range(16), *reversed(range(16))], dtype=torch.uint8)
    packed = (nibble[0::2] | nibble[1::2] << 4).expand(255, 16)
    return packed.contiguous(), torch.arange(255, dtype=torch.uint8)[:, None]


def random_bytes(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=draw)
    return packed, torch.randint(0, 255, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8, generator=draw)


@pytest.mark.parametrize("backend", ALL)
def test_a_row_by_hand(backend):
    # columns 0..31: codes 1, 2, 15, 8 and zeros; scale 128 = 2
    packed = torch.tensor([[0x21, 0x8F] + [0] * 14], dtype=torch.uint8)
    with use_backend(backend):
        weight = unpack(packed, torch.tensor([[128]], dtype=torch.uint8))
    assert weight[0, :4].tolist() == [1.0, 2.0, -12.0, 0.0]
    assert weight[0, 3].signbit() and not weight[0, 4].signbit()


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        *itertools.product(BACKENDS, (torch.float64, torch.float32, torch.bfloat16)),
        pytest.param("native", torch.float32, marks=BUILT),
    ],
)
def test_decodes_exactly_at_every_scale(backend, dtype):
    packed, scale = every_code_and_scale()
    value = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    value += [-v for v in value]
    exact = torch.tensor([value + value[::-1]], dtype=torch.float64) * torch.tensor(
        [[2.0 ** (s - 127)] for s in range(255)], dtype=torch.float64
    )
    with use_backend(backend):
        got = unpack(packed, scale, dtype)
    assert got.dtype == dtype
    in_range = exact.abs() < 2.0**128
    assert torch.equal(bits(got.double()[in_range]), bits(exact[in_range]))
    assert got[0].abs().max() == 6 * 2.0**-127  # scale byte 0 is 2^-127, not zero
    if dtype != torch.float64:
        assert got[~in_range].isinf().all() and int((~in_range).sum()) == 2 * 2 * (
            4 + 2
        )  # codes, signs, scales 254 and 253


@pytest.mark.parametrize("backend", ALL)
def test_scale_255_is_nan(backend):
    with use_backend(backend):
        assert unpack(torch.ones(1, 16, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_unpacked_and_packed_again_decodes_to_the_same(backend):
    random = random_bytes(0, 64, 5, 96)
    zeros = torch.tensor([[0x80, 0x08] * 8], dtype=torch.uint8)  # a group of zeros of both signs
    with use_backend(backend):
        for packed, scale in (every_code_and_scale(), random, (zeros, torch.tensor([[200]], dtype=torch.uint8))):
            weight = unpack(packed, scale, torch.float64)
            assert torch.equal(bits(unpack(*pack(weight), torch.float64)), bits(weight))
        # without the code 6 and 4 a smaller scale holds the group, down to where there is none
        for code in range(1, 8):
            packed = torch.full((255, 16), code, dtype=torch.uint8)
            weight = unpack(packed, torch.arange(255, dtype=torch.uint8)[:, None], torch.float64)
            assert torch.equal(bits(unpack(*pack(weight), torch.float64)), bits(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_in_the_dtypes_of_a_model(dtype):
    packed, scale = random_bytes(1, 40, 128)
    weight = unpack(packed, scale.clamp(max=252), dtype)
    assert torch.equal(bits(unpack(*pack(weight), dtype)), bits(weight))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_backends_agree_byte_for_byte(dtype):
    draw = torch.Generator().manual_seed(2)
    weight = torch.randn(30, 160, generator=draw, dtype=torch.float64)
    weight *= torch.exp2(torch.randint(-150, 120, (30, 1), generator=draw))  # also subnormal and zero groups
    weight = weight.clamp(-6e4, 6e4).to(dtype)
    with use_backend("reference"):
        want = pack(weight)
    assert all(torch.equal(a, b) for a, b in zip(pack(weight), want, strict=True))
    for to in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        with use_backend("reference"):
            value = unpack(*want, to)
        assert torch.equal(bits(unpack(*want, to)), bits(value))


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        *itertools.product(BACKENDS, (torch.float64, torch.float32)),
        pytest.param("native", torch.float32, marks=BUILT),
    ],
)
def test_rounds_to_nearest_and_ties_to_the_even_code(backend, dtype):
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    below = {0.25: 0.0, 0.75: 0.5, 1.25: 1.0, 1.75: 1.5, 2.5: 2.0, 3.5: 3.0, 5.0: 4.0}
    above = {0.25: 0.5, 0.75: 1.0, 1.25: 1.5, 1.75: 2.0, 2.5: 3.0, 3.5: 4.0, 5.0: 6.0}
    at = torch.tensor(list(ties), dtype=dtype)
    weight = torch.zeros(3, 32, dtype=dtype)
    weight[:, 31] = 6.0  # fixes the scale at 1
    weight[0, :7], weight[1, :7] = at, at.nextafter(torch.zeros_like(at))
    weight[2, :7] = -at.nextafter(torch.full_like(at, 9.0))
    with use_backend(backend):
        got = unpack(*pack(weight), dtype)
    assert got[0, :7].tolist() == list(ties.values())
    assert got[1, :7].tolist() == list(below.values())
    assert got[2, :7].tolist() == [-v for v in above.values()]


@pytest.mark.parametrize("backend", ALL)
def test_no_other_scale_keeps_the_largest_of_a_group_better(backend):
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(512, 32, generator=draw) * torch.exp2(torch.randint(-20, 20, (512, 1), generator=draw))
    with use_backend(backend):
        packed, scale = pack(weight)
        got = unpack(packed, scale)
    largest_N, where_N = weight.abs().max(1)
    loss_N = (got - weight).abs().gather(1, where_N[:, None])[:, 0] / largest_N
    code = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    best_N = torch.full((512,), torch.inf)
    for other in range(-3, 4):
        value_NM = code * torch.exp2(scale.float() - 127 + other)
        best_N = best_N.minimum((value_NM - largest_N[:, None]).abs().amin(1) / largest_N)
    torch.testing.assert_close(loss_N, best_N, rtol=0, atol=1e-6)
    above_6_N = torch.frexp(largest_N).mantissa > 0.75
    assert 0.19 < loss_N.max() <= 1 / 5
    assert 0.13 < loss_N[above_6_N].max() <= 1 / 7


@pytest.mark.parametrize(
    ("largest", "scale", "decoded"),
    [
        (4.0, 127, 4.0),
        (6.0, 127, 6.0),
        (6.99, 127, 6.0),
        (7.0, 128, 8.0),
        (7.99, 128, 8.0),
        (8.0, 128, 8.0),
        (0.0, 0, 0.0),
    ],
)
@pytest.mark.parametrize("backend", ALL)
def test_the_rule_of_the_scale(backend, largest, scale, decoded):
    with use_backend(backend):
        packed, got = pack(torch.tensor([[-largest, *[0.0] * 31]]))
        assert (got.item(), unpack(packed, got)[0, 0].item()) == (scale, -decoded)


@pytest.mark.parametrize("backend", ALL)
def test_negative_zero_keeps_its_sign(backend):
    weight = torch.tensor([[-0.0, 0.0, -0.1, 6.0] * 8])
    with use_backend(backend):
        got = unpack(*pack(weight))
    assert got.signbit()[0, :4].tolist() == [True, False, True, False]
    assert got[0, :3].tolist() == [0.0, 0.0, 0.0]


@BUILT
@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (7, 96), (3, 5, 1024), (300, 64)])
def test_native_equals_the_others_byte_for_byte(shape):
    draw = torch.Generator().manual_seed(5)
    weight = torch.randn(shape, generator=draw, dtype=torch.float64)
    weight *= torch.exp2(torch.randint(-150, 127, (*shape[:-1], 1), generator=draw))  # also subnormal and zero groups
    weight = weight.clamp(-3e38, 3e38).float()
    packed, scale = random_bytes(6, *shape)
    results = []
    for backend in ("torch", "native"):
        with use_backend(backend):
            results.append((*pack(weight), bits(unpack(packed, scale)), bits(unpack(*pack(weight)))))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@BUILT
def test_the_custom_ops_hold_to_their_contract():
    torch.library.opcheck(pack_native.registered, (torch.randn(5, 64, generator=torch.Generator().manual_seed(0)),))
    torch.library.opcheck(_unpack.registered, random_bytes(0, 5, 64))


def test_experts_stay_packed_until_asked_for():
    packed, scale = random_bytes(4, 3, 6, 64)
    weight = PackedWeight(packed=packed, scale=scale, dtype=torch.bfloat16)
    assert weight.shape == (3, 6, 64)
    assert torch.equal(bits(weight.expert(2)), bits(unpack(packed, scale, torch.bfloat16)[2]))
    with pytest.raises(ValueError, match=r"packed experts are \[E, out, in/2\], got \(6, 32\)"):
        PackedWeight(packed=packed[0], scale=scale[0], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="mxfp4: scale is uint8, got torch.int32"):
        PackedWeight(packed=packed, scale=scale.int(), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="mxfp4: packed lies on cpu, scale on meta"):
        PackedWeight(packed=packed, scale=scale.to("meta"), dtype=torch.bfloat16)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_only_finite_weights_pack(bad):
    weight = torch.zeros(2, 32)
    weight[1, 5] = bad
    with pytest.raises(ValueError, match="mxfp4: 1 of 64 weights are NaN or infinite, only finite ones pack"):
        pack(weight)


def test_bad_input_is_named():
    byte = torch.zeros(4, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"the last dimension is a multiple of 32, got shape \(4, 48\)"):
        pack(torch.zeros(4, 48))
    with pytest.raises(ValueError, match="a weight to pack is floating point, got torch.int64"):
        pack(torch.zeros(4, 32, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"magnitude 1.191e\+39 is beyond the largest, 6 \* 2\^127"):
        pack(torch.full((1, 32), 7 * 2.0**127, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"do not belong together, got \(4, 32\) and \(4, 3\)"):
        unpack(byte, byte[:, :3])
    with pytest.raises(ValueError, match=r"do not belong together, got \(4, 32\) and \(3, 2\)"):
        unpack(byte, byte[:3, :2])
    with pytest.raises(ValueError, match="scale is uint8, got torch.float32"):
        unpack(byte, torch.zeros(4, 2))
