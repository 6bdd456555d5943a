"""Each experiment's own parts by hand, and its run end to end, made tiny."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from trivium.config import MoeConfig
from trivium.data.pack import TokenStream
from trivium.lab import balance, length, muon, per_head
from trivium.lab.catalogue import EXPERIMENTS
from trivium.lab.experiment import Result, Results, Run
from trivium.lab.text import NUM_RANKS, VOCAB_SIZE, keep_text, prepare_text, read_text
from trivium.lab.training import Recipe, fresh_model, optimisers_of, small_model, train_on_text
from trivium.model.kimi_k3 import KimiK3
from trivium.train.balance import QuantileBalancer
from trivium.train.heldout import score
from trivium.train.muon import Muon

TINY = small_model(
    num_layers=2, hidden_size=32, num_heads=2, num_experts=8, num_active=2, expert_size=16, latent_size=16
)
RECIPE = Recipe(num_steps=12, step_tokens=128, max_len=32, num_evals=3, eval_tokens=200)


def stream(num_documents, doc_len, seed):
    """Documents of counting: each token is the last one's plus one."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(200, (num_documents, 1), generator=generator, dtype=torch.int32)
    ids = (first + torch.arange(doc_len, dtype=torch.int32)) % 200
    ids[:, 0] = NUM_RANKS
    return TokenStream(
        ids_T=ids.flatten(),
        starts=np.arange(num_documents + 1) * doc_len,
        num_bytes_W=torch.tensor([1] * NUM_RANKS + [0] * 256),
    )


@pytest.fixture
def folder(tmp_path):
    keep_text(tmp_path, stream(40, 60, 0), stream(6, 70, 1), what="counting")
    return tmp_path


def test_the_text_is_kept_once_and_known_by_its_tokens(folder):
    facts = prepare_text(folder, lambda line: pytest.fail("nothing is to be made"))
    assert facts["text"] == "counting: 2,360 tokens to train on, 414 held out, 2,048 ids"
    assert read_text(folder).train.starts.tolist() == stream(40, 60, 0).starts.tolist()
    keep_text(folder, stream(40, 60, 2), stream(6, 70, 1), what="counting")
    assert prepare_text(folder, print)["sha256 of its tokens"] != facts["sha256 of its tokens"]
    with pytest.raises(ValueError, match="is not there, prepare_text makes it"):
        read_text(folder / "none")


def trained(folder, **changes):
    model = fresh_model(TINY, 0)
    recipe = replace(RECIPE, **changes)
    result = train_on_text(
        model, recipe, read_text(folder), QuantileBalancer(), seed=0, say=lambda line: None, source="test"
    )
    return model, result


def test_training_lowers_the_loss_and_says_what_was_seen(folder):
    model, result = trained(folder)
    tokens, losses = result.curves["loss"]
    assert tokens == [128.0 * step for step in range(1, 13)] and losses[-1] < losses[0] - 0.3
    assert result.curves["heldout"][0] == [512.0, 1024.0, 1536.0]
    assert result.numbers["final"] == pytest.approx(score(model, read_text(folder).heldout).loss, rel=1e-5)
    assert len(result.curves["max_vio"][0]) == 12 and result.numbers["max_vio"] > 0
    assert trained(folder)[1] == result  # a seed is a run


def test_a_run_that_diverges_has_no_final_loss(folder):
    _, result = trained(folder, matrix_lr=1e30, other_lr=1e30)
    assert result.numbers["final"] is None


def test_under_adamw_the_same_parameters_are_trained(folder):
    model = fresh_model(TINY, 0)
    muon_, *rest = optimisers_of(model, RECIPE)
    adamw, *same = optimisers_of(model, replace(RECIPE, matrices="adamw", matrix_lr=0.004, momentum=0.8))
    assert isinstance(muon_, Muon) and isinstance(adamw, torch.optim.AdamW)
    assert [group["momentum"] for group in muon_.param_groups] == [RECIPE.momentum]
    assert [group["betas"] for group in same[0].param_groups] == [(0.9, 0.95)]
    ids = [[id(p) for group in optimiser.param_groups for p in group["params"]] for optimiser in (muon_, adamw)]
    assert ids[0] == ids[1] and len(rest) == len(same)
    (group,) = adamw.param_groups
    assert group["full_lr"] == 0.004 and group["betas"] == (0.8, 0.95) and group["weight_decay"] == 0.1
    with pytest.raises(ValueError, match='matrices: wanted "muon" or "adamw", got \'sgd\''):
        replace(RECIPE, matrices="sgd")


# --- balance -------------------------------------------------------------------------------------------------------


def test_draws_by_chance_are_as_uneven_as_the_normal_law_says():
    # 4,096 tokens, 4 of 64 experts: 256 each, standard deviation sqrt(256 · 15/16) = 15.5; the largest of 64 normals lies
    # at 2.4 of them, the largest of 192 at 2.8: 0.145 and 0.17.
    moe = balance.MODEL.moe
    assert balance.noise_floor(moe, 4096, 1) == pytest.approx(0.145, abs=0.02)
    assert balance.noise_floor(moe, 4096, 3) == pytest.approx(0.17, abs=0.02)
    everyone = MoeConfig(
        num_experts=4,
        num_experts_per_token=4,
        num_shared_experts=1,
        moe_intermediate_size=8,
        routed_expert_hidden_size=8,
    )
    assert balance.noise_floor(everyone, 100, 2) == 0


