"""Variants over seeds: the line is the mean, the band from the least to the most."""

import io

import numpy as np
import pytest

from trivium.evals.comparison_plot import Panel, draw_comparison
from trivium.evals.figure import line_style

TOKENS = np.array([10.0, 20.0, 30.0])
SEEDS = np.array([[1.0, 5.0, 3.0], [2.0, 4.0, np.nan], [6.0, 0.0, 9.0]])


def band(axes):
    (filled,) = axes.collections
    points = filled.get_paths()[0].vertices
    return [(points[points[:, 0] == x, 1].min(), points[points[:, 0] == x, 1].max()) for x in TOKENS]


def test_mean_and_band_by_hand():
    figure = draw_comparison("Three seeds", "tokens", [Panel(title="loss", curves={"a": (TOKENS, SEEDS)})])
    (axes,) = figure.axes
    assert axes.lines[0].get_xdata().tolist() == TOKENS.tolist()
    assert axes.lines[0].get_ydata().tolist() == [3, 3, 6]  # of what is known
    assert band(axes) == [(1, 6), (0, 5), (3, 9)]
    assert (axes.get_title(loc="left"), axes.get_xlabel()) == ("loss", "tokens")
    assert figure.legends[0].get_title().get_text() == "Three seeds"


def test_one_seed_has_no_band_and_a_point_that_no_seed_has_is_a_gap():
    curves = {"a": (TOKENS, SEEDS[1:2]), "b": (TOKENS, np.full((2, 3), np.nan))}
    axes = draw_comparison("", "tokens", [Panel(title="loss", curves={"a": curves["a"]})]).axes[0]
    assert not axes.collections and np.isnan(axes.lines[0].get_ydata()).tolist() == [False, False, True]
    axes = draw_comparison("", "tokens", [Panel(title="loss", curves=curves, log_y=True)]).axes[0]
    assert np.isnan(axes.lines[1].get_ydata()).all()


def test_a_variant_keeps_its_colour_and_the_names_are_said_once():
    loss = Panel(title="loss", curves={"_a": (TOKENS, SEEDS), "$b$": (TOKENS, SEEDS)})
    vio = Panel(
        title="max_vio", curves={"$b$": (TOKENS[:2], SEEDS[:, :2]), "c": (TOKENS, SEEDS)}, marks={"floor": 0.22}
    )
    figure = draw_comparison("Two panels", "tokens", [loss, vio])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["_a", "$b$", "c"]
    first, second = figure.axes
    colours = [line_style(number)["color"] for number in range(3)]
    assert [line.get_color() for line in first.lines] == colours[:2]
    assert [line.get_color() for line in second.lines[:2]] == colours[1:]
    assert (first.get_xlabel(), second.get_xlabel()) == ("", "tokens")
    assert list(second.lines[2].get_ydata()) == [0.22, 0.22]
    assert [text.get_text() for text in second.get_legend().get_texts()] == ["floor"] and first.get_legend() is None
    figure.savefig(io.BytesIO(), format="svg")  # a name is not read as a formula


def test_log_axes_have_the_marks_in_sight():
    panel = Panel(title="max_vio", curves={"a": (TOKENS, 100 * SEEDS)}, marks={"floor": 0.2}, log_x=True, log_y=True)
    axes = draw_comparison("", "tokens", [panel]).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_ylim()[0] < 0.2


def test_what_does_not_fit_is_refused():
    for y in (SEEDS[0], SEEDS[:, :2], SEEDS[None]):
        with pytest.raises(ValueError, match=r"^loss, a: wanted x \[points\] and y \[seeds, points\], got \(3,\) and "):
            draw_comparison("", "tokens", [Panel(title="loss", curves={"a": (TOKENS, y)})])
    with pytest.raises(ValueError, match="^three: wanted at least one variant's curve, got none$"):
        draw_comparison("three", "tokens", [])
