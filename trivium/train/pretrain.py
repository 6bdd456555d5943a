"""Pretraining: a fresh K3 from token streams, and the run folder it leaves behind."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy
import torch
from rich.console import Console
from torch import Tensor

import trivium
from trivium.checkpoint.published import write_published
from trivium.checkpoint.resume import ResumeWriter, load_resume_point
from trivium.config import K3Config
from trivium.data.batch import Batch
from trivium.data.loader import Loader
from trivium.data.pack import Stream, TokenStream, make_batch, pieces
from trivium.model.init import copy_weights_, initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.ops import cpu
from trivium.parallel.fsdp import gather_model, reshard_, shard_, share_of
from trivium.parallel.remat import checkpoint_layers
from trivium.parallel.world import ALONE, World
from trivium.train.balance import QuantileBalancer
from trivium.train.groups import build_optimisers, groups_table, parameter_groups
from trivium.train.guard import ADVICE, SpikeGuard
from trivium.train.heldout import Heldout, excerpt, score
from trivium.train.log import METRICS_FILE, NoLog, RunLog, sayer
from trivium.train.loop import Progress, train_loop
from trivium.train.point import Learner, not_finite, restore_, take_point
from trivium.train.probe import GradNorms, grad_norms, look
from trivium.train.run_folder import RUN, read_run, update_run
from trivium.train.schedule import Length, Schedule
from trivium.train.stages import Stage, check_stages
from trivium.train.step import StepResult, train_step

# Pieces of this length stand for the held-out text while training: long enough that most of what a token could know
# of its document is in it.
_EXCERPT_LEN = 1024
_LOOK_LEN = 256  # tokens that the layers are looked at with

_MOST = 1e30  # beyond it float32 has no room for a step
# How a run is laid out over time and machines: it may go on under another layout.
_LAYOUT = ("micro_tokens", "checkpoint_layers", "workers", "save_every_s", "tensorboard", "device")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """A complete run. `recipe` is the name of the function that made it.

    A step takes `batch_tokens` tokens of all processes together, in micro-batches of `micro_tokens` (None: one for each
    process), packed from pieces of documents that are as long as the step's stage says. `muon_lr` goes with the rule
    sqrt(max(1, out/in)); `weight_decay` is that of Muon's matrices, nothing else has one. `clip_norm` is the most that
    the gradient's norm may be, `logit_limit` the most an attention logit of an MLA head may; None: no limit.
    `whole`: no document is cut, a stage has those that are not longer, and a micro-batch as many as fit.
    `compute_dtype` is what the matrices are multiplied in; weights, moments and what the model keeps in float32 stay
    float32. `num_evals` times on the way `eval_tokens` tokens of the held-out text are scored; None: twice a minute, or
    every 50 steps of a given number, but 2 to 50 times.
    """

    recipe: str
    model: K3Config
    length: Length
    batch_tokens: int = 2048
    micro_tokens: int | None = None
    stages: tuple[Stage, ...] = (Stage(max_len=256, share=1.0),)
    whole: bool = False
    muon_lr: float = 0.02
    adamw_lr: float = 6e-3
    muon_momentum: float = 0.95
    adamw_betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    per_head: bool = True
    clip_norm: float | None = 1.0
    logit_limit: float | None = 100.0
    balancing: Literal["exact", "histogram"] = "histogram"
    balance_ema: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    checkpoint_layers: bool = False
    num_evals: int | None = None
    eval_tokens: int = 8192
    save_every_s: float = 30.0
    workers: int = 1
    tensorboard: bool = False
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "num_evals", "eval_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: wanted at least 1, got {value}")
        if self.micro_tokens is not None and (self.micro_tokens < 1 or self.batch_tokens % self.micro_tokens):
            raise ValueError(f"micro_tokens: wanted a part of {self.batch_tokens} tokens, got {self.micro_tokens}")
        if not 0 <= self.balance_ema < 1:
            raise ValueError(f"balance_ema: wanted a number in [0, 1), got {self.balance_ema}")
        if self.workers < 0:
            raise ValueError(f"workers: wanted at least 0, got {self.workers}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: wanted a whole number in [0, 2^63), got {self.seed}")
        for name in ("muon_lr", "adamw_lr", "save_every_s", "clip_norm", "logit_limit"):
            value = getattr(self, name)
            if value is not None and not 0 < value < _MOST:
                raise ValueError(f"{name}: wanted a number above 0, got {value}")
        if not 0 <= self.weight_decay < _MOST:
            raise ValueError(f"weight_decay: wanted a number of at least 0, got {self.weight_decay}")
        for name, averages, count in (
            ("muon_momentum", (self.muon_momentum,), 1),
            ("adamw_betas", self.adamw_betas, 2),
        ):
            if len(averages) != count or not all(0 <= average < 1 for average in averages):
                raise ValueError(f"{name}: wanted {count} in [0, 1), got {averages}")
        for name, known in (("balancing", ("exact", "histogram")), ("compute_dtype", ("float32", "bfloat16"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: wanted one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.model.dtype != "float32":
            raise ValueError(
                f"model.dtype: a model is trained and written in float32, got {self.model.dtype}; see compute_dtype"
            )
        check_stages(self.stages, self.length.num_steps)
        self.schedule.check_steps(self.length.num_steps)
        self.num_micro(ALONE)
        if self.length.num_steps is None:
            self.schedule.check_clock()
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise ValueError(f"device: {self.device!r} is not one that torch knows") from error

    def arguments(self) -> dict[str, Any]:
        """What run.json says, and what a run that goes on must agree with: all that is not layout.

        A run of a given number of steps goes by no clock: its seconds are None.
        """
        left_out = ("recipe", "model", "seed", *_LAYOUT)
        arguments = {name: value for name, value in asdict(self).items() if name not in left_out}
        if self.length.num_steps is not None:
            arguments["length"]["seconds"] = None
        return arguments

    def layout(self, world: World, num_micro: int) -> dict[str, Any]:
        """How it is run, which may change from one process to the next.

        Only the last bits of the loss depend on it; but on `micro_tokens` does where a document is cut.
        """
        layout = {name: getattr(self, name) for name in _LAYOUT}
        return {"processes": world.size, **layout, "micro_tokens": self.batch_tokens // num_micro}

    @property
    def evals(self) -> int:
        """How often the held-out text is scored on the way."""
        if self.num_evals is not None:
            return self.num_evals
        steps = self.length.num_steps
        return max(2, min(50, round(2 * min(self.length.seconds, 1e9) / 60) if steps is None else steps // 50))

    def num_micro(self, world: World, before: int | None = None) -> int:
        """Micro-batches a step, of all processes together.

        `before` is how many tokens a micro-batch had when the run began: they stay where nothing else is asked for and
        these processes can share them. Raises ValueError when they cannot, or when a piece does not fit.
        """
        micro_tokens = self.micro_tokens
        if micro_tokens is None and before and self.batch_tokens % (before * world.size) == 0:
            micro_tokens = before
        micro_tokens = micro_tokens or max(1, self.batch_tokens // world.size)
        if self.batch_tokens % (micro_tokens * world.size):
            raise ValueError(
                f"micro_tokens: {world.size} processes cannot share {self.batch_tokens} tokens a step in micro-batches "
                f"of {micro_tokens}"
            )
        if self.stages[-1].max_len > micro_tokens:
            raise ValueError(
                f"stages: pieces of {self.stages[-1].max_len} tokens do not fit into micro-batches of {micro_tokens}"
            )
        return self.batch_tokens // micro_tokens


class SavedTokenizer(Protocol):
    """What a run folder needs of a tokenizer."""

    def save(self, folder: str | Path) -> None: ...


@dataclass(frozen=True, kw_only=True)
class PretrainResult:
    """How far a run came, and whether it was asked to stop before the end.

    `model` is the trained model, whole on one device; None on processes that are not the first.
    """

    model: KimiK3 | None
    progress: Progress
    interrupted: bool


def pretrain(
    config: PretrainConfig,
    train: Stream,
    heldout: TokenStream,
    tokenizer: SavedTokenizer | None,
    folder: Path,
    *,
    about: dict[str, Any],
    console: Console,
    yardstick: str = "",
    weights: Mapping[str, Tensor] | None = None,
    world: World = ALONE,
) -> PretrainResult:
    """Train a model from its initialisation, or from the newest resume point of the folder, and write the checkpoint.

    `weights` are the state dict of a model of this config that the run begins with, in place of the initialisation.

    `about` are fields of run.json that the caller knows: the command, and what the text was. Whatever way the process
    ends, what the last resume point holds is kept; a run that is asked to stop leaves a resume point and a checkpoint.
    run.json says "finished": false: the caller sets it when nothing of its own is left to do. `yardstick` is shown
    beside the held-out figure. Collective; the first process alone writes: the others need no `tokenizer`, and their
    console should be quiet.
    """
    if len(train.num_bytes_W) != config.model.vocab_size:
        raise ValueError(f"tokenizer: {len(train.num_bytes_W)} ids, but vocab_size is {config.model.vocab_size}")
    longest = int(numpy.diff(train.starts).max(initial=1)) - 1
    if config.whole and longest > config.stages[-1].max_len:
        raise ValueError(
            f"stages: the longest document has {longest:,} tokens, wanted at most {config.stages[-1].max_len:,}: it would "
            "never be read; give a longer last stage, or shorter documents"
        )
    cpu.keep_memory()
    say = sayer(console)
    there = world.from_first(read_run(folder) if world.is_first and (folder / RUN).exists() else {})
    num_micro = config.num_micro(world, _micro_tokens(there, folder))
    learner, make_step = _build(config, train, num_micro, weights, world, say)
    console.print(groups_table(learner.groups))

    here = _here(config, world, num_micro)
    if there:
        _say_what_differs(there, here, say)
    elif world.is_first:
        _begin(folder, config, tokenizer, {**here, **about})
    num_steps = _planned(there, folder) if there else config.length.num_steps
    point = load_resume_point(folder, say)
    start = Progress(num_steps=num_steps)
    if point is not None:
        start = restore_(point, learner, num_steps)
        say(f"going on from step {start.step} of {start.num_steps or '?'}")

    part = excerpt(heldout, config.eval_tokens, max(_EXCERPT_LEN, config.stages[-1].max_len if config.whole else 0))
    begun_s = time.monotonic()
    now = score(learner.model, part)
    reshard_(learner.model)
    eval_s = time.monotonic() - begun_s
    say(
        f"held out before {'training' if point is None else 'going on'}: {now.loss:.3f} nats a token, {now.bpb:.3f} bits per byte"
    )
    writer = ResumeWriter(folder)
    metrics = folder / METRICS_FILE
    log = (
        RunLog(metrics, console, step=start.step, yardstick=yardstick, tensorboard=config.tensorboard)
        if world.is_first
        else NoLog()
    )
    with log:
        try:
            progress, interrupted = train_loop(
                make_step,
                learner.loader,
                learner.optimisers,
                config.schedule,
                config.stages,
                config.length,
                log,
                _Keeper(learner, writer, log, folder, part, world, say),
                start,
                num_evals=config.evals,
                eval_s=eval_s,
                save_every_s=config.save_every_s,
                world=world,
            )
        except BaseException:
            with suppress(OSError):  # of the two errors the first is told
                writer.finish()
            raise
        writer.finish()
    learner.loader.close()
    what = _spoilt(learner, world, part)
    if what is not None:
        raise FloatingPointError(f"step {progress.step}: {what} not finite, and no checkpoint is written. {ADVICE}")
    learner.model.compute_dtype = None  # as the checkpoint computes once it is loaded
    one = gather_model(learner.model, world)
    if one is not None:
        write_published(one, folder)
        update_run(
            folder,
            steps=progress.step,
            tokens=progress.tokens,
            time_s=round(progress.time_s, 1),
            skipped_steps=progress.skipped,
        )
    world.wait()
    return PretrainResult(model=one, progress=progress, interrupted=interrupted)


def identity(config: PretrainConfig, fingerprint: str) -> dict[str, Any]:
    """What run.json must say for the run to go on from there: recipe, arguments, seed, model and data."""
    return {
        "recipe": config.recipe,
        "arguments": config.arguments(),
        "seed": config.seed,
        "model": config.model.to_json(),
        "data": {"fingerprint": fingerprint},
    }


def _build(
    config: PretrainConfig,
    train: Stream,
    num_micro: int,
    weights: Mapping[str, Tensor] | None,
    world: World,
    say: Callable[[str], None],
) -> tuple[Learner, Callable[..., StepResult]]:
    """All that a step moves, at its beginning, and the step."""
    compute_dtype = None if config.compute_dtype == "float32" else getattr(torch, config.compute_dtype)
    with torch.device("meta"):
        model = KimiK3(config.model, dtype=torch.float32, compute_dtype=compute_dtype)
    recomputed = checkpoint_layers(model) if config.checkpoint_layers else None
    shard_(model, world)
    model.to_empty(device=world.device)
    if weights is None:
        initialise_(model, config.seed, place=share_of)
    else:
        copy_weights_(model, weights, place=share_of)
    groups = parameter_groups(
        model,
        muon_lr=config.muon_lr,
        adamw_lr=config.adamw_lr,
        muon_momentum=config.muon_momentum,
        adamw_betas=config.adamw_betas,
        weight_decay=config.weight_decay,
        per_head=config.per_head,
    )
    learner = Learner(
        model=model,
        groups=groups,
        optimisers=build_optimisers(groups),
        loader=Loader(
            train,
            max_len=config.stages[0].max_len,
            micro_tokens=config.batch_tokens // num_micro,
            num_micro=num_micro,
            seed=config.seed,
            source=config.recipe,
            whole=config.whole,
            rank=world.rank,
            num_ranks=world.size,
            workers=config.workers,
        ),
        guard=SpikeGuard(say=say),
    )
    step = partial(
        train_step,
        model,
        optimisers=learner.optimisers,
        balancer=QuantileBalancer(world, method=config.balancing, ema=config.balance_ema),
        world=world,
        clip_norm=config.clip_norm,
        logit_limit=config.logit_limit,
        guard=learner.guard,
        recomputed=recomputed,
    )

    def make_step(batches: Iterable[Batch], **look: Any) -> StepResult:
        return step([batch.to(world.device) for batch in batches], **look)

    return learner, make_step


class _Keeper:
    """`loop.Keeper` for a run folder."""

    def __init__(
        self,
        learner: Learner,
        writer: ResumeWriter,
        log: RunLog,
        folder: Path,
        heldout: TokenStream,
        world: World,
        say: Callable[[str], None],
    ) -> None:
        self._learner, self._writer, self._log = learner, writer, log
        self._folder, self._heldout, self._world, self._say = folder, heldout, world, say
        self._sample = make_batch(heldout, pieces(heldout, _LOOK_LEN)[:1], "held out").to(world.device)
        self._grads: GradNorms | None = None

    def look(self, model: KimiK3) -> None:
        self._grads = grad_norms(model, self._world)

    def evaluate(self, step: int, tokens: int) -> Heldout:
        model = self._learner.model
        found = score(model, self._heldout)
        assert self._grads is not None, "a step that is evaluated was looked at"
        self._log.write_layers(look(model, self._sample, step=step, tokens=tokens, grads=self._grads))
        reshard_(model)
        return found

    def plan(self, num_steps: int) -> None:
        if self._world.is_first:
            update_run(self._folder, planned_steps=num_steps)
        self._say(f"{num_steps} steps fit into the time; from here on their number counts, and not the clock")

    def begin_stage(self) -> None:
        self._learner.guard.forget()

    def save(self, progress: Progress) -> None:
        what = _spoilt(self._learner, self._world, self._heldout)
        if what is not None:  # it would take the place of a point that can be gone on from
            self._say(f"step {progress.step}: not saved, {what} not finite")
            return
        self._writer.save(take_point(self._learner, progress))


def _here(config: PretrainConfig, world: World, num_micro: int) -> dict[str, Any]:
    """What may differ from one process of a run to the next."""
    versions = {
        "trivium": trivium.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": sys.platform,
    }
    return {"threads": torch.get_num_threads(), "versions": versions, "layout": config.layout(world, num_micro)}


def _say_what_differs(there: dict[str, Any], here: dict[str, Any], say: Callable[[str], None]) -> None:
    for name, now in here.items():
        if there.get(name) == now:
            continue
        say(f"{name} differ, and so may the last bits of the loss: {there.get(name)} when the run began, {now} now")
        before = there.get(name) or {}
        if name == "layout" and before.get("micro_tokens") != now["micro_tokens"]:
            say(
                f"micro-batches of {now['micro_tokens']} tokens, {before.get('micro_tokens')} when the run began: "
                "documents are cut elsewhere, and the losses are other ones from here on"
            )


def _planned(there: dict[str, Any], folder: Path) -> int | None:
    num_steps = there.get("planned_steps")
    if num_steps is not None and (type(num_steps) is not int or num_steps < 1):
        raise ValueError(f"{folder / RUN}: planned_steps: wanted a number of steps or null, got {num_steps!r}")
    return num_steps


def _spoilt(learner: Learner, world: World, heldout: TokenStream) -> str | None:
    """What of a run is not finite, None where all is. Collective.

    A last step that was not finite may have been its text alone: held-out text tells whether the weights are at fault.
    """
    name = not_finite(learner.model, world)
    if name is not None:
        return f"{name} is"
    num_steps = learner.guard.not_finite
    if not num_steps:
        return None
    loss = score(learner.model, heldout).loss
    reshard_(learner.model)
    if math.isfinite(loss):
        return None
    return f"loss or gradients of the last {num_steps} steps, and the loss on held-out text, are"


def _micro_tokens(there: dict[str, Any], folder: Path) -> int | None:
    layout = there.get("layout", {})
    micro_tokens = layout.get("micro_tokens") if isinstance(layout, dict) else layout
    if not isinstance(layout, dict) or (
        micro_tokens is not None and (type(micro_tokens) is not int or micro_tokens < 1)
    ):
        raise ValueError(f"{folder / RUN}: layout: wanted an object with a number of micro_tokens, got {layout!r}")
    return micro_tokens


def _begin(folder: Path, config: PretrainConfig, tokenizer: SavedTokenizer | None, about: dict[str, Any]) -> None:
    """run.json of a run that starts."""
    assert tokenizer is not None, "the process that writes has one"
    tokenizer.save(folder)
    update_run(
        folder,
        recipe=config.recipe,
        arguments=config.arguments(),
        seed=config.seed,
        model=config.model.to_json(),
        planned_steps=config.length.num_steps,
        finished=False,
        **{"chat_format": None, **about},
    )
