"""Pretraining from text to report: what `trivium quickstart` and `trivium train` have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

import trivium
from trivium.chat.tokenizer import Tokenizer
from trivium.chat.vocabulary import NUM_SPECIALS
from trivium.checkpoint.published import read_published
from trivium.checkpoint.resume import LATEST
from trivium.config import K3Config, model_preset
from trivium.cost.params import count_params
from trivium.data.corpus import TOKENS, Corpus, Text, build_corpus, gather_text, write_heldout
from trivium.data.shards import open_shards
from trivium.evals.compression import gzip_bpb
from trivium.evals.plot import plot_runs
from trivium.evals.report import Report, report
from trivium.ops.backend import default_backend
from trivium.parallel.world import ALONE, World
from trivium.train.log import sayer
from trivium.train.pretrain import PretrainConfig, PretrainResult, identity, pretrain
from trivium.train.run_folder import open_run, update_run
from trivium.train.schedule import Length, Schedule
from trivium.train.stages import CPU_STAGES, PAPER_STAGES, Stage

# Weight, gradient and one or two moments in float32, and the resume point on its way to disk.
_TRAINING_BYTES_PER_PARAMETER = 16
_ANY = Length(seconds=600.0)
NUM_BYTES = 256  # the first ranks of every tokenizer


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
    minutes: float | None = None,
    num_steps: int | None = None,
    save_every_s: float = 60.0,
    device: str = "cpu",
    seed: int = 0,
) -> PretrainConfig:
    """A recipe by its name: one of `RECIPES`. What differs from the defaults of `PretrainConfig` is in its function.

    `minutes` None: 10. Raises ValueError for another name, and for minutes of a recipe that has a number of steps.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe: wanted one of {', '.join(RECIPES)}, got {name!r}")
    config = RECIPES[name]()
    if num_steps is None:
        num_steps = config.length.num_steps
        if num_steps is not None and minutes is not None:
            raise ValueError(
                f"minutes: {name} has a number of steps, {num_steps}, and goes by no clock; wanted --steps"
            )
    return replace(
        config,
        length=Length(seconds=config.length.seconds if minutes is None else 60 * minutes, num_steps=num_steps),
        save_every_s=save_every_s,
        device=device,
        seed=seed,
    )


def nano() -> PretrainConfig:
    """8M parameters, 2,048 tokens a step in pieces of 256. Its rates were measured, in runs of minutes."""
    return PretrainConfig(recipe="train-nano", model=model_preset("nano"), length=_ANY, balancing="exact")


def nano_long() -> PretrainConfig:
    """nano from 256 to 4,096 tokens a piece in one run of a given number of steps; half the batch is one piece at last."""
    return replace(
        nano(),
        recipe="train-nano-long",
        length=Length(seconds=600.0, num_steps=1000),
        batch_tokens=8192,
        micro_tokens=4096,
        stages=CPU_STAGES,
        schedule=Schedule(kind="wsd", warmup_share=0.01),
    )


def micro() -> PretrainConfig:
    """D 512, 12 layers, 8,192 tokens a step in pieces of 1,024."""
    return PretrainConfig(
        recipe="train-micro",
        model=model_preset("micro"),
        length=_ANY,
        batch_tokens=8192,
        stages=(Stage(max_len=1024, share=1.0),),
        adamw_lr=3e-3,
    )


def mini() -> PretrainConfig:
    """1B parameters, 145M active: 131,072 tokens a step in pieces of 4,096, bfloat16, layers run again for gradients."""
    return replace(
        micro(),
        recipe="train-mini",
        model=model_preset("mini"),
        batch_tokens=131_072,
        micro_tokens=16_384,
        stages=(Stage(max_len=4096, share=1.0),),
        compute_dtype="bfloat16",
        checkpoint_layers=True,
    )


def k3() -> PretrainConfig:
    """The released geometry, on paper: from 8K to 1M tokens a piece, for a cluster that holds 2.8T parameters."""
    return replace(
        mini(),
        recipe="train-k3",
        model=replace(model_preset("k3"), dtype="float32"),
        length=Length(seconds=600.0, num_steps=100_000),
        batch_tokens=2**26,
        micro_tokens=2**20,
        stages=PAPER_STAGES,
        schedule=Schedule(kind="cosine"),
    )


RECIPES: dict[str, Callable[[], PretrainConfig]] = {
    "nano": nano,
    "nano-long": nano_long,
    "micro": micro,
    "mini": mini,
    "k3": k3,
}


