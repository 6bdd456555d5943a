"""Laws of the whole model, on its training initialisation and over more than 300 tokens.

Fresh channels remember 7 to 700 tokens (spec of the initialisation), so a state lost or crossed anywhere shows far
behind. In the default mode equalities hold to 1e-4 in float32; in the deterministic mode, bit for bit.
"""

import time
from dataclasses import replace
from functools import cache

import pytest
import torch

import trivium
from trivium.config import K3Config, KdaConfig, MlaConfig, model_preset
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.model.recompute import recomputing
from trivium.ops.backend import use_backend
from trivium.ops.rows import Rows

T = 330


def small_config() -> K3Config:
    """Nano with narrower layers: 5 layers, KDA at 1-3, MLA at 4 and 5, two closed blocks; K and V of KDA are equal, so
    that H differs from both and from everything else."""
    nano = model_preset("nano")
    return replace(
        nano,
        num_layers=5,
        hidden_size=72,
        intermediate_size=104,
        vocab_size=300,
        attn_res_block_size=2,
        kda=KdaConfig(num_heads=3, head_dim=32),
        mla=MlaConfig(
            num_heads=2, q_lora_rank=36, kv_lora_rank=28, qk_nope_head_dim=20, qk_rope_head_dim=12, v_head_dim=24
        ),
        moe=replace(
            nano.moe, num_experts=12, num_experts_per_token=3, moe_intermediate_size=32, routed_expert_hidden_size=48
        ),
        bos_token_id=284,
        eos_token_id=286,
        media_placeholder_token_id=295,
        pad_token_id=299,
    )


@cache
def network(deterministic=False) -> KimiK3:
    model = KimiK3(small_config(), deterministic=deterministic)
    initialise_(model, seed=1)
    with torch.no_grad():  # queries away from 0, so that reads are no plain means
        for name, parameter in model.named_parameters():
            if name.endswith("res_proj.weight"):
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model.eval()


def tokens(count, seed=0):
    return torch.randint(0, 280, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, ids, rows=None, state=None):
    hidden, state = model(ids, rows or Rows.one(len(ids)), state)
    return model.head(hidden), state


@cache
def whole(deterministic=False):
    model = network(deterministic)
    return logits(model, tokens(T), state=model.empty_state(1))


def in_pieces(model, ids, cuts):
    """The same tokens fed in pieces that end at these cuts, the state carried."""
    state, got = model.empty_state(1), []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        out, state = logits(model, ids[start:end], Rows.one(end - start, past=start), state)
        got.append(out)
    return torch.cat(got), state


def states_of(state):
    for layer in state.layers:
        yield from (
            (layer.state_SHKV, layer.window_S3X)
            if hasattr(layer, "window_S3X")
            else (
                layer.latent,
                layer.shared_key,
            )
        )


