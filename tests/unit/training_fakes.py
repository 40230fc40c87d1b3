"""Small games, batches and models for the tests of the training side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from delta_belief_rl.algo.shapers.channels import build_table
from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.belief.elicit import Elicitation
from delta_belief_rl.models.loading import adapter_names, build_causal_lm, tiny_qwen3_config
from delta_belief_rl.trainer.actor import (
    POLICY,
    ActorSettings,
    AdapterSettings,
    GameScore,
    PolicyActor,
)
from delta_belief_rl.trainer.optimizer import OptimizerSettings
from delta_belief_rl.trainer.packing import UpdatePlan, build_batch, plan_update
from delta_belief_rl.types import (
    Group,
    StopReason,
    Task,
    TrainBatch,
    Trajectory,
    Turn,
    TurnTable,
    Verdict,
)

VOCAB = 37
GUESS = Elicitation("oak", (7, 8, 9, 20, 21), (3, 4))
OPTIMIZER = OptimizerSettings(lr=1e-3, weight_decay=0.01)
ADAPTER = AdapterSettings(rank=2, alpha=4.0)


def make_game(seed: int, turns: int, number: int = 0, task: str = "t") -> Trajectory:
    """A game of random tokens; sampling log-probs are those of nobody in particular."""
    rng = np.random.default_rng(seed)
    ids: list[int] = rng.integers(0, VOCAB, int(rng.integers(2, 6))).tolist()
    made: list[Turn] = []
    for index in range(turns):
        start = len(ids)
        ids += rng.integers(0, VOCAB, int(rng.integers(1, 5))).tolist()
        logprobs = tuple(float(x) for x in -rng.random(len(ids) - start))
        made.append(Turn(index, start, len(ids), logprobs, 0, "q", "No", Verdict.NO))
        ids += rng.integers(0, VOCAB, int(rng.integers(1, 4))).tolist()
    return Trajectory(
        Task(task, "tw_q", "oak", ()), number, tuple(ids), tuple(made), StopReason.TURN_LIMIT
    )


def make_groups(turns: Sequence[Sequence[int]] = ((3, 1, 2), (4, 1, 2))) -> list[Group]:
    """One group per entry, one game per number of turns."""
    groups: list[Group] = []
    for g, counts in enumerate(turns):
        games = tuple(make_game(10 * g + i, k, i, f"t{g}") for i, k in enumerate(counts))
        groups.append(Group(games[0].task, games))
    return groups


def requests(groups: Sequence[Group], guess: Elicitation | None = GUESS) -> list[ScoreRequest]:
    return [ScoreRequest.of(game, guess) for group in groups for game in group.trajectories]


def credit(table: TurnTable, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random advantages and weights of 1, both ``[R]``."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=table.num_rows), np.ones(table.num_rows)


def make_batch(
    groups: Sequence[Group],
    scores: Sequence[GameScore],
    weight: np.ndarray | None = None,
    on_policy: bool = True,
) -> TrainBatch:
    """A batch with random advantages; ``on_policy`` makes the engine agree with the trainer."""
    table = build_table(groups)
    advantages, ones = credit(table)
    names = scores[0].views if scores else {}
    batch = build_batch(
        groups,
        table,
        advantages,
        ones if weight is None else weight,
        [score.logp for score in scores],
        {name: [score.views[name] for score in scores] for name in names},
    )
    return replace(batch, rollout_logp=batch.old_logp) if on_policy else batch


def share(
    batch: TrainBatch, plan: UpdatePlan, rank: int = 0
) -> list[tuple[list[TrainBatch | None], Mapping[str, float]]]:
    """One rank's part of a plan."""
    return [
        (
            [batch.select(m.games) if len(m.games) else None for m in step.ranks[rank]],
            step.denominators,
        )
        for step in plan.steps
    ]


def one_step(
    batch: TrainBatch, ranks: int = 1, max_tokens: int = 10**6, **kwargs: Any
) -> UpdatePlan:
    """A plan with one optimizer step unless ``games_per_step`` says otherwise."""
    options = {"games_per_step": max(batch.num_games, 1)} | kwargs
    return plan_update(batch, ranks=ranks, max_tokens=max_tokens, **options)


def save_model(folder: Path) -> Path:
    """A tiny model on disk whose log-probs differ by nats between contexts."""
    model = build_causal_lm(tiny_qwen3_config(VOCAB))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
    model.save_pretrained(folder)
    return folder


def settings_of(folder: Path, **changes: Any) -> ActorSettings:
    base: dict[str, Any] = {
        "model_path": str(folder),
        "adapter": ADAPTER,
        "optimizer": OPTIMIZER,
        "beliefs": (POLICY,),
        "old_is_new": True,
        "num_threads": 1,
    }
    return ActorSettings(**(base | changes))


def stir(actor: PolicyActor, size: float = 0.1) -> PolicyActor:
    """Give the policy's adapter (and no other) weights that are not the initial ones."""
    generator = torch.Generator().manual_seed(9)
    assert POLICY in adapter_names(actor.model)
    with torch.no_grad():
        for name, parameter in actor.model.named_parameters():
            if f".{POLICY}." in name:
                noise = torch.randn(parameter.shape, generator=generator) * size
                parameter.add_(noise)
    return actor


def assert_states_close(
    got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], atol: float
) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        np.testing.assert_allclose(value, want[name], atol=atol, rtol=0, err_msg=name)
