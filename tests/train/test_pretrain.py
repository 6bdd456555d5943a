"""A whole run, small: everything but the size is as in the quickstart. Interrupted, it is the same run."""

import io
import json
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.runs import assert_same_run, metrics_of
from tests.tiny import tiny_config
from trivium.api import load
from trivium.chat.tokenizer import train_tokenizer
from trivium.checkpoint.resume import load_resume_point
from trivium.data import corpus
from trivium.data.pack import make_batch, pieces
from trivium.data.source import Document
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.ops.balance import quantile_balance_
from trivium.parallel.world import ALONE
from trivium.train import pretrain as pretrain_file
from trivium.train.balance import QuantileBalancer
from trivium.train.groups import build_optimisers, parameter_groups
from trivium.train.heldout import excerpt, score
from trivium.train.loss import token_nll
from trivium.train.pretrain import PretrainConfig, identity, pretrain
from trivium.train.run_folder import read_run, update_run
from trivium.train.schedule import Length, Schedule
from trivium.train.stages import Stage
from trivium.train.step import train_step

NUM_RANKS = 300
TEXTS = [f"def f{idx}(x):\n    return x + {idx}  # adds {idx}\n" * 4 for idx in range(40)]
TOKENIZER = train_tokenizer(TEXTS, NUM_RANKS)
CONFIG = tiny_config(NUM_RANKS)


def stream_of(texts):
    documents = [Document(source=str(idx), path=f"{idx}.py", text=text) for idx, text in enumerate(texts)]
    return corpus.stream_of(documents, TOKENIZER)


TRAIN, HELDOUT = stream_of(TEXTS[:36]), stream_of(TEXTS[36:])
SHORT = PretrainConfig(
    recipe="test",
    model=CONFIG,
    length=Length(seconds=60, num_steps=9),
    batch_tokens=72,
    stages=(Stage(max_len=40, share=1.0),),
    balancing="exact",
    eval_tokens=48,
    num_evals=3,
    schedule=Schedule(warmup_steps=2),
)
LONG = replace(
    SHORT,
    length=Length(seconds=60, num_steps=40),
    batch_tokens=256,
    stages=(Stage(max_len=64, share=1.0),),
    eval_tokens=128,
    num_evals=4,
    schedule=Schedule(),
)


def new_model(seed=0):
    model = KimiK3(CONFIG)
    initialise_(model, seed)
    return model


def new_optimisers(model):
    return build_optimisers(parameter_groups(model, muon_lr=0.02, adamw_lr=0.003))


def step_of(model, batches, **options):
    return train_step(model, batches, new_optimisers(model), balancer=QuantileBalancer(method="exact"), **options)


def full_spans():
    """Four pieces of 40 tokens, of several documents."""
    return [(first, end) for first, end in pieces(stream_of(TEXTS[:8]), 40) if end - first == 40][:4]


def full_batch():
    """The four in one batch of 160, with weights of every size."""
    batch = make_batch(stream_of(TEXTS[:8]), full_spans(), "test")
    return replace(batch, weight_T=torch.rand(160, generator=torch.Generator().manual_seed(0)))


