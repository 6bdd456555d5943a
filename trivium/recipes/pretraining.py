"""Pretraining from text to report: what `trivium quickstart` and `trivium train` have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

import trivium
from trivium.chat.tokenizer import Tokenizer
from trivium.checkpoint.published import read_published
from trivium.config import PRESETS, K3Config, preset
from trivium.cost.params import count_params
from trivium.data.corpus import Corpus, Text, build_corpus, gather_text, write_heldout
from trivium.evals.compression import gzip_bpb
from trivium.evals.plot import plot_runs
from trivium.evals.report import Report, report
from trivium.ops.backend import default_backend
from trivium.train.log import sayer
from trivium.train.pretrain import PretrainConfig, PretrainResult, identity, pretrain
from trivium.train.run_folder import open_run, update_run
from trivium.train.schedule import Length

# Weight, gradient and one or two moments in float32, and the resume point on its way to disk.
_TRAINING_BYTES_PER_PARAMETER = 16


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run left. `report` is None where it was asked to stop before its end."""

    folder: Path
    corpus: Corpus
    result: PretrainResult
    report: Report | None


def pretraining(
    name: str,
    *,
    minutes: float,
    num_steps: int | None = None,
    batch_tokens: int | None = None,
    max_len: int | None = None,
    muon_lr: float | None = None,
    adamw_lr: float | None = None,
    save_every_s: float = 60.0,
    device: str = "cpu",
    seed: int = 0,
) -> PretrainConfig:
    """A run of a preset; None is the preset's own. Those of nano were measured, in runs of minutes; the others were not.

    Raises ValueError for a preset that is no K3, or that is larger than the memory of this machine.
    """
    model = preset(name) if name in PRESETS else None
    if not isinstance(model, K3Config):
        known = ", ".join(known for known in PRESETS if isinstance(preset(known), K3Config))
        raise ValueError(f"preset: wanted one of {known}, got {name!r}")
    wanted = count_params(model).total * _TRAINING_BYTES_PER_PARAMETER
    held = _memory_bytes(device)
    if wanted > held:
        raise ValueError(
            f"preset: {name} wants {wanted / 2**30:,.1f} GiB to be trained, {device} has {held / 2**30:,.1f}; "
            "choose a smaller one"
        )
    own = (2048, 256, 0.02, 6e-3) if name == "nano" else (8192, 1024, 0.02, 3e-3)
    given = (batch_tokens, max_len, muon_lr, adamw_lr)
    batch_tokens, max_len, muon_lr, adamw_lr = (b if a is None else a for a, b in zip(given, own, strict=True))
    return PretrainConfig(
        recipe=f"train-{name}",
        model=model,
        length=Length(seconds=60 * minutes, num_steps=num_steps),
        batch_tokens=batch_tokens,
        max_len=max_len,
        muon_lr=muon_lr,
        adamw_lr=adamw_lr,
        num_evals=max(2, min(50, round(2 * minutes))) if num_steps is None else max(2, min(50, num_steps // 50)),
        save_every_s=save_every_s,
        device=device,
        seed=seed,
    )


def pretrain_on_text(
    config: PretrainConfig,
    *,
    data: Path | None,
    out: Path,
    name: str | None,
    command: Sequence[str],
    console: Console,
    show: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Read and split the text, train or go on, score the exported checkpoint, plot; everything into a folder of `out`.

    `name` None: the recipe's, with a number behind it where that is taken. `command` goes into run.json: what to type
    to go on. An unfinished run of the same arguments and the same text goes on where it was last saved. `show` has the
    folder last; only then is the run finished.
    """
    say = sayer(console)
    kind = torch.device(config.device).type
    say(
        f"trivium {trivium.__version__} on {config.device}: backend {default_backend(kind)}, "
        f"{torch.get_num_threads()} threads"
    )
    text = gather_text(data, say=say)
    _say_what_was_read(text, say)
    same = identity(config, text.fingerprint)
    with open_run(out, name or config.recipe, exact=name is not None, same=same, say=say) as (folder, goes_on):
        num_ranks = config.model.bos_token_id  # the control ids follow the ranks, [BOS] first
        corpus = build_corpus(
            text, num_ranks=num_ranks, tokenizer=Tokenizer.from_folder(folder) if goes_on else None, say=say
        )
        say(
            f"tokenizer: {corpus.tokenizer.vocab_size} ids; {corpus.train.num_targets:,} tokens to train on, "
            f"{corpus.heldout.num_targets:,} held out, {corpus.heldout.num_bytes / corpus.heldout.num_targets:.2f} "
            "bytes each"
        )
        write_heldout(folder, text.heldout)
        result = pretrain(
            config,
            corpus.train,
            corpus.heldout,
            corpus.tokenizer,
            folder,
            about={"command": list(command), "data": text.about()},
            console=console,
            yardstick=f"gzip -9: {gzip_bpb(text.heldout):.3f}",
        )
        if result.interrupted:
            return Outcome(folder=folder, corpus=corpus, result=result, report=None)
        progress = result.progress
        say(f"done: {progress.step} steps, {progress.tokens:,} tokens, {progress.time_s:.0f} s")
        say("reading the checkpoint that was written")
        exported = read_published(folder, device=config.device).model
        found = report(exported, corpus, seed=config.seed, say=say)
        update_run(folder, report=found.to_json())
        plot_runs([folder], folder / "plot.png")
        outcome = Outcome(folder=folder, corpus=corpus, result=result, report=found)
        show(outcome)
        update_run(folder, finished=True)
    return outcome


def _say_what_was_read(text: Text, say: Callable[[str], None]) -> None:
    for reason, paths in text.left_out.items():
        say(f"left out, {reason}: {len(paths)} ({paths[0]}{', ...' if len(paths) > 1 else ''})")
    near = "near ones not looked for: install trivium[data]" if text.near is None else f"{text.near} near ones"
    say(f"duplicates dropped: {text.exact} exact, {near}")
    about = text.about()
    say(
        f"text: {about['train_files']:,} files, {about['train_bytes'] / 1e6:.2f} MB to train on; "
        f"{about['heldout_files']:,} files, {about['heldout_bytes'] / 1e6:.2f} MB held out: {about['heldout']}"
    )


def _memory_bytes(device: str) -> int:
    try:
        asked = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: {device!r} is not one that torch knows") from error
    if asked.type == "cuda":
        if (asked.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device: {device}: torch sees {torch.cuda.device_count()} GPUs")
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
