"""One optimiser step over any number of batches, of any number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trivium.data.batch import Batch
from trivium.model.kimi_k3 import KimiK3
from trivium.parallel.fsdp import whole
from trivium.parallel.remat import Recomputed
from trivium.parallel.world import ALONE, World
from trivium.train.balance import Balance, Balancer
from trivium.train.guard import SpikeGuard
from trivium.train.loss import cross_entropy
from trivium.train.qk_clip import clip_logits_, watch_logits_


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did, over all processes.

    `loss` is nats a weighted token, `grad_norm` the 2-norm over all gradients before they were clipped. `skipped` is
    why the step was not applied, None where it was; then there is no `balance` either. `clipped_heads` are the MLA
    heads whose logits were over the limit.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    num_bytes: int
    balance: Balance | None
    skipped: str | None = None
    clipped_heads: int = 0


def train_step(
    model: KimiK3,
    batches: Sequence[Batch],
    optimisers: Sequence[torch.optim.Optimizer],
    *,
    balancer: Balancer,
    world: World = ALONE,
    clip_norm: float | None = None,
    logit_limit: float | None = None,
    guard: SpikeGuard | None = None,
    recomputed: Recomputed | None = None,
    look: Callable[[KimiK3], None] | None = None,
) -> StepResult:
    """Loss = Σ weight·nll / Σ weight over all batches of all processes; gradients, update, then the experts are balanced.

    However the tokens are cut into batches and spread over processes, the step is the same; but each process has as many
    batches, and pictures in the same ones: layers are gathered for all of them at once. Gradients are scaled down
    to a global norm of `clip_norm`, and the weights of an MLA head so that its largest logit was `logit_limit`. A step
    that `guard` objects to is not applied: no weight, moment or bias moves. Without a guard a loss or gradient that is
    not finite raises FloatingPointError instead. `look` sees the model between the gradients and the update.

    Collective. Raises ValueError when no token has a weight, and where the processes' batches do not go together;
    RuntimeError when layers that were to be run again for
    their gradients (`recomputed`) were not.
    """
    if any(batch.logprobs_T is not None or batch.advantage_T is not None for batch in batches):
        raise ValueError("step: logprobs_T and advantage_T are not read by this loss, a batch has them")
    if any((batch.weight_T < 0).any() for batch in batches):
        raise ValueError("step: a token's weight is never negative, a batch has one that is")
    _check_batches(batches, world)
    total_weight, num_tokens, num_bytes = world.sum(
        [
            float(sum(batch.weight_T.sum() for batch in batches)),
            float(sum(batch.rows.num_tokens for batch in batches)),
            float(sum(batch.num_bytes for batch in batches)),
        ]
    )
    if not total_weight > 0:
        raise ValueError(f"step: wanted tokens with a weight above 0, the weights of {len(batches)} batches sum to 0")
    # Nothing is left of a step that was given up, nor of a forward that belonged to none.
    model.train()
    _let_go(optimisers)
    balancer.forget(model)
    watch_logits_(model, logit_limit)
    before = (recomputed.wrapped, recomputed.owed, recomputed.count) if recomputed else ()
    own_loss = 0.0
    for batch in batches:
        hidden_TD, _ = model(batch.ids_T, batch.rows, pixels=batch.pixels)
        share = batch.weight_T.sum() / total_weight
        penalty = balancer.observe(model, batch.weight_T > 0)
        nll = _weighted_nll(hidden_TD, model, batch)
        batch_loss = nll / total_weight
        (batch_loss if penalty is None else batch_loss + share * penalty).backward()
        own_loss += batch_loss.item()
    if recomputed:
        _check_recomputed(recomputed, before, len(batches))
    (loss,) = world.sum([own_loss])
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    grad_norm = float(whole(torch.nn.utils.get_total_norm(grads)))
    if look is not None:
        look(model)
    about = {"loss": loss, "grad_norm": grad_norm, "num_tokens": int(num_tokens), "num_bytes": int(num_bytes)}
    reason = _objection(loss, grad_norm, guard)
    if reason is not None:
        balancer.forget(model)
        _let_go(optimisers)
        return StepResult(**about, balance=None, skipped=reason)
    if clip_norm is not None and grad_norm > clip_norm:
        for grad in grads:
            grad.mul_(clip_norm / grad_norm)
    for optimiser in optimisers:
        optimiser.step()
    _let_go(optimisers)
    clipped_heads = clip_logits_(model, logit_limit, world) if logit_limit is not None else 0
    return StepResult(**about, balance=balancer.update_(model), clipped_heads=clipped_heads)


def _weighted_nll(hidden_TD: Tensor, model: KimiK3, batch: Batch) -> Tensor:
    """Σ weight·nll of the batch. A target of weight 0 is left out: where two thirds are, so are two thirds of the logits."""
    counted_T = batch.weight_T > 0
    targets_T, weight_T = batch.targets_T, batch.weight_T
    if not bool(counted_T.all()):
        hidden_TD, targets_T, weight_T = hidden_TD[counted_T], targets_T[counted_T], weight_T[counted_T]
    return cross_entropy(hidden_TD, model.language_model.lm_head.weight, targets_T, weight_T)


def _check_batches(batches: Sequence[Batch], world: World) -> None:
    """What differs is an error in every process. Unseen, parameters of different layers would meet in one collective."""
    has_pictures_B = torch.tensor([batch.pixels is not None for batch in batches])
    by_rank = [flags_B.tolist() for flags_B in world.gather(has_pictures_B)]
    if any(flags != by_rank[0] for flags in by_rank):
        counts = ", ".join(f"{len(flags)} batches with pictures in {sum(flags)}" for flags in by_rank)
        raise ValueError(f"step: wanted as many batches on every process, with pictures in the same, got {counts}")


def _check_recomputed(recomputed: Recomputed, before: tuple[int, ...], num_batches: int) -> None:
    now = (recomputed.wrapped, recomputed.owed, recomputed.count)
    wrapped, owed, count = (after - then for after, then in zip(now, before, strict=True))
    if wrapped != recomputed.num_layers * num_batches or count != owed:
        raise RuntimeError(
            f"step: wanted {recomputed.num_layers} layers run again for the gradients of each of {num_batches} batches, "
            f"got {wrapped} forwards of which {owed} were to be run again and {count} were"
        )


def _let_go(optimisers: Iterable[torch.optim.Optimizer]) -> None:
    for optimiser in optimisers:
        optimiser.zero_grad(set_to_none=True)


def _objection(loss: float, grad_norm: float, guard: SpikeGuard | None) -> str | None:
    """All processes have the same two numbers, and so come to the same answer."""
    if guard is not None:
        return guard.judge(loss, grad_norm)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise FloatingPointError(
            f"step: the loss is {loss:g} and the gradient's norm {grad_norm:g}, wanted finite ones"
        )
    return None
