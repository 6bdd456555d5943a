"""Each parameter's draw against its rule, and what the rules promise of the fresh model."""

import math
from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trivium.model.kda
import trivium.model.residual
from trivium.config import K3Config, VisionConfig, model_preset
from trivium.model.init import copy_weights_, initialise_, rule_of
from trivium.model.kimi_k3 import KimiK3
from trivium.model.layers import RMSNorm
from trivium.ops.pixels import Pixels
from trivium.ops.rows import Rows

VISION = VisionConfig(
    patch_size=4,
    init_pos_emb_height=8,
    init_pos_emb_width=8,
    init_pos_emb_time=4,
    vt_hidden_size=32,
    vt_intermediate_size=64,
    vt_num_hidden_layers=2,
    vt_num_attention_heads=2,
    qkv_hidden_size=48,
    text_hidden_size=192,
)


def nano(**changed: object) -> K3Config:
    return replace(model_preset("nano"), **changed)


def drawn(config: K3Config, seed: int, dtype: torch.dtype = torch.float32) -> KimiK3:
    """A model filled from NaN, so that what the table leaves out shows."""
    model = KimiK3(config, dtype=dtype)
    for tensor in model.state_dict().values():
        tensor.fill_(torch.nan)
    initialise_(model, seed)
    return model


@cache
def fresh() -> KimiK3:
    return drawn(nano(vision=VISION), seed=1)


# --- The table -----------------------------------------------------------------------------------------------------


def test_every_name_of_the_released_model_has_one_rule():
    with torch.device("meta"):
        model = KimiK3(model_preset("k3"))
    for name in model.state_dict():
        rule_of(name)


@pytest.mark.parametrize(
    "name", ["language_model.model.layers.0.self_attn.q_proj.bias", "language_model.model.layers.x.mlp.up_proj.weight"]
)
def test_a_name_without_a_rule_is_refused(name):
    with pytest.raises(ValueError, match=f"^initialise_: wanted one rule for {name}, got 0$"):
        rule_of(name)


def test_a_name_with_two_rules_is_refused(monkeypatch):
    table = trivium.model.init.TABLE
    monkeypatch.setattr(trivium.model.init, "TABLE", (*table, (r".*A_log", table[0][1])))
    with pytest.raises(ValueError, match="^initialise_: wanted one rule for .*A_log, got 2$"):
        rule_of("language_model.model.layers.0.self_attn.A_log")


def test_a_model_without_memory_is_refused():
    with torch.device("meta"):
        model = KimiK3(nano())
    with pytest.raises(ValueError, match=r"^initialise_: language_model\.\S+ is on the meta device, wanted a tensor"):
        initialise_(model, 0)


def test_packed_experts_are_refused_before_anything_is_written():
    model = KimiK3(nano(), experts="packed")
    nn.init.zeros_(model.language_model.lm_head.weight)
    with pytest.raises(ValueError, match=r"weight_packed, got 0, packed experts cannot be drawn$"):
        initialise_(model, 0)
    assert not model.language_model.lm_head.weight.any()


def test_nothing_is_left_as_it_was():
    for name, tensor in fresh().state_dict().items():
        assert tensor.isfinite().all(), name


# --- The draws -----------------------------------------------------------------------------------------------------


def wanted_std(name: str, tensor: Tensor) -> float:
    """Of a normal draw, written down again by the name's end."""
    if name.endswith("embed_tokens.weight"):
        return 0.8
    if name.endswith("lm_head.weight"):
        return 0.25 / math.sqrt(192)
    if name.endswith("pos_emb.weight"):
        return 0.02
    if name.endswith("patch_embed.proj.weight"):
        return 0.5 / math.sqrt(3 * 4 * 4)
    return 0.5 / math.sqrt(tensor.shape[-1])  # [out, in] and [E, out, in]


def test_each_parameter_follows_its_rule():
    seen = defaultdict(int)
    for name, tensor in fresh().state_dict().items():
        if name.endswith(("norm.weight", "norm0.weight", "norm1.weight")):
            kind = "one"
            assert (tensor == 1).all(), name
        elif name.endswith(("_res_proj.weight", ".A_log", ".e_score_correction_bias")):
            kind = "zero"
            assert (tensor == 0).all(), name
        elif name.endswith("conv1d.weight"):
            kind = "uniform"
            assert 0.49 < tensor.max() <= 0.5 and -0.5 <= tensor.min() < -0.49, name
            assert tensor.std() == pytest.approx(1 / math.sqrt(12), rel=0.05), name
        elif name.endswith("dt_bias"):
            kind = "decay"
            decay = 5 * tensor.sigmoid()
            assert 0.99e-3 < decay.min() < 1.2e-3 and 0.08 < decay.max() < 0.101, name
            # log-uniform over two decades: mean log10 is -2, standard error 0.04 over 192 channels
            assert decay.log10().mean() == pytest.approx(-2, abs=0.2), name
        else:
            kind = "normal"
            std, count = wanted_std(name, tensor), tensor.numel()
            # Six standard errors of a standard deviation and of a mean.
            assert tensor.std() == pytest.approx(std, rel=6 / math.sqrt(2 * count)), name
            assert abs(tensor.mean()) < 6 * std / math.sqrt(count), name
            assert tensor.abs().max() > 2 * std, name
        seen[kind] += 1
    # nano: 6 layers of 4 norms, 4 o_norms, 2 x 2 of MLA, 5 of MoE and the last two; 5 of the tower, 1 of the projector
    assert seen["one"] == 6 * 4 + 4 + 4 + 5 + 2 + 5 + 1
    assert seen["zero"] == 6 * 2 + 1 + 4 + 5
    assert seen["uniform"] == 4 * 3 and seen["decay"] == 4


