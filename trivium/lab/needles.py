"""Retrieval in a haystack: pairs of a key and a value somewhere in a text, and all of them asked for at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from trivium.data.batch import Batch
from trivium.model.kimi_k3 import KimiK3
from trivium.ops.rows import Rows


@dataclass(frozen=True, kw_only=True)
class Needles:
    """Keys and values are ids of their own, which no text holds.

    A sequence is text with the pairs [key, value] in it, and then the same pairs in another order. What follows a key
    at the end is the answer; a key differs from all others of its sequence, a value is any. An answer weighs
    `answer_weight` in the loss, text 1, and what nobody can foresee 0: keys, and values where they first stand.
    """

    first_key: int
    num_keys: int
    first_value: int
    num_values: int
    answer_weight: float


def haystacks(
    task: Needles, text_T: Tensor, lengths: Sequence[int], depth_SP: Tensor, generator: Generator
) -> tuple[Batch, Tensor]:
    """Sequences of these lengths as one batch, and where in it each answer is foreseen, int64 [S, P].

    The haystack of sequence s is a part of `text_T` from a random place on, its needle p lies at the share
    `depth_SP[s, p]`, in [0, 1), of that. Raises ValueError for a length with no room.
    """
    ids, targets, weights, answers = [], [], [], []
    start = 0
    for length, depth_P in zip(lengths, depth_SP, strict=True):
        ids_L, weight_L, answer_P = _haystack(task, text_T, length + 1, depth_P, generator)
        ids.append(ids_L[:-1])
        targets.append(ids_L[1:])
        weights.append(weight_L[1:])
        answers.append(answer_P - 1 + start)
        start += length
    batch = Batch(
        ids_T=torch.cat(ids),
        targets_T=torch.cat(targets),
        weight_T=torch.cat(weights),
        rows=Rows.of(lengths),
        num_bytes=0,
        source="needles",
    )
    return batch, torch.stack(answers)


def _haystack(
    task: Needles, text_T: Tensor, num_ids: int, depth_P: Tensor, generator: Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, the weight of each as a target, and where the answer to each needle stands."""
    num_pairs = len(depth_P)
    num_text = num_ids - 4 * num_pairs
    if num_text < 1:
        raise ValueError(f"needles: {num_pairs} pairs, asked for once each, leave no text in {num_ids} ids")
    begin = int(torch.randint(len(text_T) - num_text, (), generator=generator))
    text_L = text_T[begin : begin + num_text].long()
    pair_P2 = torch.stack(
        [
            task.first_key + torch.randperm(task.num_keys, generator=generator)[:num_pairs],
            task.first_value + torch.randint(task.num_values, (num_pairs,), generator=generator),
        ],
        dim=1,
    )
    cut_P = (depth_P.double() * (num_text + 1)).long()
    asked_P = torch.randperm(num_pairs, generator=generator)
    parts, weights, at = [], [], 0
    for pair in cut_P.argsort(stable=True).tolist():
        cut = int(cut_P[pair])
        parts += [text_L[at:cut], pair_P2[pair]]
        weights += [torch.ones(cut - at), torch.zeros(2)]
        at = cut
    parts += [text_L[at:], pair_P2[asked_P].flatten()]
    weights += [torch.ones(num_text - at), torch.tensor([0.0, task.answer_weight]).repeat(num_pairs)]
    answer_P = torch.empty(num_pairs, dtype=torch.int64)
    answer_P[asked_P] = num_ids - 2 * num_pairs + 1 + 2 * torch.arange(num_pairs)
    return torch.cat(parts), torch.cat(weights), answer_P


@torch.no_grad()
def needle_accuracy(
    model: KimiK3, task: Needles, text_T: Tensor, *, length: int, depths: Sequence[float], count: int, seed: int
) -> list[float]:
    """The share of `count` haystacks of `length` tokens whose needle at each depth is found: the likeliest id of all."""
    model.eval()
    generator = Generator().manual_seed(seed)
    found_P = torch.zeros(len(depths))
    at_once = max(1, 8192 // length)
    for first in range(0, count, at_once):
        lengths = [length] * min(at_once, count - first)
        depth_SP = torch.tensor(depths).expand(len(lengths), -1)
        batch, answer_SP = haystacks(task, text_T, lengths, depth_SP, generator)
        hidden_TD, _ = model(batch.ids_T, batch.rows)
        said_SP = model.head(hidden_TD[answer_SP.flatten()]).argmax(-1).view_as(answer_SP)
        found_P += (said_SP == batch.targets_T[answer_SP]).sum(0)
    return (found_P / count).tolist()
