import os
import stat
from collections import Counter
from pathlib import Path

import pytest

from trivium.data import source
from trivium.data.source import Document, fingerprint, folder_of_text, split_by_source, standard_library


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def document(source, num_bytes):
    return Document(source=source, path=f"{source}.py", text="x" * num_bytes)


def size(documents):
    return sum(document.num_bytes for document in documents)


# --- Reading


def test_the_standard_library_is_here_without_its_tests():
    reading = standard_library()
    paths = [document.path for document in reading.documents]
    assert {"ast.py", "json/decoder.py"} <= set(paths) and paths == sorted(paths)
    assert not [path for path in paths if {"test", "tests", "site-packages", "encodings"} & set(path.split("/"))]
    assert {document.source for document in reading.documents if document.path.startswith("json/")} == {"json"}
    assert [document.source for document in reading.documents if document.path == "ast.py"] == ["ast"]
    assert size(reading.documents) > 5_000_000
    assert set(reading.left_out) <= {"empty", "broken link", "link to a folder"}  # some __init__.py; Debian has links


def test_an_interpreter_without_its_source_is_refused(tmp_path, monkeypatch):
    write(tmp_path, {"python311.zip": b"PK\0", "test/test_ast.py": "import ast"})
    monkeypatch.setattr(source.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="^data: .* holds no file .*; wanted at least one file of UTF-8 text$"):
        standard_library()


def test_a_folder_gives_its_text_by_path_and_says_what_it_leaves_out(tmp_path):
    write(
        tmp_path,
        {
            "b.txt": "zwei",
            "a/deep/er.md": "ü",
            "a.txt": "\N{BYTE ORDER MARK}mark\N{BYTE ORDER MARK}",
            "a/.hidden": "no",
            ".git/config": "no",
            "picture.png": b"\x89PNG\0\0",
            "long.bin": b"x" * 100_000 + b"\0",
            "latin1.txt": "für".encode("latin-1"),
            "cut.txt": "für".encode()[:2],
            "utf16.txt": "für".encode("utf-16"),
            "nothing": "",
            "blank": " \n\t\n",
        },
    )
    reading = folder_of_text(tmp_path)
    assert [(document.source, document.path, document.text) for document in reading.documents] == [
        ("a", "a.txt", "mark\N{BYTE ORDER MARK}"),  # only the first is a mark
        ("a", "a/deep/er.md", "ü"),
        ("b", "b.txt", "zwei"),
    ]
    assert [document.num_bytes for document in reading.documents] == [7, 2, 4]
    assert reading.left_out == {
        "binary": ("long.bin", "picture.png", "utf16.txt"),
        "empty": ("blank", "nothing"),
        "not UTF-8": ("cut.txt", "latin1.txt"),
    }


def test_one_file_is_a_folder_of_one(tmp_path):
    write(tmp_path, {"input.txt": "text", "other.txt": "not asked for", "picture.png": b"\0"})
    (only,) = folder_of_text(tmp_path / "input.txt").documents
    assert (only.source, only.path, only.text) == ("input", "input.txt", "text")
    with pytest.raises(ValueError, match="^data: .*/picture.png is binary; wanted UTF-8 text$"):
        folder_of_text(tmp_path / "picture.png")


def test_a_folder_without_text_is_refused_and_says_what_it_holds(tmp_path):
    with pytest.raises(ValueError, match="^data: .* holds no file that is not hidden; wanted at least one file of"):
        folder_of_text(tmp_path)
    write(tmp_path, {"empty.txt": "", "one": b"\0", "two": b"\0", "latin1": b"\xfc", ".hidden": "text"})
    with pytest.raises(ValueError, match="^data: .* holds 2 binary, 1 empty, 1 not UTF-8; wanted at least one file"):
        folder_of_text(tmp_path)


def test_what_is_no_folder_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("none", "pipe"):
        with pytest.raises(ValueError, match=f"^data: .*/{name} is neither a folder nor a file, wanted a folder"):
            folder_of_text(tmp_path / name)


def test_links_and_special_files_neither_block_nor_loop(tmp_path):
    write(tmp_path, {"text.txt": "text", "folder/more.txt": "more"})
    os.mkfifo(tmp_path / "pipe")  # nobody writes into it: opening it would wait for ever
    (tmp_path / "device").symlink_to("/dev/zero")  # has no end
    (tmp_path / "round").symlink_to("round")
    (tmp_path / "dangling").symlink_to("none")
    (tmp_path / "folder/up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "linked.txt").symlink_to("folder/more.txt")
    reading = folder_of_text(tmp_path)
    assert [document.path for document in reading.documents] == ["folder/more.txt", "linked.txt", "text.txt"]
    assert reading.left_out == {
        "broken link": ("dangling", "round"),
        "link to a folder": ("folder/up",),
        "not a regular file": ("device", "pipe"),
    }


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError(13, "Permission denied"), "unreadable"),
        (OSError(5, "Input/output error"), "unreadable"),
        (FileNotFoundError(2, "No such file or directory"), "vanished"),
    ],
)
def test_a_file_that_cannot_be_read_is_left_out(tmp_path, monkeypatch, error, reason):
    write(tmp_path, {"gone.txt": "text", "here.txt": "text"})
    open_file = Path.open

    def open_but_one(path, *args, **kwargs):
        if path.name == "gone.txt":
            raise error
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_but_one)
    reading = folder_of_text(tmp_path)
    assert [document.path for document in reading.documents] == ["here.txt"]
    assert reading.left_out == {reason: ("gone.txt",)}


