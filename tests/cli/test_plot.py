"""`trivium plot`: which picture is written where, and what is said of it."""

import json

import pytest

from tests.evals.looks import look_of
from trivium import cli

PNG = b"\x89PNG\r\n"


def main(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main([str(argument) for argument in arguments])
    return exit_.value.code, *capsys.readouterr()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to stand in, with two runs of three steps in it."""
    monkeypatch.chdir(tmp_path)
    for name, first in (("a", 8.0), ("b", 7.0)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        lines = [
            {
                "step": step,
                "tokens": 100 * step,
                "time_s": 0.5 * step,
                "loss": first - step,
                "lr": 0.03,
                "grad_norm": 1.0,
                "tokens_per_s": 200.0,
                "heldout_loss": first if step == 2 else None,
                "heldout_bpb": 2.0 if step == 2 else None,
                "max_vio": 0.5,
                "idle_experts": 0,
            }
            for step in (1, 2, 3)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text(text)
    return tmp_path


def pictures(place):
    return {path.relative_to(place).as_posix() for path in place.rglob("*.png")}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("runs/a",), "runs/a/plot.png"),
        (("runs/a", "runs/b"), "plot.png"),
        (("runs/a", "--out", "mine.png"), "mine.png"),
        (("runs/b", "runs/a", "--out", "runs/both.png"), "runs/both.png"),
    ],
)
def test_one_run_has_its_picture_beside_it_and_several_where_one_stands(place, capsys, arguments, wanted):
    assert main(capsys, "plot", *arguments) == (0, f"written to {wanted}\n", "")
    assert pictures(place) == {wanted}
    assert (place / wanted).read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("runs/a",), ["runs/a/plot.png", "runs/a/layers.png"]),
        (("runs/b", "runs/a"), ["plot.png", "layers.png"]),
        (("runs/a", "--out", "mine.png"), ["mine.png", "mine.layers.png"]),
    ],
)
def test_the_layers_are_a_picture_of_their_own(place, capsys, arguments, wanted):
    (place / "runs/a/layers.jsonl").write_text(json.dumps(look_of(1).to_json()) + "\n")
    assert main(capsys, "plot", *arguments) == (0, "".join(f"written to {path}\n" for path in wanted), "")
    assert pictures(place) == set(wanted)
    assert all((place / path).read_bytes().startswith(PNG) for path in wanted)


def test_several_runs_are_another_picture_than_one(place, capsys):
    for name, runs in (("a", ["runs/a"]), ("b", ["runs/b"]), ("both", ["runs/a", "runs/b"])):
        assert main(capsys, "plot", *runs, "--out", f"{name}.png")[0] == 0
    assert len({(place / f"{name}.png").read_bytes() for name in ("a", "b", "both")}) == 3


@pytest.mark.parametrize("arguments", [("none",), ("runs/a", "none"), ("runs/a", "--out", "none/plot.png")])
def test_what_cannot_be_drawn_is_one_line_and_no_picture(place, capsys, arguments):
    code, out, err = main(capsys, "plot", *arguments)
    assert (code, out) == (1, "") and err.startswith("error: ") and "none" in err and err.count("\n") == 1
    assert not pictures(place)


def test_no_run_is_wrong_usage(place, capsys):
    assert main(capsys, "plot")[0] == 2
