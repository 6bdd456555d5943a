"""Pretraining: a fresh K3 from token streams, and the run folder it leaves behind."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from rich.console import Console

import trivium
from trivium.checkpoint.published import write_published
from trivium.checkpoint.resume import load_resume_point, save_resume_point
from trivium.config import K3Config
from trivium.data.loader import Loader
from trivium.data.pack import TokenStream
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.ops import cpu
from trivium.train.groups import Group, build_optimisers, groups_table, parameter_groups
from trivium.train.heldout import Heldout, excerpt, score
from trivium.train.log import RunLog, sayer
from trivium.train.loop import Progress, train_loop
from trivium.train.point import restore_, take_point
from trivium.train.run_folder import read_run, update_run
from trivium.train.schedule import TIMED_SHARE, Length, Schedule

# Pieces of this length stand for the held-out text while training: long enough that most of what a token could know
# of its document is in it.
_EXCERPT_LEN = 1024


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """A complete run. `recipe` is the name of the function that made it.

    A step takes `batch_tokens` tokens, packed from pieces of documents of at most `max_len`. `muon_lr` goes with the
    rule sqrt(max(1, out/in)). `num_evals` times on the way `eval_tokens` tokens of the held-out text are scored.
    """

    recipe: str
    model: K3Config
    length: Length
    batch_tokens: int = 2048
    max_len: int = 128
    muon_lr: float = 0.02
    adamw_lr: float = 6e-3
    muon_momentum: float = 0.95
    adamw_betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)
    num_evals: int = 8
    eval_tokens: int = 8192
    save_every_s: float = 30.0
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "max_len", "num_evals", "eval_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: wanted at least 1, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: wanted a whole number in [0, 2^63), got {self.seed}")
        for name in ("muon_lr", "adamw_lr", "save_every_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: wanted a number above 0, got {getattr(self, name)}")
        for name, averages in (("muon_momentum", (self.muon_momentum,)), ("adamw_betas", self.adamw_betas)):
            if not all(0 <= average < 1 for average in averages):
                raise ValueError(f"{name}: wanted numbers in [0, 1), got {averages}")
        if self.length.num_steps is None and self.schedule.decay_from < TIMED_SHARE:
            raise ValueError(
                f"decay_from: a run by the clock times its first steps at the full rate and wants at least {TIMED_SHARE}"
                f", got {self.schedule.decay_from}; give the number of steps, or a later decay"
            )

    def arguments(self) -> dict[str, Any]:
        """What run.json says, and what a run that goes on must agree with."""
        return {name: value for name, value in asdict(self).items() if name not in ("recipe", "model", "seed")}


class SavedTokenizer(Protocol):
    """What a run folder needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    def save(self, folder: str | Path) -> None: ...


@dataclass(frozen=True, kw_only=True)
class PretrainResult:
    """The trained model, how far it came, and whether it was asked to stop before the end."""

    model: KimiK3
    progress: Progress
    interrupted: bool


