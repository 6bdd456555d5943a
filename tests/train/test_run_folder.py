import os

import pytest

from trivium.train.run_folder import claim_run_folder, write_json, write_text


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    names = [claim_run_folder(tmp_path / "runs", "first", exact=False).name for _ in range(3)]
    assert names == ["first", "first-2", "first-3"]
    with pytest.raises(ValueError, match="first: is there already and is not overwritten; choose another name$"):
        claim_run_folder(tmp_path / "runs", "first", exact=True)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden"])
def test_a_name_is_that_of_one_folder(name, tmp_path):
    with pytest.raises(ValueError, match="^name: wanted the name of one folder, got "):
        claim_run_folder(tmp_path, name, exact=True)


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_json(path, {"steps": 1})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_text(path, "half")
    assert path.read_text() == '{\n  "steps": 1\n}\n'
    assert os.listdir(tmp_path) == ["run.json"]
