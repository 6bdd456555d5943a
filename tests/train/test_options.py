"""Every field of a run does something: an option that does nothing is an error, whatever the losses look like."""

import threading
from dataclasses import fields, replace

import pytest
import safetensors.torch
import torch

from tests.runs import metrics_of
from tests.train.test_pretrain import CONFIG, SHORT, trained
from trivium.train import pretrain as pretrain_file
from trivium.train.log import read_layers
from trivium.train.schedule import Length, Schedule
from trivium.train.stages import Stage

BASE = replace(SHORT, length=Length(seconds=60, num_steps=5), num_evals=2)
ARGUMENTS = {
    "model": replace(CONFIG, rms_norm_eps=1e-3),
    "length": Length(seconds=60, num_steps=6),
    "batch_tokens": 80,
    "stages": (Stage(max_len=36, share=1.0),),
    "muon_lr": 0.01,
    "adamw_lr": 3e-3,
    "muon_momentum": 0.9,
    "adamw_betas": (0.9, 0.99),
    "weight_decay": 0.0,
    "per_head": False,
    "clip_norm": 0.1,
    "logit_limit": 1e-3,
    "balancing": "histogram",
    "balance_ema": 0.5,
    "schedule": Schedule(warmup_steps=3),
    "compute_dtype": "bfloat16",
    "num_evals": 3,
    "eval_tokens": 300,
    "seed": 1,
}
# Which change no loss, or but its last bits; what they do is below.
LAYOUT = {"micro_tokens", "checkpoint_layers", "workers", "tensorboard", "save_every_s"}
# A name; a machine that the tests do not have; what wants documents no longer than a piece, and is in test_pretrain.py.
ELSEWHERE = {"recipe", "device", "whole"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    trained(BASE, folder)
    return left_by(folder)


def left_by(folder):
    return metrics_of(folder), (folder / "model.safetensors").read_bytes()


def test_no_field_is_left_out():
    assert ARGUMENTS.keys() | LAYOUT | ELSEWHERE == {field.name for field in fields(pretrain_file.PretrainConfig)}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_another_argument_is_another_course(name, base, tmp_path):
    trained(replace(BASE, **{name: ARGUMENTS[name]}), tmp_path)
    assert left_by(tmp_path) != base


def test_all_of_them_at_once_act(monkeypatch, tmp_path):
    """bfloat16, layers run again, two micro-batches, two lengths, TensorBoard, workers, saves all the time."""
    pytest.importorskip("tensorboard")
    config = replace(
        BASE,
        length=Length(seconds=60, num_steps=6),
        batch_tokens=128,
        micro_tokens=64,
        stages=(Stage(max_len=32, share=0.5), Stage(max_len=64, share=0.5)),
        compute_dtype="bfloat16",
        checkpoint_layers=True,
        tensorboard=True,
        workers=2,
        save_every_s=1e-9,
    )
    recomputed, loaders, threads, saved = [], [], set(), []
    wrap, save, loader = pretrain_file.checkpoint_layers, pretrain_file.ResumeWriter.save, pretrain_file.Loader

    def wrapped(model):
        recomputed.append(wrap(model))
        return recomputed[-1]

    def save_counted(writer, state, **options):
        saved.append(state.step)
        return save(writer, state, **options)

    def loader_counted(*args, **options):
        loaders.append(options["workers"])
        return loader(*args, **options)

    monkeypatch.setattr(pretrain_file, "checkpoint_layers", wrapped)
    monkeypatch.setattr(pretrain_file, "Loader", loader_counted)
    monkeypatch.setattr(pretrain_file.ResumeWriter, "save", save_counted)

    def note_threads(step):
        threads.update(thread.name for thread in threading.enumerate())

    result = trained(config, tmp_path, at_step=note_threads).result
    lines = metrics_of(tmp_path)
    assert recomputed[0].count == CONFIG.num_layers * 2 * 6
    assert [line["max_len"] for line in lines] == [32] * 3 + [64] * 3
    assert [layers.step for layers in read_layers(tmp_path / "layers.jsonl")] == [3]
    assert sum(path.stat().st_size for path in (tmp_path / "tensorboard").iterdir()) > 1000
    # A pool starts its second thread only where the first is busy: with steps as small as these it may never be.
    assert loaders == [2] and 1 <= sum(name.startswith("loader") for name in threads) <= 2
    assert len(saved) > 1 and saved[-1] == 6
    # Weights and moments are float32; what the matrices are multiplied in is seen in the loss, and in that alone.
    assert {parameter.dtype for parameter in result.model.parameters()} == {torch.float32}
    assert {t.dtype for t in safetensors.torch.load_file(tmp_path / "model.safetensors").values()} == {torch.float32}
    plain = tmp_path / "float32, nothing run again, one thread"
    plain.mkdir()
    trained(replace(config, compute_dtype="float32", checkpoint_layers=False, tensorboard=False, workers=0), plain)
    assert not (plain / "tensorboard").exists()
    for got, want in zip(lines, metrics_of(plain), strict=True):
        assert got["loss"] != want["loss"] and got["loss"] == pytest.approx(want["loss"], rel=0.02)
