"""Parameters by component, in all and active for one token. Arithmetic on a config, no torch.

Counted is what is stored: routed experts as numbers, not as packed bytes, and the zeros behind A_log with them (the
model has none of these; `ParamCount.padding` says how many). Active is what one token's forward through the text model
multiplies or adds: all text layers with num_experts_per_token of their routed experts, the norms and AttnRes reads, and
lm_head. The embedding table (one row is looked up), the vision tower, its projector and the padding are not active.
"""

from __future__ import annotations

from dataclasses import dataclass

from trivium.config import K2Config, K3Config, MlaConfig, VisionConfig, preset


@dataclass(frozen=True, kw_only=True)
class ComponentParams:
    component: str
    total: int
    active: int


@dataclass(frozen=True, kw_only=True)
class ParamCount:
    """`padding` is the part of `total` that is zeros behind A_log."""

    rows: tuple[ComponentParams, ...]
    padding: int

    @property
    def total(self) -> int:
        return sum(row.total for row in self.rows)

    @property
    def active(self) -> int:
        return sum(row.active for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class PublishedParams:
    """What the makers say, as they say it."""

    total: str
    active: str


PUBLISHED = {
    "k3": PublishedParams(total="2.78T", active="104.2B"),
    "k2": PublishedParams(total="1.04T", active="32.6B"),
}


def count_params(config: K3Config | K2Config) -> ParamCount:
    """Parameters of every component the model has, in the order of the forward pass."""
    return _count_k3(config) if isinstance(config, K3Config) else _count_k2(config)


def published_params(config: K3Config | K2Config) -> PublishedParams | None:
    """The published figures, where this is the text and vision geometry of a published model."""
    count = count_params(config)
    for name, published in PUBLISHED.items():
        known = preset(name)
        if type(known) is type(config) and count_params(known) == count:
            return published
    return None


@dataclass(frozen=True, kw_only=True)
class ParamTable:
    """Ready to print: the header, one row a component, the sum, and notes in whole sentences."""

    header: tuple[str, str, str]
    rows: tuple[tuple[str, str, str], ...]
    sum: tuple[str, str, str]
    published: tuple[str, str, str] | None
    notes: tuple[str, ...]


def params_table(config: K3Config | K2Config) -> ParamTable:
    """The count as text, with the published figures beside it where there are any."""
    count, published = count_params(config), published_params(config)
    notes = ["Active: text layers with the experts of one token, and lm_head; no embedding table, no vision."]
    if count.padding:
        notes.append(f"The total counts what is stored, {count.padding:,} zeros behind A_log included.")
    if published:
        notes += _against_published(config, count, published)
    return ParamTable(
        header=("component", "parameters", "active per token"),
        rows=tuple((row.component, f"{row.total:,}", f"{row.active:,}") for row in count.rows),
        sum=("in all", f"{count.total:,}", f"{count.active:,}"),
        published=("published", published.total, published.active) if published else None,
        notes=tuple(notes),
    )


def rounded(num_params: int, digits_like: str) -> str:
    """The number with as many decimals, and in the same unit, as a published figure: (1026408232448, "1.04T") 1.03T."""
    unit = digits_like[-1]
    decimals = len(digits_like[:-1].partition(".")[2])
    return f"{num_params / {'B': 10**9, 'T': 10**12}[unit]:.{decimals}f}{unit}"


def _against_published(config: K3Config | K2Config, count: ParamCount, published: PublishedParams) -> list[str]:
    total, active = rounded(count.total, published.total), rounded(count.active, published.active)
    notes = [f"Counted {total} / {active}, published {published.total} / {published.active}."]
    if isinstance(config, K3Config) or (total, active) == (published.total, published.active):
        return notes
    # K2: the two additions that come to mind, worked out; neither gives both figures, nor do the two together.
    layer = _k2_moe_layer(config)
    embedding = config.vocab_size * config.hidden_size
    notes.append(
        f"One more MoE layer ({layer.total:,}, {layer.active:,} active) would make "
        f"{rounded(count.total + layer.total, published.total)} / {rounded(count.active + layer.active, published.active)}."
    )
    notes.append(
        f"The embedding table counted as active would make {rounded(count.active + embedding, published.active)} active, "
        f"with that layer {rounded(count.active + layer.active + embedding, published.active)}: "
        f"{published.active} does not follow from the config."
    )
    return notes


# --- Kimi K3 ----------------------------------------------------------------------------------------------------


def _count_k3(config: K3Config) -> ParamCount:
    D, W, kda, moe = config.hidden_size, config.vocab_size, config.kda, config.moe
    num_mla = len(config.mla_layers)
    num_kda = config.num_layers - num_mla
    num_dense = config.num_dense_layers
    num_moe = config.num_layers - num_dense
    L, F = moe.routed_expert_hidden_size, moe.moe_intermediate_size

    kda_layer = (
        5 * kda.width * D  # q, k, v, g, o
        + 3 * kda.width * kda.short_conv_kernel_size
        + kda.head_dim * D  # f_a
        + kda.width * kda.head_dim  # f_b
        + kda.num_heads * D  # b
        + kda.num_heads  # A_log without its padding
        + kda.width  # dt_bias
        + kda.head_dim  # o_norm
    )
    mla_layer = _mla(config.mla, D) + config.mla.num_heads * config.mla.v_head_dim * D  # and the output gate
    padding = num_kda * (kda.padded_num_heads - kda.num_heads)
    expert = 3 * F * L
    rows = [
        ComponentParams(component="embedding", total=W * D, active=0),
        _all_active("attn_res", (config.num_layers * 2 + 1) * 2 * D),  # a norm and a query each read
        _all_active("norms", config.num_layers * 2 * D + D + num_moe * L),  # two a layer, final, latent result
        ComponentParams(component="kda", total=num_kda * kda_layer + padding, active=num_kda * kda_layer),
        _all_active("mla", num_mla * mla_layer),
        _all_active("dense mlp", num_dense * 3 * config.intermediate_size * D),
        _all_active("router", num_moe * moe.num_experts * (D + 1)),  # weight and selection bias
        _all_active("latent projections", num_moe * 2 * L * D),
        ComponentParams(
            component="routed experts",
            total=num_moe * moe.num_experts * expert,
            active=num_moe * moe.num_experts_per_token * expert,
        ),
        _all_active("shared experts", num_moe * 3 * moe.shared_intermediate_size * D),
        _all_active("lm_head", W * D),
    ]
    if config.vision:
        rows.append(ComponentParams(component="vision tower", total=_vision_tower(config.vision), active=0))
        rows.append(ComponentParams(component="projector", total=_projector(config.vision), active=0))
    return ParamCount(rows=tuple(rows), padding=padding)


def _all_active(component: str, num_params: int) -> ComponentParams:
    return ComponentParams(component=component, total=num_params, active=num_params)


def _mla(mla: MlaConfig, width: int) -> int:
    """MLA without an output gate, its two inner norms with it."""
    return (
        mla.q_lora_rank * width
        + mla.q_lora_rank
        + mla.num_heads * mla.qk_head_dim * mla.q_lora_rank
        + (mla.kv_lora_rank + mla.qk_rope_head_dim) * width
        + mla.kv_lora_rank
        + mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim) * mla.kv_lora_rank
        + mla.num_heads * mla.v_head_dim * width
    )