@pytest.mark.parametrize("bound", [-5.0, -1.5])
def test_a_channel_starts_at_the_decay_it_was_drawn(bound):
    model = drawn(nano(kda=replace(nano().kda, gate_lower_bound=bound)), seed=2)
    attention = model.language_model.model.layers[0].self_attn
    log_decay = bound * (attention.A_log.exp()[0] * attention.dt_bias).sigmoid()
    assert -0.1001 < log_decay.min() < -0.08 and -1.2e-3 < log_decay.max() < -0.999e-3


def test_a_bound_that_cannot_hold_the_decays_is_refused():
    model = KimiK3(nano(kda=replace(nano().kda, gate_lower_bound=-0.1)))
    with pytest.raises(ValueError, match="^initialise_: gate_lower_bound -0.1 cannot start channels at a log decay of"):
        initialise_(model, 0)


def test_the_seed_and_the_name_are_all_a_draw_depends_on():
    one, same, other = fresh().state_dict(), drawn(nano(vision=VISION), 1).state_dict(), drawn(nano(), 2).state_dict()
    fewer = drawn(nano(num_layers=5), 1).state_dict()
    for name, tensor in one.items():
        assert torch.equal(tensor, same[name]), name
        random = tensor.unique().numel() > 1
        if name in other:
            assert torch.equal(tensor, other[name]) != random, name
        if name in fewer and fewer[name].shape == tensor.shape:
            assert torch.equal(tensor, fewer[name]), name
    assert len(fewer) < len(other) < len(one)


def test_parameters_of_one_shape_are_drawn_apart():
    weights = fresh().state_dict()
    layer = "language_model.model.layers.0.self_attn."
    assert not torch.equal(weights[layer + "q_proj.weight"], weights[layer + "k_proj.weight"])
    other = layer.replace("layers.0", "layers.1")
    assert not torch.equal(weights[layer + "q_proj.weight"], weights[other + "q_proj.weight"])


def test_a_bfloat16_model_holds_the_rounded_float32_draws():
    want, got = fresh().state_dict(), drawn(nano(), 1, torch.bfloat16).state_dict()
    for name, tensor in got.items():
        assert torch.equal(tensor, want[name].to(tensor.dtype)), name
    assert got["language_model.lm_head.weight"].dtype == torch.bfloat16
    assert got["language_model.model.layers.0.self_attn.dt_bias"].dtype == torch.float32


# --- The fresh model -----------------------------------------------------------------------------------------------


def ids_and_rows() -> tuple[Tensor, Rows]:
    ids_T = torch.randint(3840, (384,), generator=torch.Generator().manual_seed(5))
    return ids_T, Rows.of([320, 64])


def rms(x: Tensor) -> float:
    return x.float().square().mean().sqrt().item()


@cache
def norm_inputs() -> dict[str, tuple[float, float]]:
    """Of every norm that a text forward runs: the RMS of its input, and its eps."""
    model, (ids_T, rows) = fresh(), ids_and_rows()
    seen: dict[str, tuple[float, float]] = {}

    def note(name):
        return lambda module, args: seen.update({name: (rms(args[0]), module.eps)})

    hooks = [
        module.register_forward_pre_hook(note(name))
        for name, module in model.named_modules()
        if isinstance(module, RMSNorm)
    ]
    eps = model.config.rms_norm_eps
    run_kda, run_attnres = trivium.model.kda.kda, trivium.model.residual.attnres

    def kda(*args, **kwargs):  # its output goes into o_norm
        result = run_kda(*args, **kwargs)
        seen[f"o_norm of KDA layer {sum(name.startswith('o_norm') for name in seen)}"] = (rms(result[0]), eps)
        return result

    def attnres(blocks, sum_TD, *args):  # its norm runs over every source
        read_idx = sum(name.startswith("read") for name in seen)
        seen[f"read {read_idx}"] = (min(rms(source_TD) for source_TD in [*blocks, sum_TD]), eps)
        return run_attnres(blocks, sum_TD, *args)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(trivium.model.kda, "kda", kda)
        patch.setattr(trivium.model.residual, "attnres", attnres)
        model(ids_T, rows)
    for hook in hooks:
        hook.remove()
    return seen


def test_no_norms_input_is_lost_in_its_eps():
    for name, (input_rms, eps) in norm_inputs().items():
        floor = math.sqrt(eps) * (2 if name.endswith("routed_expert_norm") else 1)
        assert input_rms >= floor, f"{name}: {input_rms:.2e} under {floor:.2e}"


