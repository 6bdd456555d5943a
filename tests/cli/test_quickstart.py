"""`trivium quickstart` and then `trivium generate`, with a model and a text that take seconds."""

import json

import pytest
import torch

from tests.tiny import tiny_config
from trivium import cli
from trivium.recipes import quickstart as recipe_file

NUM_RANKS = 300


def main(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(arguments))
    return exit_.value.code, *capsys.readouterr()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with text of 40 names to stand in, and the recipe drawn small."""
    text = tmp_path / "text"
    text.mkdir()
    for idx in range(40):
        (text / f"module{idx}.py").write_text(f"def f{idx}(x):\n    return x + {idx}  # adds {idx}\n" * 4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipe_file, "model_preset", lambda name: tiny_config(NUM_RANKS))
    num_threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(num_threads)


def test_a_run_is_made_and_goes_on_with_a_prompt(place, capsys):
    code, out, err = main(capsys, "quickstart", "--steps", "2", "--data", "text")
    assert (code, err) == (0, "")
    assert "nats a token" in out and "trivium generate runs/quickstart --prompt" in out
    run = place / "runs" / "quickstart"
    about = json.loads((run / "run.json").read_text())
    assert about["data"]["what"] == "text" and about["planned_steps"] == 2
    assert 0 < len(about["data"]["heldout_names"]) < 5
    assert (run / "samples.md").read_text().count("````") == 6

    ask = ("generate", "runs/quickstart", "--prompt", "def f", "--max-tokens", "5", "--seed", "3")
    code, text, _ = main(capsys, *ask)
    assert code == 0 and text.startswith("def f") and text.endswith("\n")
    assert main(capsys, *ask)[1] == text


def test_a_finished_run_is_not_overwritten(place, capsys):
    taken = place / "runs" / "mine"
    taken.mkdir(parents=True)
    code, _, err = main(capsys, "quickstart", "--steps", "1", "--data", "text", "--name", "mine")
    assert code == 1
    assert err == "error: runs/mine: is there already and is not overwritten; choose another name\n"
    assert not list(taken.iterdir())


@pytest.mark.parametrize("arguments", [("--minutes", "0"), ("--steps", "0")])
def test_a_run_of_no_length_leaves_no_folder(place, capsys, arguments):
    code, _, err = main(capsys, "quickstart", *arguments, "--data", "text")
    assert code == 1 and err.startswith(f"error: {arguments[0][2:]}: wanted ")
    assert not (place / "runs").exists()


def test_too_little_text_is_one_line(place, capsys):
    (place / "little").mkdir()
    (place / "little" / "a.txt").write_text("hello")
    code, _, err = main(capsys, "quickstart", "--data", "little")
    assert code == 1 and err.startswith("error: data: nothing to hold out") and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [("--seed", "99999999999999999999"), ("--minutes", "inf"), ("--data", "little"), ("--out", "text/module1.py")],
)
def test_a_run_that_fails_before_its_first_step_leaves_no_folder(place, capsys, arguments):
    (place / "little").mkdir()
    (place / "little" / "a.txt").write_text("hello")
    before = sorted(place.rglob("*"))
    rest = () if "--data" in arguments else ("--data", "text")
    code, _, err = main(capsys, "quickstart", *arguments, *rest, "--name", "mine")
    assert code == 1 and err.startswith("error: ") and err.count("\n") == 1
    assert [path for path in sorted(place.rglob("*")) if path.name != "runs"] == before


def test_a_wrong_option_of_generate_prints_no_prompt(place, capsys):
    assert main(capsys, "quickstart", "--steps", "1", "--data", "text")[0] == 0
    code, out, err = main(capsys, "generate", "runs/quickstart", "--prompt", "x", "--top-p", "2")
    assert (code, out) == (1, "") and err == "error: top_p: wanted a number in (0, 1], got 2.0\n"


def test_what_is_no_run_is_one_line(place, capsys):
    code, _, err = main(capsys, "generate", "text", "--prompt", "x")
    assert code == 1 and err.startswith("error: text: ") and err.count("\n") == 1
