"""SFT: a trained model on conversations, with the loss on what the assistant writes: what `trivium sft` does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import trivium
from trivium.chat.message import Conversation
from trivium.chat.render import render
from trivium.chat.tokenizer import Tokenizer
from trivium.checkpoint.published import read_published
from trivium.config import model_preset
from trivium.data.chat import (
    ChatStreams,
    build_chat,
    chat_shards,
    chat_stream,
    fingerprint_of,
    num_counted,
    open_chat,
    read_conversations,
)
from trivium.data.corpus import TOKENS
from trivium.data.shards import open_shards, read_manifest
from trivium.envs.synth.dialogue import dialogue, drill
from trivium.evals.chat import ChatReport, evaluate
from trivium.evals.plot import plot_runs
from trivium.ops.backend import default_backend
from trivium.parallel.world import ALONE, World
from trivium.recipes.pretraining import check_memory, losses_told
from trivium.train.log import sayer
from trivium.train.pretrain import PretrainConfig, PretrainResult, identity, pretrain
from trivium.train.run_folder import open_run, update_run
from trivium.train.schedule import Length
from trivium.train.stages import Stage

# An echo is no longer than this, and hardly any other dialogue is shorter.
_DRILL_TOKENS = 176
_PROBE = 64
_NUM_HELDOUT = 100


@dataclass(frozen=True, kw_only=True)
class ChatData:
    """Conversations to learn from and to score with. `fingerprint` says which; `about` goes into run.json.

    `streams` are they as ids of a tokenizer, on disk in or beside a run's folder. `synthetic`: they are the generated
    ones, whose answers code can check.
    """

    streams: Callable[[Tokenizer, Path, Callable[[str], None]], ChatStreams]
    fingerprint: str
    about: dict[str, Any]
    synthetic: bool


@dataclass(frozen=True, kw_only=True)
class SftOutcome:
    """What a run left. `report` is None for conversations whose answers no code can check, and where it was stopped."""

    folder: Path
    result: PretrainResult
    reports: dict[str, ChatReport] | None


def generated(*, num_dialogues: int, num_drills: int, seed: int = 0, max_tokens: int | None = None) -> ChatData:
    """Generated dialogues with tools, and drills of copying, shorter than all others.

    Those of more than `max_tokens` tokens are left out. A seed's dialogues are no other seed's, and none is held out with
    the same phrasings.
    """

    def train() -> Iterator[Conversation]:
        first = seed * 10**9
        for number in range(num_dialogues):
            yield dialogue(first + number).conversation
        for number in range(num_drills):
            yield drill(first + number).conversation

    def streams(tokenizer: Tokenizer, folder: Path, say: Callable[[str], None]) -> ChatStreams:
        shards = chat_shards(train(), tokenizer, folder / TOKENS, text=fingerprint, say=say, max_tokens=max_tokens)
        heldout = (dialogue(number, heldout=True).conversation for number in range(_NUM_HELDOUT))
        return ChatStreams(train=shards, heldout=chat_stream(heldout, tokenizer), folder=folder / TOKENS)

    # Of what the generator says today: another version of it is other data.
    said = hashlib.sha256(f"{num_dialogues} {num_drills} {seed}".encode())
    for number in range(_PROBE):
        for made in (dialogue, drill):
            said.update(render(made(seed * 10**9 + number).conversation, answer=False).text.encode())
    fingerprint = said.hexdigest()
    about = {"generated": {"dialogues": num_dialogues, "drills": num_drills, "seed": seed}}
    return ChatData(streams=streams, fingerprint=fingerprint, about=about, synthetic=True)


def from_path(path: Path) -> ChatData:
    """The conversations of a JSONL file, some of them held out, or of a folder that `trivium data chat` wrote."""
    if path.is_dir():
        fingerprint = read_manifest(path / TOKENS).text

        def streams(tokenizer: Tokenizer, folder: Path, say: Callable[[str], None]) -> ChatStreams:
            return open_chat(path, tokenizer)
    else:
        fingerprint = fingerprint_of(read_conversations(path))

        def streams(tokenizer: Tokenizer, folder: Path, say: Callable[[str], None]) -> ChatStreams:
            return build_chat(path, tokenizer, folder, say)

    return ChatData(streams=streams, fingerprint=fingerprint, about={"path": str(path)}, synthetic=False)


def nano_chat(*, minutes: float | None = None, num_steps: int | None = None, seed: int = 0) -> PretrainConfig:
    """A quickstart's model on generated dialogues, 2,048 tokens a step.

    First come drills of copying alone: without any, 1,000 steps of dialogues taught it not one argument. After 600 steps
    of them little more is learned there: they are a quarter of a short run, and less of one of half an hour.
    """
    minutes = 30 if minutes is None else minutes
    short = minutes < 15 if num_steps is None else num_steps < 2500
    drills = 0.25 if short else 0.12
    return PretrainConfig(
        recipe="nano-chat",
        model=model_preset("nano"),
        length=Length(seconds=60 * minutes, num_steps=num_steps),
        batch_tokens=2048,
        stages=(Stage(max_len=_DRILL_TOKENS, share=drills), Stage(max_len=2048, share=1 - drills)),
        whole=True,
        muon_lr=0.02,
        muon_momentum=0.9,
        adamw_lr=4e-3,
        adamw_betas=(0.9, 0.98),
        weight_decay=0.0,
        balancing="exact",
        seed=seed,
    )


def sft(*, minutes: float | None = None, num_steps: int | None = None, seed: int = 0) -> PretrainConfig:
    """A model on conversations of one's own: half the rates of `nano_chat`, and one stage."""
    like = nano_chat(minutes=10 if minutes is None else minutes, seed=seed)
    return replace(
        like,
        recipe="sft",
        length=replace(like.length, num_steps=num_steps),  # one step is enough for one stage
        stages=(Stage(max_len=2048, share=1.0),),
        muon_lr=0.01,
        adamw_lr=2e-3,
    )


