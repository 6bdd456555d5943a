from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivium.train.schedule import TIMED_SHARE
from trivium.train.stages import CPU_STAGES, FIRST_BY_CLOCK, PAPER_STAGES, Stage, check_stages, last_steps, stage_at

ONE = (Stage(max_len=64, share=1.0),)
TWO = (Stage(max_len=64, share=0.7), Stage(max_len=128, share=0.3))


@pytest.mark.parametrize(
    ("stages", "num_steps", "want"),
    [
        (ONE, 1, (1,)),
        (TWO, 2, (1, 2)),
        (TWO, 10, (7, 10)),
        (TWO, 11, (8, 11)),  # 7.7
        (CPU_STAGES, 500, (400, 420, 440, 500)),
        (CPU_STAGES, 4, (1, 2, 3, 4)),  # each has a step, however small its share
        (CPU_STAGES, 10, (7, 8, 9, 10)),  # 8, 8.4 and 8.8: three that would have none take theirs from the first
        (PAPER_STAGES, 1000, (900, 970, 990, 1000)),
    ],
)
def test_stages_end_at_whole_steps(stages, num_steps, want):
    assert last_steps(stages, num_steps) == want


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(0, 400))
def test_stages_share_out_all_steps_in_order(weights, more):
    stages = tuple(Stage(max_len=2 << idx, share=weight / sum(weights)) for idx, weight in enumerate(weights))
    num_steps = len(stages) + more
    at = [stage_at(stages, step, num_steps) for step in range(1, num_steps + 1)]
    assert at == sorted(at) and set(at) == set(range(len(stages)))
    for idx, weight in enumerate(weights):
        # Half a step of rounding at either border, and one for each stage that would have none.
        short = abs(Fraction(weight * num_steps, sum(weights)) - at.count(idx))
        assert short <= len(stages)


def test_a_border_is_where_the_last_step_of_a_stage_is_done():
    assert [stage_at(TWO, step, 10) for step in (1, 7, 8, 10)] == [0, 0, 1, 1]


def test_one_stage_needs_no_number_of_steps():
    assert stage_at(ONE, 12345, None) == 0
    check_stages(ONE, None)


def test_by_the_clock_a_run_is_in_its_first_stage_until_its_steps_are_known():
    """Which takes 8 % of the time: a first stage of a tenth has not ended by then."""
    assert FIRST_BY_CLOCK > TIMED_SHARE
    tenth = (Stage(max_len=64, share=0.1), Stage(max_len=128, share=0.9))
    for stages in (TWO, tenth):
        check_stages(stages, None)
        assert [stage_at(stages, step, None) for step in (1, 2, 12345)] == [0, 0, 0]


def test_a_first_stage_that_may_end_before_the_steps_are_known_is_refused():
    short = (Stage(max_len=64, share=0.09), Stage(max_len=128, share=0.91))
    for asked in (lambda: check_stages(short, None), lambda: stage_at(short, 1, None)):
        with pytest.raises(
            ValueError,
            match="^stages: a run by the clock .* the 2 stages change; give the number of steps, or a first stage of at "
            "least 0.1, got 0.09$",
        ):
            asked()
    check_stages(short, 100)


def test_more_stages_than_steps_name_both():
    with pytest.raises(ValueError, match="^stages: 4 stages want a step each, the run has 3$"):
        last_steps(CPU_STAGES, 3)


@pytest.mark.parametrize(
    ("stages", "word"),
    [
        ((), "wanted at least one, got none"),
        ((Stage(max_len=128, share=0.5), Stage(max_len=64, share=0.5)), "wanted lengths that rise, got 64 behind 128"),
        ((Stage(max_len=64, share=0.5), Stage(max_len=64, share=0.5)), "wanted lengths that rise, got 64 behind 64"),
        ((Stage(max_len=64, share=0.5), Stage(max_len=128, share=0.4)), "wanted shares that sum to 1, .* sum to 0.9"),
    ],
)
def test_what_is_no_curriculum_is_refused(stages, word):
    with pytest.raises(ValueError, match=f"^stages: {word}$"):
        check_stages(stages, 100)


def test_thirds_are_shares():
    thirds = tuple(
        Stage(max_len=64 * number, share=share) for number, share in ((1, 0.3333333), (2, 0.3333333), (3, 0.3333334))
    )
    assert last_steps(thirds, 9) == (3, 6, 9)


@pytest.mark.parametrize(
    ("field", "value"), [("max_len", 0), ("share", 0.0), ("share", -0.5), ("share", 1.1), ("share", float("nan"))]
)
def test_what_is_no_stage_is_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field}: wanted "):
        Stage(**{"max_len": 64, "share": 0.5, field: value})


@pytest.mark.parametrize("step", [0, 11])
def test_a_step_outside_the_run_is_refused(step):
    with pytest.raises(ValueError, match=f"^stages: wanted a step from 1 to 10, got {step}$"):
        stage_at(TWO, step, 10)


def test_four_times_the_first_length_comes_within_ten_percent_extra_tokens():
    first, second, third, last = CPU_STAGES
    assert third.max_len == 4 * first.max_len and last.max_len == 16 * first.max_len
    assert (second.share + third.share) / first.share == pytest.approx(0.1)


def test_the_lengths_on_paper_are_8k_to_1m():
    assert [stage.max_len for stage in PAPER_STAGES] == [8 * 2**10, 64 * 2**10, 256 * 2**10, 2**20]
    check_stages(PAPER_STAGES, 10_000)
    check_stages(CPU_STAGES, 500)