def pretrain(
    config: PretrainConfig,
    train: TokenStream,
    heldout: TokenStream,
    tokenizer: SavedTokenizer,
    folder: Path,
    *,
    about: dict[str, Any],
    console: Console,
    yardstick: str = "",
) -> PretrainResult:
    """Train a model from its initialisation, or from the newest resume point of the folder, and write the checkpoint.

    `about` are fields of run.json that the caller knows: the command, and what the text was. Whatever way the process
    ends, what the last resume point holds is kept; a run that is asked to stop leaves a resume point and a checkpoint.
    run.json says "finished": false: the caller sets it when nothing of its own is left to do. `yardstick` is shown
    beside the held-out figure.
    """
    if tokenizer.vocab_size != config.model.vocab_size:
        raise ValueError(f"tokenizer: {tokenizer.vocab_size} ids, but vocab_size is {config.model.vocab_size}")
    cpu.keep_memory()
    model = KimiK3(config.model).to(config.device)
    initialise_(model, config.seed)
    groups = parameter_groups(
        model.named_parameters(),
        muon_lr=config.muon_lr,
        adamw_lr=config.adamw_lr,
        muon_momentum=config.muon_momentum,
        adamw_betas=config.adamw_betas,
        weight_decay=config.weight_decay,
    )
    optimisers = build_optimisers(groups)
    loader = Loader(
        train, max_len=config.max_len, num_tokens=config.batch_tokens, seed=config.seed, source=config.recipe
    )
    console.print(groups_table(groups))

    say = sayer(console)
    before = _begin(folder, config, tokenizer, about, say)
    point = load_resume_point(folder, say)
    start = Progress(num_steps=before["planned_steps"])
    if point is not None:
        start = restore_(point, model, groups, optimisers, loader, before["planned_steps"])
        say(f"going on from step {start.step} of {start.num_steps or '?'}")

    keeper = _Keeper(model, groups, optimisers, loader, folder, excerpt(heldout, config.eval_tokens, _EXCERPT_LEN), say)
    begun_s = time.monotonic()
    now = keeper.evaluate()
    eval_s = time.monotonic() - begun_s
    say(
        f"held out before {'training' if point is None else 'going on'}: {now.loss:.3f} nats a token, {now.bpb:.3f} bits per byte"
    )
    with RunLog(folder / "metrics.jsonl", console, step=start.step, yardstick=yardstick) as log:
        progress, interrupted = train_loop(
            model,
            loader,
            optimisers,
            config.schedule,
            config.length,
            log,
            keeper,
            start,
            num_evals=config.num_evals,
            eval_s=eval_s,
            save_every_s=config.save_every_s,
        )
    write_published(model, folder)
    update_run(folder, steps=progress.step, tokens=progress.tokens, time_s=round(progress.time_s, 1))
    return PretrainResult(model=model, progress=progress, interrupted=interrupted)


def identity(config: PretrainConfig, fingerprint: str) -> dict[str, Any]:
    """What run.json must say for the run to go on from there: recipe, arguments, seed, model and data."""
    return {
        "recipe": config.recipe,
        "arguments": config.arguments(),
        "seed": config.seed,
        "model": config.model.to_json(),
        "data": {"fingerprint": fingerprint},
    }


class _Keeper:
    """`loop.Keeper` for a run folder."""

    def __init__(
        self,
        model: KimiK3,
        groups: Sequence[Group],
        optimisers: Sequence[torch.optim.Optimizer],
        loader: Loader,
        folder: Path,
        heldout: TokenStream,
        say: Callable[[str], None],
    ) -> None:
        self._model, self._groups, self._optimisers, self._loader = model, groups, optimisers, loader
        self._folder, self._heldout, self._say = folder, heldout, say

    def evaluate(self) -> Heldout:
        return score(self._model, self._heldout)

    def plan(self, num_steps: int) -> None:
        update_run(self._folder, planned_steps=num_steps)
        self._say(f"{num_steps} steps fit into the time; from here on their number counts, and not the clock")

    def save(self, progress: Progress) -> None:
        save_resume_point(self._folder, take_point(self._model, self._groups, self._optimisers, self._loader, progress))


def _begin(
    folder: Path, config: PretrainConfig, tokenizer: SavedTokenizer, about: dict[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """run.json of a run that starts, or of the one that goes on here."""
    versions = {
        "trivium": trivium.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": sys.platform,
    }
    threads = torch.get_num_threads()
    if (folder / "run.json").exists():
        there = read_run(folder)
        for name, got, now in (("threads", there["threads"], threads), ("versions", there["versions"], versions)):
            if got != now:
                say(f"{name} differ, and so may the last bits of the loss: {got} when the run began, {now} now")
        return there
    tokenizer.save(folder)
    update_run(
        folder,
        recipe=config.recipe,
        arguments=config.arguments(),
        seed=config.seed,
        model=config.model.to_json(),
        planned_steps=config.length.num_steps,
        finished=False,
        chat_format=None,
        threads=threads,
        versions=versions,
        **about,
    )
    return read_run(folder)
