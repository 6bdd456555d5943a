"""What holds for every test: two test processes share two cores, and an example found by chance is found again."""

import os
import signal

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # before torch: see trivium.cli.main

import pytest
import torch
from hypothesis import settings

# With a second test process beside this one, a second thread only waits for its core.
if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)

# What a shell runs in the background ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_threads_for_all():
    """Verbs set the number of threads of their process, which here is that of the tests behind them too."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


settings.register_profile("trivium", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("trivium")
