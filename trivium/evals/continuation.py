"""Many samples at once: one forward over all prompts, then one token a row a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trivium.model.kimi_k3 import KimiK3
from trivium.model.sample import check_sampling, sample
from trivium.ops.rows import Rows


@torch.no_grad()
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
    check_sampling(temperature, top_p)
    if num_tokens < 1:
        raise ValueError(f"num_tokens: wanted at least 1, got {num_tokens}")
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
    drawn = []
    while True:
        hidden_TD, state = model(ids_T, rows, state)
        logits_SW = model.head(hidden_TD[rows.last_S])
        logits_SW[:, model.config.bos_token_id :] = -torch.inf
        ids_T, _ = sample(logits_SW, temperature=temperature, top_p=top_p, generator=generator)
        drawn.append(ids_T)
        if len(drawn) == num_tokens:
            break
        rows = Rows.of([1] * len(prompts), model.device, past=state.lengths)
    model.train(was_training)
    return torch.stack(drawn, dim=1).tolist()
