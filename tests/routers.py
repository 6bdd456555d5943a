"""Models that are nothing but their routers, and batches of scores for them: what a balancer looks at."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor


class Routers:
    """`num_layers` routers whose scores are handed in; the biases start as given, or at 0."""

    def __init__(self, num_layers: int, num_experts: int, num_active: int, bias_LE: Tensor | None = None) -> None:
        bias_LE = torch.zeros(num_layers, num_experts) if bias_LE is None else bias_LE.clone()
        self._layers = [_Layer(bias_E, num_active) for bias_E in bias_LE]

    def moe_layers(self) -> list[_Layer]:
        return self._layers

    def forward(self, scores_LTE: Tensor) -> None:
        for layer, score_TE in zip(self._layers, scores_LTE, strict=True):
            layer.scores.append(score_TE)

    @property
    def bias_LE(self) -> Tensor:
        return torch.stack([layer.gate.e_score_correction_bias for layer in self._layers])


class _Layer:
    def __init__(self, bias_E: Tensor, num_active: int) -> None:
        self.gate = SimpleNamespace(e_score_correction_bias=bias_E.contiguous(), num_active=num_active)
        self.scores: list[Tensor] = []
        self.keep_graph = True

    def take_scores(self) -> list[Tensor]:
        taken, self.scores = self.scores, []
        return taken


def skewed_scores(num_tokens: int, skew_E: Tensor, generator: torch.Generator) -> Tensor:
    """sigmoid(normal + skew): some experts are liked by all tokens, and others by none."""
    return torch.randn(num_tokens, len(skew_E), generator=generator).add_(skew_E).sigmoid_()


def even_max_violations(num_tokens: int, num_experts: int, num_active: int, *, count: int) -> Tensor:
    """MaxVio of `count` steps whose choices fall on the experts by chance, all alike: the multinomial noise."""
    generator = torch.Generator().manual_seed(0)
    num_choices = num_tokens * num_active
    worst = [
        torch.randint(num_experts, (num_choices,), generator=generator).bincount(minlength=num_experts).max()
        for _ in range(count)
    ]
    return torch.stack(worst) * num_experts / num_choices - 1