def test_every_norm_of_the_text_model_was_measured():
    # 6 layers of 2, 2 x 2 of MLA, 5 of MoE, the last; o_norm of 4 KDA layers; two reads a layer and the last.
    kinds = defaultdict(int)
    for name in norm_inputs():
        kinds[name.split()[0] if " " in name else "module"] += 1
    assert kinds == {"module": 6 * 2 + 4 + 5 + 1, "o_norm": 4, "read": 6 * 2 + 1}


def test_no_norms_input_of_the_vision_tower_is_lost_in_its_eps():
    model = KimiK3(replace(model_preset("nano"), num_layers=2, vision=VISION))
    initialise_(model, seed=0)
    seen = {}
    for tower in (model.vision_tower, model.mm_projector):
        for name, module in tower.named_modules():
            if isinstance(module, RMSNorm):
                module.register_forward_pre_hook(
                    lambda module, args, name=name: seen.update({name: (rms(args[0]), module.eps)})
                )
    grid = (1, 8, 12)
    patches = (
        torch.rand(96, 3, VISION.patch_size, VISION.patch_size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    )
    with torch.no_grad():
        model.mm_projector(model.vision_tower(Pixels(values_P3HW=patches, grids=(grid,))))
    assert len(seen) == 2 * 2 + 1 + 1
    for name, (input_rms, eps) in seen.items():
        assert input_rms >= math.sqrt(eps), f"{name}: {input_rms:.2e}"


def test_the_input_decides_little_of_a_fresh_decay():
    model, (ids_T, rows) = fresh(), ids_and_rows()
    f_b = model.language_model.model.layers[0].self_attn.f_b_proj
    z = []
    hook = f_b.register_forward_hook(lambda module, args, output: z.append(output))
    with torch.no_grad():
        model(ids_T, rows)
    hook.remove()
    # Two gains of a half on a normed input: 0.25, against a bias of -8.5 to -3.9.
    assert rms(z[0]) == pytest.approx(0.25, rel=0.3)


def test_the_first_loss_is_that_of_a_guess():
    model, (ids_T, rows) = fresh(), ids_and_rows()
    with torch.no_grad():
        hidden_TD, _ = model(ids_T, rows)
        loss = F.cross_entropy(model.head(hidden_TD)[:-1], ids_T[1:])
    assert loss.item() == pytest.approx(math.log(4096), abs=0.1)


def test_a_fresh_model_sends_gradients_everywhere_but_the_unread():
    model, (ids_T, rows) = drawn(nano(), 1), ids_and_rows()
    hidden_TD, _ = model(ids_T, rows)
    F.cross_entropy(model.head(hidden_TD)[:-1], ids_T[1:]).backward()
    for name, weight in model.named_parameters():
        # A key's norm has no gradient while its query is zero; the first read has one source, nothing to weigh.
        if name.endswith("_res_norm.weight") or "layers.0.self_attention_res_proj" in name:
            assert weight.grad is None or not weight.grad.any(), name
        else:
            assert weight.grad.isfinite().all() and weight.grad.any(), name


# --- Weights of another model ----------------------------------------------------------------------------------------


def small(seed: int | None = None, dtype: torch.dtype = torch.float32) -> KimiK3:
    """Two layers, drawn or empty."""
    model = KimiK3(nano(num_layers=2), dtype=dtype)
    if seed is None:
        for tensor in model.state_dict().values():
            tensor.fill_(torch.nan)
    else:
        initialise_(model, seed)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copied_weights_are_those_of_the_other_model_and_none_is_shared(dtype):
    """bfloat16 is a part of float32, so nothing is rounded."""
    model, weights = small(), small(3, dtype).state_dict()
    copy_weights_(model, weights)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name].float()), name
        assert tensor.data_ptr() != weights[name].data_ptr()
    assert model.state_dict()["language_model.model.norm.weight"].dtype == torch.float32


def test_of_each_weight_the_place_gets_the_whole_and_says_what_is_kept():
    model, weights, seen = small(), small(3).state_dict(), []

    def place(whole: Tensor, tensor: Tensor) -> Tensor:
        seen.append((whole.shape, tensor.shape))
        return -whole

    copy_weights_(model, weights, place=place)
    assert len(seen) == len(weights) and all(whole == shape for whole, shape in seen)
    assert all(torch.equal(tensor, -weights[name]) for name, tensor in model.state_dict().items())


def test_weights_that_do_not_fit_are_refused_before_anything_is_written():
    name = "language_model.model.norm.weight"
    weights = small(3).state_dict()
    for wrong, message in (
        ({other: value for other, value in weights.items() if other != name}, f"{name} is in the model alone"),
        ({**weights, "a.weight": torch.ones(1)}, "a.weight is in the weights alone"),
        ({**weights, name: torch.ones(191)}, rf"{name}: wanted \(192,\), got \(191,\)"),
        ({**weights, name: torch.ones(1, 192)}, rf"{name}: wanted \(192,\), got \(1, 192\)"),
    ):
        model = small()
        with pytest.raises(ValueError, match=f"^weights: {message}$"):
            copy_weights_(model, wrong)
        assert all(tensor.isnan().all() for tensor in model.state_dict().values())
