"""Pretraining: a fresh K3 from token streams, and the run folder it leaves behind."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from rich.console import Console

import trivium
from trivium.checkpoint.published import write_published
from trivium.config import K3Config
from trivium.data.pack import TokenStream, pack, pieces, shuffled_batches
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.train.groups import build_optimisers, groups_table, parameter_groups
from trivium.train.heldout import Heldout, score
from trivium.train.log import RunLog
from trivium.train.loop import Length, LoopResult, train_loop
from trivium.train.run_folder import write_json
from trivium.train.schedule import Schedule


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
    max_len: int = 256
    muon_lr: float = 0.03
    adamw_lr: float = 3e-3
    weight_decay: float = 0.0
    schedule: Schedule = field(default_factory=Schedule)
    num_evals: int = 8
    eval_tokens: int = 8192
    num_threads: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "max_len", "num_evals", "eval_tokens", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: wanted at least 1, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: wanted a whole number in [0, 2^63), got {self.seed}")
        for name in ("muon_lr", "adamw_lr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: wanted a number above 0, got {getattr(self, name)}")


class SavedTokenizer(Protocol):
    """What a run folder needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    def save(self, folder: str | Path) -> None: ...


@dataclass(frozen=True, kw_only=True)
class PretrainResult:
    """`first` and `last` are the whole held-out text's figures before the first step and after the last."""

    loop: LoopResult
    first: Heldout
    last: Heldout


def pretrain(
    config: PretrainConfig,
    train: TokenStream,
    heldout: TokenStream,
    tokenizer: SavedTokenizer,
    folder: Path,
    *,
    data: dict[str, Any],
    console: Console,
) -> PretrainResult:
    """Train a model from its initialisation and write its run folder: checkpoint, tokenizer, metrics, run.json.

    `data` says in run.json what the text was. Nothing but metrics.jsonl is written before training ends; a run ended
    by Ctrl-C is written like any other. The held-out text is scored in pieces of `max_len`, each from an empty state.
    """
    if tokenizer.vocab_size != config.model.vocab_size:
        raise ValueError(f"tokenizer: {tokenizer.vocab_size} ids, but vocab_size is {config.model.vocab_size}")
    model = KimiK3(config.model)
    initialise_(model, config.seed)
    groups = parameter_groups(
        model.named_parameters(), muon_lr=config.muon_lr, adamw_lr=config.adamw_lr, weight_decay=config.weight_decay
    )
    console.print(groups_table(groups))

    heldout_spans = pieces(heldout, config.max_len)
    whole = list(pack(heldout, heldout_spans, config.batch_tokens, "heldout"))
    # Every n-th piece, so that a part of the text stands for all of its documents.
    stride = max(1, heldout.num_targets // config.eval_tokens)
    part = list(pack(heldout, islice(heldout_spans, 0, None, stride), config.batch_tokens, "heldout"))

    first = score(model, whole)
    console.print(
        f"held out before training: {first.loss:.3f} nats a token, {first.bpb:.3f} bits per byte", highlight=False
    )
    with RunLog(folder / "metrics.jsonl", console) as log:
        loop = train_loop(
            model,
            shuffled_batches(
                train,
                max_len=config.max_len,
                num_tokens=config.batch_tokens,
                seed=config.seed,
                source=config.recipe,
            ),
            build_optimisers(groups),
            config.schedule,
            config.length,
            log,
            evaluate=lambda: score(model, part),
            num_evals=config.num_evals,
        )
    write_published(model, folder)  # before the last score: Ctrl-C in it must not cost the model
    tokenizer.save(folder)
    last = score(model, whole)
    write_json(folder / "run.json", _run_json(config, loop, first, last, data))
    return PretrainResult(loop=loop, first=first, last=last)


def _run_json(
    config: PretrainConfig, loop: LoopResult, first: Heldout, last: Heldout, data: dict[str, Any]
) -> dict[str, Any]:
    arguments = {name: value for name, value in asdict(config).items() if name not in ("recipe", "model", "seed")}
    return {
        "recipe": config.recipe,
        "arguments": arguments,
        "seed": config.seed,
        "planned_steps": config.length.num_steps,
        "steps": loop.num_steps,
        "tokens": loop.num_tokens,
        "time_s": round(loop.time_s, 1),
        "interrupted": loop.interrupted,
        "heldout": {"before": asdict(first), "after": asdict(last)},
        "data": data,
        "chat_format": None,
        "versions": {
            "trivium": trivium.__version__,
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
            "platform": sys.platform,
        },
    }
