import pytest

from trivium.train.schedule import Schedule


@pytest.mark.parametrize(
    ("step", "progress", "want"),
    [
        (1, 0.0, 0.1),
        (10, 0.05, 1.0),
        (50, 0.4, 1.0),
        (60, 0.7, 0.51),
        (99, 1.0, 0.02),
        (100, 1.1, 0.02),
        (5, 0.7, 0.255),
    ],
)
def test_warm_up_then_constant_then_linear_to_2_percent(step, progress, want):
    assert Schedule().factor(step, progress) == pytest.approx(want)


@pytest.mark.parametrize(
    ("field", "value"), [("warmup_steps", 0), ("decay_from", 1.0), ("decay_from", -0.1), ("final", 1.5)]
)
def test_what_is_no_schedule_is_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field}: wanted "):
        Schedule(**{field: value})
