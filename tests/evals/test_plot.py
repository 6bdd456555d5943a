"""Pictures of runs: what is drawn, and what a folder must hold."""

import io
import json
import struct
import subprocess
import sys

import numpy as np
import pytest

from tests.evals.looks import look_of
from trivium.evals import plot
from trivium.evals.figure import line_style
from trivium.evals.plot import Curves, draw, plot_runs, smooth


def line(step, **fields):
    """One of a run from before the steps skipped and the length of the pieces were kept."""
    return {
        "step": step,
        "tokens": 100 * step,
        "time_s": 1.0 * step,
        "loss": 8 / step,
        "lr": 0.01,
        "grad_norm": 1.0,
        "tokens_per_s": 100.0,
        "heldout_loss": None,
        "heldout_bpb": None if step % 2 else 4 / step,
        "max_vio": 0.5,
        "idle_experts": 0,
        **fields,
    }


def new_line(step, **fields):
    about = {"out_of_range": 0, "clipped_heads": 0, "skipped": 0, "reason": None, "max_len": 64}
    return {**line(step), **about, **fields}


def skipped_line(step, **fields):
    unknown = dict.fromkeys(("loss", "grad_norm", "max_vio", "idle_experts", "out_of_range"))
    return new_line(step, **{**unknown, "skipped": 1, "reason": "the loss is nan", **fields})


def folder_of(path, lines, looks=()):
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if looks:
        (path / "layers.jsonl").write_text("".join(json.dumps(look.to_json()) + "\n" for look in looks))
    return path


def run_folder(path, num_steps=6, tail="", report=None):
    path.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(line(step)) + "\n" for step in range(1, num_steps + 1)]
    (path / "metrics.jsonl").write_text("".join(lines) + tail)
    if report:
        (path / "run.json").write_text(json.dumps({"recipe": "test", "report": report}))
    return path


def curves_of(folder):
    return Curves(
        label=folder.name,
        values=plot._read_metrics(folder / "metrics.jsonl"),
        compressed=plot._read_compressed(folder),
    )


def test_a_png_is_1600_pixels_wide_and_nothing_else_is_left(tmp_path):
    folder = run_folder(tmp_path / "a")
    (out,) = plot_runs([folder], folder / "plot.png")
    content = out.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", content[16:24]) == (1600, 1400)
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "plot.png"]


@pytest.mark.parametrize(
    ("name", "head"), [("plot", b"\x89PNG"), ("p.SVG", b"<?xml"), ("p.pdf", b"%PDF"), ("a.b.svg", b"<?xml")]
)
def test_the_suffix_decides_what_is_written(tmp_path, name, head):
    (out,) = plot_runs([run_folder(tmp_path / "a")], tmp_path / name)
    assert out == tmp_path / name and out.read_bytes().startswith(head)


@pytest.mark.parametrize(
    ("name", "beside"), [("plot.png", "layers.png"), ("mine.png", "mine.layers.png"), ("a.b.svg", "a.b.layers.svg")]
)
def test_runs_that_were_looked_into_have_a_second_picture(tmp_path, name, beside):
    with_looks = folder_of(tmp_path / "a", [line(1)], [look_of(1), look_of(5)])
    assert plot_runs([run_folder(tmp_path / "b"), with_looks], tmp_path / name) == [tmp_path / name, tmp_path / beside]
    assert all((tmp_path / path).stat().st_size > 10_000 for path in (name, beside))
    assert not list(tmp_path.glob("*.part"))


def test_looks_of_a_run_under_way(tmp_path):
    folder = folder_of(tmp_path / "a", [line(1)], [look_of(1)])
    path = folder / "layers.jsonl"
    text = path.read_text()
    path.write_text(text[:30])  # the first line is being written
    assert plot_runs([folder], tmp_path / "p.svg") == [tmp_path / "p.svg"]
    path.write_text(text + text[:30])
    assert len(plot_runs([folder], tmp_path / "p.svg")) == 2
    path.write_text(text + "{}\n")
    (tmp_path / "p.svg").unlink()
    with pytest.raises(ValueError, match="a/layers.jsonl: line 2: step is missing$"):
        plot_runs([folder], tmp_path / "p.svg")
    assert not (tmp_path / "p.svg").exists()


def test_the_points_drawn_are_the_metrics(tmp_path):
    loss, heldout, *_ = draw([curves_of(run_folder(tmp_path / "a"))]).axes
    tokens = [100, 200, 300, 400, 500, 600]
    assert loss.lines[0].get_xdata().tolist() == tokens
    assert loss.lines[0].get_ydata().tolist() == [8 / step for step in range(1, 7)]
    assert heldout.lines[0].get_xdata().tolist() == [200, 400, 600]
    assert heldout.lines[0].get_ydata().tolist() == [2, 1, 4 / 6]


