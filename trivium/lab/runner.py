"""Running an experiment: every wanted run that is not finished yet, some at a time, each kept as it finishes."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from trivium.lab.experiment import Experiment, Job, Result, Results, Run, Say, Variant
from trivium.train.run_folder import write_text

DATA = "data"


def run_missing(
    experiment: Experiment,
    out: Path,
    *,
    num_seeds: int,
    parallel: int,
    threads: int,
    say: Say,
    variants: Sequence[str] = (),
) -> tuple[Results, bool, dict[str, Any]]:
    """All finished runs, whether they are all that is wanted, and what the data is.

    A run whose file in `out`/NAME carries the fingerprint of what it would be now is not made again: settings, seed and
    data must be the same. `parallel` runs go at a time, each a process of `threads` threads; each writes its own file
    when it is done, so that whatever ends this process loses only what was under way. `variants` restricts what is run, ()
    is all. Raises ValueError for a variant that is not there, and RuntimeError, after all the others
    are done, when a run failed.
    """
    for name, value in (("seeds", num_seeds), ("parallel", parallel), ("threads", threads)):
        if value < 1:
            raise ValueError(f"{name}: wanted at least 1, got {value}")
    folder = out / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    (out / DATA).mkdir(exist_ok=True)
    facts = experiment.prepare(out / DATA, say)
    failed: list[str] = []
    while True:
        results = finished(experiment, folder, facts, num_seeds)
        jobs = experiment.jobs(results, num_seeds)
        missing = [job for job in jobs if results.find(job[0].name, job[1]) is None]
        chosen = _choose(missing, jobs, variants)
        if not chosen or failed:
            break
        threads_say = f"{threads} thread{'s' if threads > 1 else ''} each"
        say(
            f"{experiment.name}: {len(jobs)} runs, {len(jobs) - len(missing)} finished; {parallel} at a time, {threads_say}"
        )
        failed = _run_all(experiment, chosen, folder, facts, parallel, threads, say)
    if failed:
        raise RuntimeError(f"{experiment.name}: {len(failed)} runs failed: {', '.join(failed)}")
    return results, not missing, facts


def finished(experiment: Experiment, folder: Path, facts: dict[str, Any], num_seeds: int) -> Results:
    """The runs of `folder` that this experiment still wants; those of other settings or data are passed over.

    Raises ValueError for a file that holds no run.
    """
    kept = [_read(path) for path in sorted(folder.glob("*.json"))]
    by_print = {run.fingerprint: run for run in kept}
    results = Results(())
    while True:  # a plan may want more once its first runs are there
        jobs = experiment.jobs(results, num_seeds)
        found = [by_print.get(experiment.fingerprint(variant, seed, facts)) for variant, seed in jobs]
        now = Results(run for run in found if run is not None)
        if len(now.runs) == len(results.runs):
            return now
        results = now


def _read(path: Path) -> Run:
    try:
        run = Run.from_json(json.loads(path.read_text(encoding="utf-8")))
        hash((run.fingerprint, run.variant, run.seed))
        return run
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: wanted a finished run, got {error}; without the file it is made again") from error


def file_of(folder: Path, variant: str, seed: int, fingerprint: str) -> Path:
    """Where a run is kept: another fingerprint is another file."""
    return folder / f"{re.sub(r'[^a-z0-9.]+', '-', variant.lower()).strip('-')}-seed{seed}-{fingerprint[:8]}.json"


def _choose(missing: list[Job], jobs: list[Job], variants: Sequence[str]) -> list[Job]:
    known = list(dict.fromkeys(variant.name for variant, _ in jobs))
    for name in variants:
        if name not in known:
            raise ValueError(f"variants: wanted some of {', '.join(known)}, got {name!r}")
    return [(variant, seed) for variant, seed in missing if not variants or variant.name in variants]


def _run_all(
    experiment: Experiment, jobs: list[Job], folder: Path, facts: dict[str, Any], parallel: int, threads: int, say: Say
) -> list[str]:
    """Make all the runs; the names of those that failed."""
    context = multiprocessing.get_context("spawn")
    waiting, done, failed = list(jobs), 0, []
    running: dict[BaseProcess, Job] = {}
    by = made_by(threads)
    begun_s = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                variant, seed = job = waiting.pop(0)
                process = context.Process(
                    target=_work,
                    args=(experiment.run, variant, seed, experiment.fingerprint(variant, seed, facts), folder, by),
                    daemon=True,
                )
                with _environment(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), GOMP_SPINCOUNT="5000"):
                    process.start()
                running[process] = job
            ready = wait([process.sentinel for process in running])
            for process in [process for process in running if process.sentinel in ready]:
                process.join()
                variant, seed = running.pop(process)
                done += 1
                what = f"{variant.name}, seed {seed}"
                if process.exitcode:
                    failed.append(what)
                say(
                    f"[{done}/{len(jobs)}] {what}: {'failed' if process.exitcode else 'done'}, {_left(begun_s, done, jobs)}"
                )
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.join()
    return failed


def _left(begun_s: float, done: int, jobs: list[Job]) -> str:
    spent_s = time.monotonic() - begun_s
    return f"{spent_s / 60:.1f} min, about {spent_s / done * (len(jobs) - done) / 60:.1f} min left"


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """What a process started inside gets; torch reads its number of threads when it is loaded."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _work(run: Any, variant: Variant, seed: int, fingerprint: str, folder: Path, by: dict[str, Any]) -> None:
    """One run, in a process of its own, which leaves with the one that started it, however that ends."""
    threading.Thread(target=_leave_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    begun_s = time.monotonic()
    try:
        result = run(
            variant,
            seed,
            folder.parent / DATA,
            lambda line: print(f"  {variant.name}, seed {seed}: {line}", flush=True),
        )
    except KeyboardInterrupt:  # the parent says so, once
        raise SystemExit(130) from None
    assert isinstance(result, Result)
    kept = Run(
        variant=variant.name,
        seed=seed,
        fingerprint=fingerprint,
        seconds=round(time.monotonic() - begun_s, 1),
        made_by=by,
        result=result,
    )
    write_text(file_of(folder, variant.name, seed, fingerprint), json.dumps(kept.to_json(), ensure_ascii=False) + "\n")


def _leave_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def made_by(threads: int) -> dict[str, Any]:
    """This machine, the versions, and the threads of a run."""
    import torch

    import trivium
    from trivium.ops.backend import default_backend

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "backend": default_backend("cpu"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # pickled as it is, it would load torch in every process
        "trivium": trivium.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
