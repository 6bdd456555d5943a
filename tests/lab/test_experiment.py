"""Means, intervals, noise and verdicts: numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
from lab.toy import TOY

from trivium.lab import experiment
from trivium.lab.experiment import Estimate, Result, Results, Run, Variant, at_least, at_most, rounded, thinned


def run_of(variant, seed, **numbers):
    result = Result(numbers=numbers, curves={"c": ([1.0], [2.0])})
    return Run(variant=variant, seed=seed, fingerprint="f", seconds=1.0, made_by={}, result=result)


def test_an_interval_of_three_seeds_by_hand():
    # 1, 2, 3: mean 2, standard deviation 1, t(2) = 4.303: 4.303 / sqrt(3) = 2.484.
    found = Estimate.of([1.0, 2.0, 3.0])
    assert found.mean == 2 and found.half == pytest.approx(2.4843, abs=1e-4)
    assert found.text(2) == "2.00 ± 2.48"


def test_one_seed_has_no_interval_and_a_diverged_one_no_mean():
    assert Estimate.of([2.0]).half == math.inf and Estimate.of([2.0]).text(1) == "2.0"
    assert Estimate.of([2.0, math.inf]) == Estimate(mean=math.inf, half=0.0, count=2)
    assert Estimate.of([2.0, math.inf]).text(1) == "never"
    assert Estimate.of([2.0, -math.inf]).text(1) == "the other diverged"
    assert Estimate.of([math.inf, -math.inf]).text(1) == "both diverged"
    with pytest.raises(ValueError, match="at least one seed, got none"):
        Estimate.of([])


def test_the_points_of_t_are_students():
    stats = pytest.importorskip("scipy.stats")
    for freedom, point in enumerate(experiment._T, start=1):
        assert point == pytest.approx(stats.t.ppf(0.975, freedom), abs=5e-4)


def test_noise_is_pooled_over_variants_by_hand():
    # a: 0 and 2, variance 2, one degree of freedom; b: 0, 0, 3, variance 3, two; (2 + 6) / 3.
    runs = [
        run_of("a", 0, x=0.0),
        run_of("a", 1, x=2.0),
        *(run_of("b", seed, x=x) for seed, x in enumerate((0.0, 0.0, 3.0))),
    ]
    assert Results(runs).noise("x") == pytest.approx(math.sqrt(8 / 3))
    assert Results([*runs, run_of("c", 0, x=9.0), run_of("d", 0, x=1.0), run_of("d", 1, x=None)]).noise("x") == (
        pytest.approx(math.sqrt(8 / 3))  # one seed says nothing, nor does a diverged one
    )
    assert Results(runs[:1]).noise("x") is None


def test_a_difference_is_seed_by_seed():
    # The seeds differ by 10, the variants by 1: unpaired, the interval would be as wide as the seeds lie apart.
    runs = [run_of(name, seed, x=10.0 * seed + value) for name, value in (("a", 1.0), ("b", 0.0)) for seed in range(3)]
    found = Results([*runs, run_of("a", 7, x=1e6)]).difference("a", "b", "x")  # b has no seed 7
    assert found == Estimate(mean=1.0, half=0.0, count=3)


def test_a_number_that_is_not_finite_is_infinite_again():
    results = Results([run_of("a", 0, x=rounded(math.nan), y=1.0)])
    assert results.values("a", "x") == [math.inf] and results.values("a", "z") == []
    with pytest.raises(ValueError, match="no z of a, seed 0"):
        results.value("a", 0, "z")


@pytest.mark.parametrize(
    ("mean", "half", "outcome"),
    [
        (0.5, 0.4, "met"),
        (0.5, 0.5, "met"),
        (0.5, 0.6, "met, within noise"),
        (0.5, math.inf, "met, within noise"),
        (1.5, 0.6, "not met, within noise"),
        (1.5, 0.4, "not met"),
        (math.inf, 0.0, "not met"),
        (1.0, 0.0, "met"),
    ],
)
def test_a_verdict_says_whether_noise_could_turn_it(mean, half, outcome):
    found = Estimate(mean=mean, half=half, count=3)
    assert at_most("g", found, 1, 1).outcome == outcome
    assert at_least("g", replace(found, mean=-mean), -1, 1).outcome == outcome


def test_what_diverged_meets_nothing_and_what_it_is_compared_with_is_not_blamed():
    lost, kept = (Results([run_of("a", 0, x=a), run_of("b", 0, x=b)]) for a, b in ((None, 1.0), (1.0, None)))
    assert at_least("g", lost.estimate("a", "x"), 0.9, 1).outcome == "not met"
    assert at_most("g", lost.estimate("a", "x"), 0.9, 1).outcome == "not met"
    assert at_most("g", lost.difference("a", "b", "x"), 0, 1).outcome == "not met"
    verdict = at_most("g", kept.difference("a", "b", "x"), 0, 1)
    assert (verdict.outcome, verdict.found) == ("met", "the other diverged")
    both = Results([run_of("a", 0, x=None), run_of("b", 0, x=None)]).difference("a", "b", "x")
    assert at_most("g", both, 0, 1).outcome == at_least("g", both, 0, 1).outcome == "not met"


def test_a_run_comes_back_from_json():
    assert Run.from_json(run_of("a", 3, x=1.0, y=None).to_json()) == run_of("a", 3, x=1.0, y=None)


def test_a_fingerprint_is_of_all_that_a_run_reads():
    low = TOY.variants[0]
    same = TOY.fingerprint(low, 0, {"data": 1})
    others = [
        TOY.fingerprint(low, 1, {"data": 1}),
        TOY.fingerprint(low, 0, {"data": 2}),
        TOY.fingerprint(Variant(name="low", settings={"value": 1.5}), 0, {"data": 1}),
        replace(TOY, settings={"size": 2}).fingerprint(low, 0, {"data": 1}),
        replace(TOY, name="another").fingerprint(low, 0, {"data": 1}),
    ]
    assert len({same, *others}) == 6
    # What only says or shows something is not read.
    assert replace(TOY, title="t", setting="s", num_seeds=9).fingerprint(low, 0, {"data": 1}) == same


def test_thinning_keeps_the_beginning_the_end_and_what_is_finite():
    xs, ys = thinned([float(x) for x in range(1000)], [float(x) for x in range(1000)])
    assert xs == ys and xs[:20] == [float(x) for x in range(20)] and xs[-1] == 999 and len(xs) <= 81
    assert thinned([1.0, 2.0], [math.nan, 3.0]) == ([2.0], [3.0])
