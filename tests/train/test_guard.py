import json
import math
import random

import pytest

from trivium.train.guard import SpikeGuard

# Forty losses of `trivium quickstart`: 2,048 tokens a step, from the first on.
QUICKSTART = (
    8.35, 8.34, 8.28, 8.23, 8.10, 8.00, 7.69, 7.32, 7.01, 6.73, 6.77, 6.61, 6.51, 6.56, 6.28, 6.18, 6.28, 6.04, 6.12, 6.00,
    6.08, 5.95, 5.91, 5.82, 5.63, 5.68, 5.84, 5.48, 5.61, 6.02, 6.03, 5.70, 5.67, 5.54, 5.84, 5.60, 5.49, 5.73, 5.70, 5.83,
)  # fmt: skip


def level(step):
    """What the quickstart's losses fall along: 8.3 at first, 5.7 after 40 steps, 4.4 after 120, 3.8 after 300."""
    return 3.6 + 2.61 * math.exp(-step / 25) + 2.14 * math.exp(-step / 120)


def run(noise, *, seed, num_steps):
    random_ = random.Random(seed)
    return [level(step) + random_.gauss(0, noise) for step in range(1, num_steps + 1)]


def judged(guard, losses, grad_norm=1.0):
    return [guard.judge(loss, grad_norm) for loss in losses]


def settled(*, noise=0.1, **options):
    """A guard that has seen a long quiet run at level 4."""
    guard = SpikeGuard(**options)
    random_ = random.Random(0)
    assert not any(judged(guard, [random_.gauss(4, noise) for _ in range(100)]))
    return guard


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.15, 0.4])
def test_a_normal_run_is_applied_whole(noise):
    guard = SpikeGuard()
    for seed in range(20):
        assert not any(judged(SpikeGuard(), run(noise, seed=seed, num_steps=600)))
    assert not any(judged(guard, QUICKSTART))
    assert guard.num_skipped == 0 and guard.num_judged == 40


@pytest.mark.parametrize("noise", [0.01, 0.15])
@pytest.mark.parametrize("at", [100, 300, 590])
def test_a_planted_spike_is_skipped_and_nothing_else(noise, at):
    losses = run(noise, seed=7, num_steps=600)
    losses[at] += 3
    reasons = judged(SpikeGuard(), losses)
    assert [idx for idx, reason in enumerate(reasons) if reason] == [at]
    assert reasons[at].startswith(f"loss {losses[at]:.4g} spikes: ")


def test_a_spike_is_six_deviations_above_the_mean_of_the_window():
    """Sixteen losses of 3 and sixteen of 5: mean 4, deviation sqrt(32 / 31) = 1.016, so at most 10.096."""
    for loss, spikes in ((10.09, False), (10.10, True)):
        guard = SpikeGuard()
        assert not any(judged(guard, [3.0, 5.0] * 16))
        reason = guard.judge(loss, 1.0)
        assert (reason is not None) == spikes
    assert reason == "loss 10.1 spikes: 4 ± 1 before, wanted at most 10.1"


def test_without_noise_a_tenth_of_a_nat_is_no_spike():
    for loss, spikes in ((2.099, False), (2.101, True)):
        guard = SpikeGuard()
        judged(guard, [2.0] * 32)
        assert (guard.judge(loss, 1.0) is not None) == spikes


def test_nothing_spikes_before_a_window_was_seen():
    guard = SpikeGuard(window=8, max_skips=2)
    assert not any(judged(guard, [4.0] * 7 + [9.0]))
    guard = SpikeGuard(window=8, max_skips=2)
    assert not any(judged(guard, [4.0] * 8))
    assert guard.judge(9.0, 1.0)


def test_a_spike_does_not_widen_what_is_normal():
    guard = settled()
    assert guard.judge(7.0, 1.0) and guard.judge(4.0, 1.0) is None and guard.judge(6.0, 1.0)
    assert guard.num_skipped == 2 and guard.num_judged == 103


@pytest.mark.parametrize(
    ("loss", "grad_norm"),
    [(math.nan, 1.0), (math.inf, 1.0), (-math.inf, 1.0), (4.0, math.nan), (4.0, math.inf), (math.nan, math.nan)],
)
def test_what_is_not_finite_is_skipped_from_the_first_step_on(loss, grad_norm):
    guard = SpikeGuard()
    assert guard.judge(loss, grad_norm) == f"loss {loss:g} and gradient norm {grad_norm:g}, wanted finite ones"
    assert guard.judge(8.3, 0.6) is None
    assert guard.num_skipped == 1 and guard.num_judged == 2
    json.dumps(guard.state(), allow_nan=False)


def test_what_stays_without_a_finite_loss_ends_the_run_and_says_since_when():
    guard = settled()
    assert judged(guard, [3.5, 3.25]) == [None, None]
    assert all(judged(guard, [math.nan] * 8))
    with pytest.raises(FloatingPointError) as raised:
        guard.judge(math.inf, 2.0)
    word = str(raised.value)
    assert word.startswith(
        "step 111: the loss is inf and the gradient's norm 2, and no step since 103 had finite ones."
    )
    assert "3.5, 3.25. Train again with lower rates or a longer warm-up; resume points, where there are any" in word


