"""The picture of a run's layers: which number is drawn where."""

import io
import math
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from tests.evals.looks import look_of
from trivium.evals.figure import line_style
from trivium.evals.layers_plot import Depth, draw_layers, read_weights


def run_of(*steps, label="run", **shape):
    return Depth(label=label, looks=tuple(look_of(step, **shape) for step in steps))


def panels(figure):
    """(heat maps, half-lives, gradients, running sums, outputs)"""
    axes = [one for one in figure.axes if one.get_label() != "<colorbar>"]
    return axes[:-4], *axes[-4:]


def names(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_weights_are_in_the_order_of_the_forward():
    # Blocks of two layers: the embedding alone, with layers 0 and 1 from the first feed-forward on, 2 and 3 from layer 2's.
    weight_NR = read_weights(look_of(1))
    assert weight_NR.shape == (3, 9)
    assert np.isfinite(weight_NR).sum(axis=0).tolist() == [1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert np.nansum(weight_NR, axis=0) == pytest.approx(np.ones(9))
    assert [weight_NR[n, read] for read, n in ((1, 1), (2, 1), (7, 2), (8, 2))] == pytest.approx(
        [0.99, 0.98, 0.93, 0.92]
    )


def test_the_map_has_the_last_look_and_its_reads_above_their_layers():
    ((map_,), *_) = panels(draw_layers([run_of(1, 5, 9)]))
    (image,) = map_.images
    assert np.array_equal(image.get_array().filled(np.nan), read_weights(look_of(9)), equal_nan=True)
    left, right, bottom, top = image.get_extent()
    # Two reads a layer, so layer l's lie from l - 1/2 to l + 1/2; the output's stands behind the last layer's.
    assert (left, right, bottom, top) == (-0.5, 4.0, 2.5, -0.5)
    assert [tick.get_text() for tick in map_.get_xticklabels()] == ["0", "1", "2", "3", "out"]
    assert [tick.get_text() for tick in map_.get_yticklabels()] == ["embedding", "block 1", "block 2"]
    assert map_.get_title(loc="right") == "step 9"


@pytest.mark.parametrize(
    ("steps", "shown"),
    [((1,), (1,)), ((1, 5), (1, 5)), ((1, 5, 9), (1, 5, 9)), ((1, 2, 5, 7, 9, 11), (1, 7, 11))],
)
def test_a_single_run_has_its_first_its_middle_and_its_last_look(steps, shown):
    figure = draw_layers([run_of(*steps)])
    _, half_lives, grads, sums, outputs = panels(figure)
    assert names(figure) == [f"step {step}" for step in shown]
    assert [line.get_ydata().tolist() for line in sums.lines] == [list(look_of(step).stream_rms) for step in shown]
    assert [list(line.get_ydata()) for line in grads.lines[::2]] == [
        list(look_of(step).grad_norm.layers) for step in shown
    ]
    assert [list(line.get_ydata()) for line in grads.lines[1::2]] == [[0.5 * step, 2.0 * step] for step in shown]
    assert [list(line.get_xdata()) for line in grads.lines[1::2]] == [[-1, 4]] * len(shown)
    assert [list(line.get_ydata()) for line in outputs.lines[::2]] == [list(look_of(step).mixer_rms) for step in shown]
    assert [list(line.get_ydata()) for line in outputs.lines[1::2]] == [list(look_of(step).ffn_rms) for step in shown]
    assert len(half_lives.lines) == 3 * len(shown)  # of four layers one is MLA
    colours = [line.get_color() for line in sums.lines]
    assert len(set(colours)) == len(shown) and colours[-1] == "#1e3a8a"  # the last one is the darkest


def test_heads_are_sorted_within_their_layer_and_mla_is_grey():
    _, half_lives, *_ = panels(draw_layers([run_of(2)]))
    assert half_lives.get_yscale() == "log"
    for layer_idx, line in enumerate(half_lives.lines):
        assert line.get_ydata().tolist() == sorted(look_of(2).half_life_tokens[layer_idx])
        assert np.diff(line.get_xdata()).min() > 0 and np.abs(line.get_xdata() - layer_idx).max() < 0.5
    (grey,) = half_lives.patches
    assert (grey.get_x(), grey.get_width()) == (2.5, 1)


def test_several_runs_have_their_last_looks_and_three_of_them_a_map():
    runs = [run_of(1, step, label=f"_$run{step}") for step in (5, 6, 7, 8)]
    figure = draw_layers(runs)
    maps, half_lives, grads, sums, _ = panels(figure)
    assert names(figure) == ["_$run5", "_$run6", "_$run7", "_$run8"]
    assert [map_.get_title(loc="right") for map_ in maps] == [f"_$run{step}, step {step}" for step in (5, 6, 7)]
    assert [line.get_ydata()[0] for line in sums.lines] == [500, 600, 700, 800]
    assert [line.get_color() for line in sums.lines] == [line_style(number)["color"] for number in range(4)]
    assert len(grads.lines) == 2 * 4 and len(half_lives.lines) == 3 * 4
    figure.savefig(io.BytesIO(), format="svg")  # a name is not read as a formula


def test_runs_of_different_depths_share_the_axis_of_layers():
    maps, half_lives, *others = panels(draw_layers([run_of(3, num_layers=4), run_of(3, num_layers=8)]))
    assert {axes.get_xlim() for axes in (*maps, half_lives, *others)} == {(-1.5, 8.5)}
    # Layer 3 is MLA in both, layer 7 in the only one that has it.
    assert [grey.get_x() for grey in half_lives.patches] == [2.5, 6.5]


def test_a_layer_that_is_kda_in_one_run_is_not_grey():
    one = look_of(3)
    other = replace(one, half_life_tokens=(*one.half_life_tokens[:3], (5.0, 6.0)))
    _, half_lives, *_ = panels(draw_layers([Depth(label="a", looks=(one,)), Depth(label="b", looks=(other,))]))
    assert not half_lives.patches and len(half_lives.lines) == 7


@pytest.mark.parametrize(
    "change",
    [
        {"half_life_tokens": (None,) * 4},
        {"stream_rms": (math.nan,) * 4, "mixer_rms": (math.inf,) * 4},
        {"half_life_tokens": ((math.nan, 3.0),) * 4},
        {"grad_norm": replace(look_of(1).grad_norm, layers=(0.0,) * 4, embedding=0.0, head=math.nan)},
    ],
)
def test_what_is_missing_or_not_finite_leaves_a_gap(change):
    picture = io.BytesIO()
    draw_layers([Depth(label="a", looks=(replace(look_of(1), **change),))]).savefig(picture, format="png")
    assert picture.tell() > 10_000


def boxes(figure, axes, dim):
    renderer = figure.canvas.get_renderer()
    labels = axes.get_xticklabels() if dim == "x" else axes.get_yticklabels()
    found = [label.get_window_extent(renderer) for label in labels if label.get_text() and label.get_visible()]
    found = [box for box in found if axes.get_window_extent(renderer).padded(30).overlaps(box)]
    return sorted([(box.x0, box.x1) if dim == "x" else (box.y0, box.y1) for box in found])


@pytest.mark.parametrize("shape", [(1, 1, 1), (6, 3, 4), (24, 8, 4), (93, 96, 12)])
def test_no_label_lies_on_another(shape):
    """From one layer to K3's 93 with 96 heads: on every axis labels keep 6 of 1,600 pixels apart, and so do titles, inside the page."""
    num_layers, num_heads, block_size = shape
    figure = draw_layers([run_of(1, 50, num_layers=num_layers, num_heads=num_heads, block_size=block_size)])
    figure.canvas.draw()
    for axes in figure.axes:
        for dim in ("x", "y"):
            at = boxes(figure, axes, dim)
            assert all(before[1] + 6 < after[0] for before, after in pairwise(at)), (axes.get_title(loc="left"), dim)
    renderer = figure.canvas.get_renderer()
    titles = [axes._left_title.get_window_extent(renderer) for axes in figure.axes if axes.get_title(loc="left")]
    assert len(titles) == 5 and all(title.x1 < figure.bbox.x1 for title in titles)
    assert not any(one.overlaps(other) for one, other in combinations(titles, 2))
