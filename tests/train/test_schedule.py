import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivium.train.schedule import TIMED_SHARE, Length, Schedule


@pytest.mark.parametrize(
    ("step", "num_steps", "want"),
    [
        (1, 100, 0.1),
        (10, 100, 1.0),
        (41, 100, 1.0),  # 40 of 100 are done as it begins
        (71, 100, 0.51),  # in the middle between 40 and 100
        (100, 100, 1 - 0.98 * 0.59 / 0.6),
        (5, 6, 0.5 * (1 - 0.98 * (4 / 6 - 0.4) / 0.6)),  # warm-up and decay at once
        (1, 1, 0.1),
        (7, None, 0.7),
        (10_000, None, 1.0),
    ],
)
def test_warm_up_then_constant_then_linear_to_2_percent(step, num_steps, want):
    assert Schedule().factor(step, num_steps) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("num_steps", [1, 2, 5, 9, 10, 11, 40, 251, 328])
def test_the_quickstart_has_the_rates_it_always_had_bit_for_bit(num_steps):
    for step in range(1, num_steps + 1):
        warmup = min(1.0, step / 10)
        decayed = max(0.0, min(1.0, ((step - 1) / num_steps - 0.4) / (1 - 0.4)))
        want = warmup * (1 - (1 - 0.02) * decayed)
        assert Schedule().factor(step, num_steps) == want
        assert Schedule(kind="wsd", warmup_steps=10, decay_from=0.4, final=0.02).factor(step, num_steps) == want


@pytest.mark.parametrize(
    ("step", "num_steps", "want"),
    [
        (1, 1000, 0.1),  # 1% of the steps: 10
        (10, 1000, 1.0),
        (11, 1000, 1.0),  # none of the 990 steps of the decay is done as it begins
        (11 + 495, 1000, 0.55),  # half of them
        (11 + 330, 1000, 0.1 + 0.9 * 0.75),  # (1 + cos 60°) / 2
        (1000, 1000, 0.1 + 0.45 * (1 + math.cos(math.pi * 989 / 990))),
        (1, 40, 1.0),  # 1% of 40 steps is one
        (1, 1, 1.0),
        (1, 2, 1.0),
        (2, 2, 1.0),  # the decay has one step, and none of it is done as that begins
        (2, 3, 1.0),
        (3, 3, 0.55),
    ],
)
def test_warm_up_of_one_percent_then_half_a_cosine_to_a_tenth(step, num_steps, want):
    assert Schedule(kind="cosine").factor(step, num_steps) == pytest.approx(want, rel=1e-12)


SCHEDULES = st.one_of(
    st.builds(
        Schedule,
        kind=st.just("wsd"),
        warmup_steps=st.integers(1, 30),
        decay_from=st.floats(0, 0.99),
        final=st.floats(0, 1),
    ),
    st.builds(
        Schedule,
        kind=st.just("wsd"),
        warmup_share=st.floats(0, 0.5),
        decay_from=st.floats(0, 0.99),
        final=st.floats(0, 1),
    ),
    st.builds(Schedule, kind=st.just("cosine"), warmup_steps=st.integers(1, 30), final=st.floats(0, 1)),
    st.builds(Schedule, kind=st.just("cosine"), warmup_share=st.floats(0, 0.99), final=st.floats(0, 1)),
)


