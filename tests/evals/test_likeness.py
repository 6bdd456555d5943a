"""Words, variety and copies of texts, with numbers worked out by hand."""

import numpy as np
import pytest

from trivium.evals.likeness import Likeness, likeness, longest_copy, words_of


def int32(ids):
    return np.array(ids, dtype=np.int32)


def test_words_are_three_letters_or_more_of_any_script():
    text = "def self_attn(x2, getName): # naïve, Жизнь 日本語 हिन्दी ab 123abc4 don't"
    assert words_of([text, "ab cd"]) == {
        *("def", "self", "attn", "getName", "naïve", "Жизнь", "日本語", "हिन्दी", "abc", "don"),
    }


def test_known_words_distinct_runs_and_the_longest_copy_by_hand():
    got = likeness(
        # Runs of four: 1234 2345 / 1234 2348 / none. Four of them, three different.
        [[1, 2, 3, 4, 5], [1, 2, 3, 4, 8], [9, 9, 9]],
        ["return self", "return nothing of it", "Return"],
        train_ids_T=int32([0, 2, 3, 4, 5, 0, 1, 2, 0]),  # 2 3 4 5, which the first text has
        train_words=words_of(["def f(self):\n    return nothing"]),
    )
    # return, self, return, nothing are known; Return is not.
    assert got == Likeness(word_share=4 / 5, distinct_4grams=3 / 4, longest_copy=4)


def test_what_cannot_be_told_is_none():
    assert likeness([[1, 2, 3]], ["a b"], train_ids_T=int32([7]), train_words=frozenset()) == Likeness(
        word_share=None, distinct_4grams=None, longest_copy=0
    )


def longest_by_trying(ids, train):
    return max(
        (
            end - first
            for row in ids
            for first in range(len(row))
            for end in range(first + 1, len(row) + 1)
            for at in range(len(train) - (end - first) + 1)
            if row[first:end] == train[at : at + end - first]
        ),
        default=0,
    )


@pytest.mark.parametrize("num_ids", [1, 2, 3, 20])
@pytest.mark.parametrize("seed", range(8))
def test_the_longest_copy_is_that_found_by_trying_all(num_ids, seed):
    random = np.random.default_rng(seed)
    ids = [random.integers(num_ids, size=random.integers(0, 15)).tolist() for _ in range(3)]
    train = random.integers(num_ids, size=random.integers(0, 40)).tolist()
    assert longest_copy(ids, int32(train)) == longest_by_trying(ids, train)


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 199, 200])
def test_a_copy_of_any_length_is_found_in_a_long_text(length):
    random = np.random.default_rng(length)
    train = random.integers(1000, size=20_000)
    text = random.integers(1000, 2000, size=(4, 200))  # ids that the training text has not
    text[2, 200 - length :] = train[7000 : 7000 + length]
    assert longest_copy(text.tolist(), int32(train)) == length


@pytest.mark.parametrize(
    ("ids", "train", "want"),
    [
        ([], [1, 2], 0),
        ([[]], [1, 2], 0),
        ([[1, 2]], [], 0),
        ([[5, 1], [2, 5]], [1, 2], 1),  # not across two texts
        ([[1, 2, 3]], [2], 1),  # a training text shorter than the texts
        ([[4, 4, 4, 4]], [4] * 9, 4),  # the whole text, and no more
        ([[1, 2, 3, 4]], [1, 2, 9, 3, 4, 2, 3], 2),  # parts of it, but not joined
    ],
)
def test_copies_at_the_edges(ids, train, want):
    assert longest_copy(ids, int32(train)) == want
