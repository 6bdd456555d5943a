import json
import os
import subprocess
import sys

import pytest

import trivium
from trivium import cli
from trivium.cli import app


def run(*arguments, **options):
    """The command line in a process of its own, as a shell starts it."""
    return subprocess.run(
        [sys.executable, "-m", "trivium", *arguments], capture_output=True, text=True, check=False, **options
    )


def main(capsys, *arguments):
    """The command line in this process: exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(arguments))
    return exit_.value.code, *capsys.readouterr()


def test_help_names_every_verb_and_loads_no_torch():
    code = (
        "import sys\nfrom trivium.cli import main\n"
        "try:\n    main(['--help'])\n"
        "finally:\n    print('torch' in sys.modules, 'trivium.train' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr.split() == ["False", "False"]
    for name in ("quickstart", "plot", "generate", "convert", "cost", "doctor", "--debug"):
        assert f"│ {name} " in done.stdout


@pytest.mark.parametrize("arguments", [["quickstart", "--data", "none"], ["cost", "params", "none"]])
def test_a_wrong_input_is_one_line_and_a_1(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, err = main(capsys, *arguments)
    assert code == 1
    assert err.startswith("error: ") and "none" in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--debug", "cost", "params", "none"], ["cost", "params", "none", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_stands(arguments):
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and "ValueError: model: wanted" in done.stderr


def test_wrong_usage_is_a_2(capsys):
    for arguments in (["generate"], ["convert", "run"], ["nonsense"], ["quickstart", "--minutes", "soon"]):
        code, _, err = main(capsys, *arguments)
        assert code == 2 and "Traceback" not in err


def test_debug_behind_two_dashes_is_an_argument():
    assert cli._debug_first(["generate", "--debug", "run", "--", "--debug"]) == [
        "--debug",
        "generate",
        "run",
        "--",
        "--debug",
    ]
    assert cli._debug_first(["doctor"]) == ["doctor"]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OSError(28, "No space left on device", "model.safetensors"), 1, "error: [Errno 28] No space left on device"),
        (ValueError("two\nlines"), 1, "error: two lines\n"),
        (FloatingPointError("step: the loss is nan"), 1, "error: step: the loss is nan\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_each_kind_of_error_has_its_line_and_code(error, code, line, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(cli.doctor, "_look", fail)
    got, _, err = main(capsys, "doctor")
    assert got == code
    assert err.startswith(line) and err.count("\n") == 1


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    def fail():
        raise AssertionError("a promise to ourselves")

    monkeypatch.setattr(cli.doctor, "_look", fail)
    with pytest.raises(AssertionError, match="a promise to ourselves"):
        app(["doctor"])


def test_a_reader_that_goes_away_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "trivium", "cost", "params", "k2", "--json"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.returncode == 1 and done.stderr == ""


def test_version_is_the_packages(capsys):
    assert main(capsys, "--version") == (0, f"trivium {trivium.__version__}\n", "")


def test_doctor_says_what_is_usable_and_why_the_rest_is_not(capsys):
    code, out, _ = main(capsys, "doctor", "--json")
    found = json.loads(out)
    assert code == 0
    rows = {(row["device"], row["backend"]): row for row in found["backends"]}
    assert rows["cpu", "torch"]["usable"] and rows["cpu", "reference"]["usable"]
    assert all(row["reason"] for row in rows.values())
    assert found["versions"]["trivium"] == trivium.__version__
    assert found["machine"]["cores"] >= 1 and found["machine"]["memory_bytes"] > 2**28
    code, out, _ = main(capsys, "doctor")
    assert code == 0 and "usable" in out and "cpu" in out


def test_doctor_lists_every_package_once_and_not_an_extra_of_our_own(monkeypatch):
    wanted = [
        "torch>=2.11",
        'none-such>=1; extra == "data"',
        'trivium[data]; extra == "dev"',
        'pytest>=8; extra == "dev"',
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: wanted)
    rows = cli.doctor._packages()
    assert [(row["package"], row["part_of"]) for row in rows] == [
        ("torch", "base"),
        ("none-such", "[data]"),
        ("pytest", "[dev]"),
    ]
    assert rows[0]["version"] and rows[1]["version"] is None
