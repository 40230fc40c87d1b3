"""Process models on the small models and games of ``training_fakes``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import training_fakes as fakes

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.base import Advantage
from delta_belief_rl.algo.shapers.channels import ChannelShaper, build_table
from delta_belief_rl.models.adapters import adapter_parameters
from delta_belief_rl.trainer import steps
from delta_belief_rl.trainer.actor import ActorSettings, GameScore, PolicyActor
from delta_belief_rl.trainer.optimizer import OptimizerSettings
from delta_belief_rl.trainer.packing import build_batch
from delta_belief_rl.trainer.process_model import ADAPTER, ProcessModel, ProcessModelSettings
from delta_belief_rl.types import Group, StopReason, TrainBatch, TurnTable, Verdict

MODEL = ProcessModelSettings(optimizer=OptimizerSettings(lr=1e-2, weight_decay=0.01))
BETA = 0.5
"""So large that pairs of these short games pull unequally."""


def make_groups(
    turns: Sequence[Sequence[int]] = ((3, 1, 2), (4, 1, 2), (2, 2)),
    wins: Sequence[tuple[int, int]] = ((0, 0), (1, 0), (1, 2)),
    failed: Sequence[tuple[int, int]] = (),
) -> list[Group]:
    """Groups in which some games are won; by default nothing is won in the last one.

    Args:
        turns: Per group, the turns of each game.
        wins: Group and game of those that are won.
        failed: Of those that end without an outcome.
    """
    groups = fakes.make_groups(turns)
    for number, group in enumerate(groups):
        games = list(group.trajectories)
        for place, game in enumerate(games):
            if (number, place) in failed:
                games[place] = replace(game, stop=StopReason.JUDGE_FAILED)
            if (number, place) in wins:
                won = replace(
                    game.turns[-1], verdict=Verdict.WIN, compatible_win=True, strict_win=True
                )
                games[place] = replace(game, turns=(*game.turns[:-1], won), stop=StopReason.WIN)
        groups[number] = replace(group, trajectories=tuple(games))
    return groups


def settings_of(
    folder: Path, model: ProcessModelSettings | None = MODEL, **changes: Any
) -> ActorSettings:
    learners = () if model is None else (model,)
    return fakes.settings_of(folder, **({"learners": learners, "beliefs": ()} | changes))


def stir(actor: PolicyActor, size: float = 0.1) -> PolicyActor:
    """Give policy and process model weights that are not the initial ones."""
    fakes.stir(actor, size)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapter_parameters(actor.model, ADAPTER).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    return actor


def model_of(actor: PolicyActor) -> ProcessModel:
    learner = actor.learners[ADAPTER]
    assert isinstance(learner, ProcessModel)
    return learner


def credited(
    groups: Sequence[Group], scores: Sequence[GameScore], **knobs: Any
) -> tuple[TurnTable, Advantage]:
    """The turn table as a training step makes it, and what ``istar`` makes of it."""
    table = build_table(groups)
    table = replace(table, rewards=ChannelShaper().shape(table, groups))
    table = replace(table, tokens=steps.token_columns(scores))
    return table, build_credit("istar", {"beta": BETA, **knobs}).apply(table)


def make_batch(groups: Sequence[Group], scores: Sequence[GameScore], **knobs: Any) -> TrainBatch:
    """The batch of a training step with ``istar``, on policy."""
    table, advantage = credited(groups, scores, **knobs)
    logp = [score.logp for score in scores]
    columns = steps.batch_columns(table, advantage, scores)
    batch = build_batch(groups, table, advantage.turns, advantage.weight, logp, columns)
    return replace(batch, rollout_logp=batch.old_logp)
