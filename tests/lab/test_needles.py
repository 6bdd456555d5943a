"""What a haystack is made of, and that finding needles is measured where the answers are."""

from itertools import pairwise

import pytest
import torch

from trivium.lab.needles import Needles, haystacks, needle_accuracy

TASK = Needles(first_key=100, num_keys=20, first_value=200, num_values=30, answer_weight=4.0)
TEXT = torch.arange(90, dtype=torch.int32).repeat(40)


def batch_of(lengths, depths, seed=0):
    depth_SP = torch.tensor(depths).expand(len(lengths), -1)
    return haystacks(TASK, TEXT, lengths, depth_SP, torch.Generator().manual_seed(seed))


def sequence(batch, number):
    """Ids of one sequence with the target of its last."""
    start, end = batch.rows.starts[number : number + 2]
    return torch.cat([batch.ids_T[start:end], batch.targets_T[end - 1 : end]]).tolist()


def test_a_sequence_is_text_with_needles_at_their_depths_and_all_of_them_again():
    batch, answer_SP = batch_of([40, 61], [0.0, 0.5, 0.99])
    assert batch.rows.lengths == (40, 61) and answer_SP.shape == (2, 3)
    for number, length in enumerate((40, 61)):
        ids = sequence(batch, number)
        haystack, asked = ids[:-6], ids[-6:]
        text = [token for token in haystack if token < 100]
        assert len(ids) == length + 1 and len(text) == length + 1 - 12
        assert all(b == (a + 1) % 90 for a, b in pairwise(text))  # a part of the text, whole
        # Behind 0, half, and 99% of the text's tokens; a needle takes two places.
        places = [int(depth * (len(text) + 1)) + 2 * needle for needle, depth in enumerate((0.0, 0.5, 0.99))]
        needles = [tuple(haystack[place : place + 2]) for place in places]
        assert all(100 <= key < 120 and 200 <= value < 230 for key, value in needles)
        assert len({key for key, _ in needles}) == 3
        assert sorted(needles) == sorted(zip(asked[::2], asked[1::2], strict=True))


def test_each_answer_is_the_value_behind_its_needles_key():
    batch, answer_SP = batch_of([40, 61], [0.9, 0.2, 0.5])  # in another order than they lie
    for number, start in enumerate(batch.rows.starts[:-1]):
        ids = sequence(batch, number)
        in_text = [idx for idx, token in enumerate(ids[:-6]) if 100 <= token < 120]
        for needle, place in enumerate((2, 0, 1)):  # the needle of depth .9 lies last
            at = int(answer_SP[number, needle])
            key, value = ids[in_text[place]], ids[in_text[place] + 1]
            assert int(batch.ids_T[at]) == key and int(batch.targets_T[at]) == value and at >= start


def test_only_what_can_be_foreseen_has_a_weight():
    batch, answer_SP = batch_of([40, 61], [0.1, 0.4, 0.8])
    is_answer_T = torch.zeros(101, dtype=torch.bool)
    is_answer_T[answer_SP.flatten()] = True
    is_text_T = batch.targets_T < 100
    assert (batch.weight_T[is_answer_T] == 4).all() and (batch.weight_T[is_text_T] == 1).all()
    assert (batch.weight_T[~is_answer_T & ~is_text_T] == 0).all() and int((~is_answer_T & ~is_text_T).sum()) == 2 * 9


def test_a_seed_is_a_batch_and_a_text_without_room_is_refused():
    first, again, other = (batch_of([40], [0.5], seed)[0].ids_T for seed in (0, 0, 1))
    assert first.equal(again) and not first.equal(other)
    with pytest.raises(ValueError, match="needles: 3 pairs, asked for once each, leave no text in 12 ids"):
        batch_of([11], [0.1, 0.5, 0.9])


class Lookup:
    """Answers right for keys of even id, and 0 for the others; in the place of a model."""

    def eval(self):
        return self

    def __call__(self, ids_T, rows):
        hidden_TD = torch.zeros(len(ids_T), 1)
        for start, end in pairwise(rows.starts):
            known = {}
            for at in range(start, end):
                key = int(ids_T[at])
                if 100 <= key < 120:
                    if key in known and key % 2 == 0:
                        hidden_TD[at] = known[key]
                    elif at + 1 < end:
                        known.setdefault(key, int(ids_T[at + 1]))
        return hidden_TD, None

    def head(self, hidden_TD):
        return torch.nn.functional.one_hot(hidden_TD[:, 0].long(), 300).float()


def test_accuracy_is_by_depth_and_of_the_answers_alone():
    # Keys are drawn evenly: half are even. 300 haystacks: a standard deviation of .029.
    found = needle_accuracy(Lookup(), TASK, TEXT, length=40, depths=(0.1, 0.5, 0.9), count=300, seed=0)
    assert len(found) == 3 and all(abs(share - 0.5) < 0.12 for share in found)
    assert found == needle_accuracy(Lookup(), TASK, TEXT, length=40, depths=(0.1, 0.5, 0.9), count=300, seed=0)
