"""Heads of contributions on the small models and batches of ``training_fakes``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import training_fakes as fakes

from delta_belief_rl.algo.credit.spa_rl import GAME, TARGET
from delta_belief_rl.algo.shapers.channels import build_table
from delta_belief_rl.trainer.actor import ActorSettings, GameScore, PolicyActor
from delta_belief_rl.trainer.contributions import NAME, Contributions, ContributionSettings
from delta_belief_rl.types import Group, TrainBatch

SOURCES = ("base", "policy")


def settings_of(folder: Path, source: str = "base", **changes: Any) -> ActorSettings:
    own = ContributionSettings(source=source)
    return fakes.settings_of(folder, **({"learners": (own,), "beliefs": ()} | changes))


def head_of(actor: PolicyActor) -> Contributions:
    head = actor.learners[NAME]
    assert isinstance(head, Contributions)
    return head


def stir(actor: PolicyActor, size: float = 0.1) -> PolicyActor:
    """Give policy and head weights that are not the initial ones."""
    fakes.stir(actor, size)
    weight = head_of(actor).weight
    with torch.no_grad():
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)) * size)
    return actor


def make_batch(
    groups: Sequence[Group],
    scores: Sequence[GameScore],
    outcomes: np.ndarray | None = None,
    weight: np.ndarray | None = None,
    valid: np.ndarray | None = None,
) -> TrainBatch:
    """A batch that teaches the head the outcome of each game, random by default.

    Args:
        outcomes: One for each game.
        weight: Of each turn in the policy's loss.
        valid: Turns that have a part in the sum.
    """
    table = build_table(groups)
    kept = np.ones(table.num_rows, dtype=np.bool_) if valid is None else valid
    wanted = np.random.default_rng(3).normal(size=table.num_games) if outcomes is None else outcomes
    targets = np.full(int(table.n_tokens.sum()), np.nan)
    targets[(np.cumsum(table.n_tokens) - 1)[kept]] = wanted[table.traj[kept]]
    batch = fakes.make_batch(groups, scores, weight)
    # The environment's tokens are zero, as ``build_batch`` leaves them.
    columns = {TARGET: targets, GAME: np.repeat(table.traj, table.n_tokens).astype(np.float64)}
    views = {name: np.zeros(len(batch.turn_ids)) for name in columns}
    for name, column in columns.items():
        views[name][batch.turn_ids >= 0] = column
    return replace(batch, views={**batch.views, **views})
