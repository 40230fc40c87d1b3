"""ArCHer's critics on the small models and batches of ``training_fakes``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import training_fakes as fakes

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.base import Advantage
from delta_belief_rl.algo.shapers.channels import build_table
from delta_belief_rl.trainer import steps
from delta_belief_rl.trainer.actor import ActorSettings, GameScore, PolicyActor
from delta_belief_rl.trainer.archer import NAME, ArcherCritics, ArcherCriticSettings
from delta_belief_rl.trainer.packing import build_batch
from delta_belief_rl.trainer.token_baseline import BaselineTeacher
from delta_belief_rl.types import Group, TrainBatch, TurnTable

SETTINGS = ArcherCriticSettings(lr=1e-2, width=8, buffer=20, epochs=4, batch=6)


def settings_of(
    folder: Path, archer: ArcherCriticSettings | None = SETTINGS, **changes: Any
) -> ActorSettings:
    learners = () if archer is None else (archer,)
    return fakes.settings_of(folder, **({"learners": learners, "beliefs": ()} | changes))


def critics_of(actor: PolicyActor) -> ArcherCritics:
    found = actor.learners[NAME]
    assert isinstance(found, ArcherCritics)
    return found


def baseline_of(actor: PolicyActor) -> BaselineTeacher:
    found = critics_of(actor).baseline
    assert found is not None
    return found


def stir(actor: PolicyActor, size: float = 0.3) -> PolicyActor:
    """Give policy and critics weights that are not the initial ones; slow copies differ again."""
    return stir_critics(fakes.stir(actor), size)


def stir_critics(actor: PolicyActor, size: float = 0.3) -> PolicyActor:
    """The same for the critics alone, which are whole on every rank."""
    generator = torch.Generator().manual_seed(5)
    teacher = critics_of(actor).teacher
    parameters = [*teacher.critic.parameters(), *teacher.slow.parameters()]
    if critics_of(actor).baseline is not None:
        parameters += baseline_of(actor).baseline.parameters()
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    return actor


def credited(
    groups: Sequence[Group], scores: Sequence[GameScore], seed: int = 0, **knobs: Any
) -> tuple[TurnTable, Advantage]:
    """The turns with random rewards, and what the method makes of them."""
    table = build_table(groups)
    rewards = np.random.default_rng(seed).normal(size=table.num_rows)
    table = replace(table, rewards={"outcome": rewards}, tokens=steps.token_columns(scores))
    return table, build_credit("archer", knobs).apply(table)


def make_batch(
    groups: Sequence[Group],
    scores: Sequence[GameScore],
    weight: np.ndarray | None = None,
    seed: int = 0,
    **knobs: Any,
) -> TrainBatch:
    """A batch with what the method hands to its critics, and random advantages."""
    table, advantage = credited(groups, scores, seed, **knobs)
    batch = build_batch(
        groups,
        table,
        np.random.default_rng(1).normal(size=table.num_rows),
        advantage.weight if weight is None else weight,
        [score.logp for score in scores],
        steps.batch_columns(table, advantage, scores),
    )
    return replace(batch, rollout_logp=batch.old_logp)