def test_a_finite_step_between_starts_the_count_anew():
    guard = settled()
    for _ in range(5):
        assert all(judged(guard, [math.nan] * 8)) and guard.judge(4.0, 1.0) is None


def test_a_lasting_rise_is_skipped_eight_times_and_then_normal():
    """Skipped steps move no weight, so what lasts is not their doing."""
    said = []
    guard = settled(say=said.append)
    reasons = judged(guard, [6.0 + 0.1 * math.sin(step) for step in range(200)])
    assert all(reasons[:8]) and not any(reasons[8:])
    assert guard.num_skipped == 8
    assert (
        len(said) == 1 and said[0].startswith("step 109: loss 6.") and "8 of the last 32 steps were skipped" in said[0]
    )
    assert guard.judge(20.0, 1.0)  # it is on its guard at the new level too


def test_what_is_high_every_other_step_is_not_skipped_for_ever():
    """Of the kind of a lasting rise: text of another sort that is only a part of what comes."""
    guard = settled()
    reasons = judged(guard, [4.0, 6.0] * 200)
    assert sum(reason is not None for reason in reasons) == 8 and not any(reasons[16:])


def test_a_rise_between_two_stages_costs_at_most_eight_steps():
    random_ = random.Random(3)
    guard = settled(noise=0.01)
    reasons = judged(guard, [random_.gauss(4.3, 0.01) for _ in range(300)])
    assert guard.num_skipped == 8 and not any(reasons[8:])


@pytest.mark.parametrize("num_before", [0, 5, 40, 104, 107, 250])
def test_a_restored_guard_judges_as_one_that_never_stopped(num_before):
    losses = run(0.3, seed=1, num_steps=300)
    losses[45] = math.nan
    losses[100:112] = [9.0] * 12  # a rise that ends in being normal
    losses[200] = 30.0
    whole = SpikeGuard()
    want = judged(whole, losses)
    first = SpikeGuard()
    got = judged(first, losses[:num_before])
    second = SpikeGuard()
    second.restore(json.loads(json.dumps(first.state())))
    got += judged(second, losses[num_before:])
    assert got == want and second.state() == whole.state()
    assert whole.num_skipped == sum(reason is not None for reason in want) == 10


def test_a_restored_guard_ends_the_run_where_one_that_never_stopped_would():
    first = settled()
    assert all(judged(first, [math.nan] * 5))
    second = SpikeGuard()
    second.restore(first.state())
    assert all(judged(second, [math.nan] * 3))
    with pytest.raises(FloatingPointError, match="^step 109: .* no step since 101 had finite ones"):
        second.judge(math.nan, 1.0)


def test_what_was_forgotten_is_seen_anew_before_anything_spikes():
    """Of another text the losses are others: the first of them are what is normal there."""
    guard = settled()
    assert guard.judge(9.0, 1.0)
    guard.forget()
    assert not any(judged(guard, [9.0] * 32))
    assert guard.judge(12.0, 1.0) and guard.judge(9.0, 1.0) is None
    assert (guard.num_judged, guard.num_skipped) == (135, 2)  # what was counted stays


def test_a_rise_between_two_stages_costs_no_step_where_the_first_is_forgotten():
    random_ = random.Random(3)
    guard = settled(noise=0.01)
    guard.forget()
    assert not any(judged(guard, [random_.gauss(4.3, 0.01) for _ in range(300)]))


def test_to_forget_is_no_way_out_of_losses_that_are_not_finite():
    guard = settled()
    assert all(judged(guard, [math.nan] * 8))
    guard.forget()
    with pytest.raises(FloatingPointError, match="no step since 101 had finite ones. The last losses applied: none"):
        guard.judge(math.nan, 1.0)


def test_a_state_does_not_move_with_its_guard():
    guard = settled()
    state = guard.state()
    kept = json.dumps(state)
    judged(guard, [4.0, math.nan, 9.0])
    assert json.dumps(state) == kept


def test_what_is_no_state_is_refused():
    state = settled().state()
    for wrong in (
        {},
        {**state, "more": 1},
        {**state, "applied": [True]},
        {**state, "losses": [1.0] * 33, "applied": [True] * 33},
    ):
        with pytest.raises(ValueError, match="^guard: wanted "):
            SpikeGuard().restore(wrong)


@pytest.mark.parametrize(
    ("option", "value"),
    [("window", 7), ("sigmas", 0.0), ("sigmas", math.inf), ("sigmas", math.nan), ("max_skips", 0), ("max_skips", 17)],
)
def test_what_is_no_guard_is_refused(option, value):
    with pytest.raises(ValueError, match=f"^{option}: wanted "):
        SpikeGuard(**{option: value})


def test_how_many_in_a_row_were_not_finite():
    guard = SpikeGuard()
    seen = []
    for loss, norm in ((2.0, 1.0), (math.nan, 1.0), (2.0, math.inf), (2.0, 1.0)):
        guard.judge(loss, norm)
        seen.append(guard.not_finite)
    assert seen == [0, 1, 2, 0]
