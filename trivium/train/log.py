"""What a run says while it trains: metrics.jsonl for machines, a view for people."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trivium.train.run_folder import write_text

# Where nothing can be redrawn, such as a file, a line is printed this often.
_PLAIN_EVERY_S = 15.0
_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 48


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
    """Writes metrics.jsonl step by step, and keeps a view on the console up to date.

    Lines behind `step` are of steps that were never saved, and cut off. `yardstick` is what the held-out figure is
    shown beside, such as "gzip -9 1.823".
    """

    def __init__(
        self,
        path: Path,
        console: Console,
        *,
        step: int = 0,
        yardstick: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._losses = cut_back(path, step)
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        self._console = console
        self._clock = clock
        self._printed_s = clock()
        self._yardstick = yardstick
        self._heldout = ""
        self._live = Live(Text("the first step"), console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._live:
            self._live.stop()
        with suppress(OSError):  # every line was flushed as it was written, or its error raised there
            self._file.close()

    def write(self, metrics: Metrics, num_steps: int | None, left_s: float | None) -> None:
        """One step of `num_steps`; `left_s` is the time left. Both are None where that is not known.

        Raises OSError with the file and the reason.
        """
        try:
            self._file.write(json.dumps(asdict(metrics)) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(f"{self._path}: cannot be written: {error.strerror or error}") from error
        self._losses.append(metrics.loss)
        if metrics.heldout_bpb is not None:
            self._heldout = f"{metrics.heldout_bpb:.3f} bits/byte"
        if self._live:
            self._live.update(self._view(metrics, num_steps, left_s), refresh=True)
            return
        now_s = self._clock()
        if metrics.heldout_bpb is not None or now_s - self._printed_s >= _PLAIN_EVERY_S:
            self._printed_s = now_s
            self._console.print(self._line(metrics, num_steps, left_s), highlight=False, soft_wrap=True)

    def sync(self) -> None:
        """Make the lines so far last through a loss of power: a resume point wants one for each of its steps."""
        os.fsync(self._file.fileno())

    def _line(self, metrics: Metrics, num_steps: int | None, left_s: float | None) -> str:
        parts = [
            f"step {metrics.step}" + (f" of {num_steps}" if num_steps else ""),
            f"loss {metrics.loss:.3f}",
            f"{metrics.tokens_per_s:,.0f} tokens/s",
            *([f"held-out {self._heldout}"] if self._heldout else []),
            f"busiest expert {1 + metrics.max_vio:.2f} × the mean, idle {metrics.idle_experts}",
            *([f"{clock_time(left_s)} left"] if left_s is not None else []),
        ]
        return " · ".join(parts)

    def _view(self, metrics: Metrics, num_steps: int | None, left_s: float | None) -> RenderableType:
        bar = ProgressBar(total=num_steps or 1, completed=metrics.step if num_steps else 0, width=_CURVE_WIDTH)
        count = f"{metrics.step}" + (f" of {num_steps}" if num_steps else ", timing the first steps")
        left = "" if left_s is None else f" · {clock_time(left_s)} left"
        table = Table.grid(padding=(0, 2))
        table.add_row("step", Text(f"{count}{left}"))
        table.add_row("", bar)
        table.add_row("loss", Text(f"{metrics.loss:.3f} nats a token"))
        table.add_row("", Text(curve(self._losses, _CURVE_WIDTH), style="cyan"))
        heldout = self._heldout or "not scored yet"
        table.add_row("held out", Text(heldout + (f" ({self._yardstick})" if self._yardstick else "")))
        table.add_row("experts", Text(f"busiest {1 + metrics.max_vio:.2f} × the mean, idle {metrics.idle_experts}"))
        table.add_row("speed", Text(f"{metrics.tokens_per_s:,.0f} tokens/s"))
        return table


def sayer(console: Console) -> Callable[[str], None]:
    """Prints a line as it is: no markup, no colours, no breaks."""
    return lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False)


def cut_back(path: Path, step: int) -> list[float]:
    """Keep the lines of metrics.jsonl up to `step`, and return their losses.

    A last line without its end was being written when its process ended. Raises ValueError when one of the steps has
    no line: the file is not the one that was written.
    """
    content = path.read_bytes() if path.exists() else b""
    kept = content.splitlines()[:step]
    try:
        losses = [float(json.loads(line)["loss"]) for line in kept]
        steps = [json.loads(line)["step"] for line in kept]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: wanted a line a step: {error}") from error
    if steps != list(range(1, step + 1)):
        raise ValueError(f"{path}: wanted the lines of steps 1 to {step}, got {len(steps)} others")
    text = b"".join(line + b"\n" for line in kept)
    if text != content:
        write_text(path, text.decode())
    return losses


def curve(values: list[float], width: int) -> str:
    """The values as one line of bars, `width` at most, each the mean of its share."""
    num_bars = min(width, len(values))
    bounds = [idx * len(values) // num_bars for idx in range(num_bars + 1)] if num_bars else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def clock_time(seconds: float) -> str:
    """134.2 → 2:14."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
