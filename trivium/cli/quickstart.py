"""trivium quickstart: a small K3 of one's own, from nothing, in minutes."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

import trivium

# What a model of source code is asked to go on with.
PROMPTS = ("def __init__(self", "import os\nimport sys\n", '"""')
SAMPLE_TOKENS = 120
TEMPERATURE = 0.7


def quickstart(
    minutes: Annotated[float, typer.Option(help="how long to train")] = 4.0,
    steps: Annotated[int | None, typer.Option(help="train for so many steps, however long they take")] = None,
    data: Annotated[Path | None, typer.Option(help="a folder of text to train on; else Python's own library")] = None,
    name: Annotated[str | None, typer.Option(help="name of the run; else quickstart, quickstart-2, ...")] = None,
    out: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
    seed: Annotated[int, typer.Option(help="of the initialisation and the order of the text")] = 0,
) -> None:
    """Train a small K3 on text that every machine has: no download, two cores, four minutes."""
    import torch
    from rich.console import Console

    from trivium.api import load
    from trivium.chat.tokenizer import train_tokenizer
    from trivium.data.pack import tokenize
    from trivium.data.source import fingerprint, folder_of_text, split_by_source, standard_library
    from trivium.ops.backend import default_backend
    from trivium.recipes.quickstart import quickstart as recipe
    from trivium.train.pretrain import pretrain
    from trivium.train.run_folder import claim_run_folder, released_if_untrained, write_text

    console = Console(highlight=False, soft_wrap=True)
    config = recipe(minutes=minutes, num_steps=steps, seed=seed)
    torch.set_num_threads(config.num_threads)
    console.print(
        f"trivium {trivium.__version__} on the CPU: backend {default_backend('cpu')}, {torch.get_num_threads()} threads"
    )

    folder = claim_run_folder(out, name or config.recipe, exact=name is not None)
    with released_if_untrained(folder):
        documents = folder_of_text(data) if data else standard_library()
        train, heldout = split_by_source(documents)
        console.print(
            f"text: {len(train)} files, {_megabytes(train)} to train on; {len(heldout)} files, {_megabytes(heldout)} "
            "held out, whole modules"
        )
        num_ranks = config.model.bos_token_id  # the control ids follow the ranks, [BOS] first
        tokenizer = train_tokenizer((document.text for document in train), num_ranks)
        num_bytes_W = torch.tensor([len(token) for token in tokenizer.vocabulary.ranks] + [0] * 256)
        streams = [
            tokenize(part, tokenizer.encode, bos_id=tokenizer.bos_id, num_bytes_W=num_bytes_W)
            for part in (train, heldout)
        ]
        console.print(
            f"tokenizer: {tokenizer.vocab_size} ids; {streams[0].num_targets:,} tokens to train on, "
            f"{streams[1].num_targets:,} held out, {streams[1].num_bytes / streams[1].num_targets:.2f} bytes each"
        )
        about = {
            "what": str(data or "the standard library's source of this Python"),
            "fingerprint": fingerprint(documents),
            "heldout_names": sorted({document.source for document in heldout}),
        }
        result = pretrain(config, *streams, tokenizer, folder, data=about, console=console)
    loop, first, last = result.loop, result.first, result.last
    console.print(
        f"{'interrupted' if loop.interrupted else 'done'}: {loop.num_steps} steps, {loop.num_tokens:,} tokens, "
        f"{loop.time_s:.0f} s\n"
        f"held out, all {last.num_bytes:,} bytes in windows of {config.max_len} tokens: "
        f"{first.loss:.3f} → [bold]{last.loss:.3f}[/bold] nats a token, "
        f"{first.bpb:.3f} → [bold]{last.bpb:.3f}[/bold] bits per byte"
    )

    model = load(folder)
    samples = [
        model.generate(prompt, max_tokens=SAMPLE_TOKENS, temperature=TEMPERATURE, seed=seed) for prompt in PROMPTS
    ]
    texts = [prompt + sample.text for prompt, sample in zip(PROMPTS, samples, strict=True)]
    about_them = f"At temperature {TEMPERATURE}, seed {seed}, {SAMPLE_TOKENS} tokens behind each prompt:\n"
    write_text(folder / "samples.md", "\n".join([about_them, *(f"````\n{text}\n````\n" for text in texts)]))
    console.print("\na sample:\n")
    console.print(texts[0], markup=False)
    # Behind `make quickstart` no `trivium` is on the path, but the program that runs this is.
    command = ["trivium"] if shutil.which("trivium") else [sys.executable, "-m", "trivium"]
    console.print(
        f"\nwritten to {folder}\n"
        f"go on with:  {shlex.join([*command, 'generate', str(folder), '--prompt', PROMPTS[0]])}\n"
        f"in Python:   trivium.load({str(folder)!r}).generate({PROMPTS[0]!r}).text",
        markup=False,
    )


def _megabytes(documents: list) -> str:
    return f"{sum(document.num_bytes for document in documents) / 1e6:.2f} MB"