def _vision_tower(vision: VisionConfig) -> int:
    D = vision.vt_hidden_size
    block = (
        2 * D + 4 * vision.qkv_hidden_size * D + 2 * vision.vt_intermediate_size * D
    )  # norms, wqkv and wo, fc0 and fc1
    patch = 3 * vision.patch_size**2 * D
    positions = vision.init_pos_emb_height * vision.init_pos_emb_width * D
    return patch + positions + vision.vt_num_hidden_layers * block + D  # and the final norm


def _projector(vision: VisionConfig) -> int:
    return (vision.merged_size + vision.text_hidden_size) * vision.merged_size + vision.text_hidden_size


# --- Kimi K2: MLA everywhere, experts on the full width, plain residuals ----------------------------------------


def _count_k2(config: K2Config) -> ParamCount:
    D, W = config.hidden_size, config.vocab_size
    num_moe = config.num_layers - config.num_dense_layers
    moe = config.moe
    return ParamCount(
        rows=(
            ComponentParams(component="embedding", total=W * D, active=0),
            _all_active("norms", config.num_layers * 2 * D + D),
            _all_active("mla", config.num_layers * _mla(config.mla, D)),
            _all_active("dense mlp", config.num_dense_layers * 3 * config.intermediate_size * D),
            _all_active("router", num_moe * moe.num_experts * (D + 1)),
            ComponentParams(
                component="routed experts",
                total=num_moe * moe.num_experts * 3 * moe.moe_intermediate_size * D,
                active=num_moe * moe.num_experts_per_token * 3 * moe.moe_intermediate_size * D,
            ),
            _all_active("shared experts", num_moe * 3 * moe.shared_intermediate_size * D),
            _all_active("lm_head", W * D),
        ),
        padding=0,
    )


def _k2_moe_layer(config: K2Config) -> ComponentParams:
    D, moe = config.hidden_size, config.moe
    expert = 3 * moe.moe_intermediate_size * D
    around = 2 * D + _mla(config.mla, D) + moe.num_experts * (D + 1) + 3 * moe.shared_intermediate_size * D
    return ComponentParams(
        component="one MoE layer",
        total=around + moe.num_experts * expert,
        active=around + moe.num_experts_per_token * expert,
    )
