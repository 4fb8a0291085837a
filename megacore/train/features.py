"""The hooks of a train step (step_hooks.py) that a configuration asks for."""

from __future__ import annotations

from megacore.config import ResolvedConfig
from megacore.parallel.mesh import Mesh
from megacore.train.expert_balance import ExpertBalance
from megacore.train.gradient_noise import GradientNoise
from megacore.train.parallelize import ParallelModel
from megacore.train.replay import Replay
from megacore.train.step_hooks import StepHook


def step_hooks(model: ParallelModel, config: ResolvedConfig, mesh: Mesh) -> list[StepHook]:
    """In the order in which they are called."""
    hooks: list[StepHook] = []
    if config.model.experts is not None:
        hooks.append(ExpertBalance(model.chunks, config, mesh))
    if config.logging.gradient_noise_interval:
        hooks.append(GradientNoise(config))
    if config.watch.replay_interval:
        hooks.append(Replay(model, config, mesh))
    return hooks
