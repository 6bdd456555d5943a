"""quickstart: a nano K3 on text that every machine has, in minutes on two cores."""

from __future__ import annotations

from trivium.config import model_preset
from trivium.train.loop import Length
from trivium.train.pretrain import PretrainConfig


def quickstart(*, minutes: float = 4.0, num_steps: int | None = None, seed: int = 0) -> PretrainConfig:
    """nano, 8 x 256 tokens a step: half of that is worse, since Muon costs as much for it (0.1 s of 0.75 s a step)."""
    return PretrainConfig(
        recipe="quickstart",
        model=model_preset("nano"),
        length=Length(seconds=60 * minutes, num_steps=num_steps),
        batch_tokens=8 * 256,
        max_len=256,
        muon_lr=0.03,
        adamw_lr=3e-3,
        num_evals=max(2, round(2 * min(minutes, 1e6))),  # 1.3 s each: a twentieth of the time
        seed=seed,
    )