def test_a_file_that_vanishes_between_listing_and_reading_is_left_out(tmp_path, monkeypatch):
    write(tmp_path, {"a.txt": "text", "b.txt": "text"})
    is_regular = stat.S_ISREG

    def removes_the_other(mode):
        (tmp_path / "b.txt").unlink(missing_ok=True)
        return is_regular(mode)

    monkeypatch.setattr(source.stat, "S_ISREG", removes_the_other)
    monkeypatch.setattr(source, "_names_below", lambda *args: ["a.txt", "b.txt"])
    assert folder_of_text(tmp_path).left_out == {"vanished": ("b.txt",)}


@pytest.mark.parametrize(
    ("error", "reason"),
    [(PermissionError(13, "Permission denied"), "unreadable"), (FileNotFoundError(2, "No such file"), "vanished")],
)
def test_a_folder_that_cannot_be_listed_is_left_out(tmp_path, monkeypatch, error, reason):
    write(tmp_path, {"closed/a.txt": "text", "here.txt": "text"})
    list_folder = os.scandir

    def list_but_one(path):
        if os.fspath(path).endswith("closed"):
            error.filename = os.fspath(path)
            raise error
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", list_but_one)
    reading = folder_of_text(tmp_path)
    assert [document.path for document in reading.documents] == ["here.txt"]
    assert reading.left_out == {reason: ("closed",)}


def test_a_name_that_is_not_utf8_is_left_out(tmp_path):
    write(tmp_path, {"here.txt": "text"})
    try:
        (tmp_path / os.fsdecode(b"f\xfcr.txt")).write_text("text")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    assert folder_of_text(tmp_path).left_out == {"name not UTF-8": ("f\\udcfcr.txt",)}


# --- Holding out


def test_whole_sources_are_held_out_within_the_limit():
    documents = [document(f"module{idx}", 1000 + idx) for idx in range(40)]
    documents += [Document(source="module3", path="module3/more.py", text="y" * 500)]
    train, heldout = split_by_source(documents, 4000)
    assert not {document.source for document in train} & {document.source for document in heldout}
    assert sorted(train + heldout, key=lambda d: d.path) == sorted(documents, key=lambda d: d.path)
    assert 2500 < size(heldout) <= 4000  # less than one more module is left


def test_the_choice_depends_on_names_alone():
    documents = [document(f"module{idx}", 1000) for idx in range(40)]
    held = {d.source for d in split_by_source(documents, 3000)[1]}
    assert len(held) == 3
    assert {d.source for d in split_by_source(documents[::-1], 3000)[1]} == held


def test_at_most_a_tenth_and_a_quarter_of_a_mebibyte_are_held_out():
    assert size(split_by_source([document(f"module{idx}", 1000) for idx in range(30)])[1]) == 3000
    assert size(split_by_source([document(f"module{idx}", 128 * 1024) for idx in range(30)])[1]) == 256 * 1024


def test_of_one_big_source_whole_files_are_held_out():
    documents = [Document(source="src", path=f"src/{idx}.py", text="x" * 1000) for idx in range(30)]
    train, heldout = split_by_source(documents)
    assert len(heldout) == 3 and Counter(train + heldout) == Counter(documents)


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_of_one_big_file_the_last_part_is_held_out_from_a_line_end_on(line_end):
    text = "".join(f"line {idx:05d}{line_end}" for idx in range(10_000))
    small = Document(source="README", path="README", text="a few words, too few to measure anything by\n")
    train, heldout = split_by_source([Document(source="input", path="input.txt", text=text), small])
    assert [(document.source, document.path) for document in train] == [("input", "input.txt"), ("README", "README")]
    assert [(document.source, document.path) for document in heldout] == [("input", "input.txt")]
    assert train[0].text + heldout[0].text == text and train[1] is small
    assert heldout[0].text.startswith("line 0900")  # a tenth of 10,000 lines
    assert 0 <= size([*train, *heldout]) // 10 - size(heldout) < 12 + len(line_end)


def test_of_two_equal_files_the_first_by_path_is_cut():
    documents = [Document(source=name, path=f"{name}.txt", text=f"{name} says\n" * 10_000) for name in ("b", "a")]
    train, heldout = split_by_source(documents)
    assert [document.path for document in heldout] == ["a.txt"]
    assert train[0] == documents[0] and train[1].text + heldout[0].text == documents[1].text
    assert heldout[0].text == "a says\n" * 1999  # a tenth are 2000 lines, and the first of them begins at the cut


def test_a_file_without_line_ends_is_cut_between_characters():
    text = (
        "€" * 10_001
    )  # three bytes each; a tenth of 30,003 bytes falls between two characters, less one byte does not
    for heldout_bytes in (2998, 2999, 3000):
        (first,), (last,) = split_by_source([Document(source="a", path="a", text=text)], heldout_bytes)
        assert first.text + last.text == text and 0 <= heldout_bytes - last.num_bytes < 3


def test_too_little_text_is_refused_with_how_much_is_wanted():
    split_by_source([document("book", 10_240)])
    with pytest.raises(ValueError, match="^data: 10,239 bytes of text, wanted at least 10,240, of which a tenth is "):
        split_by_source([document("book", 10_239)])


def test_the_fingerprint_sees_names_and_texts_and_where_they_end():
    def of(*pairs):
        return fingerprint(Document(source="s", path=path, text=text) for path, text in pairs)

    assert of(("a", "bc"), ("d", "")) == of(("a", "bc"), ("d", ""))
    assert len({of(("a", "bc")), of(("ab", "c")), of(("a", "bd")), of(("a", "b"), ("c", ""))}) == 4
