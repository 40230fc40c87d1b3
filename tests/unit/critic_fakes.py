"""Critics on the small models and batches of ``training_fakes``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import training_fakes as fakes

from delta_belief_rl.algo.shapers.channels import build_table
from delta_belief_rl.models.adapters import adapter_parameters
from delta_belief_rl.trainer.actor import ActorSettings, GameScore, PolicyActor
from delta_belief_rl.trainer.critic import CRITIC, CriticSettings
from delta_belief_rl.trainer.optimizer import OptimizerSettings
from delta_belief_rl.types import Group, TrainBatch

OPTIMIZER = OptimizerSettings(lr=1e-2, weight_decay=0.01)
FORMS: tuple[CriticSettings, ...] = (
    CriticSettings(optimizer=OPTIMIZER),
    CriticSettings(detach=False, optimizer=OPTIMIZER),
    CriticSettings(form="own", optimizer=OPTIMIZER),
)
NAMES = ("shared", "attached", "own")


def settings_of(folder: Path, critic: CriticSettings | None, **changes: Any) -> ActorSettings:
    return fakes.settings_of(folder, **({"critic": critic, "beliefs": ()} | changes))


def stir(actor: PolicyActor, size: float = 0.1) -> PolicyActor:
    """Give policy, head and the critic's own adapter weights that are not the initial ones."""
    fakes.stir(actor, size)
    assert actor.critic is not None
    generator = torch.Generator().manual_seed(5)
    moved = [*actor.critic.head.parameters()]
    if actor.critic.settings.own:
        moved += adapter_parameters(actor.model, CRITIC).values()
    with torch.no_grad():
        for parameter in moved:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    return actor


def make_batch(
    groups: Sequence[Group],
    scores: Sequence[GameScore],
    weight: np.ndarray | None = None,
    share: float = 1.0,
) -> TrainBatch:
    """A batch with random targets at a share of the trained tokens."""
    batch = fakes.make_batch(groups, scores, weight)
    sampled = batch.turn_ids >= 0
    count = int(build_table(groups).n_tokens.sum())
    rng = np.random.default_rng(3)
    targets = np.where(rng.random(count) < share, rng.normal(size=count), np.nan)
    values = np.concatenate([score.values for score in scores if score.values is not None])
    columns = {name: np.zeros(len(sampled)) for name in ("values", "targets")}
    columns["values"][sampled], columns["targets"][sampled] = values, targets
    return replace(batch, views={**batch.views, **columns})