@pytest.mark.parametrize("figure", [None, "x", True, int("9" * 400)])
def test_a_compressors_figure_that_is_none_is_named(tmp_path, figure):
    folder = run_folder(tmp_path / "a", report={"compressed": {"gzip": figure}})
    with pytest.raises(ValueError, match=r"run\.json: report\.compressed: gzip: "):
        plot_runs([folder], folder / "plot.png")


def test_a_single_run_has_the_compressors_beside_it_and_several_have_names(tmp_path):
    report = {"compressed": {"gzip": 2.5, "xz": 2.25, "primed_xz": 1.5}}
    runs = [curves_of(run_folder(tmp_path / name, report=report)) for name in ("one", r"_$\bad$")]
    alone = draw(runs[:1])
    assert [list(line.get_ydata()) for line in alone.axes[1].lines[1:]] == [[2.5] * 2, [2.25] * 2, [1.5] * 2]
    assert not alone.legends
    both = draw(runs)
    assert len(both.axes[1].lines) == 2 and both.axes[1].get_legend() is None
    assert [text.get_text() for text in both.legends[0].get_texts()] == ["one", r"_$\bad$"]
    both.savefig(io.BytesIO(), format="svg")  # a name is not read as a formula
    assert [line.get_color() for line in both.legends[0].get_lines()] == [
        line_style(number)["color"] for number in (0, 1)
    ]


def test_runs_of_one_name_are_told_apart_and_a_run_is_drawn_once(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot, "draw", lambda runs: drawn.append([run.label for run in runs]) or draw(runs))
    one, two, three = (run_folder(tmp_path / path) for path in ("a/run", "b/run", "b/other"))
    plot_runs([one, two, three, tmp_path / "b" / ".." / "a" / "run"], tmp_path / "p.svg")
    assert drawn == [["a/run", "b/run", "b/other"]]


def test_a_skipped_step_is_a_cross_and_in_no_curve(tmp_path):
    lines = [new_line(1), skipped_line(2), new_line(3), skipped_line(4, loss=900.0, grad_norm=1e9), new_line(5)]
    loss, _, _, grad_norm, max_vio, _ = draw([curves_of(folder_of(tmp_path / "a", lines))]).axes
    raw, _, crosses = loss.lines
    assert np.isnan(raw.get_ydata()).tolist() == [False, True, False, True, False]
    assert np.isnan(grad_norm.lines[0].get_ydata()).tolist() == [False, True, False, True, False]
    assert np.isnan(max_vio.lines[0].get_ydata()).tolist() == [False, True, False, True, False]
    assert crosses.get_marker() == "x" and crosses.get_xdata().tolist() == [200, 400]
    assert loss.get_ylim()[1] < 10  # of 8 and less: the loss of 900 was not learnt from
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["skipped step"]
    assert draw([curves_of(run_folder(tmp_path / "b"))]).axes[0].get_legend() is None


def test_a_run_of_skipped_steps_alone_can_be_drawn(tmp_path):
    folder = folder_of(tmp_path / "a", [skipped_line(1), skipped_line(2)])
    assert plot_runs([folder], tmp_path / "p.png")[0].stat().st_size > 10_000


def borders(axes):
    return [line.get_xdata()[0] for line in axes.lines if list(line.get_ydata()) == [0, 1]]


def test_a_line_stands_where_the_length_of_the_pieces_changed(tmp_path):
    lengths = (64, 64, 256, 256, 256, 1024)
    lines = [new_line(step, max_len=max_len) for step, max_len in enumerate(lengths, start=1)]
    run = curves_of(folder_of(tmp_path / "a", lines))
    assert run.stages == [(200, 256), (500, 1024)]  # behind the last step of the stage before
    panels = draw([run]).axes
    assert [borders(axes) for axes in panels] == 6 * [[200, 500]]
    assert [text.get_text() for text in panels[0].texts] == ["256", "1,024"]
    same, other = draw([run, run]).axes, curves_of(run_folder(tmp_path / "b"))
    assert borders(same[0]) == [200, 500] and len(same[0].texts) == 2  # shared by the runs: once
    assert other.stages == [] and borders(draw([run, other]).axes[0]) == [200, 500]
    assert not draw([run, other]).axes[0].texts


def test_names_of_stages_do_not_lie_on_one_another(tmp_path):
    lines = [new_line(step, max_len=step) for step in range(1, 101)]
    panels = draw([curves_of(folder_of(tmp_path / "a", lines))]).axes
    assert len(borders(panels[0])) == 99
    at = [text.xy[0] for text in panels[0].texts]
    assert len(at) > 10 and min(np.diff(at)) > 0.05 * 10_000


