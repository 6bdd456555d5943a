"""An experiment's page: docs/lab/NAME.md and its picture, written from NAME.json beside them and from nothing else."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivium.lab.experiment import Column, Experiment, Panel, Results, Run
from trivium.train.run_folder import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#a16207", "#4b5563")
_GREY = "#6b7280"


def write_page(
    experiment: Experiment, results: Results, docs: Path, *, num_seeds: int, facts: dict[str, Any], command: str
) -> Path:
    """Keep the runs as NAME.json, draw NAME.png, write NAME.md; returns the last."""
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
    picture = io.BytesIO()
    draw(experiment, results).savefig(picture, format="png")
    part = docs / f"{experiment.name}.png.part"
    part.write_bytes(picture.getvalue())
    part.replace(docs / f"{experiment.name}.png")
    page = docs / f"{experiment.name}.md"
    write_text(page, page_text(experiment, read_record(docs / f"{experiment.name}.json")))
    return page


def read_record(path: Path) -> dict[str, Any]:
    """NAME.json, its runs as Results. Raises ValueError for a file that cannot be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: wanted the kept runs of an experiment: {error}") from error
    return {**record, "runs": Results(Run.from_json(run) for run in record["runs"])}


def page_text(experiment: Experiment, record: dict[str, Any]) -> str:
    """The page: claim, setting, verdicts, table, noise floor, picture, and how it was made."""
    results: Results = record["runs"]
    parts = [
        f"# {experiment.title}",
        f"> {experiment.claim}",
        experiment.setting,
        _verdicts(experiment, results),
        _table(experiment, results),
        _noise(experiment, results),
        *experiment.notes(results),
        f"![{experiment.title}]({experiment.name}.png)",
        "Thick lines are means over seeds, thin ones the seeds.",
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


# --- The picture ---------------------------------------------------------------------------------------------------


def draw(experiment: Experiment, results: Results) -> Figure:
    """The panels two in a row; as a bitmap 1,600 pixels wide, to be shown at 800."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = experiment.panels(results)
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(8, 0.4 + 2.9 * rows), dpi=200, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 2, squeeze=False).flatten()
    labels = list(dict.fromkeys(label for panel in panels for label, *_ in panel.lines))
    colours = {label: _COLOURS[idx % len(_COLOURS)] for idx, label in enumerate(labels)}
    handles: dict[str, Any] = {}
    for panel, where in zip(panels, axes, strict=False):
        _draw_panel(panel, where, results, colours, handles)
    for where in axes[len(panels) :]:
        where.set_axis_off()
    figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=4, frameon=False, fontsize=8)
    return figure


def _draw_panel(panel: Panel, axes: Any, results: Results, colours: dict[str, str], handles: dict[str, Any]) -> None:
    for label, variant, curve in panel.lines:
        seeds = [run.result.curves[curve] for run in results.of(variant) if curve in run.result.curves]
        for xs, ys in seeds if len(seeds) > 1 else ():
            axes.plot(xs, ys, color=colours[label], linewidth=0.5, alpha=0.35)
        if not seeds:
            continue
        xs, mean = _mean(seeds)
        handles[label] = axes.plot(
            xs, mean, color=colours[label], linewidth=1.5, marker="o" if len(xs) < 12 else "", markersize=3
        )[0]
    for label, height in panel.marks:
        axes.axhline(height, color="#374151", linewidth=0.9, linestyle="--", zorder=1)
        axes.text(0.99, height, label, transform=axes.get_yaxis_transform(), ha="right", va="bottom", fontsize=7)
    if panel.x_log:
        axes.set_xscale("log")
    if panel.y_log:
        axes.set_yscale("symlog" if panel.y_range is None else "log")
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    axes.set_title(panel.title, loc="left", fontsize=9, fontweight="bold", color="#111827")
    axes.set_xlabel(panel.x, fontsize=8, color=_GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#d1d5db")
    axes.grid(color="#e5e7eb", linewidth=0.6)
    axes.tick_params(colors=_GREY, labelsize=7.5, length=0)


def _mean(seeds: list[tuple[list[float], list[float]]]) -> tuple[list[float], list[float]]:
    """The mean at every x that all seeds have."""
    shared = [x for x in seeds[0][0] if all(x in xs for xs, _ in seeds)]
    return shared, [math.fsum(ys[xs.index(x)] for xs, ys in seeds) / len(seeds) for x in shared]
