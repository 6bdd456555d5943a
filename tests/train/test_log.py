"""metrics.jsonl is a line a step, layers.jsonl one a look, whatever became of the process; the view says what people ask."""

import io
import json
import math
import resource
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from trivium.train.log import (
    Metrics,
    NoLog,
    RunLog,
    clock_time,
    curve,
    cut_back,
    cut_back_layers,
    read_layers,
    whole_lines,
)
from trivium.train.probe import GradNorms, Layers

METRICS = Metrics(
    step=7,
    tokens=70,
    time_s=3.5,
    loss=5.4321,
    lr=0.1,
    grad_norm=1.0,
    tokens_per_s=2114.0,
    heldout_loss=4.0,
    heldout_bpb=1.811,
    max_vio=0.4,
    idle_experts=3,
    out_of_range=0,
    clipped_heads=0,
    skipped=0,
    reason=None,
    max_len=64,
)
SKIPPED = replace(
    METRICS,
    loss=math.nan,
    grad_norm=math.inf,
    heldout_loss=None,
    heldout_bpb=None,
    max_vio=None,
    idle_experts=None,
    out_of_range=None,
    skipped=2,
    reason="the loss is nan",
)
WITHOUT = {"heldout_loss": None, "heldout_bpb": None}


def line_of(step):
    return json.dumps({"step": step, "loss": step / 7}) + "\n"


def lines_to(step):
    return "".join(map(line_of, range(1, step + 1)))


def layers_of(step):
    return Layers(
        step=step,
        tokens=10 * step,
        grad_norm=GradNorms(layers=(1.0, math.nan), embedding=0.5, head=2.0, rest=0.0),
        mixer_read=((1.0,), (0.25, 0.75)),
        ffn_read=((0.5, 0.5), (0.125, 0.875)),
        output_read=(0.5, 0.5),
        half_life_tokens=((7.0, 70.0), None),
        stream_rms=(1.0, 2.0),
        mixer_rms=(0.5, 0.25),
        ffn_rms=(0.75, 1.5),
    )


def layers_lines(*steps):
    return "".join(json.dumps(layers_of(step).to_json()) + "\n" for step in steps)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "metrics.jsonl"


@given(num_lines=st.integers(0, 12), torn=st.integers(0, 40), data=st.data())
def test_what_is_kept_is_the_lines_of_the_steps_that_were_saved(path, num_lines, torn, data):
    step = data.draw(st.integers(0, num_lines))
    path.write_text(lines_to(num_lines) + line_of(num_lines + 1)[:torn])
    assert cut_back(path, step) == [done / 7 for done in range(1, step + 1)]
    assert path.read_text() == lines_to(step)


def test_a_last_line_that_lacks_its_end_alone_is_mended(path):
    path.write_text(lines_to(3)[:-1])
    assert len(cut_back(path, 3)) == 3 and path.read_text() == lines_to(3)


def test_where_nothing_was_written_nothing_is_wanted(tmp_path):
    assert cut_back(tmp_path / "metrics.jsonl", 0) == []
    with pytest.raises(ValueError, match="metrics.jsonl: wanted the lines of steps 1 to 2, got 0 others$"):
        cut_back(tmp_path / "metrics.jsonl", 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lines_to(4), "wanted the lines of steps 1 to 5, got 4 others"),
        (lines_to(6)[len(line_of(1)) :], "wanted the lines of steps 1 to 5, got 5 others"),  # the first is lost
        (lines_to(3) + line_of(5) + line_of(4), "wanted the lines of steps 1 to 5, got 5 others"),
        (lines_to(4) + line_of(5)[:9], "wanted a line a step: "),
        (lines_to(4) + "\0\0\0\0\n", "wanted a line a step: "),
        (lines_to(4) + "5\n", "wanted a line a step: "),
        (lines_to(4) + '{"step": 5}\n', "wanted a line a step: "),
        (lines_to(4) + '{"step": 5, "loss": "null"}\n', "wanted a line a step: "),
        (lines_to(4).encode() + b"\xff\n", "wanted a line a step: "),
    ],
)
def test_a_file_that_does_not_fit_is_refused_and_left(tmp_path, content, message):
    path = tmp_path / "metrics.jsonl"
    content = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(content)
    with pytest.raises(ValueError) as raised:
        cut_back(path, 5)
    assert str(raised.value).startswith(f"{path}: {message}")
    assert path.read_bytes() == content


def test_a_log_goes_on_behind_the_step_it_is_given(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines_to(9))
    with RunLog(path, Console(quiet=True), step=6) as log:
        log.write(METRICS, None, None)
        log.sync()
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 8))


