"""From a model and conversations to a run folder: as any run it is begun once, gone on with, and never mixed up."""

import io
import json
import os
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.runs import assert_same_run, metrics_of
from tests.talks import plain, tokenizer_of, with_tool, write_jsonl
from tests.tiny import tiny_config
from trivium.api import Model, load
from trivium.data.chat import build_chat, fingerprint_of, read_conversations
from trivium.data.shards import open_shards
from trivium.evals.chat import ChatReport, Score
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.recipes import sft as recipe_file
from trivium.recipes.sft import RECIPES, from_path, generated, nano_chat, sft, sft_on_conversations
from trivium.train import pretrain as pretrain_file
from trivium.train.run_folder import read_run
from trivium.train.schedule import Length
from trivium.train.stages import Stage
from trivium.train.step import train_step

NUM_RANKS = 300
TOKENIZER = tokenizer_of(NUM_RANKS)
STEPS = 5
CONFIG = replace(
    sft(),
    length=Length(seconds=60, num_steps=STEPS),
    batch_tokens=512,
    stages=(Stage(max_len=512, share=1.0),),
    eval_tokens=200,
    num_evals=2,
)
BODIES = [*(plain(number) for number in range(12)), *(with_tool(number, 7) for number in range(3))]


def write_base(folder, seed=1, tokenizer=TOKENIZER, last=None, **options):
    network = KimiK3(tiny_config(NUM_RANKS))
    initialise_(network, seed)
    if last is not None:
        network.language_model.lm_head.weight.data[-1, -1] = last
    Model(network=network, tokenizer=tokenizer).save(folder, **options)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What all runs begin with: `base`, `other` of another seed, `talk` and `more`, which has one conversation more."""
    folder = tmp_path_factory.mktemp("made")
    return SimpleNamespace(
        base=write_base(folder / "base"),
        other=write_base(folder / "other", seed=2),
        talk=write_jsonl(folder / "talk.jsonl", BODIES),
        more=write_jsonl(folder / "more.jsonl", [*BODIES, plain(99)]),
    )


def plot(folders, out):
    """In place of a second of matplotlib."""


def tuned(base, data, out, *, config=CONFIG, name=None, stop=None, show=None):
    """(outcome, what was printed) of one process; with `stop` Ctrl-C comes in that step. Plotted where it is shown."""
    steps = []

    def step(*arguments, **options):
        steps.append(1)
        if len(steps) == stop:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(*arguments, **options)

    console = Console(record=True, width=200, file=io.StringIO())
    data = from_path(data) if isinstance(data, Path) else data
    # A process that goes on has other random numbers than the one before had.
    torch.manual_seed(len(list((out / (name or config.recipe)).glob("resume/step-*"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_file, "train_step", step)
        if show is None:
            patch.setattr(recipe_file, "plot_runs", plot)
        outcome = sft_on_conversations(
            config,
            base=base,
            data=data,
            out=out,
            name=name,
            command=["what", "was", "typed"],
            console=console,
            show=show or str,
        )
    return outcome, console.export_text()


@pytest.fixture(scope="module")
def run(made, tmp_path_factory):
    shown = []

    def show(outcome):
        shown.append((read_run(outcome.folder)["finished"], (outcome.folder / "plot.png").exists()))

    outcome, out = tuned(made.base, made.talk, tmp_path_factory.mktemp("runs"), show=show)
    return SimpleNamespace(folder=outcome.folder, outcome=outcome, out=out, shown=shown)


def test_the_run_folder_holds_a_model_that_was_taught_to_talk(run, made):
    assert {path.name for path in run.folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "heldout",
        "layers.jsonl",
        "layers.png",
        "metrics.jsonl",
        "model.safetensors",
        "plot.png",
        "resume",
        "run.json",
        "tiktoken.model",
        "tokenizer_config.json",
        "tokens",
    }
    about = read_run(run.folder)
    assert run.folder.name == about["recipe"] == "sft"
    assert (about["chat_format"], about["finished"], about["steps"]) == ("xtml", True, STEPS)
    assert about["command"] == ["what", "was", "typed"] and about["arguments"]["whole"] is True
    assert about["data"] == {
        "fingerprint": fingerprint_of(read_conversations(made.talk)),
        "path": str(made.talk),
    }
    assert about["base"]["path"] == str(made.base) and len(about["base"]["sha256"]) == 64
    assert about["model"] == tiny_config(NUM_RANKS).to_json()  # the base's, whatever the recipe has
    assert "report" not in about and run.outcome.reports is None  # no code knows what is right
    assert run.shown == [(False, True)]  # last of all it is finished
    assert "14 conversations, " in run.out and "; 1 held out" in run.out


def test_the_checkpoint_is_another_model_than_the_base_and_speaks_its_tokens(run, made):
    base, model = load(made.base), load(run.folder)
    assert model.tokenizer.vocabulary.ranks == base.tokenizer.vocabulary.ranks
    for (name, got), want in zip(
        model.network.state_dict().items(), run.outcome.result.model.state_dict().values(), strict=True
    ):
        assert torch.equal(got, want), name
    assert not torch.equal(model.network.language_model.lm_head.weight, base.network.language_model.lm_head.weight)
    network = KimiK3(tiny_config(NUM_RANKS))  # and the base is as it was
    initialise_(network, 1)
    for name, value in network.state_dict().items():
        assert torch.equal(base.network.state_dict()[name], value), name


def test_a_run_that_learns_next_to_nothing_is_the_base(made, tmp_path):
    """A step at rates of 1e-12 moves no weight by more; only the selection bias is balanced at no rate."""
    config = replace(CONFIG, muon_lr=1e-12, adamw_lr=1e-12, length=replace(CONFIG.length, num_steps=1))
    outcome, _ = tuned(made.base, made.talk, tmp_path, config=config)
    want = load(made.base).network.state_dict()
    for name, value in outcome.result.model.state_dict().items():
        if not name.endswith("e_score_correction_bias"):
            torch.testing.assert_close(value, want[name], rtol=0, atol=1e-7, msg=name)


def test_it_learns_what_the_assistant_writes(run):
    """The first loss is that of the base's, a guess among 556 ids; of so few steps it falls a little."""
    losses = [line["loss"] for line in metrics_of(run.folder)]
    assert losses[0] == pytest.approx(6.32, abs=0.2) and losses[-1] < losses[0] - 0.02
    tokens = open_shards(run.folder / "tokens")
    assert tokens.weight_T is not None and 0.1 < float(tokens.weight_T.float().mean()) < 0.9


