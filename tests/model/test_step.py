"""The fused decode step against the model's own forward."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import trivium
from trivium.config import KdaConfig, MlaConfig, MoeConfig
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.model.layers import Linear
from trivium.model.state import KdaState
from trivium.model.step import DecodeState, Stepper, serves
from trivium.ops import cpu
from trivium.ops.backend import use_backend
from trivium.ops.decode import PHASES, decode_step
from trivium.ops.decode.native import structure_sizes
from trivium.ops.rows import Rows

from ..tiny import tiny_config

pytestmark = pytest.mark.skipif(cpu.missing is not None, reason=str(cpu.missing))

FIXTURES = Path(__file__).parent.parent / "fixtures"
ALL = ["k3-tiny-a", "k3-tiny-b", "k3-tiny-c", "k3-tiny-d"]


@cache
def fixture(name, dtype="float32", experts="unpacked"):
    return trivium.load(FIXTURES / name, dtype=dtype, experts=experts).network


@cache
def odd(dtype="float32"):
    """Widths that no vector divides, three heads, MLA first and last, a block opened under each kind of layer."""
    config = replace(
        tiny_config(300),
        num_layers=4,
        full_attn_layers=(1, 3, 4),
        hidden_size=37,
        intermediate_size=51,
        attn_res_block_size=1,
        kda=KdaConfig(num_heads=3, head_dim=41),
        mla=MlaConfig(
            num_heads=5, q_lora_rank=19, kv_lora_rank=21, qk_nope_head_dim=7, qk_rope_head_dim=3, v_head_dim=11
        ),
        moe=MoeConfig(
            num_experts=9,
            num_experts_per_token=3,
            num_shared_experts=2,
            moe_intermediate_size=13,
            routed_expert_hidden_size=23,
            routed_scaling_factor=2.5,
        ),
        dtype=dtype,
        source={},
    )
    network = KimiK3(config)
    initialise_(network, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # reads that weigh their sources differently, experts that the bias moves, norms that count
        for name, weight in network.state_dict().items():
            if "res_proj" in name or "correction_bias" in name:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
            elif "norm" in name:
                weight.copy_(1 + 0.3 * torch.randn(weight.shape, generator=generator))
    return network.eval()


def ids_of(network, count, seed=0):
    return torch.randint(network.config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def forward(network, ids_T, state):
    """Logits of the last of these tokens, and the state behind them, by the model's own forward."""
    with use_backend("torch"):
        hidden_TD, state = network(ids_T, Rows.one(len(ids_T), past=state.lengths[0]), state)
        return network.head(hidden_TD[-1])[None].float()[0], state


def fed(network, ids_T):
    state = network.empty_state(1)
    return forward(network, ids_T, state)[1] if len(ids_T) else state


def largest_gap(a, b):
    pairs = [(getattr(x, n), getattr(y, n)) for x, y in zip(a.layers, b.layers, strict=True) for n in vars(x)]
    return max(float((x.float() - y.float()).abs().max()) for x, y in pairs if x is not None and x.numel())


@pytest.mark.parametrize("past", [0, 1, 2, 7])
@pytest.mark.parametrize("name", [*ALL, "odd"])
def test_a_step_is_the_forward(name, past):
    network = odd() if name == "odd" else fixture(name)
    ids_T = ids_of(network, past + 6)
    state = fed(network, ids_T[:past])
    stepper, mine = Stepper(network), DecodeState.of(network.config, state)
    for idx in range(past, len(ids_T)):
        want_W, state = forward(network, ids_T[idx : idx + 1], state)
        torch.testing.assert_close(stepper(int(ids_T[idx]), mine), want_W, rtol=0, atol=1e-4)
    back = mine.to_state(network.config, network.dtype)
    assert back.lengths == state.lengths and largest_gap(back, state) < 1e-4