@pytest.mark.parametrize("variant", EXPERIMENTS["balance"].variants, ids=lambda variant: variant.name)
def test_every_balancer_trains(folder, monkeypatch, variant):
    monkeypatch.setattr(balance, "MODEL", TINY)
    monkeypatch.setattr(balance, "RECIPE", replace(RECIPE, num_steps=6))
    result = balance.run(variant, 0, folder, lambda line: None)
    assert all(value is not None for value in result.numbers.values())
    assert ("oracle" in result.numbers) == (variant in balance.QUANTILE)


def test_the_balancers_differ_in_what_they_do(folder, monkeypatch):
    """Not one of the variants is another one under a second name."""
    monkeypatch.setattr(balance, "RECIPE", replace(RECIPE, num_steps=4))
    biases = []
    for variant in EXPERIMENTS["balance"].variants:
        model = fresh_model(TINY, 0)
        train_on_text(
            model,
            balance.RECIPE,
            read_text(folder),
            balance.balancer_of(variant),
            seed=0,
            say=lambda line: None,
            source="test",
        )
        layer = model.moe_layers()[0]
        biases.append((variant.name, layer.gate.e_score_correction_bias, layer.gate.weight.detach()))
    still = [name for name, bias_E, _ in biases if not bias_E.any()]
    assert still == ["auxiliary loss, weight .01", "none"]
    for idx, (_, bias_E, weight) in enumerate(biases):
        for _, other_E, other in biases[:idx]:
            assert not (bias_E.equal(other_E) and weight.equal(other))


# --- muon ----------------------------------------------------------------------------------------------------------


def test_where_a_curve_meets_a_loss_by_hand():
    points = [(0.5, 4.0), (0.75, 3.0), (1.0, 2.0)]
    assert muon.crossing(points, 3.0) == pytest.approx(0.75)
    assert muon.crossing(points, 2.5) == pytest.approx(math.sqrt(0.75))  # half way from 0.75 to 1 in log x
    assert muon.crossing(points, 4.5) == 0.5 and muon.crossing(points, 1.0) == math.inf
    assert muon.crossing(points, math.inf) == -math.inf  # what has the target diverged: no share of its tokens


def runs_of(jobs, loss_of):
    fields = {"fingerprint": "f", "seconds": 1.0, "made_by": {}}
    return Results(
        Run(variant=v.name, seed=seed, result=Result(numbers={"final": loss_of(v.settings)}), **fields)
        for v, seed in jobs
    )


BEST = {"muon": muon.Point(0.024, 0.012, 0.6), "adamw": muon.Point(0.006, 0.006, 0.6)}


def loss_of(settings):
    """Least at BEST; AdamW is .1 behind there, and .2 with its usual momentum."""
    best = BEST[settings["matrices"]]
    tuned = math.log(settings["matrix_lr"] / best.matrix_lr) ** 2 + abs(settings["other_lr"] - best.other_lr)
    tuned += (settings["momentum"] - best.momentum) / 3 if settings["momentum"] > best.momentum else 0.0
    tuned += 1.0 if settings["momentum"] < best.momentum else 0.0
    behind = 0.1 if settings["matrices"] == "adamw" else 0.0
    return 3.0 + tuned + behind + 0.4 * math.log(1 / settings["share"])


def test_both_are_tuned_on_one_grid_and_compared_at_other_seeds():
    grid = muon.plan(Results(()), 3)
    points = {name: [muon.Point(*(v.settings[key] for key in muon.Point._fields)) for v, _ in grid
                     if v.settings["matrices"] == name] for name in ("muon", "adamw")}  # fmt: skip
    assert points["muon"] == points["adamw"] == list(muon.GRID) and {seed for _, seed in grid} == {0}
    jobs = muon.plan(runs_of(grid, loss_of), 3)
    final = jobs[len(grid) :]
    assert jobs[: len(grid)] == grid and {seed for _, seed in final} == {1, 2, 3} and len(final) == 3 * 6
    chosen = {(v.settings["matrices"], *(v.settings[key] for key in muon.Point._fields)) for v, _ in final}
    assert chosen == {*((name, *point) for name, point in BEST.items()), ("adamw", 0.006, 0.006, muon.USUAL)}


def test_the_share_of_the_tokens_by_hand():
    jobs = muon.plan(runs_of(muon.plan(Results(()), 2), loss_of), 2)
    results = runs_of(jobs, loss_of)
    # 0.4 · ln(1/share) = 0.1: share = exp(-0.25), and the losses are linear in the logarithm.
    found = muon.shares(results, "AdamW")
    assert found.mean == pytest.approx(math.exp(-0.25), rel=1e-6) and found.count == 2
    # The usual momentum costs .1 more, and share is exp(-0.5): below the least that was tried, which is said instead.
    assert muon.shares(results, muon.USUAL_NAME).mean == min(muon.SHARES)
    share, usual, difference, *edges = muon.judge(results)
    assert [share.outcome, usual.outcome, difference.outcome] == ["not met", "met", "met"]
    assert [edge.outcome for edge in edges] == ["met"] * 2


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("key", ["matrix_lr", "momentum"])
def test_a_best_point_at_the_edge_of_the_grid_is_said(key, sign):
    def at_edge(settings):
        return sign * settings[key]

    results = runs_of(muon.plan(runs_of(muon.plan(Results(()), 2), at_edge), 2), at_edge)
    assert [verdict.outcome for verdict in muon.judge(results)[3:]] == ["not met"] * 2


