from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn

from tests.tiny import tiny_config
from trivium.model.heads import Blocks
from trivium.model.kimi_k3 import KimiK3
from trivium.train.groups import build_optimisers, groups_table, parameter_groups

SHAPES = {
    "language_model.model.embed_tokens.weight": ((32, 8), "the rest"),
    "language_model.lm_head.weight": ((32, 8), "the rest"),
    "layers.0.self_attn.q_proj.weight": ((6, 8), "matrices"),
    "layers.0.self_attn.b_proj.weight": ((3, 8), "matrices"),
    "layers.0.self_attn.f_a_proj.weight": ((2, 8), "matrices"),
    "layers.0.mlp.gate_proj.weight": ((16, 8), "matrices"),
    "layers.1.block_sparse_moe.experts.w1.weight": ((4, 6, 5), "matrices"),
    "layers.1.block_sparse_moe.shared_experts.gate_proj.weight": ((6, 8), "matrices"),
    "layers.1.block_sparse_moe.gate.weight": ((4, 8), "the rest"),
    "layers.0.self_attn.q_conv1d.weight": ((6, 1, 4), "the rest"),
    "layers.0.self_attn.A_log": ((3,), "the rest"),
    "layers.0.self_attn.dt_bias": ((6,), "the rest"),
    "layers.0.input_layernorm.weight": ((8,), "the rest"),
    "layers.0.mlp_res_proj.weight": ((1, 8), "the rest"),
    "vision_tower.patch_embed.proj.weight": ((4, 3, 2, 2), "the rest"),
    "vision_tower.patch_embed.pos_emb.weight": ((5, 5, 4), "the rest"),
    "value_head.weight": ((1, 8), "the rest"),
    "scale": ((), "the rest"),
}


def model_of(shapes, head_blocks=None):
    """A module with parameters of these names and shapes."""
    model = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        owner = model
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(last, nn.Parameter(torch.ones(shape)))
    if head_blocks:
        model.head_blocks = lambda: head_blocks
    return model


def groups(**given):
    model = model_of({name: shape for name, (shape, _) in SHAPES.items()} | {"frozen": (4, 4)})
    model.frozen.requires_grad_(False)
    return parameter_groups(model, muon_lr=0.03, adamw_lr=0.003, **given)


@pytest.mark.parametrize("name", SHAPES)
def test_who_gets_what(name):
    (group,) = [group for group in groups() if name in dict(group.parameters)]
    assert group.name == SHAPES[name][1]
    assert (group.optimiser, group.weight_decay) == (("Muon", 0.1) if group.name == "matrices" else ("AdamW", 0.0))


def test_every_trained_parameter_is_in_one_group():
    assert sorted(name for group in groups() for name, _ in group.parameters) == sorted(SHAPES)


def test_optimisers_have_the_rates_averages_and_decay_of_their_groups():
    muon, adamw = build_optimisers(groups(muon_momentum=0.9, adamw_betas=(0.8, 0.99), weight_decay=0.2))
    want = {"lr": 0.03, "full_lr": 0.03, "momentum": 0.9, "weight_decay": 0.2}
    assert type(muon).__name__ == "Muon" and muon.param_groups[0].items() >= want.items()
    want = {"lr": 0.003, "full_lr": 0.003, "betas": (0.8, 0.99), "weight_decay": 0.0}
    assert type(adamw).__name__ == "AdamW" and adamw.param_groups[0].items() >= want.items()