@pytest.mark.parametrize("stop", [1, 4])
def test_interrupted_and_gone_on_with_it_is_the_same_run(run, made, tmp_path, stop):
    cut, _ = tuned(made.base, made.talk, tmp_path, stop=stop)
    there = read_run(cut.folder)
    assert cut.result.interrupted and cut.result.progress.step == stop and cut.reports is None
    assert there["finished"] is False and there["chat_format"] == "xtml" and not (cut.folder / "plot.png").exists()
    outcome, out = tuned(made.base, made.talk, tmp_path)
    assert outcome.folder == cut.folder and f"going on from step {stop} of {STEPS}" in out
    assert "tokens are there already" in out
    assert_same_run(outcome.folder, run.folder)


def test_an_unfinished_run_of_another_base_or_other_conversations_is_left_alone(made, tmp_path):
    cut, _ = tuned(made.base, made.talk, tmp_path, name="mine", stop=2)
    before = {path: path.read_bytes() for path in cut.folder.rglob("*") if path.is_file()}
    for base, data, what in ((made.other, made.talk, "base.sha256"), (made.base, made.more, "data.fingerprint")):
        with pytest.raises(ValueError, match=f"mine: holds an unfinished run with another {what}: .*; choose another"):
            tuned(base, data, tmp_path, name="mine")
    base = write_base(tmp_path / "nearly", last=1.0)  # another number in one place of all
    with pytest.raises(ValueError, match=r"another base\.sha256"):
        tuned(base, made.talk, tmp_path, name="mine")
    slow = replace(CONFIG, muon_lr=0.005)
    with pytest.raises(ValueError, match=r"another arguments.muon_lr: 0.01 there, 0.005 here; choose another name$"):
        tuned(made.base, made.talk, tmp_path, config=slow, name="mine")
    assert before == {path: path.read_bytes() for path in cut.folder.rglob("*") if path.is_file()}


def test_without_a_name_another_base_is_another_run(run, made):
    out = run.folder.parent
    tuned(made.base, made.talk, out, stop=1)
    outcome, said = tuned(made.other, made.talk, out, stop=1)
    assert outcome.folder == out / "sft-3"  # sft is finished, and sft-2 that of the other base
    assert "sft-2: holds an unfinished run with another base.sha256: " in said and "left alone" in said


def test_the_same_weights_in_another_folder_are_the_same_base(run, made, tmp_path):
    cut, _ = tuned(made.base, made.talk, tmp_path, stop=2)
    copy = write_base(tmp_path / "copy")
    outcome, _ = tuned(copy, made.talk, tmp_path)
    assert outcome.folder == cut.folder
    assert_same_run(outcome.folder, run.folder)