CUTS = {
    "off the grid": [1, 38, 100, 301],
    "on the grid": [16, 64, 128, 320],
    "one token late": [300, *range(301, T)],  # prefill, then decode
    "nothing new": [50, 50, 200],
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_any_cut_equals_the_whole(cuts):
    want, want_state = whole()
    got, state = in_pieces(network(), tokens(T), cuts)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    for a, b in zip(states_of(state), states_of(want_state), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    assert state.lengths == want_state.lengths == (T,)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_any_cut_equals_the_whole_bit_for_bit_in_deterministic_mode(cuts):
    want, want_state = whole(True)
    got, state = in_pieces(network(True), tokens(T), cuts)
    assert torch.equal(got, want)
    for a, b in zip(states_of(state), states_of(want_state), strict=True):
        assert torch.equal(a, b)
    pendings = [
        (a.pending, b.pending) for a, b in zip(state.layers, want_state.layers, strict=True) if hasattr(a, "pending")
    ]
    for a, b in pendings:
        assert a.counts == b.counts == (T % 16,)
        assert torch.equal(a.qkv_SCX, b.qkv_SCX) and torch.equal(a.decay_in_SCHK, b.decay_in_SCHK)
        assert torch.equal(a.beta_in_SCH, b.beta_in_SCH)


def test_the_deterministic_mode_is_the_same_model():
    torch.testing.assert_close(whole(True)[0], whole()[0], rtol=0, atol=1e-4)


def test_every_token_alone_is_the_prompt_at_once_bit_for_bit():
    ids = tokens(70)
    want, _ = logits(network(True), ids)
    got, _ = in_pieces(network(True), ids, list(range(1, 70)))
    assert torch.equal(got, want)


def test_any_batch_gives_the_same_bits():
    model = network(True)
    lengths = [301, 0, 1, 50, 16]
    parts = [tokens(n, seed=n) for n in lengths]
    packed, state = logits(model, torch.cat(parts), Rows.of(lengths), model.empty_state(5))
    singles = [logits(model, part, state=model.empty_state(1)) for part in parts]
    assert torch.equal(packed, torch.cat([out for out, _ in singles]))
    # and going on together, each from its own place, equals going on alone
    more = [tokens(n, seed=9 + n) for n in (1, 4, 20, 0, 17)]
    rows = Rows.of([len(part) for part in more], past=lengths)
    together, after = logits(model, torch.cat(more), rows, state)
    alone = [
        logits(model, part, Rows.one(len(part), past=past), own)
        for part, past, (_, own) in zip(more, lengths, singles, strict=True)
    ]
    assert torch.equal(together, torch.cat([out for out, _ in alone]))
    for s, (_, own) in enumerate(alone):
        assert all(torch.equal(a, b) for a, b in zip(states_of(after.sequence(s)), states_of(own), strict=True))


def test_going_on_together_is_going_on_alone():
    model, lengths = network(), [33, 0, 7]
    parts = [tokens(n, seed=n) for n in lengths]
    more = [tokens(n, seed=9 + n) for n in (4, 20, 1)]
    _, state = logits(model, torch.cat(parts), Rows.of(lengths), model.empty_state(3))
    together, _ = logits(model, torch.cat(more), Rows.of([4, 20, 1], past=lengths), state)
    wholes = [logits(model, torch.cat(pair))[0][len(pair[0]) :] for pair in zip(parts, more, strict=True)]
    torch.testing.assert_close(together, torch.cat(wholes), rtol=0, atol=1e-4)


@pytest.mark.parametrize("t", [1, 16, 50, 299])
def test_a_later_token_changes_no_earlier_bit_in_deterministic_mode(t):
    ids = tokens(T)
    changed = torch.cat([ids[:t], tokens(T - t, seed=5)])
    assert torch.equal(logits(network(True), changed)[0][:t], whole(True)[0][:t])


def test_a_later_token_changes_nothing_earlier():
    ids = torch.cat([tokens(T)[:200], tokens(T - 200, seed=5)])
    torch.testing.assert_close(logits(network(), ids)[0][:200], whole()[0][:200], rtol=0, atol=1e-4)


def test_an_early_token_is_felt_far_behind():
    # else the laws above would prove nothing about states: change token 3, look at token 329
    ids = tokens(T)
    ids[3] = (ids[3] + 1) % 280
    assert (logits(network(), ids)[0][-1] - whole()[0][-1]).abs().max() > 1e-3


@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_documents_are_as_if_alone(deterministic):
    model = network(deterministic)
    lengths = [5, 0, 130, 1, 194]
    ids = tokens(sum(lengths))
    rows = Rows.of(lengths)
    packed, _ = logits(model, ids, rows)
    for start, end in zip(rows.starts[:-1], rows.starts[1:], strict=True):
        torch.testing.assert_close(packed[start:end], logits(model, ids[start:end])[0], rtol=0, atol=1e-4)
    other = torch.cat([tokens(5, seed=8), ids[5:]])  # another first document
    assert torch.equal(logits(model, other, rows)[0][5:], packed[5:])


@pytest.mark.parametrize("past", [(), (40, 0, 7)])
def test_the_reference_backend_is_the_same_model(past):
    model, lengths = network(), (30, 1, 17)
    ids, state = tokens(48), None
    if past:
        _, state = logits(model, tokens(47, seed=3), Rows.of(past), model.empty_state(3))
    rows = Rows.of(lengths, past=past)
    want, _ = logits(model, ids, rows, state)
    with use_backend("reference"):
        got, _ = logits(model, ids, rows, state)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_the_state_that_came_in_is_untouched():
    for model in (network(), network(True)):
        _, state = logits(model, tokens(20), state=model.empty_state(1))
        before = [x.clone() for x in states_of(state)]
        logits(model, tokens(30, seed=2), Rows.one(30, past=20), state)
        assert all(torch.equal(a, b) for a, b in zip(states_of(state), before, strict=True))


def test_every_parameter_has_a_gradient_and_no_later_token_sends_any_back():
    model = network().train()
    try:
        hidden, _ = model(tokens(T), Rows.one(T))
        model.head(hidden).logsumexp(-1).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            # layer 0 mixes one source, whose weight is 1 whatever its query: no gradient but 0
            unused = name.startswith("language_model.model.layers.0.self_attention_res_")
            assert (float(parameter.grad.abs().max()) > 0) != unused, name
    finally:
        model.zero_grad(set_to_none=True)
        [layer.take_scores() for layer in model.moe_layers()]
        model.eval()


def test_gradients_of_a_packed_row_are_the_sum_of_its_documents():
    model = network().train()
    lengths = [100, 37]
    ids = tokens(137)

    def gradients(parts):
        model.zero_grad(set_to_none=True)
        for part in parts:
            rows = Rows.of(lengths) if len(part) == 137 else Rows.one(len(part))
            hidden, _ = model(part, rows)
            model.head(hidden).logsumexp(-1).sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    try:
        packed, alone = gradients([ids]), gradients(ids.split(lengths))
        for name, want in alone.items():
            torch.testing.assert_close(packed[name], want, rtol=1e-3, atol=1e-4 * float(want.abs().max()), msg=name)
    finally:
        model.zero_grad(set_to_none=True)
        [layer.take_scores() for layer in model.moe_layers()]
        model.eval()


def test_router_scores_are_handed_over_in_training_only():
    model = network()
    layer = model.moe_layers()[0]
    logits(model, tokens(5))
    model(tokens(5), Rows.one(5))
    assert layer.take_scores() == []  # eval, with gradients and without
    model.train()
    try:
        logits(model, tokens(5))
        assert layer.take_scores() == []  # no gradients
        with recomputing():
            model(tokens(5), Rows.one(5))
        assert layer.take_scores() == []  # run again, for the gradients of a forward that was looked at
        model(tokens(5), Rows.one(5)), model(tokens(7), Rows.one(7))
        assert [tuple(scores.shape) for scores in layer.take_scores()] == [(7, 12)]  # the last
        assert layer.take_scores() == []
    finally:
        [layer.take_scores() for layer in model.moe_layers()]
        model.eval()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_state_of_the_other_mode_is_refused(deterministic):
    _, state = logits(network(deterministic), tokens(20), state=network(deterministic).empty_state(1))
    mode = "default" if deterministic else "deterministic"
    with pytest.raises(ValueError, match=f"state: it was kept in the other mode, this model runs in {mode} mode"):
        network(not deterministic)(tokens(3), Rows.one(3, past=20), state)


def test_the_deterministic_mode_refuses_to_train():
    model = network(True).train()
    try:
        with pytest.raises(ValueError, match="deterministic: this mode has no gradients"):
            model(tokens(3), Rows.one(3))
    finally:
        model.eval()


def test_rows_used_in_inference_mode_can_be_trained_on():
    model, rows = network(), Rows.of([20, 30])
    with torch.inference_mode():
        model(tokens(50), rows)
    hidden, _ = model(tokens(50), rows)
    hidden.sum().backward()
    assert model.language_model.model.embed_tokens.weight.grad.isfinite().all()
    model.zero_grad(set_to_none=True)


def test_no_tokens():
    for model in (network(), network(True)):
        out, state = logits(model, tokens(0), Rows.of([0, 0]), model.empty_state(2))
        assert out.shape == (0, 300) and state.lengths == (0, 0)


def test_the_released_model_builds_on_the_meta_device_in_seconds():
    start = time.process_time()
    with torch.device("meta"):
        model = KimiK3(model_preset("k3"), experts="packed")
    assert time.process_time() - start < 30  # about 1 s alone on a core
    assert model.dtype == torch.bfloat16 and model.device.type == "meta"
    assert sum(p.numel() for p in model.parameters()) == 57_179_884_544 + 11_122_432 - 92 * 896 - 69 * 32


def test_trace_names_what_it_keeps():
    model = network()
    with trivium.trace(model) as t:
        logits(model, tokens(20))
    decay, beta = t["layers.0.self_attn.decay"], t["layers.0.self_attn.beta"]
    assert decay.shape == (20, 3, 32) and 0 < decay.min() and decay.max() < 1
    assert beta.shape == (20, 3)
    assert t["layers.0.mixer_read.weight"].shape == (1, 20) and t["layers.4.ffn_read.weight"].shape == (4, 20)
    torch.testing.assert_close(t["layers.4.ffn_read.weight"].sum(0), torch.ones(20))
    assert torch.equal(t["layers.1.moe.experts"], t["layers.1.moe.experts"].sort(-1).values)
    assert set(t) == set(trivium.model.trace.trace_names(model.config))
    with trivium.trace(network(True)) as exact:
        logits(network(True), tokens(20))
    for name in t:
        torch.testing.assert_close(exact[name], t[name], rtol=0, atol=1e-4)


def test_trace_records_its_own_model_alone():
    model = network()
    with trivium.trace(network(True)) as t:
        logits(model, tokens(20))
        assert len(t) == 0
        logits(network(True), tokens(20))
    assert t["final_hidden"].shape == (20, 72)


def test_trace_refuses_what_it_cannot_give():
    model = network()
    with (
        pytest.raises(ValueError, match="this model has no 'layers.9.stream'"),
        trivium.trace(model, ["layers.9.stream"]),
    ):
        pass
    with pytest.raises(ValueError, match="the string 'final_hidden'"), trivium.trace(model, "final_hidden"):
        pass
    with trivium.trace(model, ["layers.*.stream"]) as t:
        logits(model, tokens(3))
        with pytest.raises(ValueError, match="another trace is running"), trivium.trace(model):
            pass
    assert len(t) == 5
    with pytest.raises(KeyError, match="final_hidden: not recorded"):
        _ = t["final_hidden"]


def test_inputs_that_do_not_fit_are_named():
    model = network()
    with pytest.raises(ValueError, match=r"ids: wanted int64 \[T\], got torch.int32 \[3\]"):
        model(tokens(3).int(), Rows.one(3))
    with pytest.raises(ValueError, match="rows: hold 4 tokens, but there are 3 ids"):
        model(tokens(3), Rows.one(4))
    with pytest.raises(ValueError, match=r"rows.past_S: \(2,\) tokens, but the state holds \(0,\)"):
        model(tokens(3), Rows.one(3, past=2))
    _, state = logits(model, tokens(5), state=model.empty_state(1))
    with pytest.raises(ValueError, match=r"rows.past_S: \(0,\) tokens, but the state holds \(5,\)"):
        model(tokens(3), Rows.one(3), state)
    with pytest.raises(ValueError, match="config: wanted a K3Config, got K2Config"):
        KimiK3(trivium.config.preset("k2"))
    with pytest.raises(ValueError, match='experts: wanted "unpacked" or "packed", got \'raw\''):
        KimiK3(small_config(), experts="raw")