RECIPES: dict[str, Callable[..., PretrainConfig]] = {"nano-chat": nano_chat, "sft": sft}


def sft_on_conversations(
    config: PretrainConfig,
    *,
    base: Path,
    data: ChatData,
    out: Path,
    name: str | None,
    command: Sequence[str],
    console: Console,
    show: Callable[[SftOutcome], None] = lambda outcome: None,
    world: World = ALONE,
) -> SftOutcome | None:
    """Train the model of the folder `base` on the conversations, or go on, and score it; everything into a folder of `out`.

    `config.model` is taken from `base`. As `recipes.pretraining.pretrain_on_text` otherwise.
    """
    published = read_published(base, dtype="float32")
    config = replace(config, model=replace(published.config, dtype="float32"))
    weights = published.model.state_dict()
    config.num_micro(world)
    check_memory(config, world)
    if not world.is_first:
        with losses_told(None, world):
            folder, tokens, heldout = world.from_first((Path(), Path(), None))
        with losses_told(folder, world):
            train = open_shards(tokens)
            pretrain(config, train, heldout, None, folder, about={}, console=console, weights=weights, world=world)
        return None
    say = sayer(console)
    kind = torch.device(config.device).type
    say(
        f"trivium {trivium.__version__} on {config.device}: backend {default_backend(kind)}, "
        f"{torch.get_num_threads()} threads; begins with {base}"
    )
    tokenizer = Tokenizer.from_folder(base)
    same = identity(config, data.fingerprint) | {"base": {"sha256": _digest(weights)}}
    with open_run(out, name or config.recipe, exact=name is not None, same=same, say=say) as (folder, _):
        streams = data.streams(tokenizer, folder, say)
        train, heldout = streams.train, streams.heldout
        say(
            f"{len(train.starts) - 1:,} conversations, {train.manifest.num_tokens:,} tokens, of which the assistant writes "
            f"{num_counted(train):,}; {len(heldout.starts) - 1} held out"
        )
        with losses_told(folder, world):
            world.from_first((folder, streams.folder, heldout))
            result = pretrain(
                config,
                train,
                heldout,
                tokenizer,
                folder,
                about={
                    "command": list(command),
                    "data": {"fingerprint": data.fingerprint, **data.about},
                    "base": {"path": str(base), "sha256": same["base"]["sha256"]},
                    "chat_format": "xtml",
                },
                console=console,
                weights=weights,
                world=world,
            )
        if result.interrupted:
            return SftOutcome(folder=folder, result=result, reports=None)
        say(f"done: {result.progress.step} steps, {result.progress.tokens:,} tokens, {result.progress.time_s:.0f} s")
        reports = None
        if data.synthetic:
            reports = _reports(published.model, folder, tokenizer, world, config.seed, say)
            update_run(folder, report={"chat": reports["trained"].to_json(), "untuned": reports["untuned"].to_json()})
        plot_runs([folder], folder / "plot.png")
        outcome = SftOutcome(folder=folder, result=result, reports=reports)
        show(outcome)
        update_run(folder, finished=True)
    return outcome


def _reports(
    base: Any, folder: Path, tokenizer: Tokenizer, world: World, seed: int, say: Callable[[str], None]
) -> dict[str, ChatReport]:
    """Of the checkpoint that was written, and of the model that it began with on a few of the same dialogues."""
    say("scoring the checkpoint on held-out dialogues")
    trained = evaluate(read_published(folder, device=world.device).model, tokenizer, seed=seed, say=say)
    say("scoring the model that it began with")
    untuned = evaluate(base.to(world.device), tokenizer, num_dialogues=48, num_efforts=8, seed=seed)
    return {"untuned": untuned, "trained": trained}


def _digest(weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
