"""All experiments by name."""

from __future__ import annotations

from trivium.lab import balance, length, muon, per_head
from trivium.lab.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT for module in (balance, muon, per_head, length)
}
