"""Makes the shipped model of a finished nano-chat run: packs it, scores what was packed, and writes how it was made.

    trivium quickstart --minutes 4 --name base
    trivium sft runs/base --minutes 30
    python -m benchmarks.ship runs/nano-chat        # writes trivium/shipped/nano-chat, at most 10 MB

`trivium eval chat` scores it again.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from trivium.api import load
from trivium.cli.chat import ABOUT_SHIPPED
from trivium.cli.command import SHIPPED
from trivium.evals.chat import ChatReport, evaluate, table
from trivium.train.run_folder import RUN, read_run

MAX_BYTES = 10_000_000


def ship(run: Path, console: Console) -> None:
    """Raises ValueError for a run that is unfinished or no nano-chat, and for a result that is too large."""
    about = read_run(run)
    if about.get("finished") is not True or about.get("recipe") != "nano-chat":
        raise ValueError(f"{run}: wanted a finished run of the recipe nano-chat")
    new = Path("build") / SHIPPED.name
    shutil.rmtree(new, ignore_errors=True)
    load(run).save(new, dtype="bfloat16", pack_experts=True)
    packed = load(new, dtype="float32")
    assert packed.tokenizer is not None
    scored = evaluate(packed.network, packed.tokenizer, seed=about["seed"], say=console.print)
    untuned = _history(run, about)
    reports = {"chat": scored.to_json(), "before packing": about["report"]["chat"], "untuned": untuned}
    about["report"] = reports
    (new / RUN).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    (new / "README.md").write_text(_card(about), encoding="utf-8")
    size = sum(path.stat().st_size for path in new.iterdir())
    if size > MAX_BYTES:
        raise ValueError(f"{new}: {size:,} bytes, wanted at most {MAX_BYTES:,}")
    shutil.rmtree(SHIPPED, ignore_errors=True)
    shutil.move(new, SHIPPED)
    console.print(table({name: ChatReport.from_json(report) for name, report in reports.items()}))
    console.print(f"{size:,} bytes, written to {SHIPPED}")


def _history(run: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Put into a run's about the run it began with, and so on to the quickstart, whose scores are returned."""
    folder = Path(about["base"]["path"])
    if not (folder / RUN).exists():
        raise ValueError(f"{run}: it began with {folder}, which is no run, or is there no more")
    base = read_run(folder)
    about["base"]["run"] = {name: base[name] for name in _KEPT if name in base}
    return _history(folder, about["base"]["run"]) if "base" in base else about["report"]["untuned"]


def _card(about: dict[str, Any]) -> str:
    report = about["report"]["chat"]
    rows = [
        f"| {name} | {score['num']} | " + " | ".join(f"{100 * score[share]:.1f}" for share in _SHARES) + " |"
        for name, score in report["scores"].items()
    ]
    efforts = ", ".join(f"{effort} {tokens:.0f}" for effort, tokens in report["effort_tokens"].items())
    return f"""# nano-chat

{ABOUT_SHIPPED}

Talk to it: `trivium chat`. Routed experts are MXFP4, all else bfloat16, in the released layout of K3.

Made by these commands, the arguments of each in run.json:

{_made(about)}

Held-out dialogues, asked in other words and with other numbers than any it has learned from, at temperature 0; percent:

| | dialogues | well-formed | right calls | right answers |
| --- | --- | --- | --- | --- |
{chr(10).join(rows)}

Tokens written on a question, by effort: {efforts}. `trivium eval chat` asks all this again.
"""


def _made(about: dict[str, Any]) -> str:
    """The runs one after another, the first first."""
    line = f"- `trivium {' '.join(about['command'])}`: {about['steps']:,} steps, {about['tokens']:,} tokens, {about['time_s']:,.0f} s"
    if made := about["data"].get("generated"):
        line += f"; {made['dialogues']:,} generated dialogues and {made['drills']:,} drills of seed {made['seed']}"
    earlier = about.get("base", {}).get("run")
    return line if earlier is None else f"{_made(earlier)}\n{line}"


_KEPT = (
    "recipe",
    "command",
    "arguments",
    "seed",
    "data",
    "steps",
    "tokens",
    "time_s",
    "threads",
    "versions",
    "base",
    "report",
)
_SHARES = ("well_formed", "calls_right", "answer_right")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    ship(parser.parse_args().run, Console(highlight=False, soft_wrap=True))