def test_a_skipped_step_is_a_line_of_json_and_its_loss_is_not_known(tmp_path):
    path = tmp_path / "metrics.jsonl"
    finite = replace(SKIPPED, step=3, loss=900.0, reason="the loss is 900, over 12")
    with RunLog(path, Console(quiet=True)) as log:
        for metrics in (replace(METRICS, step=1), replace(SKIPPED, step=2), finite):
            log.write(metrics, None, None)
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [line["loss"] for line in lines] == [5.4321, None, 900.0]  # what it was is kept
    assert [line["reason"] for line in lines] == [None, "the loss is nan", "the loss is 900, over 12"]
    assert (lines[1]["grad_norm"], lines[1]["max_vio"], lines[1]["skipped"]) == (None, None, 2)
    losses = cut_back(path, 3)
    assert losses[0] == 5.4321 and all(map(math.isnan, losses[1:]))  # but it would bend the curve


def test_looks_behind_the_resumed_step_are_cut_off(tmp_path):
    path = tmp_path / "layers.jsonl"
    (tmp_path / "metrics.jsonl").write_text(lines_to(9))
    for content, want in (
        (layers_lines(2, 4, 6, 8), (2, 4, 6)),
        (layers_lines(2, 4), (2, 4)),
        (layers_lines(7, 8), ()),
        ("", ()),
        (layers_lines(2, 4)[:-1], (2, 4)),  # mended
        (layers_lines(2, 4) + layers_lines(6)[:40], (2, 4)),
        # What follows a broken line is lost: a gauge, and no reason for a run not to go on.
        (layers_lines(2) + "\0\0\n" + layers_lines(4), (2,)),
    ):
        path.write_text(content)
        with RunLog(tmp_path / "metrics.jsonl", Console(quiet=True), step=6) as log:
            assert path.read_text() == layers_lines(*want)
            log.write_layers(layers_of(7))
        assert path.read_text() == layers_lines(*want, 7)
        (tmp_path / "metrics.jsonl").write_text(lines_to(9))


def test_a_run_that_never_looked_has_no_file_of_looks(tmp_path):
    with RunLog(tmp_path / "metrics.jsonl", Console(quiet=True)) as log:
        log.write(METRICS, None, None)
        log.sync()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "broken", [layers_lines(2), layers_lines(1), "[" * 100_000 + "\n", '{"step": ' + "9" * 5000 + "}\n"]
)
def test_a_line_of_layers_that_is_broken_or_comes_twice_is_cut_off(tmp_path, broken):
    """A run goes on without it, also to its end, where the file is drawn."""
    path = tmp_path / "layers.jsonl"
    path.write_text(layers_lines(2) + broken + layers_lines(5))
    cut_back_layers(path, 9)
    assert [layers.step for layers in read_layers(path)] == [2]


def test_layers_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "layers.jsonl"
    path.write_text(layers_lines(2, 9) + layers_lines(11)[:50])  # of a run under way
    found = read_layers(path)
    assert [layers.step for layers in found] == [2, 9]
    assert found[1].ffn_read == layers_of(9).ffn_read and math.isnan(found[1].grad_norm.layers[1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (layers_lines(2) + "{}\n", "line 2: step is missing"),
        (layers_lines(2, 2), "line 2: step: wanted one behind 2, got 2"),
        (layers_lines(3, 2), "line 2: step: wanted one behind 3, got 2"),
        ("{\n" + layers_lines(2), "line 1: Expecting property name"),
    ],
)
def test_a_broken_look_is_named(tmp_path, content, message):
    path = tmp_path / "layers.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError) as raised:
        read_layers(path)
    assert str(raised.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("text", "want"),
    [("", []), ("{", []), ("1\n2", ["1", "2"]), ("1\n2\n", ["1", "2"]), ("1\n{", ["1"]), ("1\n\n{", ["1", ""])],
)
def test_only_a_last_line_may_lack_its_end(tmp_path, text, want):
    (tmp_path / "a.jsonl").write_text(text)
    assert whole_lines(tmp_path / "a.jsonl") == want


def test_the_other_processes_of_a_run_write_nothing_and_say_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with NoLog() as log:
        log.write(METRICS, 90, 1.0)
        log.write_layers(layers_of(7))
        log.sync()
    assert not list(tmp_path.iterdir()) and capsys.readouterr() == ("", "")
    public = {name for name, member in vars(RunLog).items() if callable(member) and not name.startswith("_")}
    assert public <= set(vars(NoLog))  # none falls through to a log that was never opened


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = RunLog(path, Console(quiet=True))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(OSError) as raised, log:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        try:
            log.write(METRICS, None, None)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(raised.value) == f"{path}: cannot be written: File too large"


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_a_line_is_printed_every_15_seconds_and_with_each_held_out_figure(tmp_path):
    console = Console(record=True, width=40, force_terminal=False, file=io.StringIO())
    clock = Clock()
    plain = Metrics(**{**vars(METRICS), **WITHOUT})
    with RunLog(tmp_path / "metrics.jsonl", console, clock=clock) as log:
        for clock.now_s, metrics in ((5, plain), (14, METRICS), (28, plain), (30, plain), (40, plain)):
            log.write(metrics, 90, 134.2)
    line = (
        "step 7 of 90 · loss 5.432 · 2,114 tokens/s · held-out 1.811 bits/byte · "
        "busiest expert 1.40 × the mean, idle 3 · 2:14 left\n"
    )
    assert console.export_text() == 2 * line  # at 14 and at 30