# --- per-head ------------------------------------------------------------------------------------------------------


def test_a_planted_skew_starves_heads_of_the_whole_matrix_alone():
    whole, by_head = (per_head.planted_skew(per_head=cut, seed=0).numbers for cut in (False, True))
    assert by_head["ratio"] < 1.02 and whole["ratio"] > 1.1
    assert by_head["worst"] < 0.2 * whole["worst"]


def test_newton_schulz_is_timed_on_the_same_numbers(monkeypatch):
    monkeypatch.setattr(per_head, "TIMED", ((2, 4, 8),))
    numbers = per_head.newton_schulz_times(0).numbers
    assert numbers.keys() == {"whole 2×4×8", "cut 2×4×8", "ratio 2×4×8"} and min(numbers.values()) > 0


# --- length --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", length.VARIANTS, ids=lambda variant: variant.name)
def test_stages_are_gone_through_and_needles_looked_for_at_every_length(folder, monkeypatch, variant):
    seen = []

    def haystacks(task, text_T, lengths, depth_SP, generator):
        seen.append((*lengths, len(depth_SP[0])))
        return make(task, text_T, lengths, depth_SP, generator)

    make = length.haystacks
    for name, value in {
        "MODEL": TINY,
        "RECIPE": replace(RECIPE, step_tokens=512),
        "STAGES": tuple(replace(stage, num_steps=1, length=min(1024, stage.length)) for stage in length.STAGES),
        "HAYSTACKS": 1,
        "LENGTHS": (256, 1024),
        "BINS": (0, 128, 256, 1024, 2048),
        "haystacks": haystacks,
    }.items():
        monkeypatch.setattr(length, name, value)
    keep_text(folder, read_text(folder).train, stream(2, 2100, 1), what="counting")
    grown = variant is length.VARIANTS[0]
    lengths = [stage.length if grown else 256 for stage in length.STAGES]
    stages = [{"length": size, "num_steps": 1} for size in lengths]
    result = length.run(replace(variant, settings={"stages": stages}), 0, folder, lambda line: None)
    short = (*[64] * 4, 8)
    if grown:
        assert seen == [(256, 16), short, (512, 16), (1024, 16), (1024, 16)]
    else:  # the same tokens in every stage
        assert seen == [(256, 16), short, (256, 256, 16), (*[256] * 4, 16), (*[256] * 4, 16)]
    assert all(f"{size}, {when}" in result.numbers for size in (256, 1024) for when in length.MOMENTS)
    assert all(value is not None for value in result.numbers.values())
    assert result.curves["depth 1024"][0] == list(length.DEPTHS) and len(result.curves["position"][0]) == 4


def test_loss_by_position_is_of_long_documents_alone(monkeypatch):
    monkeypatch.setattr(length, "BINS", (0, 8, 32))
    model = fresh_model(TINY, 0)
    long, short = stream(1, 33, 0), stream(1, 20, 1)
    both = TokenStream(
        ids_T=torch.cat([short.ids_T, long.ids_T]), starts=np.array([0, 20, 53]), num_bytes_W=long.num_bytes_W
    )
    early, late = length.loss_by_position(model, both)
    assert 8 / 32 * early + 24 / 32 * late == pytest.approx(score(model, long).loss, rel=1e-5)
    with pytest.raises(ValueError, match="no held-out document has more than 32 tokens"):
        length.loss_by_position(model, short)


def test_needles_are_ids_that_no_text_holds():
    task = length.TASK
    assert NUM_RANKS + 21 < task.first_key and task.first_key + task.num_keys <= task.first_value
    assert task.first_value + task.num_values < VOCAB_SIZE  # the last id is a pad


# --- all -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda experiment: experiment.name)
def test_an_experiment_is_complete(experiment):
    assert EXPERIMENTS[experiment.name] is experiment and experiment.num_seeds >= 3
    assert isinstance(experiment.fingerprint(experiment.variants[0], 0, {}), str)  # its settings are JSON
    names = [variant.name for variant, _ in experiment.jobs(Results(()), 3)]
    assert names and experiment.noise in {column.number for column in experiment.columns}
    assert experiment.run.__module__.startswith("trivium.lab.")


def test_the_models_have_every_part():
    for config in (balance.MODEL, muon.MODEL, length.MODEL):
        with torch.device("meta"):
            model = KimiK3(config)
        assert model.moe_layers() and len(config.mla_layers) == 1 and config.num_dense_layers == 1
        assert 0.5e6 < sum(p.numel() for p in model.parameters()) < 5e6
