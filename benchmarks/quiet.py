"""Whether the machine was quiet while something was measured, and which machine it is."""

from __future__ import annotations

import os
import platform
import resource
import time
from pathlib import Path
from typing import Any, Self

QUIET_CORES = 0.1  # of CPU time that others may take


class Watch:
    """Around one child process: `others` is then the cores that all but it kept busy, None where /proc/stat says nothing.

    Counted is the whole machine and not only the cores we are pinned to: others share caches and memory with us. Time
    that a hypervisor gave to other machines (steal) is theirs, too.
    """

    def __enter__(self) -> Self:
        self._begin = (_busy_s(), _children_s(), time.monotonic())
        self.others: float | None = None
        return self

    def __exit__(self, *_: object) -> None:
        busy_s, own_s, now_s = _busy_s(), _children_s(), time.monotonic()
        if busy_s > 0:
            self.others = max(0.0, busy_s - self._begin[0] - own_s + self._begin[1]) / (now_s - self._begin[2])


def _busy_s() -> float:
    """CPU seconds since boot that were neither idle nor waiting for a disk; 0 where unknown."""
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def machine() -> dict[str, Any]:
    """The CPU as Linux names it, how many cores there are and which of them are ours."""
    try:
        lines = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
        found = {key.strip(): value.strip() for key, value in reversed(lines)}
    except OSError:
        found = {}
    model = found.get("model name", platform.machine())
    if "cpu family" in found:  # virtual machines name the maker alone
        model += f" (family {found['cpu family']} model {found['model']})"
    cores = sorted(os.sched_getaffinity(0))
    return {"cpu": model, "cores": os.cpu_count(), "ours": cores, "python": platform.python_version()}
