"""One experiment from its name to its page: what both `trivium lab` and `python -m trivium.lab` do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trivium.lab.catalogue import EXPERIMENTS
from trivium.lab.experiment import Say
from trivium.lab.page import read_record, write_page
from trivium.lab.runner import run_missing


def lab(
    name: str | None,
    *,
    num_seeds: int | None,
    parallel: int,
    threads: int,
    variants: Sequence[str],
    out: Path,
    docs: Path,
    redraw: bool,
    say: Say,
) -> None:
    """Make the runs that are missing, and write the page when all are there; without a name, list the experiments.

    `num_seeds` None: the experiment's own. `redraw`: the page anew from the runs beside it alone. Raises ValueError for
    an experiment or variant that is not there, RuntimeError when a run failed.
    """
    if name is None:
        for experiment in EXPERIMENTS.values():
            say(f"{experiment.name:<10} {experiment.title}")
        return
    if name not in EXPERIMENTS:
        raise ValueError(f"lab: wanted one of {', '.join(EXPERIMENTS)}, got {name!r}")
    experiment = EXPERIMENTS[name]
    if redraw:
        record = read_record(docs / f"{name}.json")
        kept = {field: record[field] for field in ("num_seeds", "facts", "command")}
        say(f"written to {write_page(experiment, record['runs'], docs, **kept)}")
        return
    count = experiment.num_seeds if num_seeds is None else num_seeds
    results, complete, facts = run_missing(
        experiment, out, num_seeds=count, parallel=parallel, threads=threads, say=say, variants=variants
    )
    if not complete:
        say("some runs are still missing, so no page is written")
        return
    for verdict in experiment.judge(results):
        say(f"{verdict.outcome}: {verdict.goal}: {verdict.found} (wanted {verdict.target})")
    command = " ".join(["trivium", "lab", name, *([] if num_seeds is None else ["--seeds", str(num_seeds)])])
    say(f"written to {write_page(experiment, results, docs, num_seeds=count, facts=facts, command=command)}")
