"""trivium convert: a checkpoint in another form, and what that costs in held-out loss."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trivium.cli.command import check_finished

if TYPE_CHECKING:
    from trivium.api import Model


def convert(
    run: Annotated[Path, typer.Argument(help="a run's folder, or one in the released layout")],
    out: Annotated[Path, typer.Argument(help="the new folder; it must not exist, or be empty")],
    pack: Annotated[
        bool | None,
        typer.Option(
            "--pack-experts/--unpack-experts",
            help="routed experts as MXFP4, as released, or as plain matrices; else as they are",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32, of all that is not packed")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Write a checkpoint to a new folder in the released layout, with routed experts packed or unpacked.

    Where the checkpoint has held-out text beside it, both are loaded from disk and scored on it.
    """
    if dtype not in (None, "bfloat16", "float32"):
        raise ValueError(f"dtype: wanted bfloat16 or float32, got {dtype!r}")
    check_finished(run)
    _check_new(run, out)

    from trivium.api import load
    from trivium.data.corpus import HELDOUT_FILE

    before = _form(run)
    if pack is None and before["experts"] == "mixed":
        raise ValueError(f"{run}: some routed experts are packed, some not: say --pack-experts or --unpack-experts")
    say = (lambda line: None) if as_json else typer.echo
    say(f"{run}: {_in_words(before)}")
    model = load(run, experts="packed" if before["experts"] == "packed" else "unpacked")
    heldout = model.folder / HELDOUT_FILE
    scored = heldout.is_file() and model.tokenizer is not None
    if scored:
        say("scoring the held-out text with it, and then with what is written")
    first = _score(model) if scored else None
    if before["experts"] == "packed" and pack is False:
        del model  # one at a time: memory holds the larger of the two and not both
        # In the dtype to be written: MXFP4 is exact in it, and need not be in the trunk's.
        model = load(run, experts="unpacked", dtype=dtype)
    model.save(out, dtype=dtype, pack_experts=bool(pack))
    if heldout.is_file():
        shutil.copyfile(heldout, out / HELDOUT_FILE)
    del model
    after = _form(out)
    if (before["experts"], before["dtype"]) == (after["experts"], after["dtype"]):
        say("that is what was asked for: nothing was converted, the new folder holds the same tensors")
    else:
        say(f"{out}: {_in_words(after)}")
    # Of the new files, not of what was in memory when they were written.
    last = _score(load(out, experts="packed" if after["experts"] == "packed" else "unpacked")) if scored else None
    if scored:
        say(
            f"held out, all {last['num_bytes']:,} bytes: "
            f"{_change(first['loss'], last['loss'])} nats a token, {_change(first['bpb'], last['bpb'])} bits per byte"
        )
    else:
        say(f"held-out loss not measured: that takes {HELDOUT_FILE} and a tokenizer in {run}")
    say(f"written to {out}")
    if as_json:
        change = {name: last[name] - first[name] for name in ("loss", "bpb")} if scored else None
        content = {
            "run": str(run),
            "out": str(out),
            "before": before,
            "after": after,
            "heldout": {"before": first, "after": last, "change": change} if scored else None,
        }
        typer.echo(json.dumps(content, indent=2))


def _check_new(run: Path, out: Path) -> None:
    if out.resolve() == run.resolve():
        raise ValueError(f"out: wanted a new folder, got {out}, the one that is read")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out}: is there already and is not overwritten; choose another folder")


def _form(path: Path) -> dict[str, Any]:
    """How the weights are stored: routed experts packed, unpacked or mixed, the dtype of the rest, the bytes in all."""
    from trivium.checkpoint.index import check_published

    config, index = check_published(path)
    kinds = {"packed" if spec.dtype == "U8" else "unpacked" for spec in index.specs if spec.expert is not None}
    return {
        "experts": kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "none",
        "dtype": config.dtype,
        "num_bytes": sum(spec.num_bytes for spec in index.specs),
    }


def _score(model: Model) -> dict[str, Any]:
    """The loss on the held-out text that lies beside the model."""
    from dataclasses import asdict

    from trivium.data.corpus import read_heldout, stream_of
    from trivium.train.heldout import score

    return asdict(score(model.network, stream_of(read_heldout(model.folder), model.tokenizer)))


def _in_words(form: dict[str, Any]) -> str:
    experts = {"packed": "packed as MXFP4", "mixed": "partly packed as MXFP4"}.get(form["experts"], form["experts"])
    return f"routed experts {experts}, the rest {form['dtype']}, {form['num_bytes'] / 1e6:,.1f} MB"


def _change(before: float, after: float) -> str:
    return f"{before:.4f} → {after:.4f} ({round(after - before, 4) + 0.0:+.4f})"  # + 0.0: no minus before a zero
