"""From finished games to packed micro-batches, planned once on the driver.

The plan decides everything that ranks must agree on: which game goes where, how many optimizer steps there
are, and how many forward and backward calls each rank makes in each of them. Ranks never decide for
themselves, so they cannot disagree (H7, A19). Denominators are counts over a whole optimizer step, over all
ranks, so neither micro-batching nor sharding changes the loss (A11).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from delta_belief_rl.types import FloatArray, Group, IntArray, TrainBatch, Trajectory, TurnTable


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Games of one forward and backward call on one rank; ``empty`` ones keep the ranks in step."""

    games: IntArray


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One optimizer step: ``ranks[r]`` lists rank ``r``'s micro-batches, equally many for every rank."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    denominators: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """All optimizer steps of one training step."""

    steps: tuple[OptimizerStep, ...]
    max_tokens: int

    @property
    def num_micro_batches(self) -> int:
        return sum(len(step.ranks[0]) for step in self.steps)


def flat_trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    """Games in batch order: the order of ``TurnTable.traj``."""
    return [trajectory for group in groups for trajectory in group.trajectories]


def build_batch(
    groups: Sequence[Group],
    table: TurnTable,
    turn_advantages: FloatArray,
    turn_weight: FloatArray,
    old_logp: Sequence[FloatArray],
    views: Mapping[str, Sequence[FloatArray]] | None = None,
) -> TrainBatch:
    """Lay the games of a step end to end and give every sampled token its turn's advantage.

    Args:
        groups: Finished games.
        table: Their turns; row order as in ``build_table``.
        turn_advantages: ``[R]``.
        turn_weight: ``[R]``, zero for turns that must not be trained.
        old_logp: Per game, the log-probs of its sampled tokens in stream order, before the update.
        views: Further log-probs of the same tokens, by name, in the same layout.

    Returns:
        The packed batch, without denominators (they belong to an optimizer step).

    Raises:
        ValueError: If a game's log-probs are not as many as its sampled tokens (C4, B6).
    """
    games = flat_trajectories(groups)
    offsets = np.concatenate([[0], np.cumsum([len(game.token_ids) for game in games])]).astype(np.int64)
    total = int(offsets[-1])
    turn_ids = np.full(total, -1, dtype=np.int64)
    rollout_logp = np.zeros(total)
    advantages = np.zeros(total)
    weight = np.zeros(total)
    row = 0
    for game, offset in zip(games, offsets[:-1], strict=True):
        for turn in game.turns:
            span = slice(int(offset) + turn.start, int(offset) + turn.end)
            turn_ids[span] = turn.index
            rollout_logp[span] = turn.logprobs
            advantages[span] = turn_advantages[row]
            weight[span] = turn_weight[row]
            row += 1
    if row != table.num_rows:
        raise ValueError(f"the turn table has {table.num_rows} rows but the games have {row} turns")
    sampled = turn_ids >= 0
    token_ids = np.concatenate([np.asarray(game.token_ids, dtype=np.int64) for game in games])
    return TrainBatch(
        token_ids=token_ids,
        offsets=offsets,
        turn_ids=turn_ids,
        old_logp=_scatter("policy", old_logp, sampled),
        rollout_logp=rollout_logp,
        advantages=advantages,
        weight=weight,
        views={name: _scatter(name, rows, sampled) for name, rows in (views or {}).items()},
    )


def _scatter(name: str, per_game: Sequence[FloatArray], sampled: np.ndarray) -> FloatArray:
    values = np.concatenate([np.asarray(row, dtype=np.float64) for row in per_game])
    if len(values) != int(sampled.sum()):
        raise ValueError(
            f"{len(values)} log-probs of view {name!r} were given for {int(sampled.sum())} sampled tokens"
        )
    out = np.zeros(len(sampled))
    out[sampled] = values
    return out


def trained_games(batch: TrainBatch) -> IntArray:
    """Games with at least one token of non-zero weight; the others would cost a forward for nothing."""
    per_game = np.add.reduceat(np.abs(batch.weight), batch.offsets[:-1]) if batch.num_games else np.zeros(0)
    return np.flatnonzero(per_game > 0)


def denominators(batch: TrainBatch, games: IntArray, length: float = 1.0) -> dict[str, float]:
    """Counts of tokens, turns and rows that carry weight, over the given games; see ``losses.aggregate``."""
    tokens = turns = rows = 0
    for game in games:
        span = slice(int(batch.offsets[game]), int(batch.offsets[game + 1]))
        used = batch.weight[span] != 0
        tokens += int(used.sum())
        turns += len(np.unique(batch.turn_ids[span][used]))
        rows += bool(used.any())
    return {"tokens": float(tokens), "turns": float(turns), "rows": float(rows), "length": length}


def split_by_tokens(lengths: IntArray, games: IntArray, ranks: int, max_tokens: int) -> list[list[IntArray]]:
    """Cut games into micro-batches for each rank.

    Games are sorted by length (ties by index) and dealt to ranks in a snake, so that ranks carry nearly equal
    tokens and a micro-batch holds games of similar length. Every rank gets equally many micro-batches; a rank
    with fewer games gets empty ones.
    """
    order = games[np.lexsort((games, -lengths[games]))]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for position, game in enumerate(order):
        lap, place = divmod(position, ranks)
        dealt[place if lap % 2 == 0 else ranks - 1 - place].append(int(game))
    per_rank = [_fill(lengths, chunk, max_tokens) for chunk in dealt]
    most = max((len(batches) for batches in per_rank), default=0)
    for batches in per_rank:
        batches.extend(np.zeros(0, dtype=np.int64) for _ in range(most - len(batches)))
    return per_rank


def _fill(lengths: IntArray, games: Sequence[int], max_tokens: int) -> list[IntArray]:
    batches: list[list[int]] = []
    used = max_tokens + 1
    for game in games:
        if used + lengths[game] > max_tokens:
            batches.append([])
            used = 0
        batches[-1].append(game)
        used += int(lengths[game])
    return [np.asarray(batch, dtype=np.int64) for batch in batches]


def plan_update(
    batch: TrainBatch,
    *,
    ranks: int,
    max_tokens: int,
    games_per_step: int,
    epochs: int = 1,
    length: float = 1.0,
) -> UpdatePlan:
    """Plan the optimizer steps of one training step.

    Args:
        batch: The packed batch.
        ranks: Data-parallel ranks.
        max_tokens: Token budget of a micro-batch on one rank. A longer game gets a micro-batch of its own.
        games_per_step: Games of one optimizer step (mini-batch), in batch order.
        epochs: Passes over the batch.
        length: Token budget of a game, the constant of ``seq-mean-token-sum-norm``.
    """
    lengths = batch.lengths()
    steps: list[OptimizerStep] = []
    for _ in range(epochs):
        for start in range(0, batch.num_games, games_per_step):
            window = np.arange(start, min(start + games_per_step, batch.num_games))
            used = window[np.isin(window, trained_games(batch))]
            if not len(used):
                continue
            cut = split_by_tokens(lengths, used, ranks, max_tokens)
            steps.append(
                OptimizerStep(
                    ranks=tuple(tuple(MicroBatch(chunk) for chunk in rank) for rank in cut),
                    denominators=denominators(batch, used, length),
                )
            )
    return UpdatePlan(steps=tuple(steps), max_tokens=max_tokens)
