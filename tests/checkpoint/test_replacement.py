"""Several files replaced as one: stopped anywhere, a folder shows all of the old files or all of the new."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from trivium.checkpoint.replacement import Folder, Replacement

OLD = {"config.json": b"old", "model-1.safetensors": b"old 1", "model-2.safetensors": b"old 2"}
OLD |= {"model.safetensors.index.json": b"old index"}
NEW = {"model-1.safetensors": b"new 1", "config.json": b"new", "model.safetensors": b"new single"}
KEPT = {"notes.md": b"not ours"}


def save(folder, files, removed=()):
    with Replacement(folder) as new:
        for name, content in files.items():
            new.write(name, lambda file, content=content: file.write(content))
        for name in removed:
            new.remove(name)


def seen(folder):
    """The files as a reader sees them."""
    where = Folder.at(folder)
    names = {name.removesuffix(".saving") for name in os.listdir(folder)} - {"saving.json"}
    return {name: where.file(name).read_bytes() for name in names if where.has(name)}


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "run", {**OLD, **KEPT})
    return tmp_path / "run"


STALE = ("model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json")


def test_new_files_replace_old_ones_and_stale_ones_go(folder):
    save(folder, NEW, removed=STALE)
    assert seen(folder) == {**NEW, **KEPT}
    assert sorted(os.listdir(folder)) == sorted({**NEW, **KEPT})


def test_stopped_at_any_call_a_folder_holds_all_of_the_old_or_all_of_the_new(folder, tmp_path, monkeypatch):
    snapshots = []

    def before(call):
        def recorded(*args, **kwargs):
            snapshots.append(tmp_path / f"stopped-{len(snapshots)}")
            shutil.copytree(folder, snapshots[-1])
            return call(*args, **kwargs)

        return recorded

    monkeypatch.setattr(os, "replace", before(os.replace))
    monkeypatch.setattr(os, "fsync", before(os.fsync))
    monkeypatch.setattr(Path, "unlink", before(Path.unlink))
    save(folder, NEW, removed=STALE)
    monkeypatch.undo()

    old, new = {**OLD, **KEPT}, {**NEW, **KEPT}
    states = [seen(snapshot) for snapshot in snapshots]
    assert all(state in (old, new) for state in states)
    assert old in states[:6]
    counted = states.index(new)
    assert states[counted:] == [new] * (len(states) - counted)
    assert len(states) - counted > 6  # renames, removals, syncs
    # A program that knows no journal never sees an index beside new shards.
    for snapshot in snapshots[counted + 2 :]:
        assert not (snapshot / "model.safetensors.index.json").exists()
    # The next save finishes what it finds and leaves nothing behind.
    for snapshot in snapshots:
        save(snapshot, {"config.json": b"next"})
        finished = {**seen(snapshot)}
        assert finished in ({**old, "config.json": b"next"}, {**new, "config.json": b"next"})
        assert sorted(os.listdir(snapshot)) == sorted(finished)


def test_the_index_comes_back_last(folder, monkeypatch):
    renamed = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (renamed.append(Path(new).name), replace(old, new)))
    save(folder, OLD)
    assert renamed == ["saving.json", "config.json", "model-1.safetensors", "model-2.safetensors"] + [
        "model.safetensors.index.json"
    ]


@pytest.mark.parametrize("full_at", range(4))
def test_a_full_disk_leaves_the_folder_as_it_was(folder, full_at):
    def fill(file):
        file.write(b"some")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    message = f"{folder}/late: cannot be written: No space left on device; nothing was replaced"
    with pytest.raises(OSError, match="^" + re.escape(message)), Replacement(folder) as new:
        for name in list(NEW)[:full_at]:
            new.write(name, lambda file: file.write(b"new"))
        new.write("late", fill)
    assert seen(folder) == {**OLD, **KEPT}
    assert sorted(os.listdir(folder)) == sorted({**OLD, **KEPT})


def test_any_other_error_leaves_the_folder_as_it_was(folder):
    with pytest.raises(KeyboardInterrupt), Replacement(folder) as new:
        new.write("config.json", lambda file: file.write(b"new"))
        raise KeyboardInterrupt
    assert seen(folder) == {**OLD, **KEPT}
    assert sorted(os.listdir(folder)) == sorted({**OLD, **KEPT})


def test_a_rename_that_fails_after_the_save_counted_is_read_through(folder, monkeypatch):
    replace = os.replace

    def refuse(old, new):
        if Path(new).name == "model.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(old, new)

    monkeypatch.setattr(os, "replace", refuse)
    message = f"{folder}: saved, but not every file could be renamed: Input/output error; "
    with pytest.raises(OSError, match="^" + re.escape(message)):
        save(folder, NEW, removed=STALE)
    assert seen(folder) == {**NEW, **KEPT}


def test_a_folder_that_cannot_be_made_and_a_broken_journal_are_refused(folder):
    message = f"{folder}/notes.md: cannot be written: File exists"
    with pytest.raises(OSError, match="^" + re.escape(message)):
        save(folder / "notes.md", NEW)
    (folder / "saving.json").write_text("{}")
    message = f"{folder}/saving.json: wanted the lists replaced and removed of an interrupted save"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        Folder.at(folder)


@pytest.mark.parametrize("name", ["../victim", "/victim", "..", ".", "", "a/b"])
@pytest.mark.parametrize("field", ["replaced", "removed"])
def test_a_journal_that_leads_out_of_the_folder_is_refused(tmp_path, field, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "victim").write_text("precious")
    journal = {"replaced": ["config.json"], "removed": []} | {field: [name]}
    (folder / "saving.json").write_text(json.dumps(journal))
    with pytest.raises(ValueError, match="saving.json: wanted the lists replaced and removed"):
        Folder.at(folder)
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("names", ["abc", [1], {"a": 1}, None])
def test_a_journal_of_other_things_is_refused(tmp_path, names):
    (tmp_path / "saving.json").write_text(json.dumps({"replaced": names, "removed": []}))
    with pytest.raises(ValueError, match="saving.json: wanted the lists replaced and removed"):
        Folder.at(tmp_path)
