"""What layers.jsonl holds of one run or several, over depth, in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from trivium.evals.figure import GREY, PALE, draw_legend, dress, label_x, line_style, log_scale, new_figure
from trivium.train.probe import Layers

# The AttnRes weights of more runs than these would be pictures too small to read.
_MOST_MAPS = 3

_TIMES = ("#93c5fd", "#3b82f6", "#1e3a8a")  # one hue, from light to dark: first, middle and last look
_POINT = {"marker": "o", "markersize": 2.5}  # where layers are few enough to be told apart
_SQUARE = {"marker": "s", "markersize": 3.5, "fillstyle": "none"}


@dataclass(frozen=True, kw_only=True)
class Depth:
    """A run's looks, in the order of their steps; at least one."""

    label: str
    looks: tuple[Layers, ...]


def draw_layers(runs: Sequence[Depth]) -> Figure:
    """AttnRes weights of the last look of up to three runs; below them decay, output sizes and gradients over layers.

    Of a single run the lower panels have its first, its middle and its last look, of several the last one of each.
    """
    shown = runs[:_MOST_MAPS]
    series = _series(runs)
    most = max(look.num_layers for _, look, _ in series)
    figure = new_figure(5.4 + 1.7 * len(shown))
    grid = figure.add_gridspec(len(shown) + 2, 2, height_ratios=[1] * len(shown) + [1.35, 1.35])
    for row, run in enumerate(shown):
        axes = figure.add_subplot(grid[row, :])
        _draw_reads(figure, axes, run, named=len(runs) > 1, num_layers=most)
    half_life, grads, stream, outputs = (figure.add_subplot(grid[len(shown) + a, b]) for a in (0, 1) for b in (0, 1))
    for _, look, line in series:
        layer_idx = np.arange(look.num_layers)
        line = {**line, **(_POINT if most <= 32 else {})}
        _draw_half_lives(half_life, look, line)
        grads.plot(layer_idx, look.grad_norm.layers, linewidth=1.4, **line)
        ends = (-1, look.num_layers), (look.grad_norm.embedding, look.grad_norm.head)
        grads.plot(*ends, color=line["color"], linestyle="", marker="D", markersize=3.5, clip_on=False)
        stream.plot(layer_idx, look.stream_rms, linewidth=1.4, **line)
        outputs.plot(layer_idx - 0.25, look.mixer_rms, linewidth=1.4, **line)
        outputs.plot(layer_idx + 0.25, look.ffn_rms, linewidth=0.8, **{**line, **_SQUARE})
    _shade_mla(half_life, [look for _, look, _ in series])
    for axes, title in (
        (half_life, "half-life by head, tokens (grey: MLA)"),
        (grads, "gradient norm (◆ embedding, head)"),
        (stream, "running sum behind each layer, RMS"),
        (outputs, "outputs, RMS: mixer, feed-forward (□)"),
    ):
        dress(axes, title)
        axes.set_xlim(-1.5, most + 0.5)
        axes.set_xticks(_layer_ticks(most, 8))
    for axes in (half_life, grads):
        log_scale(axes)
    for axes in (stream, outputs):
        axes.set_ylim(bottom=0)
        label_x(axes, "layer")
    lines = [Line2D([], [], linewidth=1.6, **line) for *_, line in series]
    draw_legend(figure, lines, [label for label, *_ in series])
    return figure


def _series(runs: Sequence[Depth]) -> list[tuple[str, Layers, dict[str, str]]]:
    """(name, look, line) of all that the lower panels show."""
    if len(runs) > 1:
        return [(run.label, run.looks[-1], line_style(number)) for number, run in enumerate(runs)]
    looks = runs[0].looks
    chosen = [looks[idx] for idx in sorted({0, len(looks) // 2, len(looks) - 1})]
    colours = _TIMES[-len(chosen) :]
    return [
        (f"step {look.step:,}", look, {"color": colour, "linestyle": "-"})
        for look, colour in zip(chosen, colours, strict=True)
    ]


def read_weights(look: Layers) -> NDArray[np.float64]:
    """AttnRes weights [sources, reads], nan where a read has no such source.

    Reads in the order of the forward: mixer and feed-forward of every layer, then the output's.
    """
    pairs = zip(look.mixer_read, look.ffn_read, strict=True)
    reads = [*(read for pair in pairs for read in pair), look.output_read]
    weight_NR = np.full((max(map(len, reads)), len(reads)), np.nan)
    for read_idx, read in enumerate(reads):
        weight_NR[: len(read), read_idx] = read
    return weight_NR


def _draw_reads(figure: Figure, axes: Axes, run: Depth, *, named: bool, num_layers: int) -> None:
    """Two columns a layer, so that layers lie above the lower panels' layers, and one for the output."""
    look = run.looks[-1]
    weight_NR = read_weights(look)
    num_sources, num_reads = weight_NR.shape
    extent = (-0.5, -0.5 + num_reads / 2, num_sources - 0.5, -0.5)
    axes.set_facecolor(PALE)
    image = axes.imshow(weight_NR, cmap="YlGnBu", vmin=0, vmax=1, aspect="auto", interpolation="nearest", extent=extent)
    dress(axes, "AttnRes: weight of each source in each read")
    who = f"{run.label}, step {look.step:,}" if named else f"step {look.step:,}"
    axes.set_title(who, loc="right", fontsize=9, color=GREY).set_parse_math(False)
    axes.grid(False)
    axes.set_xlim(-1.5, num_layers + 0.5)
    names = ["embedding", *(f"block {number}" for number in range(1, num_sources))]
    step = -(-num_sources // 9)
    axes.set_yticks(range(0, num_sources, step), names[::step])
    ticks = [idx for idx in _layer_ticks(look.num_layers, 14) if num_layers < 16 * (look.num_layers - idx)]
    axes.set_xticks([*ticks, look.num_layers - 0.25], [*map(str, ticks), "out"])
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01, ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=GREY, labelsize=8.5, length=0)


def _draw_half_lives(axes: Axes, look: Layers, line: dict[str, str]) -> None:
    """The heads of a layer from the shortest memory to the longest, side by side around the layer's number."""
    for layer_idx, half_life_H in enumerate(look.half_life_tokens):
        if half_life_H is not None:
            num_heads = len(half_life_H)
            at_H = layer_idx + 0.7 * ((np.arange(num_heads) + 0.5) / num_heads - 0.5)
            axes.plot(at_H, sorted(half_life_H), linewidth=1.0, **line)


def _shade_mla(axes: Axes, looks: Sequence[Layers]) -> None:
    """Grey where no run has a KDA layer: what MLA remembers does not decay."""
    for layer_idx in range(max(look.num_layers for look in looks)):
        rows = [look.half_life_tokens[layer_idx] for look in looks if layer_idx < look.num_layers]
        if all(row is None for row in rows):
            axes.axvspan(layer_idx - 0.5, layer_idx + 0.5, color=PALE, zorder=0)


def _layer_ticks(num_layers: int, most: int) -> list[int]:
    """Every, every second, fifth, tenth ... layer: at most so many."""
    return list(
        range(0, num_layers, next(step for step in (1, 2, 5, 10, 20, 50, 100, 200) if num_layers <= step * most))
    )
