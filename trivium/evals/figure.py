"""What our pictures have in common: colours, panels, a legend, and how a file gets into its place."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

FORMATS = {"": "png", ".png": "png", ".svg": "svg", ".pdf": "pdf"}
GREY, DARK, PALE = "#6b7280", "#374151", "#f3f4f6"

# Okabe and Ito's, told apart by colour-blind eyes too; their yellow and black darker and lighter, for a white page.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4b5563", "#8a7d00")
_DASHES = ("-", "--", ":", "-.")  # the ninth line has the first one's colour again


def new_figure(height: float) -> Figure:
    """`height` inches; as a bitmap 1,600 pixels wide, to be shown at 800."""
    figure = Figure(figsize=(8, height), dpi=200, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.03)
    FigureCanvasAgg(figure)
    return figure


def line_style(number: int) -> dict[str, str]:
    """Colour and dashes of the number-th run or variant."""
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _DASHES[number // len(_COLOURS) % len(_DASHES)],
    }


def dress(axes: Axes, title: str) -> None:
    """The panel's title, quiet axes and a grid behind the lines."""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color="#111827")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#d1d5db")
    axes.grid(color="#e5e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=GREY, labelsize=8.5, length=0)


def dress_counts(axes: Axes, end: float) -> None:
    """The x axis as a count from 0 to `end`, such as tokens: 500k, 1M."""
    axes.set_xlim(0, max(end, 1) * 1.02)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))


def log_scale(axes: Axes) -> None:
    """A log y axis where there is a number above 0 to show, with numbers as they are read: 0.05, 20, 1000."""
    values = np.concatenate([np.empty(0), *(np.asarray(line.get_ydata(), dtype=float) for line in axes.lines)])
    shown = values[np.isfinite(values) & (values > 0)]
    if not len(shown):
        return
    axes.set_yscale("log")
    decades = np.log10(shown.max() / shown.min())
    axes.yaxis.set_major_locator(
        LogLocator(subs=range(1, 10) if decades < 0.7 else (1, 2, 5) if decades < 2.5 else (1,))
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def label_x(axes: Axes, text: str) -> None:
    axes.set_xlabel(text, fontsize=9, color=GREY)


def draw_legend(figure: Figure, lines: Sequence[Line2D], labels: Sequence[str], title: str = "") -> None:
    """Names above all panels, as many in a row as have room; above them the title, if any."""
    columns = min(len(labels), max(1, 100 // (max(map(len, labels)) + 6)))
    legend = figure.legend(lines, ["run"] * len(labels), loc="outside upper left", ncols=columns, frameon=False)
    name_entries(legend, labels)
    if title:
        legend.set_title(title, prop={"size": 12, "weight": "bold"})
        legend.get_title().set_parse_math(False)
        legend.set_alignment("left")


def name_entries(legend: Any, labels: Sequence[str]) -> None:
    """Set a legend's texts as they are: a folder's name is no formula, and one that begins with _ is a name too."""
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(label)
        text.set_fontsize(9)


def check_format(out: Path) -> None:
    """Raises ValueError for a name that is no PNG's, SVG's or PDF's; one without a suffix is a PNG's."""
    if not out.name or out.suffix.lower() not in FORMATS:
        raise ValueError(f"{out}: wanted a name that ends in .png, .svg or .pdf")


def save_figure(figure: Figure, out: Path) -> Path:
    """Write under a temporary name, then rename; the suffix says what, as in `check_format`."""
    check_format(out)
    picture = io.BytesIO()
    figure.savefig(picture, format=FORMATS[out.suffix.lower()])
    part = out.with_name(f"{out.name}.part")
    try:
        part.write_bytes(picture.getvalue())
        part.replace(out)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return out
