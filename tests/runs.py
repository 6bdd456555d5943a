"""Two runs held against each other: what a run folder says apart from the clock, and what its last point holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trivium.checkpoint.resume import ResumePoint, load_resume_point


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """All that does not depend on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in line if name not in ("time_s", "tokens_per_s")} for line in lines]


def layers_of(folder: Path) -> str:
    path = folder / "layers.jsonl"
    return path.read_text() if path.exists() else ""


def assert_same_run(folder: Path, want: Path) -> None:
    """Losses, norms, rates and balance of every step bit for bit, and all there is in the end.

    The files of a point are not compared: the names of the saved things stand in them in any order.
    """
    assert metrics_of(folder) == metrics_of(want)
    got, wanted = load_resume_point(folder), load_resume_point(want)
    assert got.step == wanted.step and got.names == wanted.names
    tensors = _tensors_of(got)
    for name, tensor in _tensors_of(wanted).items():  # model, balancers, moments, random numbers
        assert torch.equal(tensors[name], tensor), name
    assert _without_time(got.about) == _without_time(wanted.about)
    assert layers_of(folder) == layers_of(want)
    assert (folder / "model.safetensors").read_bytes() == (want / "model.safetensors").read_bytes()


def _tensors_of(point: ResumePoint) -> dict[str, Tensor]:
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in point.names.items()}
    point.read_(tensors)
    return tensors


def _without_time(about: dict[str, Any]) -> dict[str, Any]:
    return {**about, "progress": {**about["progress"], "time_s": 0}}