def trained(config, folder, *, at_step=None, train=TRAIN, heldout=HELDOUT, weights=None, world=ALONE):
    """One process's share of a run: `at_step`, if given, is called with the number of each step made in it."""
    made, batches = [], []

    def step(*arguments, **options):
        batches.extend(arguments[1])
        result = train_step(*arguments, **options)
        made.append(result)
        if at_step:
            at_step(len(made))
        return result

    console = Console(record=True, width=120, file=io.StringIO())
    # A process that goes on has other random numbers than the one before had.
    torch.manual_seed(len(list(folder.glob("resume/step-*"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_file, "train_step", step)
        tokenizer, about = TOKENIZER if world.is_first else None, {"command": ["x"]}
        result = pretrain(
            config, train, heldout, tokenizer, folder, about=about, console=console, weights=weights, world=world
        )
    return SimpleNamespace(result=result, made=len(made), batches=batches, out=console.export_text())


def stops_at(number):
    """Ctrl-C in that step."""

    def at_step(step):
        if step == number:
            os.kill(os.getpid(), signal.SIGINT)

    return at_step


class Killed(BaseException):
    """As good as a kill: no handler of ours knows it."""


def dies_at(number):
    def at_step(step):
        if step == number:
            raise Killed

    return at_step


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    done = trained(LONG, folder)
    return folder, done.result, done.out


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    trained(SHORT, folder)
    return folder


def test_the_held_out_loss_starts_at_the_log_of_the_vocabulary_and_falls(run):
    folder, result, out = run
    assert "held out before training: 6.3" in out  # ln 556 = 6.32
    losses = [line["heldout_loss"] for line in metrics_of(folder) if line["heldout_loss"] is not None]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.5 * 6.32
    assert score(result.model, HELDOUT).num_bytes == sum(len(text) for text in TEXTS[36:])


def test_the_run_folder_holds_what_it_should(run):
    folder, result, _ = run
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "layers.jsonl",
        "metrics.jsonl",
        "model.safetensors",
        "resume",
        "run.json",
        "tiktoken.model",
        "tokenizer_config.json",
    }
    about = read_run(folder)
    assert (about["recipe"], about["seed"], about["planned_steps"], about["chat_format"]) == ("test", 0, 40, None)
    assert about["finished"] is False and about["command"] == ["x"]  # the caller has yet to finish it
    assert (about["steps"], about["tokens"]) == (40, 40 * 256)
    assert about["arguments"]["batch_tokens"] == 256 and about["arguments"]["length"]["num_steps"] == 40
    metrics = metrics_of(folder)
    assert [line["step"] for line in metrics] == list(range(1, 41))
    assert [line["step"] for line in metrics if line["heldout_bpb"] is not None] == [10, 20, 30]
    assert all(line["idle_experts"] == 0 for line in metrics[5:])
    assert (result.progress.step, result.progress.tokens, result.interrupted) == (40, 40 * 256, False)


def test_the_saved_run_is_the_trained_model(run):
    folder, result, _ = run
    model = load(folder)
    for (name, got), want in zip(model.network.state_dict().items(), result.model.state_dict().values(), strict=True):
        assert torch.equal(got, want), name
    text = model.generate("def f", max_tokens=8, temperature=0).text
    assert text == "".join(piece.text for piece in model.stream("def f", max_tokens=8, temperature=0)) != ""


def test_what_is_scored_on_the_way_is_an_excerpt(run):
    folder, result, _ = run
    out = trained(LONG, folder).out  # it has ended, and is scored once more before that is found
    part, whole = score(result.model, excerpt(HELDOUT, 128, 1024)), score(result.model, HELDOUT)
    assert part.num_tokens < whole.num_tokens == HELDOUT.num_targets
    assert f"held out before going on: {part.loss:.3f} nats a token, {part.bpb:.3f} bits per byte" in out
    assert f"{whole.loss:.3f}" not in out


def test_the_table_of_who_got_what_is_printed_once(run):
    _, _, out = run
    assert out.count("parameters by optimiser") == 1
    assert "0.02 × s " in out and "sqrt(max(1, out/in))" in out


@settings(max_examples=3)
@given(stops=st.lists(st.integers(0, 8), min_size=1, max_size=4).map(sorted))
@example(stops=[1, 2, 3, 4, 5, 6, 7, 8])
def test_an_interrupted_run_is_the_uninterrupted_one_bit_for_bit(uninterrupted, tmp_path_factory, stops):
    """Stopped behind each of these steps, and gone on with in fresh objects each time."""
    folder = tmp_path_factory.mktemp("interrupted")
    step = 0
    for stop in stops:
        if stop > step:
            share = trained(SHORT, folder, at_step=stops_at(stop - step))
            assert share.result.interrupted and share.result.progress.step == stop
            assert load(folder).logits([[1, 2]])[0].isfinite().all()  # what there is can be used
            step = stop
    last = trained(SHORT, folder)
    assert (last.result.interrupted, last.made) == (False, 9 - step)
    assert (f"going on from step {step} of 9" in last.out) == (step > 0)
    assert_same_run(folder, uninterrupted)


@settings(max_examples=3)
@given(deaths=st.lists(st.integers(1, 9), min_size=1, max_size=3), save_every_s=st.sampled_from([1e-9, 0.05, 60.0]))
@example(deaths=[9, 9], save_every_s=60.0)
def test_a_run_that_dies_goes_on_from_its_last_save(uninterrupted, tmp_path_factory, deaths, save_every_s):
    """It dies with a step behind the last save made, and its line in metrics.jsonl cut off."""
    folder = tmp_path_factory.mktemp("dead")
    config = replace(SHORT, save_every_s=save_every_s)

    for death in deaths:
        try:
            trained(config, folder, at_step=dies_at(death))
        except Killed:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write('{"step": 7, "tok')
    trained(config, folder)
    assert_same_run(folder, uninterrupted)


def test_an_ended_run_makes_no_step_and_ends_again(uninterrupted, tmp_path):
    trained(SHORT, tmp_path)
    again = trained(SHORT, tmp_path)
    assert (again.made, again.result.interrupted, again.result.progress.step) == (0, False, 9)
    assert_same_run(tmp_path, uninterrupted)


def test_a_run_by_the_clock_is_the_run_of_as_many_steps(tmp_path):
    clock, steps = tmp_path / "clock", tmp_path / "steps"
    by_clock = trained(replace(SHORT, length=Length(seconds=0.3)), clock)
    num_steps = by_clock.result.progress.num_steps
    assert read_run(clock)["planned_steps"] == num_steps == by_clock.made > 4
    trained(replace(SHORT, length=Length(seconds=0.3, num_steps=num_steps)), steps)
    for folder in (clock, steps):  # what is due before its number is known is not scored
        path = folder / "metrics.jsonl"
        lines = [{**json.loads(line), "heldout_loss": None, "heldout_bpb": None} for line in path.open()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "layers.jsonl").unlink()
    assert_same_run(clock, steps)


def test_a_run_by_the_clock_interrupted_while_it_is_timed_is_one_of_as_many_steps(tmp_path):
    clock, steps = tmp_path / "clock", tmp_path / "steps"
    config = replace(SHORT, length=Length(seconds=0.5), num_evals=1)
    assert trained(config, clock, at_step=stops_at(2)).result.progress.num_steps is None
    assert read_run(clock)["planned_steps"] is None
    rest = trained(config, clock)
    assert "going on from step 2 of ?" in rest.out
    # Killed behind its plan: no other number is made up.
    num_steps = read_run(clock)["planned_steps"]
    assert num_steps == rest.result.progress.step
    trained(replace(config, length=Length(seconds=60, num_steps=num_steps)), steps)
    assert_same_run(clock, steps)


def test_the_number_of_steps_outlives_a_death_before_the_first_save(tmp_path, monkeypatch):
    config = replace(SHORT, length=Length(seconds=0.2))

    def die(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("trivium.checkpoint.resume.ResumeWriter._write", die)
        with pytest.raises(OSError, match="No space left"):
            trained(config, tmp_path)
    num_steps = read_run(tmp_path)["planned_steps"]
    again = trained(config, tmp_path)
    assert again.made == again.result.progress.num_steps == num_steps > 0
    assert len(metrics_of(tmp_path)) == num_steps


def test_scoring_and_saving_change_nothing_about_training(uninterrupted, tmp_path):
    for name, changes in {
        "scored seldom": {"num_evals": 1},
        "scored often": {"num_evals": 9, "eval_tokens": 500},
        "saved often": {"save_every_s": 1e-9},
    }.items():
        folder = tmp_path / name
        trained(replace(SHORT, **changes), folder)
        for line, want in zip(metrics_of(folder), metrics_of(uninterrupted), strict=True):
            for field in ("loss", "grad_norm", "lr", "max_vio", "idle_experts"):
                assert line[field] == want[field], (name, field)
        assert (folder / "model.safetensors").read_bytes() == (uninterrupted / "model.safetensors").read_bytes()


def test_another_seed_is_another_run(uninterrupted, tmp_path):
    trained(replace(SHORT, seed=1), tmp_path)
    ours, theirs = metrics_of(tmp_path), metrics_of(uninterrupted)
    assert all(line["loss"] != want["loss"] for line, want in zip(ours, theirs, strict=True))


def test_other_threads_or_versions_are_said(tmp_path):
    trained(SHORT, tmp_path, at_step=stops_at(1))
    there = read_run(tmp_path)
    assert "differ" not in trained(SHORT, tmp_path, at_step=stops_at(1)).out
    update_run(tmp_path, threads=97, versions={**there["versions"], "torch": "1.0"})
    out = trained(SHORT, tmp_path, at_step=stops_at(1)).out
    assert f"threads differ, and so may the last bits of the loss: 97 when the run began, {there['threads']} now" in out
    assert "versions differ, and so may the last bits of the loss: {" in out


def test_a_point_of_another_course_is_refused_and_nothing_is_lost(tmp_path):
    trained(SHORT, tmp_path, at_step=stops_at(4))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]))
    with pytest.raises(ValueError, match="metrics.jsonl: wanted the lines of steps 1 to 4, got 3 others$"):
        trained(SHORT, tmp_path)
    assert path.read_text() == "".join(lines[:3])
    with pytest.raises(ValueError, match=r"^loader: .* does not fit"):
        trained(SHORT, tmp_path, train=stream_of(TEXTS[:1]))
    path.write_text("".join(lines))
    assert trained(SHORT, tmp_path).made == 5


