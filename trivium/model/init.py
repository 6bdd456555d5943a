"""Initialisation: one table from a parameter's name to how it is drawn.

The released files say nothing about it; each rule stands with its reason. A draw depends on the seed, the parameter's
name and its shape alone, so that a model with more layers, or with a vision tower, starts from the same numbers.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping

import torch
from torch import Generator, Tensor, nn

from trivium.config import K3Config

Rule = Callable[[Tensor, Generator, K3Config], None]  # fills a float32 tensor on the CPU

# The decay of a fresh channel, nats a token: half-lives of 693 to 7 tokens.
SLOWEST_DECAY, FASTEST_DECAY = 1e-3, 1e-1


def initialise_(
    model: nn.Module, seed: int, *, place: Callable[[Tensor, Tensor], Tensor] = lambda draw, tensor: draw
) -> None:
    """Fill every parameter and every saved buffer of a KimiK3 by the table.

    Drawn in float32 on the CPU, each from a generator of its own, then copied to the parameter's dtype and device.
    `place` makes of all the numbers what this parameter holds of them: its share, where it is sharded.
    Raises ValueError, before anything is written, for a name without exactly one rule, for a tensor on the meta
    device, and for packed experts, which hold no numbers to draw.
    """
    config: K3Config = model.config
    tensors = model.state_dict(keep_vars=True)
    rules = {name: rule_of(name) for name in tensors}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"initialise_: {name} is on the meta device, wanted a tensor that has memory")
    with torch.no_grad():
        for name, tensor in tensors.items():
            draw = torch.empty(tensor.shape, dtype=torch.float32)
            rules[name](draw, generator_of(name, seed), config)
            tensor.copy_(place(draw, tensor))


def copy_weights_(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    *,
    place: Callable[[Tensor, Tensor], Tensor] = lambda whole, tensor: whole,
) -> None:
    """Fill every parameter and every saved buffer from a state dict of whole tensors; `place` as in `initialise_`.

    Raises ValueError, before anything is written, for a name that one of them lacks and for another shape.
    """
    tensors = model.state_dict(keep_vars=True)
    for name in sorted(tensors.keys() ^ weights.keys()):
        raise ValueError(f"weights: {name} is in the {'model' if name in tensors else 'weights'} alone")
    for name, tensor in tensors.items():
        if tensor.shape != weights[name].shape:
            raise ValueError(f"weights: {name}: wanted {tuple(tensor.shape)}, got {tuple(weights[name].shape)}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(place(weights[name].float().cpu(), tensor))


def rule_of(name: str) -> Rule:
    """The one rule for this parameter. Raises ValueError when the table has none, or several."""
    found = [rule for pattern, rule in TABLE if re.fullmatch(pattern, name)]
    if len(found) != 1:
        packed = ", packed experts cannot be drawn" if re.search(r"\.weight_(packed|scale)$", name) else ""
        raise ValueError(f"initialise_: wanted one rule for {name}, got {len(found)}{packed}")
    return found[0]


def generator_of(name: str, seed: int) -> Generator:
    """The generator that this parameter is drawn from."""
    # Of a CPU generator's seed only the low 32 bits count, so name and seed are hashed into those.
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


# --- Rules ---------------------------------------------------------------------------------------------------------


def constant(value: float) -> Rule:
    def fill(draw: Tensor, generator: Generator, config: K3Config) -> None:
        draw.fill_(value)

    return fill


def normal(std: float) -> Rule:
    def fill(draw: Tensor, generator: Generator, config: K3Config) -> None:
        draw.normal_(std=std, generator=generator)

    return fill


def uniform(bound: float) -> Rule:
    def fill(draw: Tensor, generator: Generator, config: K3Config) -> None:
        draw.uniform_(-bound, bound, generator=generator)

    return fill


def linear(gain: float, *, input_dims: int = 1) -> Rule:
    """Normal with std gain * fan_in^-1/2; fan_in is the product of the last `input_dims` dims."""

    def fill(draw: Tensor, generator: Generator, config: K3Config) -> None:
        fan_in = math.prod(draw.shape[-input_dims:])
        draw.normal_(std=gain * fan_in**-0.5, generator=generator)

    return fill


def remembering(draw: Tensor, generator: Generator, config: K3Config) -> None:
    """dt_bias = logit(d / -lower_bound), d log-uniform: with A_log 0 and z 0 the log decay is -d, exactly."""
    bound = -config.kda.gate_lower_bound
    if bound <= FASTEST_DECAY:
        raise ValueError(
            f"initialise_: gate_lower_bound {config.kda.gate_lower_bound} cannot start channels at a log decay of "
            f"{-FASTEST_DECAY}"
        )
    draw.uniform_(math.log(SLOWEST_DECAY), math.log(FASTEST_DECAY), generator=generator)
    draw.exp_().div_(bound)
    draw.copy_(torch.logit(draw))


# --- The table -----------------------------------------------------------------------------------------------------

TEXT = r"language_model\.model\."
LAYER = TEXT + r"layers\.\d+\."
ATTENTION = LAYER + r"self_attn\."
MOE = LAYER + r"block_sparse_moe\."
BLOCK = r"vision_tower\.encoder\.blocks\.\d+\."

# Matrices keep half of their input's RMS. A fixed 0.02 would be a gain of 0.2 to 0.3 at width 192 and starve two
# norms: the weighted expert sum comes out at 2e-4 against sqrt(eps) = 3.2e-3, KDA's output at 3.8e-3.
GAIN = 0.5

TABLE: tuple[tuple[str, Rule], ...] = (
    # The embedding is a source that every AttnRes read adds raw, so it needs the size of a block's sum.
    (TEXT + r"embed_tokens\.weight", normal(0.8)),
    # Logits of std g on a normed input start g^2 / 2 above ln(vocabulary): 0.03 at 0.25, but 0.125 at 0.5.
    (r"language_model\.lm_head\.weight", linear(0.25)),
    (TEXT + r"(norm|output_attn_res_norm)\.weight", constant(1.0)),
    (LAYER + r"(input_layernorm|post_attention_layernorm)\.weight", constant(1.0)),
    (LAYER + r"(self_attention|mlp)_res_norm\.weight", constant(1.0)),
    # AttnRes queries of zero read the mean of all sources.
    (LAYER + r"(self_attention|mlp)_res_proj\.weight", constant(0.0)),
    (TEXT + r"output_attn_res_proj\.weight", constant(0.0)),
    # KDA. v must not be small: o is v * beta * (q . k) * K^-1/2, one to two times sqrt(eps) at this gain.
    (ATTENTION + r"(q|k|v|b)_proj\.weight", linear(GAIN)),
    # Four taps as the framework draws them, +-4^-1/2. A normal of 0.02 would be 15 times smaller.
    (ATTENTION + r"(q|k|v)_conv1d\.weight", uniform(0.5)),
    # z through f_a and f_b has std 0.25 or less, small against a dt_bias of -8.5 to -3.9.
    (ATTENTION + r"f_(a|b)_proj\.weight", linear(GAIN)),
    # exp(A_log) multiplies z + dt_bias: 1. log U(1, 16) belongs to the unbounded gate and would freeze this one.
    (ATTENTION + r"A_log", constant(0.0)),
    # With dt_bias 0 every channel would keep 8% a token.
    (ATTENTION + r"dt_bias", remembering),
    (ATTENTION + r"o_norm\.weight", constant(1.0)),
    # Both kinds of attention. o_proj is neither zero nor divided by the depth: AttnRes norms its keys and starts a new
    # sum with every block.
    (ATTENTION + r"(g|o)_proj\.weight", linear(GAIN)),
    # Gated MLA.
    (ATTENTION + r"(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)\.weight", linear(GAIN)),
    (ATTENTION + r"(q|kv)_a_layernorm\.weight", constant(1.0)),
    # Feed-forward.
    (LAYER + r"mlp\.(gate|up|down)_proj\.weight", linear(GAIN)),
    (MOE + r"shared_experts\.(gate|up|down)_proj\.weight", linear(GAIN)),
    (MOE + r"experts\.w[123]\.weight", linear(GAIN)),
    # Router scores start at 0.5, give or take 0.12; the balancer moves the selection bias from 0.
    (MOE + r"gate\.weight", linear(GAIN)),
    (MOE + r"gate\.e_score_correction_bias", constant(0.0)),
    (MOE + r"routed_expert_down_proj\.weight", linear(GAIN)),
    (MOE + r"routed_expert_norm\.weight", constant(1.0)),
    # Not zero: behind the norm it alone sets the routed path's size, and at zero no expert would learn at first.
    (MOE + r"routed_expert_up_proj\.weight", linear(GAIN)),
    # Vision.
    (r"vision_tower\.patch_embed\.proj\.weight", linear(GAIN, input_dims=3)),
    (r"vision_tower\.patch_embed\.pos_emb\.weight", normal(0.02)),
    (BLOCK + r"(wqkv|wo|mlp\.fc0|mlp\.fc1)\.weight", linear(GAIN)),
    (BLOCK + r"(norm0|norm1)\.weight", constant(1.0)),
    (r"vision_tower\.encoder\.final_layernorm\.weight", constant(1.0)),
    (r"mm_projector\.proj\.(0|2)\.weight", linear(GAIN)),
    (r"mm_projector\.post_norm\.weight", constant(1.0)),
)
