"""The curves of one run or several, from their metrics.jsonl, in one picture."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

FORMATS = {"": "png", ".png": "png", ".svg": "svg", ".pdf": "pdf"}

_FIELDS = ("tokens", "loss", "heldout_bpb", "lr", "grad_norm", "max_vio", "idle_experts")
_TITLES = (
    "training loss, nats per token",
    "held-out text, bits per byte",
    "learning rate of the matrices",
    "gradient norm",
    "max_vio: busiest expert / mean − 1",
    "idle experts",
)
_COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#a16207", "#4b5563")
_DASHES = ("-", "--", ":", "-.")  # the ninth run has the first one's colour again
_GREY = "#6b7280"
_REFERENCES = (("gzip", "gzip -9", ":"), ("xz", "xz -9", "-."), ("primed_xz", "xz -9, training text read", "--"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Curves:
    """A run's metrics by field, a number a step or nan; `compressed` is bits per byte by compressor."""

    label: str
    values: dict[str, NDArray[np.float64]]
    compressed: dict[str, float]


def plot_runs(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Draw the runs' metrics over tokens and return `out`, a PNG or by its suffix an SVG or PDF.

    Training loss is shown as it was and as the mean of a twenty-fifth of the run around each step. A single run also
    has the compressors' bits per byte where its run.json knows them. Written under a temporary name, then renamed.
    Raises ValueError for a folder without metrics, with a line that is broken, or without one step; a last line that
    was cut off in the middle is left out.
    """
    out = Path(out)
    if out.suffix.lower() not in FORMATS:
        raise ValueError(f"{out}: wanted a name that ends in .png, .svg or .pdf")
    unique = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    if not unique:
        raise ValueError("plot: wanted at least one run's folder, got none")
    runs = [
        Curves(label=label, values=_read_metrics(folder / "metrics.jsonl"), compressed=_read_compressed(folder))
        for folder, label in zip(unique, _labels(unique), strict=True)
    ]
    picture = io.BytesIO()
    draw(runs).savefig(picture, format=FORMATS[out.suffix.lower()])
    part = out.with_name(f"{out.name}.part")
    try:
        part.write_bytes(picture.getvalue())
        part.replace(out)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return out


def draw(runs: Sequence[Curves]) -> Figure:
    """Six panels over tokens; as a bitmap 1,600 pixels wide, to be shown at 800."""
    figure = Figure(figsize=(8, 7), dpi=200, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.03)
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 2, height_ratios=(1.7, 1, 1)).flatten()
    (loss, heldout, *others) = panels
    for number, run in enumerate(runs):
        tokens, values = run.values["tokens"], run.values
        line = {"color": _COLOURS[number % len(_COLOURS)], "linestyle": _DASHES[number // len(_COLOURS) % len(_DASHES)]}
        point = {"marker": "o", "markersize": 4}
        alone = point if len(tokens) == 1 else {}  # a line through one step is not to be seen
        loss.plot(tokens, values["loss"], linewidth=0.6, alpha=0.35, color=line["color"], **alone)
        loss.plot(tokens, smooth(values["loss"]), linewidth=1.6, **line)
        scored = np.isfinite(values["heldout_bpb"])
        heldout.plot(tokens[scored], values["heldout_bpb"][scored], linewidth=1.6, **line, **point)
        for axes, field in zip(others, ("lr", "grad_norm", "max_vio", "idle_experts"), strict=True):
            axes.plot(tokens, values[field], linewidth=1.0, **line, **alone)
    end = max(float(run.values["tokens"][-1]) for run in runs)
    for axes, title in zip(panels, _TITLES, strict=True):
        _dress(axes, title, end)
    for axes in others:
        axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], 1e-12))
    most = max(1.0, others[-1].get_ylim()[1])
    others[-1].set_ylim(-0.06 * most, 1.06 * most)  # the line of no idle expert lies free of the axis
    others[-1].yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    for axes in panels[-2:]:
        axes.set_xlabel("tokens", fontsize=9, color=_GREY)
    if not any(np.isfinite(run.values["heldout_bpb"]).any() for run in runs):
        heldout.set_yticks([])
        heldout.text(0.5, 0.5, "not scored yet", transform=heldout.transAxes, ha="center", color=_GREY, fontsize=9)
    elif len(runs) == 1:
        _draw_references(heldout, runs[0].compressed)
    if len(runs) > 1:
        _draw_legend(figure, loss, [run.label for run in runs])
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


def _dress(axes: Axes, title: str, end: float) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color="#111827")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#d1d5db")
    axes.grid(color="#e5e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_GREY, labelsize=8.5, length=0)
    axes.set_xlim(0, max(end, 1) * 1.02)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))


def _draw_references(heldout: Axes, compressed: dict[str, float]) -> None:
    lines = [
        heldout.axhline(compressed[name], color="#374151", linewidth=1.1, linestyle=dashes, zorder=1)
        for name, _, dashes in _REFERENCES
        if name in compressed
    ]
    labels = [f"{label}: {compressed[name]:.2f}" for name, label, _ in _REFERENCES if name in compressed]
    if lines:
        bottom, top = heldout.get_ylim()
        heldout.set_ylim(bottom, top + 0.35 * (top - bottom))  # room for the legend above the curve
        heldout.legend(lines, labels, loc="upper right", fontsize=8.5, frameon=False, labelcolor="#374151")


def _draw_legend(figure: Figure, loss: Axes, labels: list[str]) -> None:
    smoothed = loss.lines[1::2]  # every run drew its loss as it was, then smoothed
    columns = min(len(labels), max(1, 100 // (max(map(len, labels)) + 6)))
    legend = figure.legend(smoothed, ["run"] * len(labels), loc="outside upper left", ncols=columns, frameon=False)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_parse_math(False)  # a folder's name is no formula, and one that begins with _ is a name too
        text.set_text(label)
        text.set_fontsize(9)


def _labels(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many parts as it takes to tell them all apart."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        labels = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(labels)) == len(folders):
            return labels
    raise AssertionError("different paths differ in some part")


def _read_metrics(path: Path) -> dict[str, NDArray[np.float64]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{path.parent}: holds no metrics.jsonl, wanted the folder of a run") from error
    *lines, cut = text.split("\n")  # `cut` is what stands behind the last newline: nothing, or a line not yet whole
    rows = []
    for number, line in enumerate([*lines, cut] if _is_json(cut) else lines, start=1):
        try:
            rows.append(_row(line))
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}") from error
    if not rows:
        raise ValueError(f"{path}: holds no step yet")
    return {field: np.array([row[field] for row in rows]) for field in _FIELDS}


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    return True


def _row(line: str) -> dict[str, float]:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"wanted a JSON object, got {type(content).__name__}")
    row = {}
    for field in _FIELDS:
        if field not in content:
            raise ValueError(f"{field} is missing")
        value = content[field]
        if value is None and field == "heldout_bpb":
            value = np.nan
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{field}: wanted a number, got {json.dumps(value)}")
        row[field] = float(value)
    return row


def _read_compressed(folder: Path) -> dict[str, float]:
    """The compressors' figures of the report in run.json; none where there is no report yet."""
    path = folder / "run.json"
    if not path.exists():
        return {}
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    for name in ("report", "compressed"):
        content = content.get(name) if isinstance(content, dict) else None
    names = [name for name, *_ in _REFERENCES]
    return {name: content[name] for name in names if name in content} if isinstance(content, dict) else {}
