"""Makes the shipped model of a finished nano-chat run: packs it, scores what was packed, and writes how it was made.

    trivium quickstart && trivium sft runs/quickstart --minutes 60 --name shipped
    python -m benchmarks.ship runs/shipped          # writes trivium/shipped/nano-chat, at most 10 MB

`trivium eval chat` scores it again.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from rich.console import Console

from trivium.api import load
from trivium.cli.command import SHIPPED
from trivium.evals.chat import ChatReport, evaluate, table
from trivium.train.run_folder import RUN, read_run

MAX_BYTES = 10_000_000


def ship(run: Path, console: Console) -> None:
    """Raises ValueError for a run that is unfinished or no nano-chat, and for a result that is too large."""
    about = read_run(run)
    if about.get("finished") is not True or about.get("recipe") != "nano-chat":
        raise ValueError(f"{run}: wanted a finished run of the recipe nano-chat")
    new = SHIPPED.with_name(SHIPPED.name + ".part")
    shutil.rmtree(new, ignore_errors=True)
    load(run).save(new, dtype="bfloat16", pack_experts=True)
    packed = load(new, dtype="float32")
    assert packed.tokenizer is not None
    scored = evaluate(packed.network, packed.tokenizer, seed=about["seed"], say=console.print)
    reports = {
        "chat": scored.to_json(),
        "before packing": about["report"]["chat"],
        "untuned": about["report"]["untuned"],
    }
    (new / RUN).write_text(json.dumps({**about, "report": reports}, indent=2) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in new.iterdir())
    if size > MAX_BYTES:
        raise ValueError(f"{new}: {size:,} bytes, wanted at most {MAX_BYTES:,}")
    shutil.rmtree(SHIPPED, ignore_errors=True)
    new.rename(SHIPPED)
    console.print(table({name: ChatReport.from_json(report) for name, report in reports.items()}))
    console.print(f"{size:,} bytes, written to {SHIPPED}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    ship(parser.parse_args().run, Console(highlight=False, soft_wrap=True))
