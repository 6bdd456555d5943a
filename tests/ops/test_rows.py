"""Rows and their chunk tables: every token once, in its place."""

import pytest
import torch

from trivium.ops.backend import NAMES, availability, choose, use_backend
from trivium.ops.rows import Rows, Tile


def test_bounds_and_what_follows():
    rows = Rows.of([3, 0, 2], past=(1, 0, 4))
    assert rows.starts == (0, 3, 3, 5) and rows.starts_S1.dtype == torch.int32
    assert (rows.num_tokens, rows.num_sequences, rows.max_len) == (5, 3, 3)
    assert rows.lengths == (3, 0, 2) and rows.past == (1, 0, 4)
    assert rows.sequence_of_T.tolist() == [0, 0, 0, 2, 2]
    assert Rows.of([3, 2]).last_S.tolist() == [2, 4]
    assert Rows.one(4).past == (0,) and Rows.one(4, past=2).past_S == (2,)


@pytest.mark.parametrize("lengths", [[], [0], [1], [64], [65, 64, 0, 1], [16, 17, 200, 3]])
@pytest.mark.parametrize("size", [1, 16, 64])
def test_chunks_hold_every_token_once(lengths, size):
    rows = Rows.of(lengths)
    chunks = rows.chunks(size)
    T = rows.num_tokens
    x_T2 = torch.arange(2 * T).view(T, 2)
    gathered = chunks.gather(x_T2)
    assert gathered.shape == (sum(-(-n // size) for n in lengths), size, 2)
    assert torch.equal(chunks.scatter(gathered), x_T2)
    assert sum(count for _, count in chunks.steps) == len(gathered)
    if chunks.pad_NC is not None:
        assert (gathered[chunks.pad_NC] == 0).all() and chunks.pad_NC.sum() == gathered.shape[0] * size - T
    for at, count in chunks.steps:  # step n holds the n-th chunks of the longest `count` sequences
        owners = [chunks.places[n][0] for n in range(at.start, at.stop)]
        assert owners == chunks.order_S[:count].tolist()
    assert rows.chunks(size) is chunks


def test_bad_bounds_are_named():
    bounds = torch.tensor([0])
    with pytest.raises(ValueError, match=r"bounds start at 0, got \(1, 2\)"):
        Rows(starts=(1, 2), starts_S1=bounds)
    with pytest.raises(ValueError, match=r"bounds never fall, got \(0, 2, 1\)"):
        Rows(starts=(0, 2, 1), starts_S1=bounds)
    with pytest.raises(ValueError, match="2 past lengths for 1 sequences"):
        Rows.of([3], past=(1, 2))
    with pytest.raises(ValueError, match="a length is never negative"):
        Rows.of([3, -1])
    with pytest.raises(ValueError, match="sequence 1 is empty and has no last token"):
        _ = Rows.of([3, 0]).last_S


def test_a_tile_is_sixteen_rows_at_an_absolute_place():
    tile = Tile.at(48, 3, 7)
    assert (tile.num_tokens, tile.past, tile.first, tile.last) == (16, (48,), 3, 7)


def test_backends_are_asked_for_by_name_and_never_replaced():
    both = {"reference": lambda: "r", "torch": lambda: "t"}
    assert choose("op", **both)() == "t"
    with use_backend("reference"):
        assert choose("op", **both)() == "r"
        with use_backend(None):
            assert choose("op", **both)() == "t"
    with (
        use_backend("native"),
        pytest.raises(ValueError, match="op: has no 'native' backend for these tensors, only reference, torch"),
    ):
        choose("op", **both)
    with (
        pytest.raises(ValueError, match="backend: wanted one of reference, torch, native, got 'fast'"),
        use_backend("fast"),
    ):
        pass
    with pytest.raises(RuntimeError), use_backend("reference"):
        raise RuntimeError
    assert choose("op", **both)() == "t"


def test_every_backend_of_every_device_is_accounted_for():
    found = {(line.device, line.backend): line for line in availability()}
    assert set(found) == {(device, backend) for device in ("cpu", "cuda") for backend in NAMES}
    assert found["cpu", "torch"].usable and all(line.reason for line in found.values())
