"""quickstart: a nano K3 on text that every machine has, in minutes on two cores."""

from __future__ import annotations

from trivium.config import model_preset
from trivium.train.pretrain import PretrainConfig
from trivium.train.schedule import Length
from trivium.train.stages import Stage

NUM_THREADS = 2


def quickstart(*, minutes: float = 4.0, num_steps: int | None = None, seed: int = 0) -> PretrainConfig:
    """nano, 2,048 tokens a step in pieces of 128; docs/train.md has what other choices gave.

    More than 128 tokens a piece are fewer documents a step: at 256, 512, 1,024 held-out bits per byte are 0.02, 0.07
    and 0.11 higher after these few steps. Half the tokens a step is worse, since Muon costs as much for it. A few
    hundred steps want a short memory of the gradients: momentum .85 at twice the rate is 0.04 better than .95.
    """
    return PretrainConfig(
        recipe="quickstart",
        model=model_preset("nano"),
        length=Length(seconds=60 * minutes, num_steps=num_steps),
        batch_tokens=2048,
        stages=(Stage(max_len=128, share=1.0),),
        muon_lr=0.045,
        muon_momentum=0.85,
        adamw_lr=6e-3,
        adamw_betas=(0.9, 0.98),
        weight_decay=0.0,
        clip_norm=None,
        balancing="exact",
        num_evals=max(2, round(2 * min(minutes, 1e6))),  # 1 s each: a thirtieth of the time
        seed=seed,
    )
