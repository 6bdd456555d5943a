"""What of a run is looked at before it is saved."""

import pytest
import torch

from tests.parallel.processes import on_processes
from tests.train.test_pretrain import CONFIG, new_model
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.parallel.fsdp import shard_, share_of
from trivium.parallel.world import ALONE
from trivium.train.point import not_finite


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_first_parameter_that_is_not_finite_is_named(value):
    model = new_model()
    assert not_finite(model, ALONE) is None
    names = [name for name, _ in model.named_parameters()]
    for name in (names[-1], names[3]):
        model.get_parameter(name).data.view(-1)[-1] = value
        assert not_finite(model, ALONE) == name


def named_by(world):
    with torch.device("meta"):
        model = KimiK3(CONFIG)
    shard_(model, world)
    model.to_empty(device="cpu")
    initialise_(model, 0, place=share_of)
    before = not_finite(model, world)
    if not world.is_first:
        with torch.no_grad():
            model.get_parameter("language_model.lm_head.weight").to_local().fill_(torch.nan)
    return before, not_finite(model, world)


def test_it_is_named_by_every_process_whoever_holds_it():
    assert on_processes(2, named_by) == [(None, "language_model.lm_head.weight")] * 2
