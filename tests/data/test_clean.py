import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import trivium
from trivium.data import clean
from trivium.data.clean import drop_duplicates
from trivium.data.source import Document

pytest.importorskip("datasketch")
pytest.importorskip("xxhash")


def random_text(seed, num_lines=100):
    rng = random.Random(seed)
    return "".join(" ".join(f"w{rng.randrange(5000)}" for _ in range(8)) + "\n" for _ in range(num_lines))


def changed(text, *lines):
    return "".join(
        "now it says something else\n" if idx in lines else line for idx, line in enumerate(text.splitlines(True))
    )


def clean_of(**text_of):
    documents = [Document(source=path, path=path, text=text) for path, text in text_of.items()]
    cleaned = drop_duplicates(documents)
    return [document.path for document in cleaned.documents], cleaned.exact, cleaned.near


def test_equal_texts_are_kept_once_the_first_by_path():
    assert clean_of(b="same text", a="same text", c="same text\n \n", d=" same text") == (["a", "d"], 2, 0)


def test_a_copy_with_a_few_changed_lines_is_dropped():
    text = random_text(0)
    # 100 lines of 8 words have 796 shingles. A changed line of 5 words takes 12 of the old with it and brings 9 new:
    # two are a share of (796 - 24) / (796 + 18) = 0.95, six of 0.85, ten of 0.76.
    for num_changed, kept in ((2, ["a"]), (6, ["a"]), (10, ["a", "b"])):
        assert clean_of(a=text, b=changed(text, *range(5, 95, 90 // num_changed)[:num_changed]))[0] == kept
    assert clean_of(a=text, b=" ".join(text.split())) == (["a"], 0, 1)  # whitespace says nothing


def test_different_texts_with_a_common_part_are_kept():
    licence = random_text("licence", 50)
    paths, exact, near = clean_of(**{f"f{idx}": licence + random_text(idx, 50) for idx in range(9)})
    assert (paths, exact, near) == ([f"f{idx}" for idx in range(9)], 0, 0)


def test_texts_under_five_words_are_compared_whole():
    assert clean_of(a="one two three four", b="one two three five", c="", d="one two three four") == (
        ["a", "b", "c"],
        1,
        0,
    )
    assert clean_of(a="one two three four five", b="one two three four five six") == (["a", "b"], 0, 0)  # 1 of 2


def test_what_remains_does_not_depend_on_the_order_and_stands_in_it():
    texts = {f"f{idx:02d}": random_text(idx % 4, 40) for idx in range(12)}
    texts |= {f"g{idx:02d}": changed(random_text(idx % 4, 40), idx) for idx in range(12)}
    names = list(texts)
    for seed in range(5):
        random.Random(seed).shuffle(names)
        paths, exact, near = clean_of(**{name: texts[name] for name in names})
        assert paths == [name for name in names if name in ("f00", "f01", "f02", "f03")]
        assert (exact, near) == (8, 12)


def test_what_remains_does_not_depend_on_the_hash_seed():
    program = (
        "from tests.data.test_clean import *\n"
        "print(clean_of(**{f'f{i}': changed(random_text(i % 5), *range(0, i)) for i in range(40)}))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(trivium.__file__).parent.parent,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_without_the_libraries_only_equal_texts_are_dropped(monkeypatch):
    text = random_text(0)
    monkeypatch.setitem(sys.modules, "xxhash", None)  # importing it raises
    assert clean_of(a=text, b=text, c=changed(text, 3)) == (["a", "c"], 1, None)


def test_a_long_text_is_compared_by_a_sample_of_one_size():
    rng = random.Random(0)
    words = [f"w{rng.randrange(10**6)}" for _ in range(400_000)]  # 2.7 MB: three blocks, 400,000 shingles
    text = " ".join(words)
    sketch = clean._sketch_of(text, clean_hash())
    assert sketch.size == clean._SKETCH and (np.diff(sketch.astype(float)) > 0).all()
    # One word in 56 changed touches 5 shingles of 56: a share of 51 / 61 = 0.836. One in 40: 35 / 45 = 0.778.
    for every, kept in ((56, ["a"]), (40, ["a", "b"])):
        other = " ".join("else" if idx % every == 0 else word for idx, word in enumerate(words))
        assert clean_of(a=text, b=other)[0] == kept
    # Four fifths of it at its front are a share of 0.8 and a little, of sets of different size.
    for share, kept in ((0.83, ["a"]), (0.77, ["a", "b"])):
        assert clean_of(a=text, b=" ".join(words[: int(share * len(words))]))[0] == kept


def clean_hash():
    import xxhash

    return xxhash.xxh3_64_intdigest
