"""The text that the experiments train on: the standard library of Python as tokens, kept as one file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trivium.data.pack import TokenStream
from trivium.lab.experiment import Say

# A small vocabulary leaves a small model most of its parameters and its time for what is compared.
NUM_RANKS = 1792
VOCAB_SIZE = NUM_RANKS + 256
_FILE = f"standard-library-{VOCAB_SIZE}.safetensors"


@dataclass(frozen=True, kw_only=True)
class LabText:
    """Both parts as tokens, and what identifies them."""

    train: TokenStream
    heldout: TokenStream
    facts: dict[str, Any]


def prepare_text(folder: Path, say: Say) -> dict[str, Any]:
    """Make the file where it is not there yet, which wants the tokenizer's libraries; returns what identifies it."""
    if not (folder / _FILE).exists():
        from trivium.data.corpus import build_corpus, gather_text

        corpus = build_corpus(gather_text(None, say=say), num_ranks=NUM_RANKS, say=say)
        keep_text(folder, corpus.train, corpus.heldout, what=corpus.text.what)
    return read_text(folder).facts


def keep_text(folder: Path, train: TokenStream, heldout: TokenStream, *, what: str) -> None:
    """Write the file, under a temporary name, then renamed."""
    tensors = {"num_bytes": train.num_bytes_W}
    for name, stream in (("train", train), ("heldout", heldout)):
        tensors |= {f"{name}.ids": stream.ids_T, f"{name}.starts": torch.from_numpy(stream.starts)}
    part = folder / f"{_FILE}.part"
    save_file(tensors, part, metadata={"what": what})
    part.replace(folder / _FILE)


def read_text(folder: Path) -> LabText:
    """The kept text. Raises ValueError where it was not prepared."""
    path = folder / _FILE
    if not path.exists():
        raise ValueError(f"{path}: is not there, prepare_text makes it")
    with safe_open(path, "pt") as file:
        what = file.metadata()["what"]
        num_bytes_W = file.get_tensor("num_bytes")
        train, heldout = (
            TokenStream(
                ids_T=file.get_tensor(f"{name}.ids"),
                starts=file.get_tensor(f"{name}.starts").numpy(),
                num_bytes_W=num_bytes_W,
            )
            for name in ("train", "heldout")
        )
    digest = hashlib.sha256(train.ids_T.numpy().tobytes() + heldout.ids_T.numpy().tobytes()).hexdigest()[:16]
    facts = {
        "text": f"{what}: {train.num_targets:,} tokens to train on, {heldout.num_targets:,} held out, "
        f"{VOCAB_SIZE:,} ids",
        "sha256 of its tokens": digest,
    }
    return LabText(train=train, heldout=heldout, facts=facts)
