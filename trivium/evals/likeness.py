"""How much a few texts are like the text a model was trained on: known words, variety, and what is copied outright."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import regex
from numpy.typing import NDArray

# Three letters or more of any script, each with the marks it bears. A script without spaces gives whole clauses, of
# which few are found again.
WORD = regex.compile(r"(?:\p{L}\p{M}*){3,}")

GRAM = 4


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """Of several texts together.

    `word_share`: words of three letters or more that occur in the training text, of all such words, each as often as it
    stands there; None without a word. `distinct_4grams`: different runs of four tokens, of all runs of four tokens;
    None without one. `longest_copy`: tokens in the longest run of a text that stands in the training text.
    """

    word_share: float | None
    distinct_4grams: float | None
    longest_copy: int


def words_of(texts: Iterable[str]) -> frozenset[str]:
    """The different words of three letters or more; upper and lower case differ."""
    return frozenset(word for text in texts for word in WORD.findall(text))


def likeness(
    ids: Sequence[Sequence[int]], texts: Sequence[str], *, train_ids_T: NDArray[np.int32], train_words: frozenset[str]
) -> Likeness:
    """Of texts, given as token ids and as strings, beside the training text's tokens and its words (`words_of`)."""
    words = [word for text in texts for word in WORD.findall(text)]
    grams = [tuple(row[at : at + GRAM]) for row in ids for at in range(len(row) - GRAM + 1)]
    return Likeness(
        word_share=sum(word in train_words for word in words) / len(words) if words else None,
        distinct_4grams=len(set(grams)) / len(grams) if grams else None,
        longest_copy=longest_copy(ids, train_ids_T),
    )


def longest_copy(ids: Sequence[Sequence[int]], train_ids_T: NDArray[np.int32]) -> int:
    """The most consecutive tokens of any text that stand somewhere in the training tokens; ids are not negative.

    Exact, by naming windows (Karp, Miller and Rosenberg 1972): two windows of n tokens, k <= n <= 2k, are equal when
    the names of their first k tokens and of their last k are. n doubles while a window is found; then it is bisected.
    """
    # A token that is none stands around each text, so that no window of two texts is found.
    text_T = np.array([-1, *(id_ for row in ids for id_ in (*row, -1))], dtype=np.int64)
    names = _name(text_T, train_ids_T)
    if not (names[1] >= 0).any():
        return 0
    length = 1
    while (longer := _windows(names, length, 2 * length)) is not None:
        names, length = longer, 2 * length
    low, high = length, 2 * length  # found, not found
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _windows(names, length, middle) is not None else (low, middle)
    return low


# The names of the texts' windows and of the training text's, by where a window begins; -1 for one no text has.
Names = tuple[NDArray[np.int64], NDArray[np.int64]]


def _windows(names: Names, length: int, longer: int) -> Names | None:
    """Names of the windows of `longer` tokens, at most twice `length`; None when no text's is found."""
    shift = longer - length
    if min(map(len, names)) <= shift:
        return None
    factor = int(names[0].max()) + 1
    text_T, train_T = (side[:-shift] * factor + side[shift:] for side in names)
    train_T[(names[1][:-shift] < 0) | (names[1][shift:] < 0)] = -1
    named = _name(text_T, train_T)
    return named if (named[1] >= 0).any() else None


def _name(text_T: NDArray[np.int64], train_T: NDArray[np.integer]) -> Names:
    """Numbers in the place of keys, equal for equal keys, -1 for a key of the training text that no text has."""
    keys, names_T = np.unique(text_T, return_inverse=True)
    at_T = np.searchsorted(keys, train_T).clip(max=len(keys) - 1)
    return names_T, np.where(keys[at_T] == train_T, at_T, -1)
