"""A run's folder: one run, one writer, and nothing finished is written to again."""

import json
import os
import subprocess
import sys

import pytest

from trivium.train.run_folder import RUN, open_run, read_run, update_run, write_json, write_text

SAME = {"recipe": "tiny", "arguments": {"lr": 0.1, "betas": (0.9, 0.95)}, "data": {"fingerprint": "abc"}}

HOLDS_THE_LOCK = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(handle, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def opened(root, name="mine", *, exact=True, same=SAME):
    """What `open_run` gives and says."""
    lines = []
    with open_run(root, name, exact=exact, same=same, say=lines.append) as (folder, goes_on):
        return folder.name, goes_on, lines


def begun(root, name="mine", **fields):
    folder = root / name
    folder.mkdir(parents=True)
    update_run(folder, **{**SAME, "finished": False, **fields})
    return folder


def test_a_new_run_has_a_new_folder(tmp_path):
    assert opened(tmp_path / "some" / "runs") == ("mine", False, [])


@pytest.mark.parametrize("exact", [True, False])
def test_an_unfinished_run_of_the_same_arguments_goes_on(tmp_path, exact):
    begun(tmp_path, data={"fingerprint": "abc", "files": 3}, command=["what", "was", "typed"])  # others may differ
    assert opened(tmp_path, exact=exact) == ("mine", True, [])


def test_an_empty_folder_is_as_good_as_none(tmp_path):
    (tmp_path / "mine").mkdir()
    assert opened(tmp_path) == ("mine", False, [])


@pytest.mark.parametrize("finished", [{"finished": True}, {"finished": None}, {"finished": 0}])
def test_a_finished_run_is_never_written_to(tmp_path, finished):
    folder = begun(tmp_path, **finished)
    before = (folder / RUN).read_bytes()
    with pytest.raises(ValueError) as raised:
        opened(tmp_path)
    assert str(raised.value) == (f"{folder}: holds a finished run, which is never overwritten; choose another name")
    begun(tmp_path, "mine-2", **finished)
    assert opened(tmp_path, exact=False) == ("mine-3", False, [])
    assert (folder / RUN).read_bytes() == before


def test_a_run_that_says_nothing_of_its_end_is_taken_as_finished(tmp_path):
    write_json(tmp_path / "run.json", SAME)  # as runs were written before there was a "finished"
    with pytest.raises(ValueError, match="holds a finished run"):
        opened(tmp_path.parent, tmp_path.name)


@pytest.mark.parametrize(
    ("there", "why"),
    [
        ({"recipe": "other"}, 'recipe: "other" there, "tiny" here'),
        ({"arguments": {"lr": 0.2, "betas": [0.9, 0.95]}}, "arguments.lr: 0.2 there, 0.1 here"),
        ({"arguments": {"lr": 0.1, "betas": [0.9]}}, "arguments.betas: [0.9] there, [0.9, 0.95] here"),
        ({"arguments": {"lr": 0.1}}, "arguments.betas: nothing there, [0.9, 0.95] here"),
        ({"data": {"fingerprint": "abd"}}, 'data.fingerprint: "abd" there, "abc" here'),
        ({"data": None}, 'data: null there, {"fingerprint": "abc"} here'),
    ],
)
def test_an_unfinished_run_of_other_arguments_is_left_alone(tmp_path, there, why):
    folder = begun(tmp_path, **there)
    why = f"{folder}: holds an unfinished run with another {why}"
    with pytest.raises(ValueError) as raised:
        opened(tmp_path)
    assert str(raised.value) == f"{why}; choose another name"
    assert opened(tmp_path, exact=False) == ("mine-2", False, [f"{why}; left alone"])


def test_the_first_that_goes_on_is_taken_past_all_that_do_not(tmp_path):
    begun(tmp_path, finished=True)
    (tmp_path / "mine-2").write_text("")
    begun(tmp_path, "mine-3", recipe="other")
    begun(tmp_path, "mine-4")
    name, goes_on, lines = opened(tmp_path, exact=False)
    assert (name, goes_on, len(lines)) == ("mine-4", True, 1) and "mine-3: " in lines[0]


@pytest.mark.parametrize(
    "names",
    [
        ("heldout.jsonl.part",),
        ("heldout.jsonl", "tiktoken.model", "tokenizer_config.json.part"),
        ("heldout.jsonl", "tiktoken.model", "tokenizer_config.json", "run.json.part"),
    ],
)
def test_what_is_left_of_a_run_killed_before_it_had_begun_is_begun_anew(tmp_path, names):
    (tmp_path / "mine").mkdir()
    for name in names:
        (tmp_path / "mine" / name).write_text("half of it")
    assert opened(tmp_path) == ("mine", False, [])


def test_a_tokenizer_alone_is_no_beginning_of_a_run(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tiktoken.model").write_text("somebody's own")
    with pytest.raises(ValueError, match="mine: is there already and holds no run; choose another name$"):
        opened(tmp_path)
    assert (tmp_path / "mine" / "tiktoken.model").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="mine: is there already and holds no run; choose another name$"):
        opened(tmp_path)
    assert opened(tmp_path, exact=False)[0] == "mine-2"
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_a_file_of_that_name_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("years of work")
    with pytest.raises(ValueError, match="mine: is a file; choose another name$"):
        opened(tmp_path)
    assert opened(tmp_path, exact=False)[0] == "mine-2"


def test_a_folder_of_runs_that_cannot_be_one_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file/runs: cannot be made a folder of runs: Not a directory$"):
        opened(tmp_path / "file" / "runs")
    with pytest.raises(ValueError, match="cannot be made a run's folder: File name too long$"):
        opened(tmp_path, "n" * 300)


def test_another_process_keeps_its_run_until_it_ends_however_it_does(tmp_path):
    folder = begun(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_LOCK, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="mine: another process is writing to it; choose another name$"):
            opened(tmp_path)
        name, goes_on, lines = opened(tmp_path, exact=False)
        assert (name, goes_on) == ("mine-2", False)
        assert lines == [f"{folder}: another process is writing to it; left alone"]
        other.kill()
        other.wait()
    assert opened(tmp_path)[1]


def test_the_lock_is_held_in_the_block_and_given_back_behind_it(tmp_path):
    for _ in range(2):
        with open_run(tmp_path, "mine", exact=True, same=SAME), pytest.raises(ValueError, match="another process is"):
            opened(tmp_path)
    with pytest.raises(RuntimeError), open_run(tmp_path, "mine", exact=True, same=SAME) as (folder, _):
        update_run(folder, **SAME, finished=False)
        raise RuntimeError
    assert opened(tmp_path) == ("mine", True, [])


@pytest.mark.parametrize("error", [ValueError("no text"), KeyboardInterrupt()])
def test_a_folder_without_a_run_goes_away_when_it_fails(tmp_path, error):
    with pytest.raises(type(error)), open_run(tmp_path, "mine", exact=True, same=SAME) as (folder, _):
        (folder / "heldout.jsonl").write_text("{}\n")  # what comes before run.json
        raise error
    assert not folder.exists()


def test_a_run_that_fails_keeps_its_folder(tmp_path):
    folder = begun(tmp_path)
    with pytest.raises(KeyboardInterrupt), open_run(tmp_path, "mine", exact=True, same=SAME):
        raise KeyboardInterrupt
    assert read_run(folder)["recipe"] == "tiny"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a/", "/a", ".hidden"])
def test_a_name_is_that_of_one_folder(name, tmp_path):
    with pytest.raises(ValueError, match="^name: wanted the name of one folder, got "):
        opened(tmp_path, name)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no JSON: "),
        (b"{", "no JSON: "),
        (b"\xff", "no JSON: "),
        (b"[" * 100_000, "no JSON: "),
        (b"[]", "wanted a JSON object, got list"),
    ],
)
def test_a_broken_run_json_is_one_line_and_no_lock_is_left(tmp_path, content, message):
    folder = begun(tmp_path)
    (folder / RUN).write_bytes(content)
    for exact in (True, False):
        with pytest.raises(ValueError) as raised:
            opened(tmp_path, exact=exact)
        assert str(raised.value).startswith(f"{folder}/run.json: {message}")
    write_json(folder / RUN, {**SAME, "finished": False})
    assert opened(tmp_path)[1]


def test_a_run_json_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "mine" / RUN).mkdir(parents=True)
    with pytest.raises(ValueError, match="mine/run.json: cannot be read: Is a directory$"):
        opened(tmp_path)
    with pytest.raises(ValueError, match="run.json: cannot be read: No such file or directory$"):
        read_run(tmp_path)


def test_fields_are_set_one_by_one(tmp_path):
    update_run(tmp_path, a=1, b="ü")
    update_run(tmp_path, b=2, c=None)
    assert read_run(tmp_path) == json.loads((tmp_path / RUN).read_text()) == {"a": 1, "b": 2, "c": None}


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_json(path, {"steps": 1})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as raised:
        write_text(path, "half")
    assert str(raised.value) == f"{path}: cannot be written: No space left on device; what was there is kept"
    assert path.read_text() == '{\n  "steps": 1\n}\n'
    assert os.listdir(tmp_path) == ["run.json"]
