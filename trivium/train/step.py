"""One optimiser step over any number of batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trivium.data.batch import Batch
from trivium.model.kimi_k3 import KimiK3
from trivium.ops.balance import count_experts, idle_experts, max_violation, quantile_balance_
from trivium.train.loss import cross_entropy


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How the step's tokens were spread over the experts.

    `max_vio` is the largest over the layers of (tokens of the busiest expert / mean) − 1, `idle_experts` how many took
    no token, over all layers.
    """

    max_vio: float
    idle_experts: int


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did. `loss` is nats a weighted token, `grad_norm` the 2-norm over all gradients before the update."""

    loss: float
    grad_norm: float
    num_tokens: int
    num_bytes: int
    balance: Balance


def train_step(model: KimiK3, batches: Sequence[Batch], optimisers: Sequence[torch.optim.Optimizer]) -> StepResult:
    """Loss = Σ weight·nll / Σ weight over all the batches; gradients, update, and then the experts are balanced.

    However the tokens are cut into batches, the step is the same. Raises ValueError when no token has a weight, and
    FloatingPointError, before any weight moves, when the loss or a gradient is not finite.
    """
    total_weight = sum(float(batch.weight_T.sum()) for batch in batches)
    if not total_weight > 0:
        raise ValueError(f"step: wanted tokens with a weight above 0, the weights of {len(batches)} batches sum to 0")
    if any(batch.logprobs_T is not None or batch.advantage_T is not None for batch in batches):
        raise ValueError("step: logprobs_T and advantage_T are not read by this loss, a batch has them")
    model.train()
    for optimiser in optimisers:
        optimiser.zero_grad(set_to_none=True)  # of a step that was given up
    for layer in model.moe_layers():
        layer.take_scores()  # of a forward that belonged to no step
    loss = 0.0
    for batch in batches:
        hidden_TD, _ = model(batch.ids_T, batch.rows, pixels=batch.pixels)
        batch_loss = (
            cross_entropy(hidden_TD, model.language_model.lm_head.weight, batch.targets_T, batch.weight_T)
            / total_weight
        )
        batch_loss.backward()
        loss += batch_loss.item()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    grad_norm = float(torch.nn.utils.get_total_norm(grads))
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise FloatingPointError(
            f"step: the loss is {loss:g} and the gradient's norm {grad_norm:g}, wanted finite ones"
        )
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return StepResult(
        loss=loss,
        grad_norm=grad_norm,
        num_tokens=sum(batch.rows.num_tokens for batch in batches),
        num_bytes=sum(batch.num_bytes for batch in batches),
        balance=balance_experts_(model, torch.cat([batch.weight_T for batch in batches]) > 0),
    )


@torch.no_grad()
def balance_experts_(model: KimiK3, counts_T: torch.Tensor) -> Balance:
    """Set every MoE layer's selection bias by quantile balancing over the scores of the tokens that count."""
    max_vio, idle = 0.0, 0
    for layer in model.moe_layers():
        bias_E = layer.gate.e_score_correction_bias
        score_NE = torch.cat(layer.take_scores())[counts_T]
        num_active = model.config.moe.num_experts_per_token
        # Of the routes as they were taken: before the bias moves.
        count_E = count_experts(score_NE, bias_E, num_active)
        max_vio = max(max_vio, max_violation(count_E))
        idle += idle_experts(count_E)
        quantile_balance_(bias_E, score_NE, num_active)
    return Balance(max_vio=max_vio, idle_experts=idle)
