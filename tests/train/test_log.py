"""metrics.jsonl is a line a step, whatever became of the process; the view says what people ask."""

import io
import json
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from trivium.train.log import Metrics, RunLog, clock_time, curve, cut_back

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
)
WITHOUT = {"heldout_loss": None, "heldout_bpb": None}


def line_of(step):
    return json.dumps({"step": step, "loss": step / 7}) + "\n"


def lines_to(step):
    return "".join(map(line_of, range(1, step + 1)))


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
        (lines_to(4) + '{"step": 5, "loss": null}\n', "wanted a line a step: "),
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
    ],
)
def test_a_curve_is_of_the_means_of_its_parts(values, width, want):
    assert curve(values, width) == want


@pytest.mark.parametrize(
    ("seconds", "want"), [(134.2, "2:14"), (59.6, "1:00"), (0.2, "0:00"), (-3.0, "0:00"), (3725, "62:05")]
)
def test_clock_time(seconds, want):
    assert clock_time(seconds) == want
