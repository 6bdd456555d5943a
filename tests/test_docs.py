"""What the pages name is there: every test and every file."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEST = re.compile(r"`(?:tests/)?([\w/]*(?:\.py)?)::(test_\w+)")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_and_files_that_a_page_names_are_there(page):
    missing = []
    for line in page.read_text(encoding="utf-8").splitlines():
        file = ""
        for named, test in TEST.findall(line):
            file = named or file  # a name without a file is of the one before it
            path = ROOT / "tests" / file
            if not path.is_file() or f"def {test}(" not in path.read_text(encoding="utf-8"):
                missing.append(f"{file}::{test}")
        links = [link for link in LINK.findall(line) if "://" not in link]
        missing += [link for link in links if not (page.parent / link).exists()]
    assert missing == []
