"""The table of who gathers what, and the numbers that go there and come back: all processes in one here."""

import math
import random
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from trivium.model.heads import Blocks, Rectangle
from trivium.parallel.exchange import Exchange, Place, shard_bounds


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 9])
@pytest.mark.parametrize("num_rows", [1, 2, 6, 7, 8])
def test_bounds_are_those_of_torch(num_rows, size):
    chunks = torch.arange(num_rows).chunk(size)
    lengths = [len(chunk) for chunk in chunks] + [0] * (size - len(chunks))
    bounds = shard_bounds(num_rows, size, rows_each=5)
    assert [5 * length for length in lengths] == [end - start for start, end in pairwise(bounds)]


def exchanges(places, bounds, size):
    return [Exchange(places, bounds, rank, size) for rank in range(size)]


def places_of(*matrices):
    """Of (shape, blocks) each."""
    return [Place(i, rectangle) for i, (shape, cut) in enumerate(matrices) for rectangle in cut.rectangles(*shape)]


def test_what_lies_in_one_shard_stays_there():
    # 8 rows as 4 heads over 2 processes: two heads each, nothing straddles.
    found = exchanges(places_of(((8, 5), Blocks(rows=(2,) * 4))), [[0, 4, 8]], 2)
    assert [each.whole for each in found] == [[0, 1], [2, 3]]
    assert not any(each.anything_sent or each.gathered for each in found)


def test_what_straddles_goes_to_the_least_loaded_of_its_holders():
    # Heads of 3 rows over shards of 4: [0, 3) in the first, [3, 6) in both, [6, 8) in the second, which has less to do.
    found = exchanges(places_of(((8, 5), Blocks(rows=(3, 3, 2)))), [[0, 4, 8]], 2)
    assert [each.whole for each in found] == [[0], [2]]
    assert [each.gathered for each in found] == [[], [1]]
    assert all(each.anything_sent for each in found)


def test_who_holds_nothing_is_no_holder():
    found = exchanges(places_of(*[((4, 5), Blocks())] * 4), [[0, 2, 2, 4]] * 4, 3)
    assert [len(each.gathered) for each in found] == [2, 0, 2]


def test_equal_matrices_are_shared_out_evenly():
    found = exchanges(places_of(*[((8, 5), Blocks())] * 6), [[0, 3, 6, 8, 8]] * 6, 4)
    assert [len(each.gathered) for each in found] == [2, 2, 2, 0]  # the last holds nothing
    assert sorted(place_idx for each in found for place_idx in each.gathered) == list(range(6))


def test_a_dear_one_goes_first():
    # 20 x 20 costs 8,000, the four 4 x 40 but 640 each: one process has the first, the other the four.
    matrices = [((4, 40), Blocks())] * 4 + [((20, 20), Blocks())]
    found = exchanges(places_of(*matrices), [[0, 2, 4]] * 4 + [[0, 10, 20]], 2)
    assert [each.gathered for each in found] == [[4], [0, 1, 2, 3]]


class Wires:
    """all_to_all_single between exchanges that run one after the other: what is sent in one round is got in the next."""

    def __init__(self, size):
        self.size, self.rank = size, 0
        self.sent = [None] * size
        self.num_calls = 0

    def __call__(self, received, sent, num_received, num_sent, group):
        self.num_calls += 1
        if self.sent[self.rank] is None:
            assert len(sent) == sum(num_sent) and len(received) == sum(num_received)
            self.sent[self.rank] = [part.clone() for part in sent.split(num_sent)]
            return
        parts = [self.sent[peer][self.rank] for peer in range(self.size)]
        assert [len(part) for part in parts] == num_received
        received.copy_(torch.cat(parts))

    def round(self, calls):
        """Every process's call, twice: once to hear what it sends, once to give it what it gets."""
        self.sent = [None] * self.size
        for _ in range(2):
            answers = []
            for self.rank, call in enumerate(calls):
                answers.append(call())
        return answers


def random_spans(total, rng):
    spans = []
    while sum(spans) < total:
        spans.append(min(rng.randint(1, total), total - sum(spans)))
    return tuple(spans)


@pytest.mark.parametrize("seed", range(20))
def test_every_block_is_whole_at_one_owner_and_comes_back(monkeypatch, seed):
    rng = random.Random(seed)
    size = rng.choice([1, 2, 3, 4, 6])
    matrices = []
    for _ in range(rng.randint(1, 5)):
        height, width = rng.randint(1, 12), rng.randint(1, 9)
        matrices.append(((height, width), Blocks(random_spans(height, rng), random_spans(width, rng))))
    bounds = [shard_bounds(height, size) for (height, _), _ in matrices]
    full = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for shape, _ in matrices]
    shards = [[m[of[r] : of[r + 1]].clone() for m, of in zip(full, bounds, strict=True)] for r in range(size)]
    places = places_of(*matrices)
    found = exchanges(places, bounds, size)
    owned = sorted(place_idx for each in found for place_idx in each.whole + each.gathered)
    assert owned == list(range(len(places)))

    wires = Wires(size)
    monkeypatch.setattr(dist, "all_to_all_single", wires)
    gathered = [{i: torch.full(shape_of(places[i]), math.nan) for i in each.gathered} for each in found]

    def held(rank, piece):
        matrix_idx, (_, _, left, right) = places[piece.place_idx]
        first = bounds[matrix_idx][rank]
        return shards[rank][matrix_idx][piece.top - first : piece.bottom - first, left:right]

    def in_whole(rank, piece):
        top = places[piece.place_idx].rectangle.top
        return gathered[rank][piece.place_idx][piece.top - top : piece.bottom - top]

    def there(rank):
        return found[rank].to_owners(lambda piece, into: into.copy_(held(rank, piece)), torch.empty(0), None)

    def back(rank):
        return found[rank].to_holders(lambda piece, into: into.copy_(in_whole(rank, piece)), torch.empty(0), None)

    for rank, pieces in enumerate(wires.round([lambda rank=rank: there(rank) for rank in range(size)])):
        for piece, part in pieces:
            in_whole(rank, piece).copy_(part)
        for place_idx, block in gathered[rank].items():
            matrix_idx, (top, bottom, left, right) = places[place_idx]
            assert torch.equal(block, full[matrix_idx][top:bottom, left:right])
            block.mul_(-2)
    for rank, pieces in enumerate(wires.round([lambda rank=rank: back(rank) for rank in range(size)])):
        for piece, part in pieces:
            held(rank, piece).copy_(part)
    straddling = {i for each in found for i in each.gathered}
    for i, (matrix_idx, (top, bottom, left, right)) in enumerate(places):
        if i in straddling:
            full[matrix_idx][top:bottom, left:right] *= -2
    for matrix_idx, matrix in enumerate(full):
        assert torch.equal(torch.cat([shard[matrix_idx] for shard in shards]), matrix)


def shape_of(place):
    return place.rectangle.height, place.rectangle.width


def test_one_call_each_way_however_many_blocks(monkeypatch):
    wires = Wires(2)
    monkeypatch.setattr(dist, "all_to_all_single", wires)
    places = [Place(0, Rectangle(top, top + 2, 0, 3)) for top in (1, 5, 9)]
    found = exchanges(places, [[0, 6, 12]], 2)
    wires.round(
        [lambda each=each: each.to_owners(lambda piece, into: into.zero_(), torch.empty(0), None) for each in found]
    )
    assert wires.num_calls == 2 * 2  # one a process, in two rounds