@pytest.mark.parametrize("past", [63, 300, 1100])
def test_many_keys(past):
    """Blocks of 64 and of 128 keys, a memory that has to grow, and weights that are far from even."""
    network = odd()
    ids_T = ids_of(network, past + 3)
    state = fed(network, ids_T[:past])
    for layer in state.layers:
        if hasattr(layer, "latent"):
            layer.latent.mul_(5)
    stepper, mine = Stepper(network), DecodeState.of(network.config, state)
    for own in mine.memory:
        if own.ring is None:
            own.state = own.state[: past + 1].contiguous()
    for idx in range(past, len(ids_T)):
        want_W, state = forward(network, ids_T[idx : idx + 1], state)
        torch.testing.assert_close(stepper(int(ids_T[idx]), mine), want_W, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_packed_experts_are_read_as_they_are(name):
    """The same numbers as the same experts unpacked: only the order of sums differs."""
    packed, plain = fixture(name, experts="packed"), fixture(name)
    got, want = DecodeState.of(packed.config, packed.empty_state(1)), DecodeState.of(plain.config, plain.empty_state(1))
    for id_ in ids_of(packed, 8).tolist():
        torch.testing.assert_close(Stepper(packed)(id_, got), Stepper(plain)(id_, want), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [*ALL, "odd"])
def test_bfloat16_weights_are_those_numbers(name):
    """Between the weights all is float32, so the step is that of a float32 model with the rounded weights."""
    half = odd("bfloat16") if name == "odd" else fixture(name, dtype="bfloat16")
    full = KimiK3(half.config, dtype=torch.float32)
    full.load_state_dict(half.state_dict())
    got, want = DecodeState.of(half.config, half.empty_state(1)), DecodeState.of(full.config, full.empty_state(1))
    for id_ in ids_of(half, 8).tolist():
        torch.testing.assert_close(Stepper(half)(id_, got), Stepper(full.eval())(id_, want), rtol=0, atol=1e-4)


def test_the_number_of_threads_changes_no_bit():
    network = odd()
    stepper, states = (
        Stepper(network),
        [DecodeState.of(network.config, fed(network, ids_of(network, 200))) for _ in "1234"],
    )
    for id_ in ids_of(network, 4, seed=3).tolist():
        logits = []
        for threads, state in enumerate(states, start=1):
            torch.set_num_threads(threads)
            logits.append(stepper(id_, state))
        torch.set_num_threads(1)
        assert all(torch.equal(logits[0], other) for other in logits)


def test_the_state_that_came_in_is_not_changed():
    network = fixture("k3-tiny-a")
    state, same = fed(network, ids_of(network, 5)), fed(network, ids_of(network, 5))
    mine = DecodeState.of(network.config, state)
    Stepper(network)(3, mine)
    assert largest_gap(state, same) == 0 and state.lengths == (5,)


def test_what_the_step_does_not_serve():
    network = fixture("k3-tiny-a")
    assert serves(network)
    with trivium.trace(network):
        assert not serves(network)
    network.deterministic = True
    assert not serves(network)
    with pytest.raises(ValueError, match="fused step"):
        Stepper(network)
    network.deterministic = False
    hook = network.language_model.lm_head.register_forward_hook(lambda *_: None)
    assert not serves(network)
    hook.remove()
    assert not serves(KimiK3(network.config, dtype=torch.float16))


def test_errors_name_what_is_wrong():
    network = fixture("k3-tiny-a")
    stepper, mine = Stepper(network), DecodeState.of(network.config, network.empty_state(1))
    with pytest.raises(ValueError, match="token id in"):
        stepper(network.config.vocab_size, mine)
    with pytest.raises(ValueError, match="one sequence, got 2"):
        DecodeState.of(network.config, network.empty_state(2))
    with pytest.raises(ValueError, match="layers, got 0"):
        stepper(0, DecodeState(memory=[], length=0))


def test_both_sides_have_the_same_structures():
    assert all(here == there for here, there in structure_sizes().values())


def test_phases_are_timed():
    network = fixture("k3-tiny-a")
    seconds = torch.zeros(len(PHASES), dtype=torch.float64)
    Stepper(network)(1, DecodeState.of(network.config, network.empty_state(1)), seconds)
    assert bool((seconds > 0).all())


def test_two_hundred_tokens_choose_alike():
    """Greedy by the step; the torch backend chooses the same wherever its first two logits are 1e-3 apart."""
    network = fixture("k3-tiny-a")
    stepper, mine, ids, logits = Stepper(network), DecodeState.of(network.config, network.empty_state(1)), [3], []
    for _ in range(200):
        logits.append(stepper(ids[-1], mine))
        ids.append(int(logits[-1].argmax()))
    with use_backend("torch"):
        want_TW = trivium.api.Model(network=network).logits([ids[:-1]])[0]
    first_T, second_T = want_TW.topk(2).values.T
    sure_T = first_T - second_T >= 1e-3
    assert int(sure_T.sum()) > 150 and torch.equal(want_TW.argmax(-1)[sure_T], torch.tensor(ids[1:])[sure_T])
    torch.testing.assert_close(torch.stack(logits), want_TW, rtol=0, atol=1e-4)


def test_generate_takes_the_step_unless_told_otherwise(monkeypatch):
    held, steps = trivium.load(FIXTURES / "k3-tiny-a", dtype="float32"), []
    step = Stepper.__call__
    monkeypatch.setattr(Stepper, "__call__", lambda *args: steps.append(1) or step(*args))

    def ids(**options):
        return held.generate([1, 2, 3], max_tokens=9, seed=5, **options).ids

    for options in ({"temperature": 0}, {"temperature": 1.0, "top_p": 0.9}):
        with use_backend("torch"):
            want = ids(**options)
        assert not steps
        assert ids(**options) == want and len(steps) == 8
        steps.clear()
    with trivium.trace(held) as t:
        ids()
    assert not steps and len(t["final_hidden"]) == 3 + 8


def test_a_backend_that_is_asked_for_serves_where_the_step_does_not():
    held = trivium.load(FIXTURES / "k3-tiny-a", dtype="float32", backend="native", deterministic=True)
    assert len(held.generate([1, 2, 3], max_tokens=4, temperature=0).ids) == 4
    held = trivium.load(FIXTURES / "k3-tiny-a", dtype="float32", backend="native")
    with trivium.trace(held) as t:
        held.generate([1, 2, 3], max_tokens=4, temperature=0)
    assert len(t["final_hidden"]) == 3 + 3


def test_a_module_that_computes_something_else_is_not_passed_over():
    class Doubled(Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    held = trivium.load(FIXTURES / "k3-tiny-a", dtype="float32")
    mixer = held.network.language_model.model.layers[0].self_attn
    doubled = Doubled(*mixer.o_proj.weight.T.shape)
    doubled.weight = mixer.o_proj.weight
    mixer.o_proj = doubled
    assert not serves(held.network)


@pytest.mark.parametrize("hooked", [False, True])
def test_weights_seen_to_change_hold_from_the_next_token_on(hooked):
    """Vectors, which the step copied, as well as matrices, which it did not; with a hook it gives way to the forward."""
    held = trivium.load(FIXTURES / "k3-tiny-a", dtype="float32")
    before = {name: x.clone() for name, x in held.network.state_dict().items()}

    def logprobs(backend):
        held.network.load_state_dict(before)
        found, handles = [], []
        with use_backend(backend):
            for piece in held.stream([1, 2, 3], max_tokens=5, temperature=1.0, seed=3):
                found += piece.logprobs
                if len(found) == 2:
                    if hooked:
                        handles.append(held.network.register_forward_hook(lambda *_: None))
                    with torch.no_grad():
                        for parameter in held.network.parameters():
                            parameter.mul_(1.1)
        for handle in handles:
            handle.remove()
        return torch.tensor(found)

    torch.testing.assert_close(logprobs(None), logprobs("torch"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: setattr(text.lm_head, "forward", lambda x: x),
        lambda text: setattr(text.model.norm, "eps", 1.0),
        lambda text: setattr(text.model.layers[1].block_sparse_moe.gate, "num_active", 1),
        lambda text: setattr(text.model.layers[1].block_sparse_moe.gate, "scale", 7.0),
        lambda text: text.model.layers[0].mlp.bounds.update(bound=5.0),
        lambda text: text.model.layers[1].block_sparse_moe.experts.bounds.update(up_bound=5.0),
        lambda text: setattr(text.model.layers[0].self_attn, "lower_bound", -4.0),
    ],
)
def test_a_module_with_other_numbers_is_not_passed_over(change):
    network = trivium.load(FIXTURES / "k3-tiny-a", dtype="float32").network
    assert serves(network)
    change(network.language_model)
    assert not serves(network)


def test_a_hook_on_all_modules_is_not_passed_over():
    network = trivium.load(FIXTURES / "k3-tiny-a", dtype="float32").network
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not serves(network)
    finally:
        handle.remove()
    assert serves(network)


def test_a_state_made_with_gradients_keeps_none_of_their_graph():
    network = fixture("k3-tiny-a")
    _, state = network(torch.tensor([1, 2, 3]), Rows.one(3), network.empty_state(1))
    assert any(layer.state_SHKV.requires_grad for layer in state.layers if isinstance(layer, KdaState))
    held = DecodeState.of(network.config, state)
    assert not any(x.requires_grad for own in held.memory for x in (own.state, own.ring) if x is not None)


def test_memory_that_the_step_could_not_use_is_named():
    network = fixture("k3-tiny-a")
    plan = Stepper(network).plan
    _, state = network(torch.tensor([1, 2, 3]), Rows.one(3), network.empty_state(1))

    def wrong(match, change, position=3, seconds=None):
        memory = DecodeState.of(network.config, state).memory
        change(memory)
        with pytest.raises(ValueError, match=match):
            decode_step(plan, memory, 5, position, seconds)

    kda = next(i for i, layer in enumerate(plan.layers) if not layer.is_mla)
    mla = next(i for i, layer in enumerate(plan.layers) if layer.is_mla)
    stack = lambda x: torch.stack([x, x], -1)[..., 0]
    set_state = lambda i, f: lambda m: setattr(m[i], "state", f(m[i].state))
    wrong("position of at least 0, got -1", lambda m: None, position=-1)
    wrong(f"layer {mla} has room for 256 tokens, got position 256", lambda m: None, position=256)
    wrong(f"layer {kda}'s state: wanted contiguous", set_state(kda, stack))
    wrong(f"layer {mla}'s state: wanted contiguous", set_state(mla, stack))
    wrong(f"layer {kda}'s state: wanted torch.float32 .* got torch.float64", set_state(kda, torch.Tensor.double))
    wrong(f"layer {kda}'s ring: wanted torch.float32 .* got none", lambda m: setattr(m[kda], "ring", None))
    wrong("seconds: wanted torch.float64", lambda m: None, seconds=torch.zeros(len(PHASES)))
    wrong("seconds: wanted torch.float64", lambda m: None, seconds=torch.zeros(3, dtype=torch.float64))