def test_a_damaged_point_costs_the_steps_behind_the_one_before(uninterrupted, tmp_path):
    config = replace(SHORT, save_every_s=1e-9)
    trained(config, tmp_path, at_step=stops_at(7))
    newest, before = sorted(path for path in (tmp_path / "resume").iterdir() if path.name != "latest")[::-1]
    (newest / "state.json").write_text("")
    step = int(before.name.removeprefix("step-"))
    rest = trained(config, tmp_path)
    assert f"{newest}: damaged, not used: " in rest.out and rest.made == 9 - step
    assert_same_run(tmp_path, uninterrupted)


def test_what_a_run_must_agree_with_is_all_that_changes_its_losses():
    same = identity(SHORT, "abc")
    assert same["data"] == {"fingerprint": "abc"} and same["model"] == CONFIG.to_json()
    for changes in (
        {"seed": 1},
        {"recipe": "other"},
        {"muon_lr": 0.01},
        {"stages": (Stage(max_len=41, share=1.0),)},
        {"whole": True},
        {"weight_decay": 0.0},
        {"clip_norm": None},
        {"logit_limit": None},
        {"per_head": False},
        {"balancing": "histogram"},
        {"balance_ema": 0.5},
        {"compute_dtype": "bfloat16"},
        {"schedule": Schedule(final=0.1)},
        {"length": Length(seconds=60, num_steps=8)},
        {"model": replace(CONFIG, hidden_size=64)},
    ):
        assert identity(replace(SHORT, **changes), "abc") != same
    by_clock = replace(SHORT, length=Length(seconds=60))
    assert identity(replace(by_clock, length=Length(seconds=61)), "abc") != identity(by_clock, "abc")
    assert identity(replace(SHORT, length=Length(seconds=61, num_steps=9)), "abc") == same  # it goes by no clock
    for layout in ({"micro_tokens": 72}, {"checkpoint_layers": True}, {"workers": 0}, {"save_every_s": 1.0}):
        assert identity(replace(SHORT, **layout), "abc") == same
    assert json.loads(json.dumps(same))["arguments"]["length"] == {"seconds": None, "num_steps": 9}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": ()}, "stages: wanted at least one, got none"),
        (
            {"stages": (Stage(max_len=73, share=1.0),)},
            "stages: pieces of 73 tokens do not fit into micro-batches of 72",
        ),
        ({"micro_tokens": 36}, "stages: pieces of 40 tokens do not fit into micro-batches of 36"),
        ({"micro_tokens": 50}, "micro_tokens: wanted a part of 72 tokens, got 50"),
        ({"clip_norm": 0.0}, "clip_norm: wanted a number above 0, got 0.0"),
        ({"logit_limit": -1.0}, "logit_limit: wanted a number above 0, got -1.0"),
        ({"muon_lr": 1e308}, r"muon_lr: wanted a number above 0, got 1e\+308"),
        ({"weight_decay": 1e38}, r"weight_decay: wanted a number of at least 0, got 1e\+38"),
        ({"adamw_betas": (0.9,)}, r"adamw_betas: wanted 2 in \[0, 1\), got \(0.9,\)"),
        ({"model": replace(CONFIG, dtype="bfloat16")}, "model.dtype: a model is trained and written in float32, .*"),
        (
            {"schedule": Schedule(warmup_steps=9)},
            "schedule.warmup_steps: wanted fewer than the 9 steps of the run, got 9",
        ),
        ({"weight_decay": -0.1}, "weight_decay: wanted a number of at least 0, got -0.1"),
        ({"balancing": "sign"}, "balancing: wanted one of exact, histogram, got 'sign'"),
        ({"compute_dtype": "float16"}, "compute_dtype: wanted one of float32, bfloat16, got 'float16'"),
        ({"workers": -1}, "workers: wanted at least 0, got -1"),
        ({"batch_tokens": 0}, "batch_tokens: wanted at least 1, got 0"),
        ({"muon_lr": 0}, "muon_lr: wanted a number above 0, got 0"),
        ({"adamw_lr": float("nan")}, "adamw_lr: wanted a number above 0, got nan"),
        ({"save_every_s": 0.0}, "save_every_s: wanted a number above 0, got 0.0"),
        ({"device": "toaster"}, "device: 'toaster' is not one that torch knows"),
        ({"seed": -1}, r"seed: wanted a whole number in \[0, 2\^63\), got -1"),
        ({"seed": 2**63}, r"seed: wanted a whole number in \[0, 2\^63\), got 9223372036854775808"),
        (
            {"length": Length(seconds=60), "schedule": Schedule(decay_from=0.05)},
            "decay_from: a run by the clock times its first steps at the full rate and wants at least 0.08, got 0.05; .*",
        ),
    ],
)
def test_a_config_that_cannot_run_is_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        replace(SHORT, **changes)