def test_only_matrices_decay():
    model = model_of({name: shape for name, (shape, _) in SHAPES.items()})
    optimisers = build_optimisers(parameter_groups(model, muon_lr=0.03, adamw_lr=0.003, weight_decay=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimiser in optimisers:
        optimiser.step()
    for name, parameter in model.named_parameters():
        want = 1 - 0.03 * 0.1 if SHAPES[name][1] == "matrices" else 1.0
        assert torch.equal(parameter.detach(), torch.full_like(parameter, want)), name


def test_a_model_without_matrices_or_without_the_rest_has_one_group():
    assert [g.name for g in parameter_groups(model_of({"a": (3,)}), muon_lr=1, adamw_lr=1)] == ["the rest"]
    assert [g.name for g in parameter_groups(model_of({"a": (3, 2)}), muon_lr=1, adamw_lr=1)] == ["matrices"]


def test_heads_are_cut_unless_they_are_not_wanted():
    # By hand, of tiny: 2 KDA layers of 5 row-cut and 1 column-cut matrices with 2 heads, and f_a and b_proj; MLA's q_b,
    # g, o with 2, kv_b with 4, kv_a with 2, q_a; dense 3; two MoE layers of 6 · 3 experts, 2 latent and 3 shared matrices.
    with torch.device("meta"):
        model = KimiK3(tiny_config(44))
    cut, _ = parameter_groups(model, muon_lr=0.03, adamw_lr=0.003)
    assert cut.num_blocks == 2 * (6 * 2 + 2) + (3 * 2 + 4 + 2 + 1) + 3 + 2 * (18 + 2 + 3)
    whole, rest = parameter_groups(model, muon_lr=0.03, adamw_lr=0.003, per_head=False)
    assert whole.num_blocks == 2 * 8 + 6 + 3 + 2 * 23
    assert (rest.num_blocks, whole.blocks) == (0, {})
    assert build_optimisers([cut])[0].blocks == dict(cut.blocks)


def test_blocks_of_what_muon_does_not_train_are_left_out():
    model = model_of({"q.weight": (4, 3), "k.weight": (4, 3)}, {"q.weight": Blocks((2, 2)), "k.weight": Blocks((1, 3))})
    model.k.weight.requires_grad_(False)
    (group,) = parameter_groups(model, muon_lr=0.03, adamw_lr=0.003)
    assert group.blocks == {"q.weight": Blocks((2, 2))}
    build_optimisers([group])


# speculators#821: Muon crashed on a [1, N] weight. Of the kind: [N, 1], vectors, scalars, and stacks of those.
def test_what_is_no_matrix_is_trained_by_adamw_and_said_so():
    shapes = {"proj.weight": (4, 3), "scalar_head.weight": (1, 8), "column": (8, 1), "bias": (8,), "alone": ()}
    shapes["conv1d.weight"] = (8, 1, 4)
    model = model_of(shapes)
    found = parameter_groups(model, muon_lr=0.03, adamw_lr=0.003)
    optimisers = build_optimisers(found)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for optimiser in optimisers:
            optimiser.step()
    assert all(parameter.isfinite().all() and (parameter < 1).all() for parameter in model.parameters())
    console = Console(width=80, record=True, file=SimpleNamespace(write=len, flush=int))
    console.print(groups_table(found))
    # Parameters come owner by owner, a module's own before those of its children.
    assert "AdamW: column, bias, alone, scalar_head, conv1d" in console.export_text()


def test_the_table_says_rates_averages_decay_and_blocks_in_80_columns():
    with torch.device("meta"):
        model = KimiK3(tiny_config(44))
    console = Console(width=80, record=True, file=SimpleNamespace(write=len, flush=int))
    console.print(groups_table(parameter_groups(model, muon_lr=0.045, adamw_lr=0.006, muon_momentum=0.85)))
    text = console.export_text()
    assert "…" not in text
    muon, adamw = (
        next(line for line in text.splitlines() if line.startswith(f" {name}: ")) for name in ("Muon", "AdamW")
    )
    assert muon.split()[3:4] + muon.split()[5:] == ["90", "0.045", "×", "s", "0.85", "0.1"]
    assert adamw.split()[-4:] == ["0.006", "0.9,", "0.95", "0"]
    assert "gate" in text and "A_log" in text and "lm_head" in text and "self_attention_res_proj" in text
