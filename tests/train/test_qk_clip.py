"""Clipped attention logits: one head's own rows, by the factor that brings it to the limit, and nothing else."""

import math
from dataclasses import replace

import pytest
import torch
from tiny import tiny_config

import trivium.model.mla
from trivium.config import MlaConfig
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.ops.rows import Rows
from trivium.train.qk_clip import clip_logits_, watch_logits_

H, K, J, V = 3, 8, 6, 10
QUERY, KEYS = "q_b_proj.weight", "kv_b_proj.weight"
IDS = torch.randint(0, 300, (90,), generator=torch.Generator().manual_seed(0))
ROWS = Rows.of([50, 40])


def tiny(dtype=torch.float32) -> KimiK3:
    """Three layers, the last two MLA: heads of 8 + 6 query and 8 + 10 key and value rows."""
    mla = MlaConfig(num_heads=H, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=K, qk_rope_head_dim=J, v_head_dim=V)
    model = KimiK3(replace(tiny_config(300), full_attn_layers=(2, 3), mla=mla), dtype=dtype)
    initialise_(model, seed=0)
    return model.train()


def watched_max(model: KimiK3) -> list[list[float]]:
    """Every MLA layer's largest logits, by the very forward that clipping looks at."""
    watch_logits_(model, 1.0)
    model(IDS, ROWS)
    return [layer.take_max_logit().tolist() for layer in model.mla_layers()]


def grow_(model: KimiK3, head: int, factor: float) -> None:
    """The head's queries, of the first MLA layer."""
    with torch.no_grad():
        model.mla_layers()[0].q_b_proj.weight.unflatten(0, (H, -1))[head].mul_(factor)


def step_(model: KimiK3, generator: torch.Generator) -> None:
    """An update that does not depend on gradients, so that two runs differ by the clipping alone."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-4)


def test_a_growing_head_stays_at_the_threshold_and_no_other_moves():
    clipped, free = tiny(), tiny()
    limit, growth = 10 * watched_max(clipped)[0][1], 1.2
    found = []
    for model in (clipped, free):
        generator = torch.Generator().manual_seed(0)
        for _ in range(40):
            watch_logits_(model, limit if model is clipped else None)
            model(IDS, ROWS)
            step_(model, generator)
            grow_(model, head=1, factor=growth)
            if model is clipped:
                found.append(clip_logits_(model, limit))
        assert all(layer.take_max_logit() is None for layer in model.mla_layers())
    # Seen before the update and clipped behind it: what the last update added is still there.
    assert limit < watched_max(clipped)[0][1] < 1.05 * growth * limit
    assert watched_max(free)[0][1] > 50 * limit
    # log 10 / log 1.2 = 12.6 steps until the limit is passed; the small updates move that by a step or two.
    first = found.index(1)
    assert 10 <= first <= 15 and found == [0] * first + [1] * (40 - first)
    for (name, got), want in zip(clipped.named_parameters(), free.parameters(), strict=True):
        if name.endswith(f"layers.1.self_attn.{QUERY}"):
            got, want = (x.unflatten(0, (H, K + J))[[0, 2]] for x in (got, want))
        elif name.endswith(f"layers.1.self_attn.{KEYS}"):
            values = [x.unflatten(0, (H, K + V))[1, K:] for x in (got, want)]
            assert torch.equal(*values)
            got, want = (x.unflatten(0, (H, K + V))[[0, 2]] for x in (got, want))
        assert torch.equal(got, want), name


def test_every_logit_of_the_head_is_scaled_by_gamma(monkeypatch):
    """Latent part sqrt(gamma) · sqrt(gamma), shared key's part gamma · 1: in float64, exactly."""
    model = tiny(torch.float64)
    seen = []

    def attention(q_nope_THK, q_rest_THJ, latent_UR, shared_key_UJ, kv_b_HXR, rows):
        k_UHK = torch.einsum("ur,hkr->uhk", latent_UR, kv_b_HXR[:, :K])
        of_latent_HTU = torch.einsum("thk,uhk->htu", q_nope_THK, k_UHK)
        seen.append((of_latent_HTU, torch.einsum("thj,uj->htu", q_rest_THJ, shared_key_UJ)))
        return q_nope_THK.new_zeros(len(q_nope_THK), H, V)

    max_H = watched_max(model)[0]
    limit = sorted(max_H)[1] * 0.9  # two heads of the first layer are above it
    watch_logits_(model, limit)
    model(IDS, ROWS)
    taken = [layer._max_logit_H.tolist() for layer in model.mla_layers()]
    num_over = sum(value > limit for max_H in taken for value in max_H)
    monkeypatch.setattr(trivium.model.mla, "latent_attention", attention)
    model.eval()
    model(IDS, ROWS)
    assert clip_logits_(model, limit) == num_over >= 2
    model(IDS, ROWS)
    for before, after in zip(seen[0], seen[2], strict=True):  # of the first MLA layer, whose input is as it was
        for head, highest in enumerate(max_H):
            gamma = min(1.0, limit / highest)
            torch.testing.assert_close(after[head], gamma * before[head], rtol=1e-12, atol=1e-15)
            assert (gamma < 1) != torch.equal(after[head], before[head])


def test_the_largest_of_all_micro_batches_counts():
    model = tiny()
    watch_logits_(model, 1.0)
    parts = [slice(0, 45), slice(45, 90)]
    alone = []
    for part in parts:
        model(IDS[part], Rows.one(len(IDS[part])))
        alone.append(model.mla_layers()[0].take_max_logit())
    for part in parts:
        model(IDS[part], Rows.one(len(IDS[part])))
    both = model.mla_layers()[0].take_max_logit()
    assert torch.equal(both, torch.maximum(*alone))
    assert not any(torch.equal(both, max_H) for max_H in alone)


@pytest.mark.parametrize("limit", [None, math.inf])
def test_without_a_limit_nothing_is_watched(limit, monkeypatch):
    monkeypatch.setattr(trivium.model.mla, "max_logit", None)  # calling it would raise
    model = tiny()
    watch_logits_(model, limit)
    model(IDS, ROWS)
    assert [layer.take_max_logit() for layer in model.mla_layers()] == [None, None]
    assert clip_logits_(model, math.inf) == 0


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_only_training_is_watched(mode):
    model = tiny()
    watch_logits_(model, 1.0)
    model.train(mode != "eval")
    with torch.set_grad_enabled(mode != "no_grad"):
        model(IDS, ROWS)
    assert model.mla_layers()[0].take_max_logit() is None


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_that_is_none_is_refused(limit):
    for call in (watch_logits_, clip_logits_):
        with pytest.raises(ValueError, match=r"logit limit: wanted a number above 0, got (0\.0|-1\.0|nan)"):
            call(tiny(), limit)


def test_clipping_what_was_not_watched_is_an_error():
    """An option that does nothing is an error (ReaLLM-Forge#873's kind): here a limit whose forwards nobody looked at."""
    model = tiny()
    model(IDS, ROWS)
    with pytest.raises(ValueError, match="no forward of this step was watched"):
        clip_logits_(model, 100.0)
    watched_max(model)  # what was handed over once is not there again
    with pytest.raises(ValueError, match="no forward of this step was watched"):
        clip_logits_(model, 100.0)


def test_a_new_step_forgets_the_one_that_was_given_up():
    model = tiny()
    watch_logits_(model, 1.0)
    model(IDS, ROWS)
    watch_logits_(model, 1.0)
    assert model.mla_layers()[0].take_max_logit() is None
