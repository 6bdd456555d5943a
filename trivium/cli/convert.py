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
    out: Annotated[
        Path | None,
        typer.Argument(help="the new folder, which must not exist or be empty; or the GGUF file", show_default=False),
    ] = None,
    to: Annotated[str, typer.Option(help="released: a folder in the released layout; gguf: one file for llama.cpp")] = (
        "released"
    ),
    out_option: Annotated[
        Path | None,
        typer.Option("--out", help="the same as OUT; for gguf it may be left out: RUN.gguf", show_default=False),
    ] = None,
    pack: Annotated[
        bool | None,
        typer.Option(
            "--pack-experts/--unpack-experts",
            help="routed experts as MXFP4, as released, or as plain matrices; else as they are",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 or float32, of all that is not packed; for gguf float16 too")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Write a checkpoint to a new folder in the released layout, with routed experts packed or unpacked.

    Where the checkpoint has held-out text beside it, both are loaded from disk and scored on it. With --to gguf the
    text model and its tokenizer become one file that llama.cpp loads; that takes the package gguf.
    """
    if to not in ("released", "gguf"):
        raise ValueError(f"to: wanted released or gguf, got {to!r}")
    if out is not None and out_option is not None:
        raise ValueError(f"out: wanted once, got {out} and --out {out_option}")
    out = out_option if out is None else out
    check_finished(run)
    if to == "gguf":
        _to_gguf(run, _beside(run) if out is None else out, pack, dtype, as_json)
        return
    if out is None:
        raise typer.BadParameter("the new folder is missing", param_hint="OUT")
    if dtype not in (None, "bfloat16", "float32"):
        raise ValueError(f"dtype: wanted bfloat16 or float32, got {dtype!r}")
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


def _to_gguf(run: Path, out: Path, pack: bool | None, dtype: str | None, as_json: bool) -> None:
    if out.exists():
        raise ValueError(f"{out}: is there already and is not overwritten; choose another file")

    from trivium.api import load
    from trivium.checkpoint.gguf import check_gguf, write_gguf
    from trivium.checkpoint.index import check_published

    before = _form(run)
    check_gguf(check_published(run)[0], dtype or before["dtype"])
    if pack is None and before["experts"] == "mixed":
        raise ValueError(f"{run}: some routed experts are packed, some not: say --pack-experts or --unpack-experts")
    packed = before["experts"] == "packed" and pack is not False
    # Unpacked in float32 MXFP4 is exact, and a dtype asked for is rounded to once, when it is written.
    unpacks = not packed and before["experts"] in ("packed", "mixed")
    model = load(run, experts="packed" if packed else "unpacked", dtype="float32" if unpacks else None)
    vocabulary = model.tokenizer.vocabulary if model.tokenizer else None
    name = run.resolve().name
    write_gguf(
        model.network, out, vocabulary=vocabulary, dtype=dtype or before["dtype"], pack_experts=bool(pack), name=name
    )
    after = {
        "experts": "none" if before["experts"] == "none" else "packed" if packed or pack else "unpacked",
        "dtype": dtype or before["dtype"],
        "num_bytes": out.stat().st_size,
    }
    left_out = [
        what
        for what, missing in (
            ("the vision tower", model.config.vision is not None),
            ("a tokenizer, which the folder does not have", vocabulary is None),
            ("a chat template", True),
        )
        if missing
    ]
    if as_json:
        content = {"run": str(run), "out": str(out), "before": before, "after": after, "left_out": left_out}
        typer.echo(json.dumps(content, indent=2))
        return
    typer.echo(f"{run}: {_in_words(before)}")
    typer.echo(f"{out}: {_in_words(after)}")
    for what in left_out:
        typer.echo(f"without {what}")
    typer.echo(f"written to {out}")


def _beside(run: Path) -> Path:
    """RUN.gguf, or model.gguf beside a file that was named."""
    run = run.resolve()
    return run.with_name(f"{run.name.split('.')[0]}.gguf") if run.is_file() else run.with_name(f"{run.name}.gguf")


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
