"""The smallest K3 that has every part: KDA and MLA, dense and MoE layers, two residual blocks; and text for it."""

import random
from dataclasses import replace
from pathlib import Path

from trivium.config import K3Config, KdaConfig, MlaConfig, MoeConfig, model_preset


def tiny_config(num_ranks: int) -> K3Config:
    """For a tokenizer of that many ranks, the 256 control ids behind them."""
    return replace(
        model_preset("nano"),
        num_layers=3,
        hidden_size=32,
        intermediate_size=48,
        attn_res_block_size=2,
        vocab_size=num_ranks + 256,
        bos_token_id=num_ranks,
        eos_token_id=num_ranks + 2,
        media_placeholder_token_id=num_ranks + 21,
        pad_token_id=num_ranks + 255,
        kda=KdaConfig(num_heads=2, head_dim=16),
        mla=MlaConfig(
            num_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
        ),
        moe=MoeConfig(
            num_experts=6,
            num_experts_per_token=2,
            num_shared_experts=1,
            moe_intermediate_size=32,
            routed_expert_hidden_size=32,
        ),
    )


def write_tiny_text(folder: Path) -> None:
    """40 modules of 0.4 KB, no two alike: enough for a tokenizer of 300 ranks, four of them held out."""
    folder.mkdir()
    for idx in range(40):
        name = random.Random(idx).randrange
        lines = (f"def w{name(999)}(x):\n    return x + w{name(999)}(x)\n\n" for _ in range(12))
        (folder / f"module{idx}.py").write_text("".join(lines))