# --- Stages, whole documents, and a run that begins with another one's weights


TWO_STAGES = replace(SHORT, stages=(Stage(max_len=20, share=0.5), Stage(max_len=40, share=0.5)))


@pytest.fixture(scope="module")
def in_two_stages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    trained(TWO_STAGES, folder)
    return folder


def test_at_a_stage_the_guard_begins_anew(in_two_stages):
    metrics = metrics_of(in_two_stages)
    assert [line["max_len"] for line in metrics] == 4 * [20] + 5 * [40]
    assert load_resume_point(in_two_stages).about["guard"]["losses"] == [line["loss"] for line in metrics[4:]]


@pytest.mark.parametrize("stop", [4, 5])
def test_stopped_at_the_border_of_two_stages_it_is_the_same_run(in_two_stages, tmp_path, stop):
    trained(TWO_STAGES, tmp_path, at_step=stops_at(stop))
    guard = load_resume_point(tmp_path).about["guard"]
    assert len(guard["losses"]) == (stop if stop <= 4 else stop - 4)
    trained(TWO_STAGES, tmp_path)
    assert_same_run(tmp_path, in_two_stages)


def talks_of(numbers):
    """Documents of 4 to 16 tokens, in which what stands behind the third one counts."""
    stream = stream_of([f"x{number}" * (1 + number % 5) for number in numbers])
    flags = torch.ones(len(stream.ids_T), dtype=torch.bool)
    for start in stream.starts[:-1].tolist():
        flags[start : start + 3] = False
    return replace(stream, weight_T=flags)


