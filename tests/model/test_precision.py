"""float32 parameters and bfloat16 rows: a bfloat16 model's numbers, and updates that are not lost."""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from tiny import tiny_config

from trivium.config import VisionConfig
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.model.step import serves
from trivium.model.trace import trace
from trivium.ops import cpu
from trivium.ops.backend import use_backend
from trivium.ops.pixels import Pixels
from trivium.ops.rows import Rows
from trivium.train.loss import cross_entropy

BF16 = torch.bfloat16
IDS = torch.randint(0, 300, (70,), generator=torch.Generator().manual_seed(0))
ROWS = Rows.of([30, 40])
VISION = VisionConfig(
    patch_size=2,
    init_pos_emb_height=2,
    init_pos_emb_width=2,
    init_pos_emb_time=4,
    vt_hidden_size=4,
    vt_intermediate_size=6,
    vt_num_hidden_layers=1,
    vt_num_attention_heads=1,
    qkv_hidden_size=8,
    text_hidden_size=32,
)


@cache
def weights(vision: bool = False) -> dict[str, torch.Tensor]:
    """Of all parameters, what bfloat16 can hold of those that a bfloat16 model has in it; none is 0."""
    with torch.device("meta"):
        dtypes = {name: tensor.dtype for name, tensor in tiny(BF16, vision=vision).state_dict().items()}
    drawn = KimiK3(config(vision), dtype=torch.float32)
    initialise_(drawn, seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in drawn.state_dict().items():
        if name.endswith(("res_proj.weight", "A_log")):
            tensor.normal_(std=0.3, generator=generator)
    return {name: tensor.to(dtypes[name]).float() for name, tensor in drawn.state_dict().items()}


def config(vision: bool):
    return replace(tiny_config(300), vision=VISION if vision else None)


def tiny(dtype, *, vision=False, **options) -> KimiK3:
    return KimiK3(config(vision), dtype=dtype, **options).train()


def loaded(dtype, *, vision=False, **options) -> KimiK3:
    model = tiny(dtype, vision=vision, **options)
    model.load_state_dict(weights(vision))
    return model


def masters(**options) -> KimiK3:
    return loaded(torch.float32, compute_dtype=BF16, **options)


def loss_of(model: KimiK3) -> torch.Tensor:
    hidden_TD, _ = model(IDS, ROWS)
    head_WD = model.language_model.lm_head.weight.to(hidden_TD.dtype)
    return cross_entropy(hidden_TD, head_WD, IDS.roll(-1), torch.ones(len(IDS))) / len(IDS)


@pytest.mark.parametrize("backend", [None, "torch", "reference"])
def test_rows_loss_and_gradients_are_those_of_a_bfloat16_model(backend):
    with use_backend(backend):
        models = [loaded(BF16), masters()]
        losses = [loss_of(model) for model in models]
        for loss in losses:
            loss.backward()
    assert torch.equal(*losses)
    for (name, narrow), wide in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if narrow.grad is None:  # layer 0's first read has one source
            assert wide.grad is None
            continue
        assert wide.dtype == wide.grad.dtype == torch.float32
        # Rows of the embedding, and queries, add up in float32 here, in bfloat16 there.
        if not name.endswith(("embed_tokens.weight", "res_norm.weight", "res_proj.weight")):
            assert torch.equal(wide.grad.to(narrow.dtype), narrow.grad), name
        else:
            torch.testing.assert_close(wide.grad, narrow.grad.float(), rtol=2e-2, atol=1e-6)


def test_pictures_too():
    # 4 x 2 patches, a stretched position grid; then 2 x 2 of the native size
    pixels = Pixels(
        values_P3HW=torch.randn(12, 3, 2, 2, generator=torch.Generator().manual_seed(0)), grids=((1, 4, 2), (1, 2, 2))
    )
    ids = torch.cat([IDS[:7], torch.full((3,), config(True).media_placeholder_token_id), IDS[7:20]])
    rows = [model(ids, Rows.one(23), pixels=pixels)[0] for model in (loaded(BF16, vision=True), masters(vision=True))]
    assert rows[0].dtype == rows[1].dtype == BF16
    assert torch.equal(*rows)


# What spec and release keep in float32: convolutions, decay, output norm, router, the queries of Attention Residuals.
FLOAT32 = r".*(conv1d|A_log|dt_bias|o_norm|block_sparse_moe\.gate|res_norm|res_proj)(\.weight)?"


def test_only_what_is_float32_sees_a_change_below_bfloat16():
    """w (1 + 2^-9) is w again in bfloat16: at most 2^-9 (2 - 2^-7) of the power of two below w, under half a step."""
    model = masters()
    with torch.no_grad():
        want_TD, _ = model(IDS, ROWS)
        named = dict(model.named_parameters())
        kinds = {re.sub(r"layers\.\d+", "layers.N", name) for name in named}
        assert len(kinds) > 40
        for kind in sorted(kinds):
            own = [x for name, x in named.items() if re.sub(r"layers\.\d+", "layers.N", name) == kind]
            before = [x.clone() for x in own]
            for x in own:
                x.mul_(1 + 2**-9)
            got_TD, _ = model(IDS, ROWS)
            assert torch.equal(got_TD, want_TD) != bool(re.fullmatch(FLOAT32, kind)), kind
            for x, value in zip(own, before, strict=True):
                x.copy_(value)


def test_rows_are_bfloat16_and_scores_decay_and_states_float32():
    model = masters()
    with trace(model) as seen:
        _, state = model(IDS, ROWS, model.empty_state(2))
    dtypes = {name.rpartition(".")[2]: seen[name].dtype for name in seen}
    assert dtypes["stream"] == dtypes["final_hidden"] == BF16
    assert dtypes["decay"] == dtypes["beta"] == dtypes["weight"] == dtypes["weights"] == torch.float32
    assert {scores.dtype for layer in model.moe_layers() for scores in layer.take_scores()} == {torch.float32}
    kept = {(name, x.dtype) for layer in state.layers for name, x in vars(layer).items() if torch.is_tensor(x)}
    bf16 = {(name, BF16) for name in ("window_S3X", "latent", "shared_key")}
    assert kept == {("state_SHKV", torch.float32), *bf16}


def test_small_updates_add_up():
    """12 steps of a third of bfloat16's half step move a float32 master 4 half steps, a bfloat16 weight not at all."""
    models = [loaded(BF16), masters()]
    losses, start = [], weights()
    for model in models:
        losses.append([])
        for _ in range(12):
            loss = loss_of(model)
            losses[-1].append(loss.item())
            loss.backward()
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if name.endswith("down_proj.weight"):
                        weight.addcmul_(weight.grad.sign(), weight.abs(), value=-(2**-9) / 3)
                    weight.grad = None
    narrow, wide = losses
    assert narrow == [narrow[0]] * 12
    assert wide[0] == narrow[0] and wide[-1] < narrow[0] - 2e-4
    for name, weight in models[0].named_parameters():
        assert torch.equal(weight.float(), start[name]), name


def test_the_loss_is_close_to_float32():
    want, got = loss_of(loaded(torch.float32)), loss_of(masters())
    assert got != want
    torch.testing.assert_close(got, want, rtol=2e-3, atol=0)  # 2^-9 a rounding


def test_no_compute_dtype_adds_no_operation():
    kinds = []
    for options in ({}, {"compute_dtype": torch.float32}, {"compute_dtype": BF16}):
        model = loaded(torch.float32, **options)
        found, todo = set(), [loss_of(model).grad_fn]
        while todo:
            node = todo.pop()
            if node is not None and node not in found:
                found.add(node)
                todo += [below for below, _ in node.next_functions]
        kinds.append(sorted(node.name() for node in found))
    assert kinds[0] == kinds[1] and len(kinds[2]) > len(kinds[0])
    assert not any("ToCopy" in name for name in kinds[0])


@torch.no_grad()
def test_deterministic_mode_cuts_anywhere_in_bfloat16_too():
    model = masters(deterministic=True).eval()
    want_TD, _ = model(IDS, Rows.one(70))
    state, got = model.empty_state(1), []
    for start, end in ((0, 1), (1, 38), (38, 70)):
        hidden_TD, state = model(IDS[start:end], Rows.one(end - start, past=start), state)
        got.append(hidden_TD)
    assert want_TD.dtype == BF16 and torch.equal(torch.cat(got), want_TD)


@pytest.mark.skipif(cpu.missing is not None, reason=str(cpu.missing))
def test_the_decode_step_does_not_stand_for_rounded_rows():
    assert serves(loaded(torch.float32)) and serves(loaded(torch.float32, compute_dtype=torch.float32))
    assert not serves(masters())


@torch.no_grad()
def test_packed_experts_are_unpacked_to_what_comes_in():
    models = [loaded_packed(BF16), loaded_packed(torch.float32, compute_dtype=BF16)]
    assert torch.equal(*(model(IDS, ROWS)[0] for model in models))


def loaded_packed(dtype, **options) -> KimiK3:
    model = tiny(dtype, experts="packed", **options)
    state = {name: value for name, value in weights().items() if name in model.state_dict()}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if name not in state:
            low, high = (118, 124) if name.endswith("scale") else (0, 256)
            state[name] = torch.randint(low, high, tensor.shape, generator=generator, dtype=torch.uint8)
    model.load_state_dict(state)
    return model


def test_a_dtype_without_fractions_is_refused():
    with pytest.raises(ValueError, match=r"compute_dtype: wanted a floating dtype, got torch\.int8"):
        KimiK3(tiny_config(300), compute_dtype=torch.int8)