def test_a_folder_of_shards_is_the_file_that_it_was_made_of(run, made, tmp_path):
    """Begun on the file and gone on with on the folder; the shards stay where they are."""
    build_chat(made.talk, TOKENIZER, tmp_path / "shards", lambda line: None)
    whole, _ = tuned(made.base, tmp_path / "shards", tmp_path, name="whole")
    assert not (whole.folder / "tokens").exists() and not (whole.folder / "heldout").exists()
    assert_same_run(whole.folder, run.folder)
    tuned(made.base, made.talk, tmp_path, name="mixed", stop=2)
    outcome, _ = tuned(made.base, tmp_path / "shards", tmp_path, name="mixed")
    assert_same_run(outcome.folder, run.folder)


@pytest.mark.parametrize("spoilt", ["tokenizer", "too long", "a line that is none", "one conversation"])
def test_conversations_that_cannot_be_learned_leave_no_run(made, tmp_path, spoilt):
    config, data = CONFIG, made.talk
    if spoilt == "tokenizer":
        build_chat(made.talk, tokenizer_of(NUM_RANKS, num_dialogues=3), tmp_path / "shards", lambda line: None)
        data, message = tmp_path / "shards", "made with another tokenizer than this model's; make it anew$"
    elif spoilt == "too long":
        config = replace(CONFIG, stages=(Stage(max_len=100, share=1.0),))
        message = r"^stages: the longest document has \d+ tokens, wanted at most 100: it would never be read; "
    elif spoilt == "a line that is none":
        data, message = write_jsonl(tmp_path / "talk.jsonl", [plain(1), {}]), "talk.jsonl: line 2: messages: missing"
    else:
        data, message = write_jsonl(tmp_path / "talk.jsonl", [plain(1)]), "^data: wanted at least 2 different conv"
    with pytest.raises(ValueError, match=message):
        tuned(made.base, data, tmp_path / "runs", config=config)
        assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_a_base_in_bfloat16_is_trained_and_written_in_float32(made, tmp_path):
    base = write_base(tmp_path / "base", dtype="bfloat16")
    assert json.loads((base / "config.json").read_text())["dtype"] == "bfloat16"
    config = replace(CONFIG, length=replace(CONFIG.length, num_steps=1))
    outcome, _ = tuned(base, made.talk, tmp_path / "runs", config=config)
    assert json.loads((outcome.folder / "config.json").read_text())["dtype"] == "float32"
    other, _ = tuned(made.base, made.talk, tmp_path / "runs", config=config)
    assert read_run(outcome.folder)["base"]["sha256"] != read_run(other.folder)["base"]["sha256"]  # it was rounded


def test_a_base_without_a_tokenizer_cannot_be_taught(made, tmp_path):
    base = write_base(tmp_path / "base", tokenizer=None)
    with pytest.raises(ValueError, match=r"base/tiktoken\.model"):
        tuned(base, made.talk, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_path_that_holds_no_conversations_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"^{tmp_path}/none: cannot be read: No such file"):
        from_path(tmp_path / "none")
    with pytest.raises(ValueError, match=f"^{tmp_path}/tokens/manifest.json: cannot be read: No such file"):
        from_path(tmp_path)


# --- Generated ones


def streams_of(data, folder):
    return data.streams(TOKENIZER, folder, lambda line: None)


def documents_of(shards):
    starts = shards.starts.tolist()
    return [TOKENIZER.decode(shards.read(first, end).tolist()) for first, end in pairwise(starts)]


def test_generated_conversations_are_those_of_the_seed_and_of_no_other(tmp_path):
    data = generated(num_dialogues=6, num_drills=4)
    assert data.synthetic and data.about == {"generated": {"dialogues": 6, "drills": 4, "seed": 0}}
    streams = streams_of(data, tmp_path / "one")
    found = documents_of(streams.train)
    assert len(found) == len(set(found)) == 10
    assert documents_of(streams_of(generated(num_dialogues=6, num_drills=4), tmp_path / "two").train) == found
    other = streams_of(generated(num_dialogues=6, num_drills=4, seed=1), tmp_path / "three")
    assert not set(documents_of(other.train)) & set(found)
    assert other.heldout.ids_T.tolist() == streams.heldout.ids_T.tolist()  # every seed is scored with the same
    assert len(streams.heldout.starts) > 50 and not set(documents_of(streams.heldout)) & set(found)
    # More of them begin with the same.
    assert documents_of(streams_of(generated(num_dialogues=8, num_drills=0), tmp_path / "four").train)[:6] == found[:6]


