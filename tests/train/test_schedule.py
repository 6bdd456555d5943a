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
    [("warmup_steps", 0), ("decay_from", 1.0), ("decay_from", -0.1), ("final", 1.5), ("final", -0.1)],
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
