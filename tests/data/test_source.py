import pytest

from trivium.data.source import Document, fingerprint, folder_of_text, split_by_source, standard_library


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def document(source, num_bytes):
    return Document(source=source, path=f"{source}.py", text="x" * num_bytes)


def test_the_standard_library_is_here_without_its_tests():
    documents = standard_library()
    paths = {document.path for document in documents}
    assert {"ast.py", "json/decoder.py"} <= paths
    assert not [path for path in paths if {"test", "tests", "site-packages"} & set(path.split("/"))]
    assert {document.source for document in documents if document.path.startswith("json/")} == {"json"}
    assert [document.source for document in documents if document.path == "ast.py"] == ["ast"]
    assert sum(document.num_bytes for document in documents) > 5_000_000


def test_a_folder_gives_its_text_by_path_and_leaves_out_the_rest(tmp_path):
    write(
        tmp_path,
        {
            "b.txt": "zwei",
            "a/deep/er.md": "ü",
            "a/.hidden": "no",
            ".git/config": "no",
            "picture.png": b"\x89PNG\0\0",
            "latin1.txt": "für".encode("latin-1"),
        },
    )
    got = folder_of_text(tmp_path)
    assert [(document.source, document.path, document.text) for document in got] == [
        ("a", "a/deep/er.md", "ü"),
        ("b", "b.txt", "zwei"),
    ]
    assert got[0].num_bytes == 2


def test_a_folder_without_text_is_refused(tmp_path):
    write(tmp_path, {"empty.txt": "", "binary": b"\0"})
    with pytest.raises(ValueError, match="^data: .* holds no file of UTF-8 text$"):
        folder_of_text(tmp_path)
    with pytest.raises(ValueError, match="^data: .*/none is not a folder$"):
        folder_of_text(tmp_path / "none")


def test_whole_sources_are_held_out_within_the_limit():
    documents = [document(f"module{idx}", 100 + idx) for idx in range(40)]
    documents += [Document(source="module3", path="module3/more.py", text="y" * 50)]
    train, heldout = split_by_source(documents, 400)
    assert not {document.source for document in train} & {document.source for document in heldout}
    assert sorted(train + heldout, key=lambda d: d.path) == sorted(documents, key=lambda d: d.path)
    assert 250 < sum(document.num_bytes for document in heldout) <= 400  # less than one more module is left


def test_the_choice_depends_on_names_alone():
    documents = [document(f"module{idx}", 100) for idx in range(40)]
    held = {d.source for d in split_by_source(documents, 300)[1]}
    assert {d.source for d in split_by_source(documents[::-1], 300)[1]} == held


def test_at_most_a_tenth_is_held_out():
    _, heldout = split_by_source([document(f"module{idx}", 10) for idx in range(30)])
    assert sum(document.num_bytes for document in heldout) == 30


def test_one_source_cannot_be_split():
    with pytest.raises(
        ValueError, match="^data: nothing to hold out: none of the 1 top-level names has at most 10 bytes"
    ):
        split_by_source([document("book", 100)])


def test_the_fingerprint_sees_names_and_texts_and_where_they_end():
    def of(*pairs):
        return fingerprint(Document(source="s", path=path, text=text) for path, text in pairs)

    assert of(("a", "bc"), ("d", "")) == of(("a", "bc"), ("d", ""))
    assert len({of(("a", "bc")), of(("ab", "c")), of(("a", "bd")), of(("a", "b"), ("c", ""))}) == 4
