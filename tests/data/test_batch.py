"""Batch: what it checks, and that all of it goes to a device."""

from dataclasses import fields, replace

import pytest
import torch

from trivium.data.batch import Batch
from trivium.ops.pixels import Pixels
from trivium.ops.rows import Rows


def full_batch():
    """Every field set, also those of pictures, policies and serving."""
    return Batch(
        ids_T=torch.tensor([3, 1, 4, 1, 5]),
        targets_T=torch.tensor([1, 4, 1, 5, 9]),
        weight_T=torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0]),
        rows=replace(Rows.of([2, 3], past=(4, 0)), slots_S=torch.tensor([1, 0])),
        num_bytes=12,
        source="test",
        pixels=Pixels(values_P3HW=torch.rand(4, 3, 2, 2), grids=((1, 2, 2),)),
        logprobs_T=torch.zeros(5),
        advantage_T=torch.ones(5),
    )


def tensors_of(value):
    """Every tensor in it, however deep, by name."""
    found = {}
    for field in fields(value):
        part = getattr(value, field.name)
        if isinstance(part, torch.Tensor):
            found[field.name] = part
        elif isinstance(part, Rows | Pixels):
            found |= {f"{field.name}.{name}": tensor for name, tensor in tensors_of(part).items()}
    return found


def test_every_tensor_goes_to_the_device_and_nothing_else_changes():
    batch = full_batch()
    moved = batch.to("meta")
    before, after = tensors_of(batch), tensors_of(moved)
    assert before.keys() == after.keys() and len(after) == 8
    for name, tensor in after.items():
        assert tensor.device.type == "meta", name
        assert (tensor.shape, tensor.dtype) == (before[name].shape, before[name].dtype), name
        assert before[name].device.type == "cpu", name
    assert (moved.num_bytes, moved.source, moved.pixels.grids) == (12, "test", ((1, 2, 2),))
    assert (moved.rows.starts, moved.rows.past_S) == ((0, 2, 5), (4, 0))


def test_what_is_not_there_is_not_there_behind_it_either():
    batch = replace(full_batch(), pixels=None, logprobs_T=None, advantage_T=None, rows=Rows.of([2, 3]))
    moved = batch.to("meta")
    assert (moved.pixels, moved.logprobs_T, moved.advantage_T, moved.rows.slots_S) == (None, None, None, None)


def test_tables_of_the_rows_are_those_of_the_device():
    batch = full_batch()
    assert batch.rows.sequence_of_T.device.type == "cpu"  # kept where it was made
    assert batch.to("meta").rows.sequence_of_T.device.type == "meta"


def test_a_batch_that_is_there_already_is_the_same_one():
    batch = full_batch()
    assert batch.to("cpu") is batch and batch.to(torch.device("cpu")) is batch


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ids_T", torch.zeros(4, dtype=torch.int64)),
        ("ids_T", torch.zeros(5, dtype=torch.int32)),
        ("targets_T", torch.zeros(5)),
        ("weight_T", torch.zeros(5, dtype=torch.float64)),
        ("logprobs_T", torch.zeros(5, 1)),
        ("advantage_T", torch.zeros(6)),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"^batch: {name} wants torch\.\w+ of shape \(5,\), got {value.dtype} of "):
        replace(full_batch(), **{name: value})


def test_bytes_are_never_negative():
    with pytest.raises(ValueError, match="^batch: num_bytes is never negative, got -1$"):
        replace(full_batch(), num_bytes=-1)