TALKS, HELDOUT_TALKS = talks_of(range(100, 140)), talks_of(range(140, 150))
LONGEST = int((TALKS.starts[1:] - TALKS.starts[:-1]).max()) - 1
WHOLE = replace(
    SHORT, whole=True, stages=(Stage(max_len=LONGEST // 2, share=0.4), Stage(max_len=LONGEST, share=0.6)), workers=2
)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """(folder, how it went) of a run on whole documents that begins with another one's weights."""
    folder = tmp_path_factory.mktemp("tuned")
    return folder, trained(WHOLE, folder, train=TALKS, heldout=HELDOUT_TALKS, weights=new_model(5).state_dict())


def test_a_run_on_whole_documents_cuts_none_and_learns_what_counts(tuned):
    folder, run = tuned
    bos_id = CONFIG.bos_token_id
    for batch in run.batches:
        first_of_rows = batch.ids_T[list(batch.rows.starts[:-1])]
        assert (first_of_rows == bos_id).all() and int((batch.ids_T == bos_id).sum()) == batch.rows.num_sequences
        assert batch.rows.num_tokens <= 72
        # The first two targets of each document do not count.
        assert int((batch.weight_T == 0).sum()) == 2 * batch.rows.num_sequences
    metrics = metrics_of(folder)
    assert [line["max_len"] for line in metrics] == 4 * [LONGEST // 2] + 5 * [LONGEST]
    longest = [batch.rows.max_len for batch in run.batches]
    assert max(longest[:4]) <= LONGEST // 2 < max(longest[4:])
    assert metrics[-1]["tokens"] == sum(batch.rows.num_tokens for batch in run.batches) < 9 * 72


def test_a_run_begins_exactly_with_the_weights_it_is_given(tmp_path, monkeypatch):
    seen = {}

    def step(model, *_, **__):
        seen.update({name: tensor.clone() for name, tensor in model.state_dict().items()})
        raise Killed

    weights = new_model(5).state_dict()
    assert any(not torch.equal(value, weights[name]) for name, value in new_model(SHORT.seed).state_dict().items())
    console = Console(record=True, width=120, file=io.StringIO())
    with monkeypatch.context() as patch:
        patch.setattr(pretrain_file, "train_step", step)
        with pytest.raises(Killed):
            pretrain(SHORT, TRAIN, HELDOUT, TOKENIZER, tmp_path, about={}, console=console, weights=weights)
    assert seen.keys() == weights.keys()
    for name, value in seen.items():
        assert torch.equal(value, weights[name]), name
    want = score(new_model(5), excerpt(HELDOUT, SHORT.eval_tokens, 1024))
    assert f"held out before training: {want.loss:.3f} nats a token" in console.export_text()


def test_the_weights_that_were_given_stay_as_they_are(tmp_path):
    weights = new_model(5).state_dict()
    trained(replace(SHORT, length=Length(seconds=60, num_steps=3)), tmp_path, weights=weights)
    for name, value in new_model(5).state_dict().items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize("stop", [4, 7])
def test_a_run_that_began_with_weights_goes_on_with_its_own(tuned, tmp_path, stop):
    given = {"train": TALKS, "heldout": HELDOUT_TALKS, "weights": new_model(5).state_dict()}
    assert trained(WHOLE, tmp_path, at_step=stops_at(stop), **given).result.progress.step == stop
    assert trained(WHOLE, tmp_path, **given).made == 9 - stop
    assert_same_run(tmp_path, tuned[0])


def test_weights_of_another_model_are_refused_and_nothing_is_written(tmp_path):
    weights = new_model().state_dict()
    name = "language_model.lm_head.weight"
    less = {other: value for other, value in weights.items() if other != name}
    for wrong, message in (
        (less, f"weights: {name} is in the model alone"),
        ({**weights, "more": torch.zeros(1)}, "weights: more is in the weights alone"),
        ({**weights, name: torch.zeros(2, 3)}, rf"weights: {name}: wanted \(556, 32\), got \(2, 3\)"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            trained(SHORT, tmp_path, weights=wrong)
    assert not os.listdir(tmp_path)


def test_a_document_that_no_stage_would_have_is_refused(tmp_path):
    stages = (Stage(max_len=LONGEST - 1, share=1.0),)
    message = (
        f"^stages: the longest document has {LONGEST} tokens, wanted at most {LONGEST - 1}: it would never be read; "
    )
    with pytest.raises(ValueError, match=message):
        trained(replace(WHOLE, stages=stages), tmp_path, train=TALKS, heldout=HELDOUT_TALKS)
    assert not os.listdir(tmp_path)


def test_by_the_clock_a_run_has_stages(tmp_path):
    run = trained(replace(TWO_STAGES, length=Length(seconds=0.4)), tmp_path)
    lengths = [line["max_len"] for line in metrics_of(tmp_path)]
    assert lengths == sorted(lengths) and set(lengths) == {20, 40} and len(lengths) == run.made


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match="^tokenizer: 556 ids, but vocab_size is 1000$"):
        trained(replace(SHORT, model=replace(CONFIG, vocab_size=1000)), tmp_path)
    assert not os.listdir(tmp_path)


def test_a_step_in_parts_is_the_step_as_a_whole():
    whole = full_batch()
    stream, spans = stream_of(TEXTS[:8]), full_spans()
    parts = [
        replace(make_batch(stream, [span], "test"), weight_T=weight_T)
        for span, weight_T in zip(spans, whole.weight_T.split(40), strict=True)
    ]
    models = [new_model(), new_model()]
    want, got = (step_of(model, batches) for model, batches in zip(models, ([whole], parts), strict=True))
    assert got.loss == pytest.approx(want.loss, rel=1e-5)  # float32, sums in another order
    assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-4)
    assert (got.num_tokens, got.num_bytes, got.balance) == (want.num_tokens, want.num_bytes, want.balance)
    for layer, other in zip(models[0].moe_layers(), models[1].moe_layers(), strict=True):
        torch.testing.assert_close(
            layer.gate.e_score_correction_bias, other.gate.e_score_correction_bias, rtol=0, atol=1e-5
        )


def test_the_loss_is_the_weighted_mean():
    batch, model = full_batch(), new_model()
    hidden_TD, _ = model(batch.ids_T, batch.rows)
    nll_T = token_nll(hidden_TD.detach(), model.language_model.lm_head.weight, batch.targets_T)
    want = float((batch.weight_T * nll_T).sum() / batch.weight_T.sum())
    assert step_of(model, [batch]).loss == pytest.approx(want, rel=1e-5)


def test_targets_without_a_weight_take_no_part_and_a_batch_may_have_no_other():
    """Against the loss written down in one line, its gradient and all."""
    whole, model = full_batch(), new_model()
    weight_T = whole.weight_T.clone()
    weight_T[40:80] = 0
    weight_T[100:113] = 0
    hidden_TD, _ = model(whole.ids_T, whole.rows)
    nll_T = F.cross_entropy(model.head(hidden_TD), whole.targets_T, reduction="none")
    want = (weight_T * nll_T).sum() / weight_T.sum()
    want.backward()
    norm = torch.stack([weight.grad.norm() for weight in model.parameters() if weight.grad is not None]).norm()
    stream, spans = stream_of(TEXTS[:8]), full_spans()
    parts = [
        replace(make_batch(stream, [span], "test"), weight_T=part_T)
        for span, part_T in zip(spans, weight_T.split(40), strict=True)
    ]
    assert not parts[1].weight_T.any()
    for batches in ([replace(whole, weight_T=weight_T)], parts):
        result = step_of(new_model(), batches)
        assert result.loss == pytest.approx(want.item(), rel=1e-5)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)


def test_only_tokens_with_a_weight_balance_the_experts():
    batch, model = full_batch(), new_model()
    weight_T = torch.ones(160)
    weight_T[100:] = 0
    model.train()
    with torch.enable_grad():
        model(batch.ids_T, batch.rows)
    wanted = []
    for layer in model.moe_layers():
        bias_E = torch.zeros(CONFIG.moe.num_experts)
        quantile_balance_(bias_E, layer.take_scores()[0][:100], CONFIG.moe.num_experts_per_token)
        wanted.append(bias_E)
    step_of(model, [replace(batch, weight_T=weight_T)])
    for layer, want in zip(model.moe_layers(), wanted, strict=True):
        assert torch.equal(layer.gate.e_score_correction_bias, want) and want.abs().max() > 0


def test_a_step_without_weight_or_with_a_broken_loss_moves_nothing():
    stream = stream_of(TEXTS[:2])
    batch = make_batch(stream, pieces(stream, 40)[:1], "test")
    model = new_model()
    with pytest.raises(
        ValueError, match="^step: wanted tokens with a weight above 0, the weights of 1 batches sum to 0$"
    ):
        step_of(model, [replace(batch, weight_T=torch.zeros(40))])
    with torch.no_grad():
        model.language_model.lm_head.weight[0, 0] = torch.nan
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        FloatingPointError, match="^step: the loss is nan and the gradient's norm nan, wanted finite ones$"
    ):
        step_of(model, [batch])
    for name, value in model.state_dict().items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num())