def warmup_of(schedule, num_steps):
    """Steps of the warm-up, by its definition."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    return max(1, round(schedule.warmup_share * num_steps))


@given(SCHEDULES, st.integers(1, 300))
def test_every_step_has_a_rate_and_none_is_above_the_full_one(schedule, num_steps):
    factors = [schedule.factor(step, num_steps) for step in range(1, num_steps + 1)]
    assert all(0 < factor <= 1 for factor in factors)  # also where `final` is 0: a step at no rate would be lost
    for step in range(1, min(warmup_of(schedule, num_steps), num_steps) + 1):
        assert factors[step - 1] <= step / warmup_of(schedule, num_steps)


@given(SCHEDULES, st.integers(1, 300))
def test_it_rises_in_the_warm_up_then_falls_to_its_end_without_a_jump(schedule, num_steps):
    warmup = warmup_of(schedule, num_steps)
    factors = [schedule.factor(step, num_steps) for step in range(1, num_steps + 1)]
    if schedule.kind == "cosine":
        fall = math.pi / 2 / max(1, num_steps - warmup)  # of the middle, where it is steepest
    else:
        fall = 1 / ((1 - schedule.decay_from) * num_steps)
    assert all(-fall - 1e-12 <= after - before <= 1 / warmup + 1e-12 for before, after in pairwise(factors))
    if schedule.kind == "cosine" or warmup <= schedule.decay_from * num_steps:
        assert all(before < after for before, after in pairwise(factors[:warmup]))
        assert all(before >= after for before, after in pairwise(factors[warmup - 1 :]))
    if warmup < num_steps:
        assert -1e-12 <= factors[-1] - schedule.final <= fall + 1e-12


@pytest.mark.parametrize("kind", ["wsd", "cosine"])
def test_a_run_shorter_than_its_warm_up_ends_in_it(kind):
    schedule = Schedule(kind=kind, warmup_steps=10, **({"decay_from": 0.99} if kind == "wsd" else {}))
    assert [schedule.factor(step, 4) for step in range(1, 5)] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_share_is_that_share_of_any_run():
    schedule = Schedule(kind="wsd", warmup_share=0.05)
    assert [schedule.factor(1, num_steps) for num_steps in (1, 20, 40, 1000)] == [1.0, 1.0, 0.5, 1 / 50]


@pytest.mark.parametrize(
    ("schedule", "word"),
    [
        (
            Schedule(kind="cosine"),
            "^schedule: a cosine wants the number of steps .*; give the number of steps, or kind wsd$",
        ),
        (Schedule(kind="cosine", warmup_steps=5), "^schedule: a cosine wants "),
        (
            Schedule(warmup_share=0.02),
            "^warmup_share: .* what 0.02 of its steps are; give the number .* or warmup_steps$",
        ),
        (
            Schedule(decay_from=0.07),
            "^decay_from: .* at least 0.08, got 0.07; give the number of steps, or a later decay$",
        ),
    ],
)
def test_a_run_by_the_clock_is_told_what_its_schedule_wants_to_know(schedule, word):
    for asked in (schedule.check_clock, lambda: schedule.factor(1, None), lambda: schedule.min_steps(5)):
        with pytest.raises(ValueError, match=word):
            asked()
    assert 0 < schedule.factor(1, 100) <= 1


def test_a_schedule_of_any_steps_may_run_by_the_clock():
    Schedule().check_clock()
    Schedule(warmup_steps=500, decay_from=TIMED_SHARE, final=0).check_clock()


def test_options_that_would_do_nothing_are_refused():
    """As training-faults.md asks of checkpointing that silently stops; the rest of its kind here: a decay_from that a
    cosine never reads, and of two warm-ups the one that would not count."""
    with pytest.raises(ValueError, match="^decay_from: wanted none, a cosine decays from its warm-up on; got 0.4$"):
        Schedule(kind="cosine", decay_from=0.4)
    with pytest.raises(
        ValueError, match="^warmup_steps: wanted either steps or a share, got 10 and warmup_share 0.01$"
    ):
        Schedule(warmup_steps=10, warmup_share=0.01)


def test_what_was_not_given_follows_the_kind():
    assert replace(Schedule(), kind="cosine") == Schedule(kind="cosine")
    assert Schedule(kind="cosine").factor(10**6, 10**6) == pytest.approx(0.1, abs=1e-5)
    assert Schedule().factor(10**6, 10**6) == pytest.approx(0.02, abs=1e-5)


@given(
    schedule=st.builds(
        Schedule,
        warmup_steps=st.integers(1, 30),
        decay_from=st.floats(TIMED_SHARE, 0.99),
        final=st.floats(0, 1),
    ),
    seconds=st.floats(0.1, 1000),
    steps_s=st.lists(st.floats(1e-3, 100), min_size=3, max_size=200),
    reserved_s=st.floats(0, 100),
)
def test_steps_made_before_their_number_is_known_had_the_factor_they_have_with_it(
    schedule, seconds, steps_s, reserved_s
):
    length = Length(seconds=seconds)
    for step in range(1, len(steps_s) + 1):
        fixed = length.fixed_steps(step, steps_s[:step], sum(steps_s[:step]), reserved_s)
        if fixed is not None:
            break
    num_steps = max(fixed or 0, schedule.min_steps(step))
    assert num_steps >= step
    for done in range(1, step + 1):
        assert schedule.factor(done, num_steps) == schedule.factor(done, None)


@pytest.mark.parametrize(("num_done", "want"), [(1, 1), (2, 3), (3, 5), (4, 8), (41, 100)])
def test_the_fewest_steps_end_their_constant_part_with_the_last_one_made(num_done, want):
    assert Schedule(decay_from=0.4).min_steps(num_done) == want  # ceil((n - 1) / .4), and n itself


@pytest.mark.parametrize(
    ("steps_s", "time_s", "want"),
    [
        ([5, 1, 1], 8, 3 + 80),  # 100 - 8 - 12 s are left
        ([5, 1, 9, 1], 16, 4 + 72),  # one that was disturbed does not count
        ([5, 2, 2], 9, 3 + 39),  # 39.5: the last step has to fit
        ([1, 1], 50, None),  # too few to tell
        ([1, 1, 1, 1], 7.9, None),  # less than 8 % of the time
        ([40, 40, 40], 120, 3),  # its time is over
    ],
)
def test_as_many_steps_as_fit_at_the_pace_of_the_first_ones(steps_s, time_s, want):
    length = Length(seconds=100)
    assert length.fixed_steps(len(steps_s), steps_s, time_s, 12) == want


def test_steps_made_before_this_process_count_too():
    assert Length(seconds=100).fixed_steps(50, [5, 1, 1], 60, 12) == 50 + 28


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "linear"),
        ("warmup_steps", 0),
        ("warmup_share", 1.0),
        ("warmup_share", -0.1),
        ("decay_from", 1.0),
        ("decay_from", -0.1),
        ("decay_from", float("nan")),
        ("final", 1.5),
        ("final", -0.1),
    ],
)
def test_what_is_no_schedule_is_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field}: wanted "):
        Schedule(**{field: value})


def test_a_run_of_no_length_is_refused():
    for seconds, shown in ((0.0, "0"), (-60.0, "-1"), (float("inf"), "inf"), (float("nan"), "nan")):
        with pytest.raises(ValueError, match=f"^minutes: wanted a number above 0, got {shown}$"):
            Length(seconds=seconds)
    with pytest.raises(ValueError, match="^steps: wanted at least 1, got 0$"):
        Length(seconds=1.0, num_steps=0)
