"""From logits to the next token."""

from __future__ import annotations

import torch
from torch import Tensor


def check_sampling(temperature: float, top_p: float) -> None:
    """Raises ValueError unless temperature >= 0 and 0 < top_p <= 1."""
    if not isinstance(temperature, int | float) or not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: wanted a number >= 0, got {temperature}")
    if not isinstance(top_p, int | float) or not 0 < top_p <= 1:
        raise ValueError(f"top_p: wanted a number in (0, 1], got {top_p}")


def sample(
    logits_SW: Tensor, *, temperature: float = 1.0, top_p: float = 1.0, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """One id per row [S], int64, and its log-probability [S], float32, under the model itself.

    Temperature 0 takes the largest logit, the lower id on a tie. top_p keeps the fewest most likely ids whose
    probabilities reach it. Log-probabilities are at temperature 1 over all ids, whatever was kept. Raises ValueError
    for a row with nan or +inf, or with nothing but -inf: no id is drawn from it. A single -inf is an id ruled out.
    """
    check_sampling(temperature, top_p)
    logits_SW = logits_SW.float()
    peak_S1 = logits_SW.amax(-1, keepdim=True)
    if not bool(peak_S1.isfinite().all()):
        bad = int((~peak_S1.isfinite()).nonzero()[0, 0])
        raise ValueError(f"sample: row {bad} of the logits holds nan or +inf, or nothing but -inf")
    log_SW = logits_SW.log_softmax(-1)
    if temperature < 1e-30:  # as float32 it may be 0, and 0 / 0 no probability
        id_S = logits_SW.argmax(-1)  # of equal values torch returns the first
    else:
        # Subtract the peak first: 1 / temperature may be large, and logits times it must not overflow.
        scaled_SW = (logits_SW - peak_S1) / temperature
        probability_SW = scaled_SW.softmax(-1)
        if top_p < 1:
            probability_SW = _nucleus(probability_SW, top_p)
        id_S = torch.multinomial(probability_SW, 1, generator=generator).squeeze(-1)
    return id_S, log_SW.gather(-1, id_S[:, None]).squeeze(-1)


def _nucleus(probability_SW: Tensor, top_p: float) -> Tensor:
    sorted_SW, id_SW = probability_SW.sort(dim=-1, descending=True, stable=True)
    before_SW = sorted_SW.cumsum(-1) - sorted_SW
    return torch.zeros_like(probability_SW).scatter(-1, id_SW, sorted_SW.masked_fill(before_SW >= top_p, 0.0))
