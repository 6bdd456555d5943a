"""From a folder of text to a run folder: the order of things, and what becomes of them when one fails."""

import io
import json
import os
import signal
from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console

from tests.runs import metrics_of
from tests.tiny import tiny_config, write_tiny_text
from trivium.api import load
from trivium.config import preset
from trivium.cost.params import count_params
from trivium.data import corpus as corpus_file
from trivium.parallel.world import ALONE
from trivium.recipes import pretraining as recipe_file
from trivium.recipes.pretraining import RECIPES, pretrain_on_text, pretraining
from trivium.recipes.quickstart import quickstart
from trivium.train import pretrain as pretrain_file
from trivium.train.heldout import score
from trivium.train.run_folder import read_run
from trivium.train.schedule import Length
from trivium.train.stages import Stage
from trivium.train.step import train_step

CONFIG = replace(
    pretraining("nano", minutes=1),
    model=tiny_config(300),
    length=Length(seconds=60, num_steps=4),
    batch_tokens=64,
    stages=(Stage(max_len=64, share=1.0),),
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    write_tiny_text(tmp_path / "text")
    monkeypatch.setattr(recipe_file, "report", partial(recipe_file.report, num_samples=3, sample_tokens=20))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(place, config=CONFIG, *, data="text", name=None):
    """(outcome, what was printed)."""
    console = Console(record=True, width=120, file=io.StringIO())
    outcome = pretrain_on_text(
        config, data=place / data, out=place / "runs", name=name, command=["what", "was", "typed"], console=console
    )
    return outcome, console.export_text()


def stop_in_step(patch, number):
    made = []

    def step(*arguments, **options):
        made.append(1)
        if len(made) == number:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(*arguments, **options)

    patch.setattr(pretrain_file, "train_step", step)


def test_the_figures_are_those_of_the_checkpoint_that_was_written(place, monkeypatch):
    scored, report = [], recipe_file.report

    def watched(model, *arguments, **options):
        scored.append(model)
        return report(model, *arguments, **options)

    monkeypatch.setattr(recipe_file, "report", watched)
    outcome, out = trained(place)
    assert len(scored) == 1 and scored[0] is not outcome.result.model
    folder, text = outcome.folder, outcome.corpus.text
    there = read_run(folder)
    assert folder == place / "runs" / "train-nano" and there["finished"] is True
    assert there["data"] == text.about() and there["command"] == ["what", "was", "typed"]
    assert there["report"] == json.loads(json.dumps(outcome.report.to_json()))
    assert score(load(folder).network, outcome.corpus.heldout) == outcome.report.heldout
    assert outcome.report.heldout.num_bytes == sum(document.num_bytes for document in text.heldout)
    assert outcome.report.samples.num_samples == 3
    assert (folder / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert "done: 4 steps, 256 tokens, " in out and "duplicates dropped: 0 exact, " in out


def test_an_interrupted_run_goes_on_with_its_own_tokenizer(place, monkeypatch):
    with monkeypatch.context() as patch:
        stop_in_step(patch, 2)
        outcome, _ = trained(place)
    assert outcome.report is None and outcome.result.interrupted and outcome.result.progress.step == 2
    there = read_run(outcome.folder)
    assert (there["finished"], there["steps"], "report" in there) == (False, 2, False)
    assert not (outcome.folder / "plot.png").exists()

    def fail(*_):
        raise AssertionError("trained a second time")

    with monkeypatch.context() as patch:
        patch.setattr(corpus_file, "_train_tokenizer", fail)
        again, out = trained(place)
    assert again.folder == outcome.folder and "going on from step 2 of 4" in out
    assert read_run(again.folder)["finished"] is True


def test_a_report_that_fails_leaves_a_run_that_only_lacks_its_report(place, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(recipe_file, "plot_runs", fail)
        with pytest.raises(OSError, match="No space left"):
            trained(place)
    folder = place / "runs" / "train-nano"
    assert read_run(folder)["finished"] is False
    before = (folder / "metrics.jsonl").read_bytes()
    outcome, out = trained(place)
    assert outcome.folder == folder and "going on from step 4 of 4" in out
    assert read_run(folder)["finished"] is True and (folder / "metrics.jsonl").read_bytes() == before


def test_a_run_that_fails_before_it_has_begun_leaves_nothing_and_keeps_its_name(place, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    for where in ("trivium.train.pretrain.update_run", "trivium.chat.tokenizer.Tokenizer.save"):
        with monkeypatch.context() as patch:
            patch.setattr(where, fail if where.endswith("save") else lambda *_, **__: fail())
            with pytest.raises(OSError, match="No space left"):
                trained(place, name="mine")
        assert not (place / "runs" / "mine").exists()
    assert trained(place, name="mine")[0].folder == place / "runs" / "mine"


def test_a_run_of_changed_text_is_another_run(place, monkeypatch):
    with monkeypatch.context() as patch:
        stop_in_step(patch, 1)
        trained(place)
    (place / "text" / "one-more.py").write_text("# a line that was not there before\n" * 9)
    outcome, out = trained(place)
    assert outcome.folder.name == "train-nano-2"
    assert "train-nano: holds an unfinished run with another data.fingerprint: " in out


def test_another_layout_goes_on_and_is_said_and_another_argument_is_another_run(place, monkeypatch):
    config = replace(CONFIG, stages=(Stage(max_len=32, share=1.0),))
    whole, _ = trained(place, config, name="whole")
    folder = place / "runs" / "train-nano"
    with monkeypatch.context() as patch:
        for changes in ({}, {"workers": 3}, {"checkpoint_layers": True}, {"muon_lr": 0.01}):
            stop_in_step(patch, 1)
            outcome, out = trained(place, replace(config, **changes))
            lines = [line for line in out.splitlines() if line.startswith("layout differ")]
            if "muon_lr" in changes:
                assert outcome.folder.name == "train-nano-2" and not lines
                assert "another arguments.muon_lr: 0.02 there, 0.01 here" in out
                continue
            assert outcome.folder == folder and len(lines) == len(changes)
            for name, value in changes.items():
                there, now = lines[0].split(" when the run began, ")
                assert f"'{name}': {getattr(config, name)}" in there and f"'{name}': {value}" in now
    outcome, out = trained(place, replace(config, micro_tokens=32))
    assert outcome.folder == folder and "'micro_tokens': 32" in out and "going on from step 3 of 4" in out
    got, want = metrics_of(folder), metrics_of(whole.folder)
    assert got[:3] == want[:3]  # workers and layers run again change no bit
    assert got[3]["loss"] == pytest.approx(want[3]["loss"], rel=1e-5)  # the sum of two


def test_what_was_left_out_is_said_with_an_example(place):
    (place / "text" / "picture.py").write_bytes(b"\0\1\2")
    (place / "text" / "latin1.py").write_bytes("Grüße".encode("latin-1"))
    outcome, out = trained(place)
    assert "left out, binary: 1 (picture.py)\n" in out and "left out, not UTF-8: 1 (latin1.py)\n" in out
    assert read_run(outcome.folder)["data"]["left_out"] == {"binary": 1, "not UTF-8": 1}


def test_a_recipes_own_choices_hold():
    nano, micro = pretraining("nano", minutes=10), pretraining("micro", minutes=10, seed=7)
    assert (nano.recipe, nano.model, nano.length) == ("train-nano", preset("nano"), Length(seconds=600))
    assert (nano.batch_tokens, nano.stages[0].max_len, nano.muon_lr, nano.adamw_lr) == (2048, 256, 0.02, 6e-3)
    assert (micro.batch_tokens, micro.stages[0].max_len, micro.adamw_lr, micro.seed) == (8192, 1024, 3e-3, 7)
    assert (micro.weight_decay, micro.clip_norm, micro.logit_limit, micro.per_head) == (0.1, 1.0, 100.0, True)


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_can_be_built_for_a_number_of_steps(name):
    config = pretraining(name, minutes=1, num_steps=1000)
    assert config.model == replace(preset(name.removesuffix("-long")), dtype="float32")
    assert config.num_micro(ALONE) >= 1


def test_the_paper_recipe_goes_from_8k_to_1m_and_the_long_one_from_256_to_4096():
    lengths = {name: [stage.max_len for stage in RECIPES[name]().stages] for name in ("nano-long", "k3")}
    assert lengths == {"nano-long": [256, 512, 1024, 4096], "k3": [2**13, 2**16, 2**18, 2**20]}


@pytest.mark.parametrize(
    ("minutes", "num_steps", "want"),
    [(10, None, 20), (0.1, None, 2), (1e9, None, 50), (10, 500, 10), (10, 3, 2), (10, 10**6, 50)],
)
def test_the_held_out_text_is_scored_twice_a_minute_or_every_50_steps(minutes, num_steps, want):
    assert pretraining("nano", minutes=minutes, num_steps=num_steps).evals == want


@pytest.mark.parametrize(("minutes", "want"), [(4, 8), (0.2, 2), (1e300, 2_000_000)])
def test_the_quickstart_is_scored_twice_a_minute(minutes, want):
    config = quickstart(minutes=minutes, seed=3)
    assert (config.num_evals, config.seed, config.length.seconds) == (want, 3, 60 * minutes)
    assert (config.recipe, config.model) == ("quickstart", preset("nano"))


def test_what_is_no_recipe_is_refused_with_those_that_are():
    for name in ("giant", "k2"):
        with pytest.raises(ValueError, match=f"^recipe: wanted one of nano, nano-long, micro, mini, k3, got '{name}'$"):
            pretraining(name, minutes=1)


def test_a_model_larger_than_the_memory_is_refused_before_it_is_built(place, monkeypatch):
    # 2.8 trillion parameters of 16 bytes.
    with pytest.raises(
        ValueError, match=r"^recipe: train-k3 wants 4\d,\d{3}\.\d GiB to be trained, cpu has .*; choose"
    ):
        trained(place, pretraining("k3", minutes=1, num_steps=1000))
    wanted = 16 * count_params(CONFIG.model).total
    monkeypatch.setattr(recipe_file, "_memory_bytes", lambda device: wanted - 1)
    with pytest.raises(
        ValueError, match="^recipe: train-nano wants 0.0 GiB to be trained, cpu has 0.0; choose a smaller"
    ):
        trained(place)
    monkeypatch.setattr(recipe_file, "_memory_bytes", lambda device: wanted)
    assert trained(place)[0].report is not None


def test_more_tokens_at_once_than_the_memory_holds_are_refused_before_the_text_is_read(place):
    with pytest.raises(
        ValueError, match=r"^micro_tokens: 1,000,000,000,000 tokens at once want .* GiB for what goes in"
    ):
        trained(place, replace(CONFIG, batch_tokens=10**12))


@pytest.mark.parametrize("changes", [{"bos_token_id": 299}, {"vocab_size": 600}, {"bos_token_id": 0}])
def test_ids_that_no_tokenizer_has_are_refused_before_the_text_is_read(place, changes):
    with pytest.raises(ValueError, match="^model.vocab_size: wanted bos_token_id, at least 256, and 256 control ids"):
        trained(place, replace(CONFIG, model=replace(CONFIG.model, **changes)))
    assert not list((place / "runs").glob("*"))
