"""The curves of one run or several, from their metrics.jsonl, in one picture, and their layers in another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from trivium.evals.figure import (
    DARK,
    GREY,
    check_format,
    draw_legend,
    dress,
    dress_counts,
    label_x,
    line_style,
    new_figure,
    save_figure,
)
from trivium.evals.layers_plot import Depth, draw_layers
from trivium.train.log import LAYERS_FILE, METRICS_FILE, read_layers, whole_lines

_FIELDS = ("tokens", "loss", "heldout_bpb", "lr", "grad_norm", "max_vio", "idle_experts")
_TITLES = (
    "training loss, nats per token",
    "held-out text, bits per byte",
    "learning rate of the matrices",
    "gradient norm",
    "max_vio: busiest expert / mean − 1",
    "idle experts",
)
# Of a step that was skipped nothing was learnt, and of one before these were kept nothing is known.
_NULLABLE = ("loss", "heldout_bpb", "grad_norm", "max_vio", "idle_experts")
_REFERENCES = (("gzip", "gzip -9", ":"), ("xz", "xz -9", "-."), ("primed_xz", "xz -9, training text read", "--"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
    """A run's metrics by field, a number a step or nan; `compressed` is bits per byte by compressor.

    `skipped` is 1 where a step was not applied, else 0; its loss and gradient norm are nan. `max_len` is nan where the
    file is older than the field.
    """

    label: str
    values: dict[str, NDArray[np.float64]]
    compressed: dict[str, float]

    @property
    def stages(self) -> list[tuple[float, int]]:
        """(tokens before the first step of that length, tokens of its longest piece) where the length changed."""
        tokens, max_len = self.values["tokens"], self.values["max_len"]
        return [
            (float(tokens[idx]), int(now))
            for idx, (before, now) in enumerate(pairwise(max_len))
            if now != before and np.isfinite([before, now]).all()
        ]


def plot_runs(folders: Sequence[str | Path], out: str | Path) -> list[Path]:
    """Draw the runs' metrics over tokens into `out`, and their layers beside it where a run has any; what was written.

    `out` is a PNG or by its suffix an SVG or PDF; beside plot.png are layers.png, beside NAME.png NAME.layers.png.
    Training loss is shown as it was and as the mean of a twenty-fifth of the run around each step. A single run also
    has the compressors' bits per byte where its run.json knows them. Written under a temporary name, then renamed.
    Raises ValueError for a folder without metrics, with a line that is broken, or without one step; a last line that
    was cut off in the middle is left out.
    """
    out = Path(out)
    check_format(out)
    unique = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    if not unique:
        raise ValueError("plot: wanted at least one run's folder, got none")
    labels = _labels(unique)
    runs = [
        Curves(label=label, values=_read_metrics(folder / METRICS_FILE), compressed=_read_compressed(folder))
        for folder, label in zip(unique, labels, strict=True)
    ]
    depths = [
        Depth(label=label, looks=tuple(read_layers(folder / LAYERS_FILE)))
        for folder, label in zip(unique, labels, strict=True)
        if (folder / LAYERS_FILE).exists()
    ]
    depths = [depth for depth in depths if depth.looks]  # none yet where the first line is being written
    curves, layers = draw(runs), draw_layers(depths) if depths else None
    written = [save_figure(curves, out)]
    if layers is not None:
        stem = "layers" if out.stem == "plot" else f"{out.stem}.layers"
        written.append(save_figure(layers, out.with_name(stem + out.suffix)))
    return written


def draw(runs: Sequence[Curves]) -> Figure:
    """Six panels over tokens; where the length of the pieces changed a thin line, where a step was skipped a cross."""
    figure = new_figure(7)
    panels = figure.subplots(3, 2, height_ratios=(1.7, 1, 1)).flatten()
    (loss, heldout, *others) = panels
    lines = []
    for number, run in enumerate(runs):
        tokens, values = run.values["tokens"], run.values
        line = line_style(number)
        point = {"marker": "o", "markersize": 4}
        alone = point if len(tokens) == 1 else {}  # a line through one step is not to be seen
        loss.plot(tokens, values["loss"], linewidth=0.6, alpha=0.35, color=line["color"], **alone)
        lines += loss.plot(tokens, smooth(values["loss"]), linewidth=1.6, **line)
        scored = np.isfinite(values["heldout_bpb"])
        heldout.plot(tokens[scored], values["heldout_bpb"][scored], linewidth=1.6, **line, **point)
        for axes, field in zip(others, ("lr", "grad_norm", "max_vio", "idle_experts"), strict=True):
            axes.plot(tokens, values[field], linewidth=1.0, **line, **alone)
    end = max(float(run.values["tokens"][-1]) for run in runs)
    for axes, title in zip(panels, _TITLES, strict=True):
        dress(axes, title)
        dress_counts(axes, end)
    for axes in others:
        axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], 1e-12))
    most = max(1.0, others[-1].get_ylim()[1])
    others[-1].set_ylim(-0.06 * most, 1.06 * most)  # the line of no idle expert lies free of the axis
    others[-1].yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    for axes in panels[-2:]:
        label_x(axes, "tokens")
    if not any(np.isfinite(run.values["heldout_bpb"]).any() for run in runs):
        heldout.set_yticks([])
        heldout.text(0.5, 0.5, "not scored yet", transform=heldout.transAxes, ha="center", color=GREY, fontsize=9)
    elif len(runs) == 1:
        _draw_references(heldout, runs[0].compressed)
    if all(run.stages == runs[0].stages for run in runs):
        _draw_stages(panels, runs[0].stages, GREY)
        _name_stages(loss, runs[0].stages, end)
    else:
        for number, run in enumerate(runs):
            _draw_stages(panels, run.stages, line_style(number)["color"])
    _draw_skipped(loss, runs)
    if len(runs) > 1:
        draw_legend(figure, lines, [run.label for run in runs])
    return figure


def smooth(values_T: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of what is finite in a twenty-fifth of the run around each step, of fewer steps towards both ends."""
    num_steps = len(values_T)
    idx_T = np.arange(num_steps)
    reach_T = np.minimum(num_steps // 50, np.minimum(idx_T, num_steps - 1 - idx_T))
    finite_T = np.isfinite(values_T)
    sums, counts = (np.cumsum(np.append(0.0, part)) for part in (np.where(finite_T, values_T, 0), finite_T))
    first_T, end_T = idx_T - reach_T, idx_T + reach_T + 1
    count_T = counts[end_T] - counts[first_T]
    return np.where(count_T > 0, (sums[end_T] - sums[first_T]) / np.maximum(count_T, 1), np.nan)


def _draw_stages(panels: Sequence[Axes], stages: Sequence[tuple[float, int]], colour: str) -> None:
    for axes in panels:
        for tokens, _ in stages:
            axes.axvline(tokens, color=colour, linewidth=0.8, alpha=0.6, zorder=1)


def _name_stages(loss: Axes, stages: Sequence[tuple[float, int]], end: float) -> None:
    """The length that begins there, beside the top of its line; none where the last one's name still stands."""
    taken = -np.inf
    for tokens, max_len in stages:
        if tokens - taken > 0.05 * end:
            at = {"xycoords": ("data", "axes fraction"), "xytext": (2, -2), "textcoords": "offset points"}
            loss.annotate(f"{max_len:,}", (tokens, 1), **at, va="top", rotation=90, color=GREY, fontsize=8)
            taken = tokens


def _draw_skipped(loss: Axes, runs: Sequence[Curves]) -> None:
    """A row of crosses a run, at the foot of the panel: what was skipped has no loss to stand at."""
    cross = {"marker": "x", "markersize": 5, "linestyle": ""}
    foot = loss.get_xaxis_transform()  # x in tokens, y as a share of the height
    for number, run in enumerate(runs):
        tokens = run.values["tokens"][run.values["skipped"] > 0]
        if len(tokens):
            height = np.full(len(tokens), 0.03 + 0.04 * number)
            loss.plot(tokens, height, transform=foot, color=line_style(number)["color"], **cross)
            name = Line2D([], [], color=GREY, **cross)
            loss.legend([name], ["skipped step"], loc="upper right", fontsize=8.5, frameon=False, labelcolor=DARK)


def _draw_references(heldout: Axes, compressed: dict[str, float]) -> None:
    lines = [
        heldout.axhline(compressed[name], color=DARK, linewidth=1.1, linestyle=dashes, zorder=1)
        for name, _, dashes in _REFERENCES
        if name in compressed
    ]
    labels = [f"{label}: {compressed[name]:.2f}" for name, label, _ in _REFERENCES if name in compressed]
    if lines:
        bottom, top = heldout.get_ylim()
        heldout.set_ylim(bottom, top + 0.35 * (top - bottom))  # room for the legend above the curve
        heldout.legend(lines, labels, loc="upper right", fontsize=8.5, frameon=False, labelcolor=DARK)


def _labels(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many parts as it takes to tell them all apart."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        labels = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(labels)) == len(folders):
            return labels
    raise AssertionError("different paths differ in some part")


def _read_metrics(path: Path) -> dict[str, NDArray[np.float64]]:
    try:
        lines = whole_lines(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{path.parent}: holds no metrics.jsonl, wanted the folder of a run") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_row(line))
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}") from error
    if not rows:
        raise ValueError(f"{path}: holds no step yet")
    return {field: np.array([row[field] for row in rows]) for field in rows[0]}


def _row(line: str) -> dict[str, float]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"wanted a JSON object, got {type(content).__name__}")
    row = {field: _number(content, field) for field in _FIELDS}
    row["max_len"] = _number(content, "max_len") if "max_len" in content else np.nan
    row["skipped"] = float(content.get("reason") is not None)
    if row["skipped"]:
        row["loss"] = row["grad_norm"] = np.nan
    return row


def _number(content: dict[str, Any], field: str) -> float:
    if field not in content:
        raise ValueError(f"{field} is missing")
    value = content[field]
    if value is None and field in _NULLABLE:
        return np.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field}: wanted a number, got {json.dumps(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{field}: {error}") from error


def _read_compressed(folder: Path) -> dict[str, float]:
    """The compressors' figures of the report in run.json; none where there is no report yet."""
    path = folder / "run.json"
    if not path.exists():
        return {}
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    for name in ("report", "compressed"):
        content = content.get(name) if isinstance(content, dict) else None
    if not isinstance(content, dict):
        return {}
    try:
        return {name: _number(content, name) for name, *_ in _REFERENCES if name in content}
    except ValueError as error:
        raise ValueError(f"{path}: report.compressed: {error}") from error