def test_a_step_behind_a_broken_one_is_as_if_it_were_the_first():
    stream = stream_of(TEXTS[:2])
    batch = make_batch(stream, pieces(stream, 40)[:1], "test")
    model, other = new_model(), new_model()
    weight = model.language_model.model.norm.weight
    with torch.no_grad():
        weight[0] = torch.nan
    with pytest.raises(FloatingPointError):
        step_of(model, [batch])
    with torch.no_grad():
        weight[0] = 1.0
    step_of(model, [batch])
    step_of(other, [batch])
    for (name, got), want in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(got, want), name


def test_what_the_loss_does_not_read_is_refused():
    stream = stream_of(TEXTS[:2])
    batch = make_batch(stream, pieces(stream, 40)[:1], "test")
    with pytest.raises(ValueError, match="logprobs_T and advantage_T are not read by this loss"):
        step_of(new_model(), [replace(batch, advantage_T=torch.ones(40))])


def test_of_two_errors_the_first_is_told(tmp_path, monkeypatch):
    """A save that fails while the run ends with an error of its own does not stand in front of it."""

    def fails(*_):
        raise OSError("the save failed")

    def first(number):
        raise ValueError("the first")

    monkeypatch.setattr(pretrain_file.ResumeWriter, "finish", fails)
    with pytest.raises(ValueError, match="^the first$"):
        trained(SHORT, tmp_path / "one", at_step=first)
    with pytest.raises(OSError, match="^the save failed$"):
        trained(SHORT, tmp_path / "two")


