"""Runs one test on the package in a folder, and says which package that was and how the test ended.

`python flip.py FOLDER NODE...` prints one line of JSON: the folder trivium came from, how many tests passed, and the type and
message of every failure. It exits with pytest's code.
"""

import json
import shlex
import sys

import pytest


class Watch:
    def __init__(self) -> None:
        self.passed = 0
        self.failures: list[tuple[str, str]] = []

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        if call.excinfo is not None:
            self.failures.append((f"{call.when} {call.excinfo.typename}", str(call.excinfo.value)))
        elif call.when == "call":
            self.passed += 1


if __name__ == "__main__":
    folder, *nodes = sys.argv[1:]
    watch = Watch()
    # The tests' own setting puts the repository in front of every other folder, so it is replaced.
    code = pytest.main(
        ["-q", "-p", "no:cacheprovider", "-o", f"pythonpath={shlex.quote(folder)} tests", *nodes], plugins=[watch]
    )
    package = sys.modules.get("trivium")
    print(json.dumps({"package": package and package.__file__, "passed": watch.passed, "failures": watch.failures}))
    sys.exit(code)