def test_a_line_says_only_what_is_known(tmp_path):
    console = Console(record=True, width=40, force_terminal=False, file=io.StringIO())
    clock = Clock()
    with RunLog(tmp_path / "metrics.jsonl", console, clock=clock) as log:
        clock.now_s = 15
        log.write(Metrics(**{**vars(METRICS), **WITHOUT}), None, None)
    assert console.export_text() == ("step 7 · loss 5.432 · 2,114 tokens/s · busiest expert 1.40 × the mean, idle 3\n")


def test_a_skipped_step_is_said_at_once(tmp_path):
    console = Console(record=True, width=40, force_terminal=False, file=io.StringIO())
    with RunLog(tmp_path / "metrics.jsonl", console, clock=Clock()) as log:
        log.write(SKIPPED, 90, None)
    assert console.export_text() == ("step 7 of 90 · skipped: the loss is nan · 2,114 tokens/s · skipped so far 2\n")


@pytest.mark.parametrize(
    ("metrics", "num_steps", "left_s", "wanted"),
    [
        (
            METRICS,
            90,
            61.0,
            ("7 of 90 · 1:01 left", "1.811 bits/byte (gzip -9: 1.9)", "1.40 × the mean, idle 3", "▁▁██"),
        ),
        (Metrics(**{**vars(METRICS), **WITHOUT}), None, None, ("7, timing the first steps", "not scored yet")),
        (SKIPPED, 90, None, ("nan nats a token", "2, the last: the loss is nan", "▁▁█ ")),
        (replace(METRICS, skipped=4), 90, None, ("skipped   4 ",)),  # of the process before this one
    ],
)
def test_the_view_says_how_it_goes(tmp_path, metrics, num_steps, left_s, wanted):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in ((1, 1), (2, 1), (3, 5.4321)))
    )
    console = Console(record=True, width=100, force_terminal=True, file=io.StringIO())
    with RunLog(path, console, step=3, yardstick="gzip -9: 1.9") as log:
        log.write(metrics, num_steps, left_s)
    out = console.export_text()
    for text in wanted:
        assert text in out


@pytest.mark.parametrize(
    ("values", "width", "want"),
    [
        ([], 5, ""),
        ([3.0], 5, "▁"),
        ([2.0, 2.0], 5, "▁▁"),
        ([7, 6, 5, 4, 3, 2, 1, 0], 8, "█▇▆▅▄▃▂▁"),
        ([8, 6, 1, 0, 0, 0], 2, "█▁"),  # means 5 and 0
        ([1, 0, 0, 7, 7], 2, "▁█"),  # 2 values, then 3
        ([1, math.nan, 8], 5, "▁ █"),
        ([1, math.nan, math.inf, 8, 8, -math.inf], 2, "▁█"),  # means of what is finite
        ([math.nan, math.inf], 5, "  "),
    ],
)
def test_a_curve_is_of_the_means_of_its_parts(values, width, want):
    assert curve(values, width) == want


@pytest.mark.parametrize(
    ("seconds", "want"), [(134.2, "2:14"), (59.6, "1:00"), (0.2, "0:00"), (-3.0, "0:00"), (3725, "62:05")]
)
def test_clock_time(seconds, want):
    assert clock_time(seconds) == want


# --- TensorBoard ---------------------------------------------------------------------------------------------------


def board(folder):
    """{tag: {step: value}} as TensorBoard would show it."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_every_number_of_the_steps_that_count(tmp_path):
    pytest.importorskip("tensorboard")
    path = tmp_path / "metrics.jsonl"
    for first, last, resumed in ((1, 5, 0), (4, 6, 3)):  # steps 4 and 5 of the first process were never saved
        with RunLog(path, Console(quiet=True), step=resumed, tensorboard=True) as log:
            for step in range(first, last + 1):
                log.write(replace(METRICS, step=step, loss=100.0 * first + step), None, None)
            log.write(replace(SKIPPED, step=last + 1), None, None)
            log.sync()
    shown = board(tmp_path / "tensorboard")
    assert shown["loss"] == {1: 101, 2: 102, 3: 103, 4: 404, 5: 405, 6: 406}
    assert shown["skipped"] == {**dict.fromkeys(range(1, 7), 0), 7: 2}
    numbers = {name for name, value in METRICS.to_json().items() if value is not None}
    assert set(shown) == numbers - {"step"}


def test_without_its_package_tensorboard_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines_to(9))
    with pytest.raises(ValueError, match=r"^tensorboard: .* pip install trivium\[tensorboard\]$"):
        RunLog(path, Console(quiet=True), step=6, tensorboard=True)
    assert path.read_text() == lines_to(9)  # nothing was touched
