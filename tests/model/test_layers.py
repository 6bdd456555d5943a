"""The small parts of a layer against numbers worked out by hand: norms and their eps, caps, bounds, the router."""

import math
from dataclasses import replace

import pytest
import torch

from trivium.config import K3Config, model_preset
from trivium.model.kda import KimiDeltaAttention
from trivium.model.kimi_k3 import KimiK3
from trivium.model.layers import Mlp, RMSNorm
from trivium.model.moe import Experts, Router
from trivium.model.state import KdaState
from trivium.ops.balance import Route
from trivium.ops.rows import Rows


def rms_norm(x: list[float], weight: list[float], eps: float, dtype=torch.float32) -> list[float]:
    norm = RMSNorm(len(x), eps, dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor(weight))
        return norm(torch.tensor(x, dtype=dtype)).tolist()


def test_rms_norm_by_hand():
    # mean square 12.5, and eps as much: the root of 25 is 5
    assert rms_norm([3.0, 4.0], [2.0, -1.0], eps=12.5) == pytest.approx([1.2, -0.8])


def test_rms_norm_rounds_before_the_weight():
    # 4 / sqrt(12.5) = 1.13137 is 1.1328125 in bfloat16; 7 times that is 7.9297, between 7.90625 and 7.9375.
    # Seven times 1.13137 is 7.9196 and would round to 7.90625.
    assert rms_norm([4.0, 3.0], [7.0, 1.0], eps=1e-5, dtype=torch.bfloat16)[0] == 7.9375


def test_the_eps_of_every_norm():
    with torch.device("meta"):
        model = KimiK3(replace(model_preset("nano"), rms_norm_eps=3e-5))
    eps = {name: module.eps for name, module in model.named_modules() if isinstance(module, RMSNorm)}
    latent = ("q_a_layernorm", "kv_a_layernorm")
    assert {name.rpartition(".")[2] for name in eps} == {
        *latent,
        "input_layernorm",
        "post_attention_layernorm",
        "self_attention_res_norm",
        "mlp_res_norm",
        "output_attn_res_norm",
        "routed_expert_norm",
        "o_norm",
        "norm",
    }
    for name, value in eps.items():
        assert value == (1e-6 if name.endswith(latent) else 3e-5), name


def capped() -> K3Config:
    return replace(model_preset("nano"), activation_situ_beta=2.0, activation_situ_linear_beta=9.0)


def zeroed(module: torch.nn.Module, **first: float) -> torch.nn.Module:
    """All weights 0 but, of the matrices named, the entry of the first input and the first output (of expert 0)."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.zero_()
            for matrix, value in first.items():
                if name.startswith(f"{matrix}."):
                    parameter.view(-1)[0] = value
    return module


@pytest.mark.parametrize("kind", ["dense", "routed"])
def test_both_feed_forwards_take_the_caps_of_the_config(kind):
    # gate 1e4 on its cap 2, up 1 under its cap 9: 2 · sigmoid(1e4) · 9 tanh(1/9)
    if kind == "dense":
        mlp = zeroed(Mlp(capped(), 3), gate_proj=1e4, up_proj=1.0, down_proj=1.0)
        y = mlp(torch.ones(1, 192))
    else:
        experts = zeroed(Experts(capped(), packed=False), w1=1e4, w3=1.0, w2=1.0)
        ones = torch.ones(1, 1)
        route = Route(experts_TA=torch.zeros(1, 1, dtype=torch.int64), weights_TA=ones, scores_TE=ones)
        y = experts(torch.ones(1, 96), route, Rows.one(1))
    assert y[0, 0].item() == pytest.approx(18 * math.tanh(1 / 9), rel=1e-6)
    assert (y[0, 1:] == 0).all()


def test_the_gate_takes_the_bound_of_the_config():
    # A key of 0 writes nothing; a gate wide open to forgetting multiplies the state by exp(bound).
    nano = model_preset("nano")
    config = replace(nano, kda=replace(nano.kda, gate_lower_bound=-4.0))
    layer = zeroed(KimiDeltaAttention(config, "layer"))
    layer.dt_bias.data.fill_(100.0)
    state = KdaState(state_SHKV=torch.ones(1, 3, 64, 64), window_S3X=torch.zeros(1, 3, 3 * 3 * 64))
    with torch.no_grad():
        _, state = layer(torch.ones(1, 192), Rows.one(1, past=1), state)
    torch.testing.assert_close(state.state_SHKV, torch.full((1, 3, 64, 64), math.exp(-4)))


def test_the_router_scores_in_float32():
    # logit 1 + 2^-9, which bfloat16 would round to 1: its score is 4e-4 above that of 1
    router = Router(model_preset("nano"))
    router.weight = torch.nn.Parameter(torch.zeros(48, 192, dtype=torch.bfloat16))
    router.e_score_correction_bias.zero_()
    router.weight.data[0, :2] = torch.tensor([1.0, 2**-9])
    route = router(torch.ones(1, 192, dtype=torch.bfloat16))
    assert route.scores_TE.dtype == torch.float32
    assert route.scores_TE[0, 0].item() == pytest.approx(1 / (1 + math.exp(-1 - 2**-9)), rel=1e-6)


def test_the_routed_scale_and_bias_reach_the_weights():
    # all scores are 1/2; the bias picks experts 5 to 8, and four equal weights sum to 2.5
    nano = model_preset("nano")
    router = Router(replace(nano, moe=replace(nano.moe, routed_scaling_factor=2.5)))
    router.weight.data.zero_()
    router.e_score_correction_bias.zero_()[5:9] = 0.25
    route = router(torch.ones(1, 192))
    assert route.experts_TA.tolist() == [[5, 6, 7, 8]]
    torch.testing.assert_close(route.weights_TA, torch.full((1, 4), 0.625))
