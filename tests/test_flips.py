"""Every equation of docs/model.md has a line that computes it and a test that fails when that line is wrong.

`flips.toml` holds the lines, the wrong code tried in the place of each, and the tests. The fast tests hold it and the
page together; the slow ones put every wrong line into a copy of the package and see its test fail. All of them:
`pytest -m slow tests/test_flips.py -n 2`, about ten minutes on two cores.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "trivium"
PAGE = TESTS.parent / "docs" / "model.md"
LINES = tomllib.loads((TESTS / "flips.toml").read_text())["line"]
NODES = sorted({line["test"] for line in LINES})
FLIPS = [
    pytest.param(line, wrong, id=f"({line['equation']}) {line['file']}: {name}")
    for line in LINES
    for name, wrong in line["wrong"].items()
]
ROW = re.compile(r"^\| \((\d+)\) \| `(.+)`<br>`(.+)` \| `(.+)`<br>(.+) \|$", re.MULTILINE)
EQUATION = re.compile(r"^ ?\((\d+)\) +\S", re.MULTILINE)


def run_tests(folder: Path, nodes: list[str]) -> tuple[int, dict]:
    """pytest's exit code, and what `flip.py` says, of these tests on the package in this folder."""
    # Every wrong line is one of the torch path.
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "TRIVIUM_NATIVE": "0"}
    command = [sys.executable, str(TESTS / "flip.py"), str(folder), *(str(TESTS / node) for node in nodes)]
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout.splitlines()[-1])


def copy_of_the_package(folder: Path) -> Path:
    return Path(shutil.copytree(PACKAGE, folder / "trivium", ignore=shutil.ignore_patterns("__pycache__")))


def test_every_line_stands_once_in_its_file():
    for line in LINES:
        count = (PACKAGE / line["file"]).read_text().count(line["code"])
        assert count == 1, f"{line['file']}: {line['code']!r} stands there {count} times"


def test_every_wrong_line_is_code_and_another():
    for line in LINES:
        source = (PACKAGE / line["file"]).read_text()
        for wrong in line["wrong"].values():
            assert wrong != line["code"]
            compile(source.replace(line["code"], wrong), line["file"], "exec")


def test_the_page_names_the_same_lines_and_tests():
    page = PAGE.read_text()
    numbers = [int(number) for number in EQUATION.findall(page)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert {line["equation"] for line in LINES} == set(numbers)
    in_page = [(int(number), *rest) for number, *rest in ROW.findall(page)]
    in_table = [
        (line["equation"], line["code"], line["file"], line["test"], "; ".join(line["wrong"])) for line in LINES
    ]
    assert in_page == in_table


def test_every_named_test_exists():
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *(str(TESTS / node) for node in NODES)],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{len(NODES)} tests collected" in ended.stdout


@pytest.mark.slow
def test_all_pass_on_the_package_as_it_is(tmp_path):
    package = copy_of_the_package(tmp_path)
    code, ended = run_tests(tmp_path, NODES)
    assert Path(ended["package"]).parent == package
    assert (code, ended["passed"], ended["failures"]) == (0, len(NODES), [])


@pytest.mark.slow
@pytest.mark.parametrize(("line", "wrong"), FLIPS)
def test_the_test_fails_when_the_line_is_wrong(line, wrong, tmp_path):
    package = copy_of_the_package(tmp_path)
    file = package / line["file"]
    source = file.read_text()
    assert source.count(line["code"]) == 1
    file.write_text(source.replace(line["code"], wrong))
    code, ended = run_tests(tmp_path, [line["test"]])
    assert Path(ended["package"]).parent == package
    # A comparison that does not hold, in the test itself: not a crash, nor a file that cannot be imported.
    assert code == 1 and [kind for kind, _ in ended["failures"]] == ["call AssertionError"], ended
