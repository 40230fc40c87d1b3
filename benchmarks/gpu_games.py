"""Games of random tokens in the shape of long real ones, for models with random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from delta_belief_rl.algo.shapers.channels import build_table
from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.belief.elicit import Elicitation
from delta_belief_rl.trainer.packing import build_batch, plan_update
from delta_belief_rl.types import (
    FloatArray,
    Group,
    StopReason,
    Task,
    TrainBatch,
    Trajectory,
    Turn,
    Verdict,
)

Steps = list[tuple[list[TrainBatch | None], Mapping[str, float]]]

PROMPT, QUESTION, REPLY = 120, (8, 16), 10
"""Tokens before the first turn, of a question (fewest and most), of a reply and its headers."""
GUESS, SECRET = 9, 2
"""Tokens of a guess (an empty thought, ``Is it '`` and the secret) and of the secret in it."""


def random_games(count: int, turns: int, vocabulary: int, seed: int = 0) -> list[Trajectory]:
    """Finished games; with 20 turns they have about 560 tokens, 240 of them sampled."""
    rng = np.random.default_rng(seed)
    return [_game(rng, number, turns, vocabulary) for number in range(count)]


def _game(rng: np.random.Generator, number: int, turns: int, vocabulary: int) -> Trajectory:
    ids: list[int] = rng.integers(0, vocabulary, PROMPT).tolist()
    made: list[Turn] = []
    for index in range(turns):
        start = len(ids)
        low, high = QUESTION
        ids += rng.integers(0, vocabulary, int(rng.integers(low, high + 1))).tolist()
        logprobs = (0.0,) * (len(ids) - start)
        made.append(Turn(index, start, len(ids), logprobs, 0, "q", "No", Verdict.NO))
        ids += rng.integers(0, vocabulary, REPLY).tolist()
    task = Task(f"t{number}", "tw_q", "oak", ())
    return Trajectory(task, 0, tuple(ids), tuple(made), StopReason.TURN_LIMIT)


def random_requests(
    games: Sequence[Trajectory], vocabulary: int, seed: int = 1
) -> list[ScoreRequest]:
    """Each game with a belief after every turn."""
    rng = np.random.default_rng(seed)
    requests: list[ScoreRequest] = []
    for game in games:
        ids = tuple(rng.integers(0, vocabulary, GUESS).tolist())
        guess = Elicitation("oak", ids, tuple(range(GUESS - SECRET, GUESS)))
        requests.append(ScoreRequest.of(game, guess))
    return requests


def random_batch(
    games: Sequence[Trajectory], logp: Sequence[FloatArray], max_tokens: int, seed: int = 2
) -> tuple[TrainBatch, Steps]:
    """A batch with random advantages and its optimizer step, as ``PolicyActor.update`` takes it.

    Args:
        games: The games.
        logp: Log-probs of their sampled tokens under the model that will be trained.
        max_tokens: Bound on the tokens of a micro-batch.
    """
    groups = [Group(game.task, (game,)) for game in games]
    table = build_table(groups)
    advantages = np.random.default_rng(seed).normal(size=table.num_rows)
    batch = build_batch(groups, table, advantages, np.ones(table.num_rows), logp)
    # The games were sampled by this very policy, or the guards of the loss would drop them.
    batch = replace(batch, rollout_logp=batch.old_logp)
    plan = plan_update(batch, ranks=1, max_tokens=max_tokens, games_per_step=len(games))
    return batch, [
        ([batch.select(micro.games) for micro in step.ranks[0]], step.denominators)
        for step in plan.steps
    ]
