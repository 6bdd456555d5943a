"""Runs are kept as they finish, and made once: whatever ended the process, and only while nothing has changed."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from lab.toy import TOY, failing

from trivium.lab.experiment import Variant
from trivium.lab.runner import file_of, run_missing

SIZES = {"num_seeds": 2, "parallel": 2, "threads": 1}


def calls(out):
    path = out / "data" / "calls"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def make(experiment, out, **given):
    lines = []
    results, complete, _ = run_missing(experiment, out, say=lines.append, **{**SIZES, **given})
    return results, complete, lines


def test_what_is_finished_is_not_made_again(tmp_path):
    results, complete, lines = make(TOY, tmp_path)
    assert complete and calls(tmp_path) == ["high 0", "high 1", "low 0", "low 1"]
    assert results.values("low", "final") == [1.0, 1.1] and results.values("high", "final") == [2.0, 2.1]
    assert lines[0] == "toy: 4 runs, 0 finished; 2 at a time, 1 thread each" and "[4/4] " in lines[-1]
    again, complete, lines = make(TOY, tmp_path)
    assert complete and again.runs == results.runs and lines == [] and len(calls(tmp_path)) == 4
    # One more seed: only that one is made.
    assert make(TOY, tmp_path, num_seeds=3)[1] and calls(tmp_path) == [
        "high 0", "high 1", "high 2", "low 0", "low 1", "low 2"
    ]  # fmt: skip


def test_what_has_changed_is_made_anew(tmp_path):
    make(TOY, tmp_path, num_seeds=1)
    low, high = TOY.variants
    changed = replace(TOY, variants=(replace(low, settings={"value": 5.0}), high))
    results, _, _ = make(changed, tmp_path, num_seeds=1)
    assert results.values("low", "final") == [5.0] and calls(tmp_path) == ["high 0", "low 0", "low 0"]
    other_data = replace(TOY, prepare=lambda folder, say: {"data": "other"})
    assert make(other_data, tmp_path, num_seeds=1)[1] and len(calls(tmp_path)) == 5


def test_a_part_leaves_the_rest_for_later(tmp_path):
    results, complete, _ = make(TOY, tmp_path, variants=["high"])
    assert not complete and results.variants == ["high"] and calls(tmp_path) == ["high 0", "high 1"]
    with pytest.raises(ValueError, match="variants: wanted some of low, high, got 'hihg'"):
        make(TOY, tmp_path, variants=["hihg"])
    with pytest.raises(ValueError, match="parallel: wanted at least 1, got 0"):
        make(TOY, tmp_path, parallel=0)


def test_a_failed_run_stops_no_other_and_is_an_error_at_the_end(tmp_path):
    with pytest.raises(RuntimeError, match="toy: 1 runs failed: broken, seed 0$"):
        make(failing(), tmp_path, num_seeds=1)
    assert calls(tmp_path) == ["broken 0", "high 0", "low 0"]
    with pytest.raises(RuntimeError, match="broken"):
        make(failing(), tmp_path, num_seeds=1)
    assert calls(tmp_path) == ["broken 0", "broken 0", "high 0", "low 0"]  # it alone was tried again


def test_a_plan_may_want_more_once_its_first_runs_are_there(tmp_path):
    def plan(results, num_seeds):
        jobs = [(variant, 0) for variant in TOY.variants]
        if len(results.runs) < 2:
            return jobs
        best = min(TOY.variants, key=lambda variant: results.estimate(variant.name, "final").mean)
        return [*jobs, (Variant(name="best", settings=best.settings), 1)]

    results, complete, _ = make(replace(TOY, plan=plan), tmp_path)
    assert complete and results.values("best", "final") == [1.1] and calls(tmp_path) == ["best 1", "high 0", "low 0"]
    assert make(replace(TOY, plan=plan), tmp_path)[0].runs == results.runs


def place(out, idx):
    """The file of seed 0 of the toy's first or second variant."""
    variant = TOY.variants[idx]
    return file_of(out / "toy", variant.name, 0, TOY.fingerprint(variant, 0, {}))


RUN = """
import pathlib, sys
from lab.toy import TOY
from trivium.lab.runner import run_missing
if __name__ == "__main__":
    run_missing(TOY, pathlib.Path(sys.argv[1]), num_seeds=1, parallel=2, threads=1, say=print)
"""


@pytest.mark.parametrize(
    "number, kill",
    [(signal.SIGKILL, os.killpg), (signal.SIGINT, os.killpg), (signal.SIGKILL, os.kill), (signal.SIGTERM, os.kill)],
    ids=["all killed", "Ctrl-C", "the first killed", "the first asked to end"],
)
def test_killed_in_the_middle_only_what_was_under_way_is_made_again(tmp_path, number, kill):
    (tmp_path / "data").mkdir()
    hold = tmp_path / "data" / "hold-high"
    hold.touch()
    script = tmp_path / "script.py"
    script.write_text(RUN)
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests), str(tests.parent)])
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        until_s = time.monotonic() + 120
        while not place(tmp_path, 0).exists() or len(calls(tmp_path)) < 2:
            assert process.poll() is None and time.monotonic() < until_s
            time.sleep(0.02)
    finally:
        kill(process.pid, number)  # a terminal's Ctrl-C reaches the runs too
    assert process.wait(60) != 0
    time.sleep(1)  # the runs have left by now, too: one that stayed would finish
    hold.unlink()
    time.sleep(1)
    assert not place(tmp_path, 1).exists()
    assert make(TOY, tmp_path, num_seeds=1)[1] and calls(tmp_path) == ["high 0", "high 0", "low 0"]
    assert {*(tmp_path / "toy").iterdir()} == {place(tmp_path, 0), place(tmp_path, 1)}


def test_a_run_says_what_made_it(tmp_path):
    results, _, _ = make(TOY, tmp_path, num_seeds=1, variants=["low"])
    (run,) = results.runs
    assert run.made_by["threads"] == 1 and run.made_by["torch"] and run.made_by["processor"]
    assert json.loads(place(tmp_path, 0).read_text()) == json.loads(json.dumps(run.to_json()))


def test_a_file_is_named_for_its_run():
    assert (
        file_of(Path(), "Muon, 75% of the tokens", 1, "0123456789").name == "muon-75-of-the-tokens-seed1-01234567.json"
    )


UNHASHABLE = json.dumps(
    {
        "variant": "low",
        "seed": 0,
        "fingerprint": [],
        "seconds": 1,
        "made_by": {},
        "result": {"numbers": {}, "curves": {}},
    }
)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"variant": "low"}', "[" * 100_000, UNHASHABLE])
def test_a_kept_file_that_holds_no_run_is_named(tmp_path, text):
    make(TOY, tmp_path, num_seeds=1)
    place(tmp_path, 0).write_text(text)
    with pytest.raises(
        ValueError, match=r"low-seed0-.*\.json: wanted a finished run, got .*; without the file it is made"
    ):
        make(TOY, tmp_path, num_seeds=1)