def test_generated_ones_that_are_too_long_for_this_tokenizer_are_left_out_and_counted(tmp_path):
    """Another tokenizer cuts them into more tokens, and a document longer than a row would be refused."""
    made = documents_of(streams_of(generated(num_dialogues=6, num_drills=4), tmp_path / "all").train)
    lengths = sorted(len(TOKENIZER.encode_control(text)) for text in made)
    said = []
    data = generated(num_dialogues=6, num_drills=4, max_tokens=lengths[6])
    train = data.streams(TOKENIZER, tmp_path / "some", said.append).train
    assert np.diff(train.starts).tolist() == [
        n for n in map(len, map(TOKENIZER.encode_control, made)) if n <= lengths[6]
    ]
    assert said[-1] == f"3 conversations of more than {lengths[6]:,} tokens are left out"


def test_another_number_seed_or_generator_is_other_data(monkeypatch):
    def fingerprint(**options):
        return generated(**{"num_dialogues": 6, "num_drills": 4, **options}).fingerprint

    first = fingerprint()
    assert fingerprint() == first
    assert len({first, fingerprint(num_dialogues=7), fingerprint(num_drills=5), fingerprint(seed=1)}) == 4
    made = recipe_file.dialogue
    monkeypatch.setattr(recipe_file, "dialogue", lambda seed, **options: made(seed + (seed == 9), **options))
    assert fingerprint() != first


def test_generated_ones_are_scored_with_the_checkpoint_and_with_the_base(made, tmp_path, monkeypatch):
    calls = []

    def evaluate(model, tokenizer, **options):
        calls.append((model, options))
        score = Score(num=1, well_formed=1.0, calls_right=0.5, answer_right=0.25, tokens=float(len(calls)))
        return ChatReport(scores={"all": score}, effort_tokens={"low": 1.0})

    monkeypatch.setattr(recipe_file, "evaluate", evaluate)
    data = generated(num_dialogues=2, num_drills=6)
    longest = max(len(TOKENIZER.encode_control(text)) for text in documents_of(streams_of(data, tmp_path / "x").train))
    config = replace(
        nano_chat(num_steps=2, seed=3),
        batch_tokens=longest + 100,
        stages=(Stage(max_len=250, share=0.5), Stage(max_len=longest + 100, share=0.5)),
        eval_tokens=100,
    )
    outcome, _ = tuned(made.base, data, tmp_path / "runs", config=config)
    (trained, first), (base, second) = calls
    want = outcome.result.model.state_dict()
    assert all(torch.equal(value, want[name]) for name, value in trained.state_dict().items())
    want = load(made.base).network.state_dict()
    assert all(torch.equal(value, want[name]) for name, value in base.state_dict().items())
    assert (first["seed"], second["seed"]) == (3, 3) and second["num_dialogues"] < 100
    about = read_run(outcome.folder)
    assert outcome.folder.name == about["recipe"] == "nano-chat" and about["finished"] is True
    assert about["data"]["generated"] == {"dialogues": 2, "drills": 6, "seed": 0}
    assert about["report"]["chat"] == json.loads(json.dumps(outcome.reports["trained"].to_json()))
    assert about["report"]["chat"]["scores"]["all"]["tokens"] == 1.0
    assert about["report"]["untuned"]["scores"]["all"]["tokens"] == 2.0
    assert [line["max_len"] for line in metrics_of(outcome.folder)] == [250, longest + 100]


def test_a_run_whose_scoring_fails_only_lacks_its_scores(made, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(recipe_file, "plot_runs", fail)
        with pytest.raises(OSError, match="No space left"):
            tuned(made.base, made.talk, tmp_path, show=str)
    assert read_run(tmp_path / "sft")["finished"] is False
    outcome, out = tuned(made.base, made.talk, tmp_path)
    assert f"going on from step {STEPS} of {STEPS}" in out and read_run(outcome.folder)["finished"] is True


# --- The recipes


def test_the_recipes_own_choices_hold():
    assert set(RECIPES) == {"nano-chat", "sft"}
    assert (nano_chat().length.seconds, sft().length.seconds) == (1800, 600)
    assert nano_chat(minutes=2).length.seconds == sft(minutes=2).length.seconds == 120
    for name, recipe in RECIPES.items():
        config = recipe(num_steps=100, seed=7)
        assert (config.recipe, config.whole, config.seed, config.length.num_steps) == (name, True, 7, 100)
        assert config.stages[-1].max_len <= config.batch_tokens
    assert (sft().muon_lr, sft().adamw_lr) == (nano_chat().muon_lr / 2, nano_chat().adamw_lr / 2)
    assert len(sft(num_steps=1).stages) == 1 and len(nano_chat().stages) == 2
    drills = [made.stages[0].share for made in (nano_chat(), nano_chat(minutes=5), nano_chat(num_steps=2499))]
    assert drills == [0.12, 0.25, 0.25] and nano_chat(num_steps=5000) == replace(
        nano_chat(), length=Length(seconds=1800, num_steps=5000)
    )
