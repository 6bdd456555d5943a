"""What quantile balancing is measured against: no balancing, the sign rule, an auxiliary loss."""

from __future__ import annotations

import torch
from torch import Tensor

from trivium.model.kimi_k3 import KimiK3
from trivium.parallel.world import ALONE, World
from trivium.train.balance import LoadGauge, Tally


class NoBalancing(LoadGauge):
    """The bias never moves; the gauges are live."""


class SignRule(LoadGauge):
    """b_e <- b_e + step · sign(mean load − load_e), after each optimiser step, over all its tokens.

    Wang et al. 2024, "Auxiliary-loss-free load balancing". Raises ValueError for a step that is not above 0.
    """

    def __init__(self, step: float = 1e-3, world: World = ALONE) -> None:
        super().__init__(world)
        if not step > 0:
            raise ValueError(f"sign rule: step is above 0, got {step}")
        self._step = step

    def _move_(self, model: KimiK3, tally: Tally) -> None:
        for layer, load_E in zip(model.moe_layers(), tally.loads_LE.long(), strict=True):
            lack_E = load_E.sum() - len(load_E) * load_E  # E times the mean less the load, in whole numbers
            layer.gate.e_score_correction_bias.add_(lack_E.sign(), alpha=self._step)


class AuxiliaryLoss(LoadGauge):
    """The loss is raised by weight · E · Σ_e f_e P_e for each MoE layer and micro-batch; the bias never moves.

    f_e is the share of the micro-batch's choices that fell on expert e, P_e the mean over its tokens of s_ie over their
    sum. Even loads give 1, all on one expert up to E. The gradient comes through P alone. Fedus et al. 2021, "Switch
    Transformers", (4)-(6); normalised sigmoid scores as DeepSeek-V3. Raises ValueError for a weight not above 0.
    """

    def __init__(self, weight: float, world: World = ALONE) -> None:
        super().__init__(world)
        if not weight > 0:
            raise ValueError(f"auxiliary loss: weight is above 0, got {weight}")
        self._weight = weight

    def forget(self, model: KimiK3) -> None:
        super().forget(model)
        for layer in model.moe_layers():
            layer.keep_graph = True  # of the step that begins

    def _observed(self, model: KimiK3, tally: Tally, scores: list[Tensor], loads: list[Tensor]) -> Tensor | None:
        if not all(layer.keep_graph for layer in model.moe_layers()):
            raise ValueError(
                "auxiliary loss: the scores came without their graph, wanted forget() in front of the step"
            )
        if not scores or not len(scores[0]):
            return None
        losses = [
            len(load_E) * (load_E / load_E.sum()) @ (score_NE / (score_NE.sum(1, keepdim=True) + 1e-20)).mean(0)
            for score_NE, load_E in zip(scores, loads, strict=True)
        ]
        return self._weight * torch.stack(losses).sum()