def test_weights_that_are_not_finite_are_not_saved_over_those_that_are(tmp_path):
    """The step before the first loss that is none is applied and spoils them; no save behind it takes a point's place."""
    lost = replace(SHORT, adamw_lr=1e20, length=Length(seconds=60, num_steps=20), save_every_s=1e-6)
    for _ in range(2):  # gone on with, it says the same
        with pytest.raises(FloatingPointError, match="resume points, where there are any, are from before$"):
            trained(lost, tmp_path)
        assert load_resume_point(tmp_path).step == 1


def test_a_run_that_diverged_in_its_last_steps_says_so_and_writes_no_checkpoint(tmp_path):
    lost = replace(SHORT, adamw_lr=1e20, length=Length(seconds=60, num_steps=4))
    message = "^step 4: loss or gradients of the last 3 steps, and the loss on held-out text, are not finite, and no checkpoint"
    with pytest.raises(FloatingPointError, match=message):
        trained(lost, tmp_path)
    assert not (tmp_path / "model.safetensors").exists() and read_run(tmp_path)["finished"] is False


@pytest.mark.parametrize("layout", [None, [], "x", {"micro_tokens": "x"}, {"micro_tokens": 0}, {"micro_tokens": 1.5}])
def test_a_layout_that_is_none_is_named(tmp_path, layout):
    trained(SHORT, tmp_path, at_step=stops_at(2))
    update_run(tmp_path, layout=layout)
    with pytest.raises(ValueError, match=r"run\.json: layout: wanted an object with a number of micro_tokens, got "):
        trained(SHORT, tmp_path)
