"""Many samples at once: one forward over all prompts, then one token a row a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trivium.model.kimi_k3 import KimiK3
from trivium.model.sample import check_sampling, sample
from trivium.model.state import ModelState
from trivium.ops.rows import Rows


def continuations(
    model: KimiK3,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    temperature: float,
    top_p: float = 1.0,
    seed: int,
) -> list[list[int]]:
    """`num_tokens` sampled ids behind every prompt, in the prompts' order; the prompts are not among them.

    The control ids, [BOS] and all behind it, have logits of -inf and are never drawn: what is measured is text, and
    every sample has as much of it. The prompts share one generator, so what one row draws depends on the others. Raises
    ValueError for an empty prompt and an option out of range.
    """
    _check_positive("num_tokens", num_tokens)
    return _written(model, prompts, num_tokens, None, model.config.bos_token_id, temperature, top_p, seed)


def answers(
    model: KimiK3,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    end_id: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[list[int]]:
    """What the model writes behind every prompt, up to and with `end_id`, or `max_tokens` ids without one.

    Any id may be drawn. Otherwise as `continuations`.
    """
    _check_positive("max_tokens", max_tokens)
    return _written(model, prompts, max_tokens, end_id, model.config.vocab_size, temperature, top_p, seed)


@torch.no_grad()
def _written(
    model: KimiK3,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    end_id: int | None,
    num_ids: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> list[list[int]]:
    """Ids below `num_ids` behind every prompt. A row that has written `end_id` leaves."""
    check_sampling(temperature, top_p)
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompts[{row}]: wanted at least one token id, got none")
    if not prompts:
        return []
    generator = torch.Generator(device=model.device).manual_seed(seed)
    was_training = model.training
    model.eval()
    ids_T = torch.tensor([id_ for prompt in prompts for id_ in prompt], dtype=torch.int64, device=model.device)
    rows = Rows.of([len(prompt) for prompt in prompts], model.device)
    state = model.empty_state(len(prompts))
    drawn: list[list[int]] = [[] for _ in prompts]
    here = list(range(len(prompts)))
    while True:
        hidden_TD, state = model(ids_T, rows, state)
        logits_SW = model.head(hidden_TD[rows.last_S])
        logits_SW[:, num_ids:] = -torch.inf
        ids_T, _ = sample(logits_SW, temperature=temperature, top_p=top_p, generator=generator)
        for row, id_ in zip(here, ids_T.tolist(), strict=True):
            drawn[row].append(id_)
        stay = [s for s, row in enumerate(here) if drawn[row][-1] != end_id and len(drawn[row]) < num_tokens]
        if not stay:
            break
        if len(stay) < len(here):
            here = [here[s] for s in stay]
            ids_T, state = ids_T[stay], ModelState.join([state.sequence(s) for s in stay])
        rows = Rows.of([1] * len(here), model.device, past=state.lengths)
    model.train(was_training)
    return drawn


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}: wanted at least 1, got {value}")
