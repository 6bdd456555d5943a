"""Variants of a training, several seeds of each, in one picture: the mean over the seeds and how far they lie apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from trivium.evals.figure import DARK, draw_legend, dress, label_x, line_style, log_scale, name_entries, new_figure

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Panel:
    """A curve a variant: `curves` are (x [points], y [seeds, points]) by the variant's name; nan is not known.

    `marks` are horizontal lines by name, such as a noise floor.
    """

    title: str
    curves: Mapping[str, tuple[Array, Array]]
    marks: Mapping[str, float] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False


def draw_comparison(title: str, x_label: str, panels: Sequence[Panel]) -> Figure:
    """The panels one below the other: the mean over the seeds as a line, from the least to the most as a band.

    A variant has one colour in all panels. Raises ValueError for a curve whose shapes do not fit.
    """
    variants = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    if not variants:
        raise ValueError(f"{title}: wanted at least one variant's curve, got none")
    figure = new_figure(0.8 + 2.4 * len(panels))
    styles = {name: line_style(number) for number, name in enumerate(variants)}
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        for name, (x_P, y_SP) in panel.curves.items():
            if np.ndim(y_SP) != 2 or np.shape(y_SP)[1:] != np.shape(x_P):
                raise ValueError(
                    f"{panel.title}, {name}: wanted x [points] and y [seeds, points], got {np.shape(x_P)} and {np.shape(y_SP)}"
                )
            _draw_seeds(axes, np.asarray(x_P, dtype=float), np.asarray(y_SP, dtype=float), styles[name])
        dress(axes, panel.title)
        _draw_marks(axes, panel.marks)
        if panel.log_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # behind the scale, which brings its own
        if panel.log_y:
            log_scale(axes)
    label_x(axes, x_label)
    draw_legend(figure, [Line2D([], [], linewidth=1.6, **styles[name]) for name in variants], variants, title)
    return figure


def _draw_seeds(axes: Axes, x_P: Array, y_SP: Array, line: dict[str, str]) -> None:
    known_SP = np.ma.masked_invalid(y_SP)
    least_P, mean_P, most_P = (part.filled(np.nan) for part in (known_SP.min(0), known_SP.mean(0), known_SP.max(0)))
    if len(y_SP) > 1:
        axes.fill_between(x_P, least_P, most_P, color=line["color"], alpha=0.18, linewidth=0)
    alone = {"marker": "o", "markersize": 3} if len(x_P) < 12 else {}
    axes.plot(x_P, mean_P, linewidth=1.5, **line, **alone)


def _draw_marks(axes: Axes, marks: Mapping[str, float]) -> None:
    dashes = ("--", ":", "-.")
    lines = [
        axes.axhline(height, color=DARK, linewidth=1.0, linestyle=dashes[number % len(dashes)], zorder=1)
        for number, height in enumerate(marks.values())
    ]
    if lines:
        legend = axes.legend(lines, ["mark"] * len(lines), loc="best", frameon=False, labelcolor=DARK)
        name_entries(legend, list(marks))
