"""A page says what the kept runs say, and nothing else."""

import json
import re
from pathlib import Path

import pytest
from lab.toy import TOY

from trivium.lab import length, per_head
from trivium.lab.catalogue import EXPERIMENTS
from trivium.lab.experiment import Result, Results, Run
from trivium.lab.page import page_text, read_record, write_page

DOCS = Path(__file__).parents[2] / "docs" / "lab"
BY = {
    "processor": "A chip",
    "cores": 4,
    "threads": 2,
    "backend": "native",
    "python": "3.12.1",
    "torch": "2.11.0",
    "trivium": "1",
}


def results(values):
    return Results(
        Run(
            variant=variant,
            seed=seed,
            fingerprint="f",
            seconds=60.0,
            made_by=BY,
            result=Result(numbers={"final": value}, curves={"loss": ([1.0, 2.0], [4.0, value or 3.0])}),
        )
        for variant, found in values.items()
        for seed, value in enumerate(found)
    )


def write(tmp_path, values):
    page = write_page(
        TOY, results(values), tmp_path, num_seeds=2, facts={"text": "none"}, command="trivium lab toy --seeds 2"
    )
    return page.read_text()


def test_the_page_has_every_part(tmp_path):
    text = write(tmp_path, {"low": [1.0, 1.2], "high": [2.0, 2.2]})
    assert text.startswith("# A toy\n\n> Low is below high.\n\nNothing is trained.\n\n")
    # low - high is -1 for either seed: no spread.
    assert "| low below high | ≤ 0.00 | -1.00 ± 0.00 | **met** |" in text
    # Standard deviation .1414, t(1) 12.706, over sqrt(2): 1.2706. bad has no value.
    assert "| low | 2 | 1.10 ± 1.27 | – |" in text
    assert "Noise floor, the standard deviation from seed to seed of final: 0.14." in text
    assert "![Loss](toy-1.png)" in text and "Made by `trivium lab toy --seeds 2`" in text
    assert (
        "* 4 minutes of runs on A chip, 4 cores, 2 threads a run, backend native; Python 3.12.1, torch 2.11.0" in text
    )
    assert "* text: none" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy-1.png", "toy.json", "toy.md"]
    assert (tmp_path / "toy-1.png").read_bytes().startswith(b"\x89PNG")


def test_other_runs_are_another_page_and_the_same_the_same(tmp_path):
    first = write(tmp_path, {"low": [1.0, 1.2], "high": [2.0, 2.2]})
    assert first == page_text(TOY, read_record(tmp_path / "toy.json"))
    text = write(tmp_path, {"low": [3.0, 3.2], "high": [2.0, 2.2]})
    assert "| low below high | ≤ 0.00 | 1.00 ± 0.00 | **not met** |" in text and text != first


def made_up(experiment, variant, seed):
    """A result with every number and curve that the experiment's runs have, and nothing trained for it."""
    task = {"per-head": variant.settings.get("task")}.get(experiment.name, experiment.name)
    value = 1 + seed / 100 + len(variant.name) / 1000
    if task == "time":
        return Result(numbers={f"{what} {shape}": value for what in ("whole", "cut", "ratio") for shape in shapes()})
    if task == "skew":
        return Result(numbers={"worst": value, "ratio": value}, curves={"worst": ([1.0, 2.0], [1.0, value])})
    if task == "length":
        found = [0.9 - seed / 100] * len(length.LENGTHS)
        sizes = [float(size) for size in length.LENGTHS]
        curves = {when: (sizes, found) for when in length.MOMENTS}
        curves |= {f"depth {size}": (list(length.DEPTHS), [0.9] * len(length.DEPTHS)) for size in length.LENGTHS}
        curves |= {"learnt": ([1.0, 2.0], [0.1, value]), "position": ([float(x) for x in length.BINS[1:]], [value] * 7)}
        numbers = {f"{size}, {when}": 0.9 for size in length.LENGTHS for when in length.MOMENTS}
        return Result(numbers={**numbers, "worst": 0.8, "rise": value - 1}, curves=curves)
    numbers = {"final": value, "idle_late": 0.0, "max_vio": value, "noise_floor": 0.2}
    if variant.settings.get("balancer") == "quantile":
        numbers["oracle"] = 0.3
    names = ("loss", "heldout", "max_vio", "idle")
    return Result(numbers=numbers, curves={name: ([1.0, 2.0, 3.0], [2.0, 1.5, value]) for name in names})


def shapes():
    return ["×".join(map(str, shape)) for shape in per_head.TIMED]


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda experiment: experiment.name)
def test_every_experiment_has_its_page(tmp_path, experiment):
    """Judged, tabled and drawn from results that are made up: what is missing in one of them would be an error."""
    found = Results(())
    while len(jobs := experiment.jobs(found, 3)) > len(found.runs):  # a plan may want more
        found = Results(
            Run(
                variant=variant.name,
                seed=seed,
                fingerprint=experiment.fingerprint(variant, seed, {}),
                seconds=1.0,
                made_by=BY,
                result=made_up(experiment, variant, seed),
            )
            for variant, seed in jobs
        )
    page = write_page(experiment, found, tmp_path, num_seeds=3, facts={}, command="trivium lab")
    text = page.read_text()
    assert text.count("| **") == len(experiment.judge(found)) >= 4
    assert not re.search(r"\b(nan|inf|None)\b", text)
    (table,) = re.findall(r"\n\| \| seeds \|.*?\n\n", text, re.DOTALL)
    shown = found.variants if experiment.shown is None else experiment.shown(found)
    assert table.strip().count("\n") == 1 + len(shown)
    assert len(list(tmp_path.glob("*.png"))) == text.count("![") == len(experiment.pictures(found))


def test_one_seed_has_no_interval_and_a_diverged_run_no_number(tmp_path):
    text = write(tmp_path, {"low": [1.0], "high": [None]})
    assert "| low | 1 | 1.00 | – |" in text and "| high | 1 | diverged | – |" in text
    assert "not known from one seed" in text


def test_a_record_that_is_none_is_named(tmp_path):
    (tmp_path / "toy.json").write_text("{")
    with pytest.raises(ValueError, match="toy.json: wanted the kept runs of an experiment"):
        read_record(tmp_path / "toy.json")


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.json")), ids=lambda path: path.stem)
def test_a_page_of_the_documents_says_what_its_runs_say(path):
    """Neither edited by hand, nor of an experiment that has changed since, nor with runs missing."""
    record = read_record(path)
    experiment = EXPERIMENTS[path.stem]
    assert path.with_suffix(".md").read_text(encoding="utf-8") == page_text(experiment, record)
    pictures = [f"{path.stem}-{number}.png" for number, _ in enumerate(experiment.pictures(record["runs"]), start=1)]
    assert sorted(picture.name for picture in DOCS.glob(f"{path.stem}-?.png")) == pictures
    wanted = experiment.jobs(record["runs"], record["num_seeds"])
    prints = [experiment.fingerprint(variant, seed, record["facts"]) for variant, seed in wanted]
    assert sorted(prints) == sorted(run.fingerprint for run in record["runs"].runs)


def test_every_page_has_its_runs():
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert pages == {path.stem for path in DOCS.glob("*.json")} and pages <= set(EXPERIMENTS)
    for path in DOCS.glob("*.json"):
        assert not re.search(r"[/\\](home|root|work|tmp|usr)[/\\]", json.dumps(json.loads(path.read_text())))