def pretrain_on_text(
    config: PretrainConfig,
    *,
    data: Path | None,
    out: Path,
    name: str | None,
    command: Sequence[str],
    console: Console,
    show: Callable[[Outcome], None] = lambda outcome: None,
    world: World = ALONE,
) -> Outcome | None:
    """Read and split the text, train or go on, score the exported checkpoint, plot; everything into a folder of `out`.

    `name` None: the recipe's, with a number behind it where that is taken. `command` goes into run.json: what to type
    to go on. An unfinished run of the same arguments and the same text goes on where it was last saved. `show` has the
    folder last; only then is the run finished. Of several processes the first reads the text, and the others train on
    the tokens it wrote; they return None. Raises ValueError for a model larger than the memory, and RuntimeError when
    a process was lost.
    """
    config.num_micro(world)
    _check_ids(config.model)
    check_memory(config, world)
    if not world.is_first:
        with losses_told(None, world):
            folder, heldout = world.from_first((Path(), None))
        with losses_told(folder, world):
            pretrain(
                config, open_shards(folder / TOKENS), heldout, None, folder, about={}, console=console, world=world
            )
        return None
    say = sayer(console)
    kind = torch.device(config.device).type
    processes = "" if world.size == 1 else f"{world.size} processes, "
    say(
        f"trivium {trivium.__version__} on {config.device}: {processes}backend {default_backend(kind)}, "
        f"{torch.get_num_threads()} threads"
    )
    text = gather_text(data, say=say)
    _say_what_was_read(text, say)
    same = identity(config, text.fingerprint)
    with open_run(out, name or config.recipe, exact=name is not None, same=same, say=say) as (folder, goes_on):
        num_ranks = config.model.bos_token_id  # the control ids follow the ranks, [BOS] first
        corpus = build_corpus(
            text,
            num_ranks=num_ranks,
            tokenizer=Tokenizer.from_folder(folder) if goes_on else None,
            folder=folder,
            say=say,
        )
        say(
            f"tokenizer: {corpus.tokenizer.vocab_size} ids; {corpus.train.num_targets:,} tokens to train on, "
            f"{corpus.heldout.num_targets:,} held out, {corpus.heldout.num_bytes / corpus.heldout.num_targets:.2f} "
            "bytes each"
        )
        write_heldout(folder, text.heldout)
        with losses_told(folder, world):
            world.from_first((folder, corpus.heldout))
            result = pretrain(
                config,
                corpus.train,
                corpus.heldout,
                corpus.tokenizer,
                folder,
                about={"command": list(command), "data": text.about()},
                console=console,
                yardstick=f"gzip -9: {gzip_bpb(text.heldout):.3f}",
                world=world,
            )
        if result.interrupted:
            return Outcome(folder=folder, corpus=corpus, result=result, report=None)
        progress = result.progress
        skipped = f", {progress.skipped} of the steps skipped" if progress.skipped else ""
        say(f"done: {progress.step} steps, {progress.tokens:,} tokens, {progress.time_s:.0f} s{skipped}")
        say("reading the checkpoint that was written")
        exported = read_published(folder, device=world.device).model
        found = report(exported, corpus, seed=config.seed, say=say)
        update_run(folder, report=found.to_json())
        plot_runs([folder], folder / "plot.png")
        outcome = Outcome(folder=folder, corpus=corpus, result=result, report=found)
        show(outcome)
        update_run(folder, finished=True)
    return outcome


@contextmanager
def losses_told(folder: Path | None, world: World) -> Iterator[None]:
    """That a process was lost is told as what it is, and not as a broken connection. None: no folder is known yet."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if not world.lost_one(error):
            raise
        then = "goes on from its last save, where it has one"
        if folder is not None:
            latest = folder / "resume" / LATEST
            then = (
                f"goes on from {latest.parent / latest.readlink()}" if latest.exists() else "begins anew: no save yet"
            )
        raise RuntimeError(
            f"process {world.rank} of {world.size} lost touch with another one, and stops; the same command {then}"
        ) from error


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


def _check_ids(model: K3Config) -> None:
    """The tokenizer has as many ranks as there are ids before [BOS], and the control ids behind them."""
    if model.vocab_size != model.bos_token_id + NUM_SPECIALS or model.bos_token_id < NUM_BYTES:
        raise ValueError(
            f"model.vocab_size: wanted bos_token_id, at least {NUM_BYTES}, and {NUM_SPECIALS} control ids from there on, "
            f"got {model.vocab_size} and bos_token_id {model.bos_token_id}"
        )


def check_memory(config: PretrainConfig, world: World) -> None:
    """Raises ValueError where a model is larger than the memory that it would be trained in."""
    wanted = count_params(config.model).total * _TRAINING_BYTES_PER_PARAMETER
    here = _memory_bytes(config.device)
    held = here * (world.size if config.device.startswith("cuda") else 1)
    if wanted > held:
        raise ValueError(
            f"recipe: {config.recipe} wants {wanted / 2**30:,.1f} GiB to be trained, {config.device} has "
            f"{held / 2**30:,.1f}; choose a smaller one"
        )

    micro_tokens = config.batch_tokens // config.num_micro(world)
    stream = 4 * micro_tokens * config.model.hidden_size * config.model.num_layers
    if stream > here:
        raise ValueError(
            f"micro_tokens: {micro_tokens:,} tokens at once want {stream / 2**30:,.0f} GiB for what goes into the layers "
            f"alone, {config.device} has {here / 2**30:,.1f}; choose fewer"
        )


def _memory_bytes(device: str) -> int:
    asked = torch.device(device)
    if asked.type == "cuda":
        if (asked.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device: {device}: torch sees {torch.cuda.device_count()} GPUs")
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
