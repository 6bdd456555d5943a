"""What a run says while it trains: metrics.jsonl for machines, a line for people."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

# Where nothing can be redrawn, such as a file, a line is printed this often.
_PLAIN_EVERY_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """One line of metrics.jsonl. `tokens` and `time_s` are since the start, `lr` is the matrices'.

    The held-out figures are null where nothing was held against the held-out text.
    """

    step: int
    tokens: int
    time_s: float
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    heldout_loss: float | None
    heldout_bpb: float | None
    max_vio: float
    idle_experts: int


class RunLog:
    """Writes metrics.jsonl step by step, and keeps one line on the console up to date."""

    def __init__(self, path: Path, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._console = console
        self._clock = clock
        self._printed_s = clock()
        self._status = Status("the first step", console=console) if console.is_terminal else None
        self._heldout = ""

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._status:
            self._status.stop()
        self._file.close()

    def write(self, metrics: Metrics, left_s: float | None) -> None:
        """One step; `left_s` is the time left, None where that is not known."""
        self._file.write(json.dumps(asdict(metrics)) + "\n")
        self._file.flush()
        if metrics.heldout_bpb is not None:
            self._heldout = f" · held-out {metrics.heldout_bpb:.3f} bits/byte"
        left = "" if left_s is None else f" · {clock_time(left_s)} left"
        line = (
            f"step {metrics.step} · loss {metrics.loss:.3f} · {metrics.tokens_per_s:,.0f} tokens/s{self._heldout}"
            f" · idle experts {metrics.idle_experts}{left}"
        )
        if self._status:
            self._status.update(line)
        now_s = self._clock()
        due = now_s - self._printed_s >= _PLAIN_EVERY_S and not self._status
        if metrics.heldout_bpb is not None or due:
            self._printed_s = now_s
            self._console.print(line, highlight=False, soft_wrap=True)


def clock_time(seconds: float) -> str:
    """134.2 → 2:14."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
