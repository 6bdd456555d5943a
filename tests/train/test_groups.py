import pytest
import torch
from torch import nn

from trivium.train.groups import build_optimisers, parameter_groups

SHAPES = {
    "language_model.model.embed_tokens.weight": ((32, 8), "embedding and lm_head"),
    "language_model.lm_head.weight": ((32, 8), "embedding and lm_head"),
    "layers.0.self_attn.q_proj.weight": ((6, 8), "matrices"),
    "layers.0.self_attn.b_proj.weight": ((3, 8), "matrices"),
    "layers.0.self_attn.f_a_proj.weight": ((2, 8), "matrices"),
    "layers.0.mlp.gate_proj.weight": ((16, 8), "matrices"),
    "layers.1.block_sparse_moe.experts.w1.weight": ((4, 6, 5), "matrices"),
    "layers.1.block_sparse_moe.shared_experts.gate_proj.weight": ((6, 8), "matrices"),
    "layers.1.block_sparse_moe.gate.weight": ((4, 8), "rest"),
    "layers.0.self_attn.q_conv1d.weight": ((6, 1, 4), "rest"),
    "layers.0.self_attn.A_log": ((3,), "rest"),
    "layers.0.self_attn.dt_bias": ((6,), "rest"),
    "layers.0.input_layernorm.weight": ((8,), "rest"),
    "layers.0.mlp_res_proj.weight": ((1, 8), "rest"),
}


def groups():
    named = [(name, nn.Parameter(torch.ones(shape))) for name, (shape, _) in SHAPES.items()]
    frozen = ("frozen", nn.Parameter(torch.ones(4, 4), requires_grad=False))
    return parameter_groups([*named, frozen], muon_lr=0.03, adamw_lr=0.003, weight_decay=0.1)


@pytest.mark.parametrize("name", SHAPES)
def test_who_gets_what(name):
    (group,) = [group for group in groups() if name in dict(group.parameters)]
    want = SHAPES[name][1]
    assert group.name == want or (want == "rest" and group.name == "router and all vectors")
    assert group.optimiser == ("Muon" if want == "matrices" else "AdamW")
    assert group.weight_decay == (0.0 if want == "rest" else 0.1)


def test_every_trained_parameter_is_in_one_group():
    assert sorted(name for group in groups() for name, _ in group.parameters) == sorted(SHAPES)


def test_optimisers_have_the_rates_of_their_groups():
    got = [
        (type(o).__name__, o.param_groups[0]["lr"], o.param_groups[0]["full_lr"]) for o in build_optimisers(groups())
    ]
    assert got == [("Muon", 0.03, 0.03), ("AdamW", 0.003, 0.003), ("AdamW", 0.003, 0.003)]
