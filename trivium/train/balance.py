"""What keeps all experts in use: the tokens of a step are counted, and the selection bias follows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from trivium.model.kimi_k3 import KimiK3
from trivium.ops.balance import count_experts, idle_experts, max_violation, quantile_balance_
from trivium.ops.balance.histogram import NUM_COUNTS, count_margins_, out_of_range, quantile_balance_counts_
from trivium.parallel.world import ALONE, World


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How the step's tokens were spread over the experts, of all processes.

    `max_vio` is the largest over the layers of (tokens of the busiest expert / mean) − 1, `idle_experts` how many took
    no token, over all layers. `out_of_range` are the margins that fell outside a histogram's bins.
    """

    max_vio: float
    idle_experts: int
    out_of_range: int = 0


class Balancer(Protocol):
    """What a training step asks of whatever balances the experts."""

    def observe(self, model: KimiK3, counts_T: Tensor) -> Tensor | None:
        """Behind each micro-batch's forward and before its backward; `counts_T` (bool): the tokens with a weight.

        What comes back is added to the loss, a mean over these tokens as the loss is one; None adds nothing.
        """

    def update_(self, model: KimiK3) -> Balance:
        """Once an optimiser step, behind the optimisers: move the biases, in place. Collective."""

    def forget(self, model: KimiK3) -> None:
        """Drop what was observed: the step was given up."""


class LoadGauge:
    """Counts how many tokens every expert took and moves no bias: what each balancer does besides its own.

    Counts are whole numbers; those of all layers are added up over the processes in one reduction a step, so they and
    all that follows from them are the same bits whatever the micro-batches and the number of processes.
    """

    num_counts = 0  # further counts an expert, for those who need them

    def __init__(self, world: World = ALONE) -> None:
        self._world = world
        self._tally: Tally | None = None

    def observe(self, model: KimiK3, counts_T: Tensor) -> Tensor | None:
        """Takes every MoE layer's scores. Raises ValueError where they are not those of one forward of these tokens."""
        scores = _take_scores(model, counts_T)
        if self._tally is None:
            self._tally = Tally(model, self.num_counts)
        loads = [
            count_experts(score_NE.detach(), layer.gate.e_score_correction_bias, layer.gate.num_active)
            for layer, score_NE in zip(model.moe_layers(), scores, strict=True)
        ]
        for own_E, load_E in zip(self._tally.loads_LE, loads, strict=True):
            own_E += load_E
        return self._observed(model, self._tally, scores, loads)

    def update_(self, model: KimiK3) -> Balance:
        tally, self._tally = self._tally or Tally(model, self.num_counts), None
        self._world.sum_(tally.flat_Y)
        self._move_(model, tally)
        return tally.balance()

    def forget(self, model: KimiK3) -> None:
        self._tally = None
        for layer in model.moe_layers():
            layer.take_scores()

    def _observed(self, model: KimiK3, tally: Tally, scores: list[Tensor], loads: list[Tensor]) -> Tensor | None:
        """One micro-batch: each layer's scores of the tokens that count, with their graph, and its loads."""

    def _move_(self, model: KimiK3, tally: Tally) -> None:
        """The step's counts, over all processes."""


Method = Literal["exact", "histogram"]


class QuantileBalancer(LoadGauge):
    """Quantile balancing (docs/model.md, 65-70) over all tokens of a step that count, of all its processes.

    "exact" keeps the scores of a step, and every process gathers those of all; "histogram" keeps counts, however many
    micro-batches there are, and is off by less than a bin (`quantile_balance_counts_`). b <- ema · old + (1 − ema) ·
    new; the bias is all there is to save. Raises ValueError for another method, and an `ema` outside [0, 1).
    """

    def __init__(self, world: World = ALONE, *, method: Method = "exact", ema: float = 0.0) -> None:
        super().__init__(world)
        if method not in get_args(Method):
            raise ValueError(f"balancer: method is one of {', '.join(get_args(Method))}, got {method!r}")
        if not 0 <= ema < 1:
            raise ValueError(f"balancer: ema is at least 0 and below 1, got {ema}")
        self.num_counts = NUM_COUNTS if method == "histogram" else 0
        self._ema = ema
        self._kept: list[list[Tensor]] = []  # of each micro-batch, each layer

    def forget(self, model: KimiK3) -> None:
        super().forget(model)
        self._kept = []

    def _observed(self, model: KimiK3, tally: Tally, scores: list[Tensor], loads: list[Tensor]) -> None:
        if not self.num_counts:
            self._kept.append([score_NE.detach() for score_NE in scores])
            return
        for layer, score_NE, count_EX in zip(model.moe_layers(), scores, tally.counts_LEX, strict=True):
            count_margins_(count_EX, score_NE.detach(), layer.gate.e_score_correction_bias, layer.gate.num_active)

    def _move_(self, model: KimiK3, tally: Tally) -> None:
        kept, self._kept = self._kept, []
        for idx, layer in enumerate(model.moe_layers()):
            bias_E, num_active = layer.gate.e_score_correction_bias, layer.gate.num_active
            old_E = bias_E.clone()
            if self.num_counts:
                quantile_balance_counts_(bias_E, tally.counts_LEX[idx], num_active)
            else:
                own_NE = torch.cat([bias_E.new_empty(0, len(bias_E)), *(scores[idx] for scores in kept)])
                quantile_balance_(bias_E, torch.cat(self._world.gather(own_NE)), num_active)
            bias_E.lerp_(old_E, self._ema)


class Tally:
    """The whole numbers (int32) of one step: `flat_Y` is all of them, the others are parts of its memory.

    `loads_LE`: tokens of each layer's experts. `counts_LEX`: `num_counts` further ones an expert.
    """

    def __init__(self, model: KimiK3, num_counts: int) -> None:
        biases = [layer.gate.e_score_correction_bias for layer in model.moe_layers()]
        L, E = len(biases), len(biases[0]) if biases else 0
        device = biases[0].device if biases else None
        self.flat_Y = torch.zeros(L * E * (1 + num_counts), dtype=torch.int32, device=device)
        self.loads_LE = self.flat_Y[: L * E].view(L, E)
        self.counts_LEX = self.flat_Y[L * E :].view(L, E, num_counts)

    def balance(self) -> Balance:
        """The gauges of what was counted."""
        return Balance(
            max_vio=max(map(max_violation, self.loads_LE.cpu()), default=0.0),
            idle_experts=idle_experts(self.loads_LE),
            out_of_range=int(out_of_range(self.counts_LEX)) if self.counts_LEX.numel() else 0,
        )


def _take_scores(model: KimiK3, counts_T: Tensor) -> list[Tensor]:
    """Each MoE layer's scores [N, E] of the tokens that count, with their graph."""
    at_N = counts_T.nonzero()[:, 0]
    scores = []
    for layer in model.moe_layers():
        taken = layer.take_scores()
        if [len(score_TE) for score_TE in taken] != [len(counts_T)]:
            raise ValueError(
                f"balancer: wanted the router scores of one training forward of {len(counts_T)} tokens, got "
                f"{len(taken)} forwards of {[len(score_TE) for score_TE in taken]} tokens"
            )
        scores.append(taken[0][at_N])
    return scores
