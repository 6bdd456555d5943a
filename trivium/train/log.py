"""What a run says while it trains: metrics.jsonl and layers.jsonl for machines, a view for people."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trivium.train.probe import Layers
from trivium.train.run_folder import write_text

METRICS_FILE, LAYERS_FILE, TENSORBOARD = "metrics.jsonl", "layers.jsonl", "tensorboard"

# Where nothing can be redrawn, such as a file, a line is printed this often.
_PLAIN_EVERY_S = 15.0
_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 48


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """One line of metrics.jsonl. `tokens` and `time_s` are since the start, `lr` is the matrices'.

    The held-out figures are null where nothing was held against the held-out text, the experts' where the step was
    skipped: `reason` says why, null where it was not; `skipped` are the steps skipped so far. `max_len` are the tokens
    of the longest piece at this stage of the run. A number that is not finite is null in the file.
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
    max_vio: float | None
    idle_experts: int | None
    out_of_range: int | None
    clipped_heads: int
    skipped: int
    reason: str | None
    max_len: int

    def to_json(self) -> dict[str, Any]:
        return {name: value if _is_said(value) else None for name, value in asdict(self).items()}


class RunLog:
    """Writes metrics.jsonl step by step, layers.jsonl beside it, and keeps a view on the console up to date.

    Lines behind `step` are of steps that were never saved, and cut off. `yardstick` is what the held-out figure is
    shown beside, such as "gzip -9 1.823". With `tensorboard` every number goes to the folder tensorboard/ beside the
    file as well. Raises ValueError where that is wanted and its package is missing.
    """

    def __init__(
        self,
        path: Path,
        console: Console,
        *,
        step: int = 0,
        yardstick: str = "",
        tensorboard: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = _open_board(path.with_name(TENSORBOARD), step) if tensorboard else None
        self._losses = cut_back(path, step)
        self._path, self._layers_path = path, path.with_name(LAYERS_FILE)
        cut_back_layers(self._layers_path, step)
        self._file = path.open("a", encoding="utf-8")
        self._console = console
        self._clock = clock
        self._printed_s = clock()
        self._yardstick = yardstick
        self._heldout = ""
        self._reason = ""
        self._live = Live(Text("the first step"), console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._live:
            self._live.stop()
        if self._board:
            self._board.close()
        with suppress(OSError):  # every line was flushed as it was written, or its error raised there
            self._file.close()

    def write(self, metrics: Metrics, num_steps: int | None, left_s: float | None) -> None:
        """One step of `num_steps`; `left_s` is the time left. Both are None where that is not known.

        Raises OSError with the file and the reason.
        """
        try:
            self._file.write(_line(metrics.to_json()))
            self._file.flush()
        except OSError as error:
            raise _unwritten(self._path, error) from error
        for name, value in metrics.to_json().items() if self._board else ():
            if isinstance(value, int | float) and name != "step":
                self._board.add_scalar(name, value, metrics.step)
        self._losses.append(metrics.loss if metrics.reason is None else math.nan)
        self._reason = metrics.reason or self._reason
        if metrics.heldout_bpb is not None:
            self._heldout = f"{metrics.heldout_bpb:.3f} bits/byte"
        if self._live:
            self._live.update(self._view(metrics, num_steps, left_s), refresh=True)
            return
        now_s = self._clock()
        due = metrics.heldout_bpb is not None or metrics.reason is not None
        if due or now_s - self._printed_s >= _PLAIN_EVERY_S:
            self._printed_s = now_s
            self._console.print(self._words(metrics, num_steps, left_s), highlight=False, soft_wrap=True, markup=False)

    def write_layers(self, layers: Layers) -> None:
        """A line of layers.jsonl, which lasts through a loss of power. Raises OSError with the file and the reason."""
        try:
            with self._layers_path.open("a", encoding="utf-8") as file:
                file.write(_line(layers.to_json()))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _unwritten(self._layers_path, error) from error

    def sync(self) -> None:
        """Make the lines so far last through a loss of power: a resume point wants one for each of its steps."""
        os.fsync(self._file.fileno())
        if self._board:
            self._board.flush()

    def _words(self, metrics: Metrics, num_steps: int | None, left_s: float | None) -> str:
        parts = [
            f"step {metrics.step}" + (f" of {num_steps}" if num_steps else ""),
            *([f"skipped: {metrics.reason}"] if metrics.reason is not None else [f"loss {metrics.loss:.3f}"]),
            f"{metrics.tokens_per_s:,.0f} tokens/s",
            *([f"held-out {self._heldout}"] if self._heldout else []),
            *([] if metrics.max_vio is None else [_experts(metrics, "busiest expert")]),
            *([f"skipped so far {metrics.skipped}"] if metrics.skipped else []),
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
        if metrics.skipped:
            table.add_row(
                "skipped", Text(f"{metrics.skipped}" + (f", the last: {self._reason}" if self._reason else ""))
            )
        heldout = self._heldout or "not scored yet"
        table.add_row("held out", Text(heldout + (f" ({self._yardstick})" if self._yardstick else "")))
        table.add_row("experts", Text("-" if metrics.max_vio is None else _experts(metrics, "busiest")))
        table.add_row("speed", Text(f"{metrics.tokens_per_s:,.0f} tokens/s"))
        return table


class NoLog(RunLog):
    """What the other processes of a run have for a log: nothing is written, nothing is said."""

    def __init__(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        pass

    def write(self, metrics: Metrics, num_steps: int | None, left_s: float | None) -> None:
        pass

    def write_layers(self, layers: Layers) -> None:
        pass

    def sync(self) -> None:
        pass


def sayer(console: Console) -> Callable[[str], None]:
    """Prints a line as it is: no markup, no colours, no breaks."""
    return lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False)


def cut_back(path: Path, step: int) -> list[float]:
    """Keep the lines of metrics.jsonl up to `step`, and return their losses, nan of a step that was skipped.

    A last line without its end was being written when its process ended. Raises ValueError when one of the steps has
    no line: the file is not the one that was written.
    """
    content = path.read_bytes() if path.exists() else b""
    kept = content.splitlines()[:step]
    try:
        lines = [json.loads(line) for line in kept]
        losses = [math.nan if line.get("reason") or line["loss"] is None else float(line["loss"]) for line in lines]
        steps = [line["step"] for line in lines]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: wanted a line a step: {error}") from error
    if steps != list(range(1, step + 1)):
        raise ValueError(f"{path}: wanted the lines of steps 1 to {step}, got {len(steps)} others")
    text = b"".join(line + b"\n" for line in kept)
    if text != content:
        write_text(path, text.decode())
    return losses


def cut_back_layers(path: Path, step: int) -> None:
    """Keep the lines of layers.jsonl up to `step`; where one is broken, those before it.

    These lines are looked at and nothing depends on them: a run goes on without.
    """
    content = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    kept, last = [], 0
    for line in content.splitlines():
        try:
            layers = Layers.from_json(json.loads(line))
        except (ValueError, OverflowError, RecursionError):
            break
        if not last < layers.step <= step:
            break
        last = layers.step
        kept.append(line + "\n")
    if "".join(kept) != content:
        write_text(path, "".join(kept))


def read_layers(path: Path) -> list[Layers]:
    """The lines of layers.jsonl, of a run under way too.

    Raises ValueError with the number of a line that is broken, or whose step is not behind the one before.
    """
    found: list[Layers] = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            found.append(Layers.from_json(json.loads(line)))
            if len(found) > 1 and found[-1].step <= found[-2].step:
                raise ValueError(f"step: wanted one behind {found[-2].step}, got {found[-1].step}")
        except (ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path}: line {number}: {error}") from error
    return found


def whole_lines(path: Path) -> list[str]:
    """The lines of a JSON lines file without a last one that was cut off in the middle."""
    *lines, last = path.read_text(encoding="utf-8", errors="replace").split("\n")
    try:
        json.loads(last)  # what stands behind the last newline: nothing, a part of a line, or one that lacks its end
    except (ValueError, RecursionError):
        return lines
    return [*lines, last]


def curve(values: list[float], width: int) -> str:
    """The values as one line of bars, `width` at most, each the mean of what is finite in its share; else a blank."""
    num_bars = min(width, len(values))
    bounds = [idx * len(values) // num_bars for idx in range(num_bars + 1)] if num_bars else []
    shares = [[value for value in values[a:b] if math.isfinite(value)] for a, b in pairwise(bounds)]
    means = [sum(share) / len(share) if share else math.nan for share in shares]
    known = [mean for mean in means if math.isfinite(mean)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] if math.isfinite(mean) else " " for mean in means)


def clock_time(seconds: float) -> str:
    """134.2 → 2:14."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def _experts(metrics: Metrics, busiest: str) -> str:
    return f"{busiest} {1 + metrics.max_vio:.2f} × the mean, idle {metrics.idle_experts}"


def _is_said(value: Any) -> bool:
    """JSON has no infinity and no nan."""
    return not isinstance(value, float) or math.isfinite(value)


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, allow_nan=False) + "\n"


def _unwritten(path: Path, error: OSError) -> OSError:
    return OSError(f"{path}: cannot be written: {error.strerror or error}")


def _open_board(folder: Path, step: int) -> Any:
    """A writer of TensorBoard's events; what is there of steps behind `step` is not shown any more."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("tensorboard: its package is missing; pip install trivium[tensorboard]") from error
    return SummaryWriter(str(folder), purge_step=step + 1)
