"""`trivium lab`: what is listed, run, kept and written."""

import pytest
from lab.toy import TOY

from trivium import cli
from trivium.lab import catalogue


def main(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main([str(argument) for argument in arguments])
    return exit_.value.code, *capsys.readouterr()


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(catalogue.EXPERIMENTS, "toy", TOY)
    return tmp_path


def test_without_a_name_all_are_listed(capsys):
    code, out, _ = main(capsys, "lab")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["balance", "muon", "per-head", "length"]


def test_a_name_that_is_none_is_one_line(capsys):
    code, out, err = main(capsys, "lab", "balanse")
    assert (code, out) == (
        1,
        "",
    ) and err == "error: lab: wanted one of balance, muon, per-head, length, got 'balanse'\n"


def test_runs_are_kept_and_the_page_written_once_all_are_there(place, capsys):
    code, out, err = main(capsys, "lab", "toy", "--seeds", "1", "--threads", "1", "--variant", "low")
    assert (code, err) == (0, "") and "some runs are still missing, so no page is written" in out
    assert not (place / "docs").exists()
    code, out, _ = main(capsys, "lab", "toy", "--seeds", "1", "--threads", "1", "--parallel", "2")
    assert code == 0 and "toy: 2 runs, 1 finished; 2 at a time, 1 thread each" in out
    assert "met, within noise: low below high: -1.00 (wanted ≤ 0.00)" in out  # one seed has no interval
    assert out.endswith("written to docs/lab/toy.md\n")
    assert "Made by `trivium lab toy --seeds 1`" in (place / "docs/lab/toy.md").read_text()
    # Again: nothing is run, the page is the same.
    before = (place / "docs/lab/toy.md").read_text()
    code, out, _ = main(capsys, "lab", "toy", "--seeds", "1")
    assert code == 0 and "at a time" not in out and (place / "docs/lab/toy.md").read_text() == before
    # And from the runs beside it alone.
    (place / "docs/lab/toy.md").unlink()
    assert main(capsys, "lab", "toy", "--redraw", "--out", "none") == (0, "written to docs/lab/toy.md\n", "")
    assert (place / "docs/lab/toy.md").read_text() == before and not (place / "none").exists()
