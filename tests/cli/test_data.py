"""`trivium data chat`: a file of conversations made ready, and what is wrong with it by file and line."""

import json

import pytest

from tests.talks import plain, tokenizer_of, with_tool, write_jsonl
from trivium import cli
from trivium.data.chat import num_counted, open_chat

TOKENIZER = tokenizer_of(300)


def main(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main([str(argument) for argument in arguments])
    return exit_.value.code, *capsys.readouterr()


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TOKENIZER.save(tmp_path / "run")
    write_jsonl(tmp_path / "talk.jsonl", [*(plain(number) for number in range(9)), with_tool(2, 3)])
    return tmp_path


def test_a_file_becomes_a_folder_beside_it(place, capsys):
    code, out, err = main(capsys, "data", "chat", "talk.jsonl", "--run", "run")
    assert (code, err) == (0, "")
    streams = open_chat(place / "talk", TOKENIZER)
    lengths = (streams.train.starts[1:] - streams.train.starts[:-1]).tolist()
    assert len(lengths) == 9
    num_counts = num_counted(streams.train)
    assert out.splitlines()[-3:] == [
        "9 conversations to learn from, 1 held out",
        f"{sum(lengths):,} tokens, of which the assistant writes {num_counts:,}; the longest conversation has {max(lengths)}",
        "written to talk",
    ]
    code, out, _ = main(capsys, "data", "chat", "talk.jsonl", "--run", "run")
    assert code == 0 and out.count("tokens are there already") == 2


@pytest.mark.parametrize("out", ["ready", ".", "deep/down"])
def test_the_folder_may_be_any(place, capsys, out):
    code, said, err = main(capsys, "data", "chat", "talk.jsonl", "--run", "run", "--out", out)
    assert (code, err) == (0, "") and f"written to {out}\n" in said
    assert open_chat(place / out, TOKENIZER).train.manifest.num_documents == 9
    assert not (place / "talk").exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([plain(1), plain(2), {}], "talk.jsonl: line 3: messages: missing"),
        ([plain(1), plain(1)], "data: wanted at least 2 different conversations, got 1"),
        ([], "data: wanted at least 2 different conversations, got 0"),
    ],
)
def test_what_cannot_be_made_ready_is_one_line_and_no_folder(place, capsys, lines, message):
    write_jsonl(place / "talk.jsonl", lines)
    code, out, err = main(capsys, "data", "chat", "talk.jsonl", "--run", "run")
    assert (code, out) == (1, "") and err.startswith(f"error: {message}") and err.count("\n") == 1
    assert not (place / "talk").exists()


def test_a_file_or_a_tokenizer_that_is_not_there_is_one_line(place, capsys):
    for arguments, message in (
        (("none.jsonl", "--run", "run"), "error: none.jsonl: cannot be read: No such file or directory\n"),
        (("talk.jsonl", "--run", "nowhere"), "error: nowhere/tiktoken.model"),
    ):
        code, out, err = main(capsys, "data", "chat", *arguments)
        assert (code, out) == (1, "") and err.startswith(message) and err.count("\n") == 1
    assert main(capsys, "data", "chat", "talk.jsonl")[0] == 2  # whose tokenizer?
    assert json.loads((place / "talk.jsonl").read_text().splitlines()[0]) == plain(0)