def test_more_runs_than_colours_differ_in_their_dashes(tmp_path):
    runs = [curves_of(run_folder(tmp_path / str(idx))) for idx in range(10)]
    lines = draw(runs).axes[1].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 10


@pytest.mark.parametrize("fields", [{}, {"heldout_bpb": 2.0}, {"loss": float("nan"), "grad_norm": float("inf")}])
def test_one_step_is_enough(tmp_path, fields):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps(line(1, **fields)) + "\n")
    assert plot_runs([folder], tmp_path / "p.png")[0].stat().st_size > 10_000


@pytest.mark.parametrize("tail", ["", '{"step": 7, "tok', json.dumps(line(7))[:-1], "{"])
def test_a_last_line_cut_off_is_left_out(tmp_path, tail):
    assert len(curves_of(run_folder(tmp_path / "a", tail=tail)).values["loss"]) == 6


def test_a_last_line_that_lacks_only_its_newline_counts(tmp_path):
    assert len(curves_of(run_folder(tmp_path / "a", tail=json.dumps(line(7)))).values["loss"]) == 7


def without(name):
    return {field: value for field, value in line(7).items() if field != name}


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ('{"step": 7, "tok\n' + json.dumps(line(8)) + "\n", "metrics.jsonl: line 7: not JSON: "),
        ("\n", "metrics.jsonl: line 7: not JSON: "),
        ("[1]\n", "metrics.jsonl: line 7: wanted a JSON object, got list$"),
        (json.dumps(without("max_vio")) + "\n", "metrics.jsonl: line 7: max_vio is missing$"),
        (json.dumps(line(7, loss="low")) + "\n", 'metrics.jsonl: line 7: loss: wanted a number, got "low"$'),
        (json.dumps(line(7, lr=None)), "metrics.jsonl: line 7: lr: wanted a number, got null$"),
        (json.dumps(new_line(7, max_len="64")), 'metrics.jsonl: line 7: max_len: wanted a number, got "64"$'),
    ],
)
def test_a_broken_line_is_named(tmp_path, tail, message):
    with pytest.raises(ValueError, match=message):
        plot_runs([run_folder(tmp_path / "a", tail=tail)], tmp_path / "p.png")
    assert not (tmp_path / "p.png").exists()


@pytest.mark.parametrize("content", ["", '{"st'])
def test_a_run_without_a_step_is_refused(tmp_path, content):
    run_folder(tmp_path / "a", num_steps=0, tail=content)
    with pytest.raises(ValueError, match="a/metrics.jsonl: holds no step yet$"):
        plot_runs([tmp_path / "a"], tmp_path / "p.png")


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for name in ("missing", "file", "."):
        with pytest.raises(ValueError, match="holds no metrics.jsonl, wanted the folder of a run$"):
            plot_runs([tmp_path / name], tmp_path / "p.png")
    with pytest.raises(ValueError, match="^plot: wanted at least one run's folder, got none$"):
        plot_runs([], tmp_path / "p.png")
    with pytest.raises(ValueError, match=r"p\.jpg: wanted a name that ends in \.png, \.svg or \.pdf$"):
        plot_runs([run_folder(tmp_path / "a")], tmp_path / "p.jpg")
    (tmp_path / "a" / "run.json").write_text("{")
    with pytest.raises(ValueError, match="a/run.json: not a JSON file: "):
        plot_runs([tmp_path / "a"], tmp_path / "p.png")


def test_a_picture_that_cannot_be_put_in_its_place_leaves_the_old_one(tmp_path):
    (tmp_path / "p.png").mkdir()  # no file can take the place of a folder
    with pytest.raises(OSError):
        plot_runs([run_folder(tmp_path / "a")], tmp_path / "p.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "p.png"]


def test_smoothing_by_hand():
    # 100 steps: the mean of up to 2 on each side, of fewer at the ends.
    values = np.zeros(100)
    values[[0, 1, 50]] = 6, 3, 5
    got = smooth(values)
    assert got[[0, 1, 2, 3, 4]].tolist() == [6, 3, 9 / 5, 3 / 5, 0]
    assert got[[47, 48, 50, 52, 53]].tolist() == [0, 1, 1, 1, 0]
    values[50] = np.nan
    values[60:65] = np.inf
    got = smooth(values)
    assert got[50] == 0 and np.isnan(got[62]) and got[61] == 0
    assert smooth(np.array([2.0, 7.0])).tolist() == [2, 7]  # too short to smooth


def test_no_global_state_of_matplotlib_is_touched():
    code = "import sys, trivium.evals.plot; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=plot.__file__.rsplit("/", 3)[0], check=False).returncode == 0
    )
