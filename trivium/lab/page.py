"""An experiment's page: docs/lab/NAME.md and its pictures, written from NAME.json beside them and from nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivium.lab.experiment import Column, Experiment, Picture, Results, Run
from trivium.train.run_folder import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_page(
    experiment: Experiment, results: Results, docs: Path, *, num_seeds: int, facts: dict[str, Any], command: str
) -> Path:
    """Keep the runs as NAME.json, draw NAME-1.png, ..., write NAME.md; returns the last."""
    from trivium.evals.figure import save_figure

    docs.mkdir(parents=True, exist_ok=True)
    record = {
        "experiment": experiment.name,
        "command": command,
        "num_seeds": num_seeds,
        "facts": facts,
        "runs": [run.to_json() for run in results.runs],
    }
    lines = [f"  {json.dumps(run, ensure_ascii=False)}" for run in record.pop("runs")]
    head = json.dumps(record, ensure_ascii=False)[1:-1]
    write_text(docs / f"{experiment.name}.json", f'{{{head}, "runs": [\n' + ",\n".join(lines) + "\n]}\n")
    for number, picture in enumerate(experiment.pictures(results), start=1):
        save_figure(draw(picture, results), docs / f"{experiment.name}-{number}.png")
    page = docs / f"{experiment.name}.md"
    write_text(page, page_text(experiment, read_record(docs / f"{experiment.name}.json")))
    return page


def read_record(path: Path) -> dict[str, Any]:
    """NAME.json, its runs as Results. Raises ValueError for a file that cannot be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: wanted the kept runs of an experiment: {error}") from error
    return {**record, "runs": Results(Run.from_json(run) for run in record["runs"])}


def page_text(experiment: Experiment, record: dict[str, Any]) -> str:
    """The page: claim, setting, verdicts, table, noise floor, pictures, and how it was made."""
    results: Results = record["runs"]
    parts = [
        f"# {experiment.title}",
        f"> {experiment.claim}",
        experiment.setting,
        _verdicts(experiment, results),
        _table(experiment, results),
        _noise(experiment, results),
        *experiment.notes(results),
        *(
            f"![{picture.title}]({experiment.name}-{number}.png)"
            for number, picture in enumerate(experiment.pictures(results), start=1)
        ),
        "Lines are means over seeds, bands go from the least to the most.",
        _made(record, results),
    ]
    return "\n\n".join(parts) + "\n"


def _verdicts(experiment: Experiment, results: Results) -> str:
    lines = ["| goal | target | found | verdict |", "| --- | --- | --- | --- |"]
    for verdict in experiment.judge(results):
        lines.append(f"| {verdict.goal} | {verdict.target} | {verdict.found} | **{verdict.outcome}** |")
    return "\n".join(lines)


def _table(experiment: Experiment, results: Results) -> str:
    names = results.variants if experiment.shown is None else experiment.shown(results)
    lines = [
        "| | seeds | " + " | ".join(column.heading for column in experiment.columns) + " |",
        "| --- |" + " ---: |" * (1 + len(experiment.columns)),
    ]
    for name in names:
        cells = [_cell(results, name, column) for column in experiment.columns]
        lines.append(f"| {name} | {len(results.of(name))} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(results: Results, variant: str, column: Column) -> str:
    values = results.values(variant, column.number)
    if not values:
        return "–"
    if not all(map(math.isfinite, values)):
        return "diverged"
    return results.estimate(variant, column.number).text(column.digits)


def _noise(experiment: Experiment, results: Results) -> str:
    noise = results.noise(experiment.noise)
    known = "not known from one seed" if noise is None else f"{noise:.2g}"
    (what,) = (column.heading for column in experiment.columns if column.number == experiment.noise)
    return (
        "Means over seeds ± half of their 95% t-interval. Noise floor, the standard deviation from seed to seed of "
        f"{what}: {known}."
    )


def _made(record: dict[str, Any], results: Results) -> str:
    ways: dict[str, float] = {}
    for run in results.runs:
        by = run.made_by
        way = (
            f"{by['processor']}, {by['cores']} cores, {by['threads']} threads a run, backend {by['backend']}; "
            f"Python {by['python']}, torch {by['torch']}, trivium {by['trivium']}"
        )
        ways[way] = ways.get(way, 0.0) + run.seconds
    made = [f"* {seconds / 60:.0f} minutes of runs on {way}" for way, seconds in ways.items()]
    facts = [f"* {name}: {value}" for name, value in record["facts"].items()]
    head = f"Made by `{record['command']}`; every number here is in [{record['experiment']}.json]({record['experiment']}.json)."
    return "\n".join([head, "", *made, *facts])


def draw(picture: Picture, results: Results) -> Figure:
    """`draw_comparison` of the picture; a seed that lacks a point of the others is left out there."""
    import numpy as np

    from trivium.evals.comparison_plot import Panel, draw_comparison

    panels = []
    for panel in picture.panels:
        curves = {}
        for label, variant, curve in panel.lines:
            seeds = [run.result.curves[curve] for run in results.of(variant)]
            xs = max((xs for xs, _ in seeds), key=len)
            known = [dict(zip(*seed, strict=True)) for seed in seeds]
            curves[label] = (np.array(xs), np.array([[points.get(x, np.nan) for x in xs] for points in known]))
        panels.append(
            Panel(title=panel.title, curves=curves, marks=panel.marks, log_x=picture.log_x, log_y=panel.log_y)
        )
    return draw_comparison(picture.title, picture.x, panels)
