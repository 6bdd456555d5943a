"""Clipping with the weights on two processes, and a head across both, is clipping on one."""

from dataclasses import replace

import torch

from tests.parallel.processes import on_processes
from tests.tiny import tiny_config
from trivium.config import MlaConfig
from trivium.model.init import initialise_
from trivium.model.kimi_k3 import KimiK3
from trivium.ops.rows import Rows
from trivium.parallel.fsdp import shard_, whole
from trivium.parallel.world import ALONE
from trivium.train.qk_clip import clip_logits_, watch_logits_

# Three heads of 14 query rows and 18 rows of keys and values: the border between two processes runs through the second.
MLA = MlaConfig(num_heads=3, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10)
IDS = torch.randint(0, 300, (90,), generator=torch.Generator().manual_seed(0))
PARTS = (IDS[:20], IDS[20:])  # a micro-batch for each of two processes, or both for one


def clipped(world, limits, parts):
    """MLA's weights after a step with each of these limits, the heads that were over it, and the largest logits."""
    model = KimiK3(replace(tiny_config(300), mla=MLA))
    initialise_(model, seed=0)
    shard_(model.train(), world)
    counts, largest = [], []
    for limit in limits:
        watch_logits_(model, limit)
        for ids_T in parts:
            hidden_TD, _ = model(ids_T, Rows.one(len(ids_T)))
            hidden_TD.sum().backward()  # FSDP2 lets go of what it gathered in the backward
        (layer,) = model.mla_layers()
        largest.append(layer._max_logit_H.tolist())
        counts.append(clip_logits_(model, limit, world))
    return {name: whole(parameter).tolist() for name, parameter in layer.named_parameters()}, counts, largest


def on_a_process(world, limits):
    return clipped(world, limits, [PARTS[world.rank]])


def test_two_processes_clip_as_one():
    torch.set_num_threads(1)  # as theirs: bits of torch's products depend on it
    _, _, [max_H] = clipped(ALONE, [1e9], PARTS)
    low, middle, _ = sorted(max_H)
    limits = [0.9 * middle, 0.5 * low]  # two heads, then all three
    want, counts, _ = clipped(ALONE, limits, PARTS)
    assert counts == [2, 3]
    both = on_processes(2, on_a_process, limits)
    # No process saw every head's largest logit by itself, so that the answer needs the other's.
    largest = [found for _, _, [found, _] in both]
    assert largest[0] != max_H != largest[1]
    assert [max(pair) for pair in zip(*largest, strict=True)] == max_H
    for got, got_counts, _ in both:
        assert got_counts == counts
        assert got.keys() == want.keys()
        for name, weight in want.items():
            assert got[name] == weight, name  # bit for bit
