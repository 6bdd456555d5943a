"""Cleaning: a text that is there twice, or nearly, is kept once.

Two copies of a text, one trained on and one held out, would make the held-out loss a measure of memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from trivium.data.source import Document

# Two texts are near duplicates when this share of their shingles, taken together, is in both. A shingle is five
# consecutive words: one changed line of ten words touches 14.
JACCARD = 0.8
SHINGLE_WORDS = 5

# The smallest hashes of a text's shingles stand for all of them: exact up to about 25 KB of text, and above that the
# share of 0.8 is known to sqrt(0.8 * 0.2 / 4096) = 0.006.
_SKETCH = 4096
# 25 bands of 6 hashes find two texts of share 0.8 with 1 - (1 - 0.8^6)^25 = 0.9995. Where the sketches are not all of
# them and one text is 0.8 of the other, the sketches share 0.67 and the figure is 0.90. At 0.3 it is 0.02: with rows of 5
# it would be 0.06, and 4,000 files under one long licence took 17 s in place of 3.
_BANDS, _ROWS = 25, 6
# A long text is hashed in blocks: all words of 200 MB at once would be 2 GB of Python objects.
_BLOCK_CHARS = 2**20
_WEIGHTS = np.array([0x9E3779B97F4A7C15 ** (idx + 1) % 2**64 for idx in range(SHINGLE_WORDS)], dtype=np.uint64)

Sketch = NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Cleaned:
    """What is left, in the order it came, and how many were dropped; `near` is None where datasketch or xxhash lack."""

    documents: tuple[Document, ...]
    exact: int
    near: int | None


def drop_duplicates(documents: Iterable[Document]) -> Cleaned:
    """Of equal or nearly equal texts the first by path, whatever order they come in.

    Equal are texts that differ in whitespace at their end at most. Nearly equal are two whose sets of five consecutive
    words have a Jaccard index of at least 0.8; a text under five words has none of them, and only equals are dropped.
    MinHash proposes and the sets decide. Without datasketch and xxhash only equal texts are dropped.
    """
    documents = tuple(documents)
    first_of: dict[bytes, int] = {}
    for idx in sorted(range(len(documents)), key=lambda idx: documents[idx].path):
        first_of.setdefault(_digest(documents[idx].text), idx)
    kept = list(first_of.values())  # by path: a dict keeps its order
    near = _near_duplicates([documents[idx].text for idx in kept])
    dropped = near or set()
    kept = sorted(idx for position, idx in enumerate(kept) if position not in dropped)
    return Cleaned(
        documents=tuple(documents[idx] for idx in kept),
        exact=len(documents) - len(first_of),
        near=None if near is None else len(near),
    )


def _digest(text: str) -> bytes:
    """SHA-256 of the text without whitespace at its end, which is not copied for it."""
    end = len(text)
    while end and text[end - 1].isspace():
        end -= 1
    seen = hashlib.sha256()
    for start in range(0, end, _BLOCK_CHARS):
        seen.update(text[start : min(start + _BLOCK_CHARS, end)].encode())
    return seen.digest()


def _near_duplicates(texts: Sequence[str]) -> set[int] | None:
    """Positions of the texts that are nearly one before them which is kept; None without the libraries."""
    try:
        from datasketch import MinHash, MinHashLSH
        from xxhash import xxh3_64_intdigest
    except ImportError:
        return None
    index = MinHashLSH(num_perm=_BANDS * _ROWS, params=(_BANDS, _ROWS))
    empty = MinHash(num_perm=_BANDS * _ROWS, seed=1, hashfunc=int)  # what is given are hashes already
    sketches: dict[int, Sketch] = {}
    dropped = set()
    for position, text in enumerate(texts):
        sketch = _sketch_of(text, xxh3_64_intdigest)
        if not sketch.size:
            continue
        minhash = empty.copy()
        minhash.update_batch((sketch & 0xFFFFFFFF).tolist())  # 32 bits it takes; the high ones are small by choice
        if any(_jaccard(sketches[other], sketch) >= JACCARD for other in index.query(minhash)):
            dropped.add(position)
        else:
            index.insert(position, minhash)
            sketches[position] = sketch
    return dropped


def _sketch_of(text: str, hash_of: Callable[[bytes], int]) -> Sketch:
    """The smallest `_SKETCH` distinct hashes of the text's shingles, sorted.

    Shingles across two blocks are lost and a word may be cut there: five of some 150,000.
    """
    smallest = np.empty(0, dtype=np.uint64)
    for start in range(0, len(text), _BLOCK_CHARS):
        words = text[start : start + _BLOCK_CHARS].encode().split()
        if len(words) < SHINGLE_WORDS:
            continue
        word_N = np.fromiter(map(hash_of, words), dtype=np.uint64, count=len(words))
        shingle_N = (sliding_window_view(word_N, SHINGLE_WORDS) * _WEIGHTS).sum(axis=1)  # modulo 2^64
        if smallest.size == _SKETCH:
            shingle_N = shingle_N[shingle_N < smallest[-1]]
        smallest = np.unique(np.concatenate([smallest, shingle_N]))[:_SKETCH]
    return smallest


def _jaccard(a: Sketch, b: Sketch) -> float:
    """Jaccard index of two sets by their sketches: of all that lies in the range that both sketches cover."""
    covered = min((sketch[-1] for sketch in (a, b) if sketch.size == _SKETCH), default=np.uint64(2**64 - 1))
    a, b = a[a <= covered], b[b <= covered]
    num_shared = np.intersect1d(a, b, assume_unique=True).size
    return num_shared / (a.size + b.size - num_shared)
