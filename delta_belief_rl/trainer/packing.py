"""From finished games to packed micro-batches, planned once on the driver.

The plan decides everything that ranks must agree on: which game goes where, how many optimizer
steps there are, and how many forward and backward calls each rank makes in each of them. Ranks
never decide for themselves, so they cannot disagree (H7, A19). Denominators are counts over a whole
optimizer step, over all ranks, so neither micro-batching nor sharding changes the loss (A11).
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
    """One optimizer step: ``ranks[r]`` lists rank ``r``'s micro-batches, as many for every rank."""

    ranks: tuple[tuple[MicroBatch, ...], ...]
    denominators: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """All optimizer steps of one training step; none when nothing is left to train."""

    steps: tuple[OptimizerStep, ...]
    max_tokens: int

    @property
    def num_micro_batches(self) -> int:
        """Forward and backward calls of each rank."""
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
    token_advantages: FloatArray | None = None,
) -> TrainBatch:
    """Lay the games of a step end to end and give every sampled token its turn's advantage.

    Args:
        groups: Finished games.
        table: Their turns; row order as in ``build_table``.
        turn_advantages: ``[R]``.
        turn_weight: ``[R]``, zero for turns that must not be trained.
        old_logp: Per game, the log-probs of its sampled tokens in stream order, before the update.
        views: Further log-probs of the same tokens, by name, in the same layout.
        token_advantages: ``[n_tokens.sum()]``, instead of ``turn_advantages`` where the tokens of a
            turn differ.

    Returns:
        The packed batch, without denominators (they belong to an optimizer step).

    Raises:
        ValueError: A game's log-probs are not as many as its sampled tokens (C4, B6), nor are the
            token advantages, a span lies outside its stream, the table is not that of the games, or
            a weight is not a finite number of at least 0.
    """
    games = flat_trajectories(groups)
    for game in games:
        _check_spans(game)
    _check_rows(games, table, turn_advantages, turn_weight)
    lengths = np.array([len(game.token_ids) for game in games], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    turn_ids = np.full(total, -1, dtype=np.int64)
    rollout_logp, advantages, weight = np.zeros(total), np.zeros(total), np.zeros(total)
    row = 0
    for game, offset in zip(games, offsets[:-1], strict=True):
        for turn in game.turns:
            span = slice(int(offset) + turn.start, int(offset) + turn.end)
            turn_ids[span] = turn.index
            rollout_logp[span] = turn.logprobs
            advantages[span] = turn_advantages[row]
            weight[span] = turn_weight[row]
            row += 1
    sampled = turn_ids >= 0
    if token_advantages is not None:
        # Turns are laid out in the order of the rows, so are their tokens.
        if len(token_advantages) != int(sampled.sum()):
            raise ValueError(
                f"{int(sampled.sum())} sampled tokens but {len(token_advantages)} token advantages"
            )
        advantages[sampled] = token_advantages
    token_ids = [np.asarray(game.token_ids, dtype=np.int64) for game in games]
    return TrainBatch(
        token_ids=np.concatenate([np.zeros(0, dtype=np.int64), *token_ids]),
        offsets=offsets,
        turn_ids=turn_ids,
        old_logp=_scatter("policy", old_logp, games, sampled),
        rollout_logp=rollout_logp,
        advantages=advantages,
        weight=weight,
        views={name: _scatter(name, rows, games, sampled) for name, rows in (views or {}).items()},
    )


def _check_spans(game: Trajectory) -> None:
    """Spans follow each other inside the stream, with one log-prob for each token (C4)."""
    free = 1  # The first token of a stream is predicted by nothing.
    for turn in game.turns:
        where = f"turn {turn.index} of game {game.task.id}/{game.game}"
        if not free <= turn.start <= turn.end <= len(game.token_ids):
            raise ValueError(
                f"{where} claims the tokens {turn.start} .. {turn.end}, "
                f"outside {free} .. {len(game.token_ids)}"
            )
        if len(turn.logprobs) != turn.n_tokens:
            raise ValueError(
                f"{where} has {turn.n_tokens} tokens but {len(turn.logprobs)} sampling log-probs"
            )
        free = turn.end


def _check_rows(
    games: Sequence[Trajectory], table: TurnTable, advantages: FloatArray, weight: FloatArray
) -> None:
    """Row ``r`` of the table is the ``r``-th turn, so that no turn gets another one's credit."""
    turns = [(number, turn) for number, game in enumerate(games) for turn in game.turns]
    if table.num_rows != len(turns):
        raise ValueError(f"the turn table has {table.num_rows} rows but the games {len(turns)}")
    want = np.array([(number, turn.index, turn.n_tokens) for number, turn in turns], dtype=np.int64)
    have = np.stack([table.traj, table.turn, table.n_tokens], axis=1)
    if not np.array_equal(have, want.reshape(-1, 3)):
        raise ValueError("the rows of the turn table are not the turns of the games in their order")
    if advantages.shape != (len(turns),) or weight.shape != (len(turns),):
        raise ValueError(
            f"{len(turns)} turns need as many advantages and weights, "
            f"not {advantages.shape} and {weight.shape}"
        )
    if not (np.isfinite(weight) & (weight >= 0)).all():
        raise ValueError("the weight of a turn must be a finite number of at least 0")
    if not np.isfinite(advantages[weight > 0]).all():
        raise ValueError("the advantage of a trained turn must be a finite number")


def _scatter(
    name: str,
    per_game: Sequence[FloatArray],
    games: Sequence[Trajectory],
    sampled: np.ndarray,
) -> FloatArray:
    """``[T]``, the values of each game at its sampled tokens and zero elsewhere."""
    if len(per_game) != len(games):
        raise ValueError(f"view {name!r} has {len(per_game)} games, the batch {len(games)}")
    for game, values in zip(games, per_game, strict=True):
        count = sum(turn.n_tokens for turn in game.turns)
        # Game by game: with a total alone, one game's surplus would shift all later games.
        if len(values) != count:
            raise ValueError(
                f"game {game.task.id}/{game.game} has {count} sampled tokens but {len(values)} "
                f"log-probs of view {name!r}"
            )
    out = np.zeros(len(sampled))
    out[sampled] = np.concatenate([np.zeros(0), *per_game])
    return out


def trained_games(batch: TrainBatch) -> IntArray:
    """Games with a token of non-zero weight; the others would cost a forward for nothing."""
    game_of = np.repeat(np.arange(batch.num_games), batch.lengths())
    return np.unique(game_of[batch.weight != 0])


def denominators(batch: TrainBatch, games: IntArray, length: float = 1.0) -> dict[str, float]:
    """Tokens, turns and rows that carry weight in some games; see ``losses.aggregate``.

    Where turns are distilled, also their tokens, as ``distil`` (``losses.distil``).
    """
    tokens = turns = rows = distilled = 0
    for game in games:
        span = slice(int(batch.offsets[game]), int(batch.offsets[game + 1]))
        used = batch.weight[span] != 0
        tokens += int(used.sum())
        turns += len(np.unique(batch.turn_ids[span][used]))
        rows += bool(used.any())
        if "distil" in batch.views:
            distilled += int((used & (batch.views["distil"][span] > 0)).sum())
    counts = {"tokens": float(tokens), "turns": float(turns), "rows": float(rows), "length": length}
    return {**counts, "distil": float(distilled)} if "distil" in batch.views else counts


def deal(lengths: Sequence[int] | IntArray, ranks: int) -> list[list[int]]:
    """Indices for each rank: longest first, in a snake, so that totals are nearly equal."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for position, index in enumerate(order):
        lap, place = divmod(position, ranks)
        parts[place if lap % 2 == 0 else ranks - 1 - place].append(index)
    return parts


def split_by_tokens(
    lengths: IntArray, games: IntArray, ranks: int, max_tokens: int
) -> list[list[IntArray]]:
    """Cut games into micro-batches for each rank.

    Games are dealt to ranks by length, so that ranks carry nearly equal tokens and a micro-batch
    holds games of similar length. Every rank gets equally many micro-batches; a rank with fewer
    games gets empty ones.
    """
    per_rank = [
        _fill(lengths, [int(games[place]) for place in part], max_tokens)
        for part in deal(lengths[games], ranks)
    ]
    most = max((len(batches) for batches in per_rank), default=0)
    for batches in per_rank:
        batches.extend(np.zeros(0, dtype=np.int64) for _ in range(most - len(batches)))
    return per_rank


def _fill(lengths: IntArray, games: Sequence[int], max_tokens: int) -> list[IntArray]:
    batches: list[list[int]] = []
    used = 0
    for game in games:
        if not batches or used + lengths[game] > max_tokens:
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
        max_tokens: Token budget of a micro-batch on one rank. A longer game gets one of its own.
        games_per_step: Games of one optimizer step (mini-batch), in batch order.
        epochs: Passes over the batch.
        length: Token budget of a game, the constant of ``seq-mean-token-sum-norm``.

    Returns:
        A function of the arguments alone; without steps when no token carries weight (A18).
    """
    lengths, trained = batch.lengths(), trained_games(batch)
    steps: list[OptimizerStep] = []
    for start in range(0, batch.num_games, games_per_step):
        used = trained[(trained >= start) & (trained < start + games_per_step)]
        if not len(used):
            continue
        cut = split_by_tokens(lengths, used, ranks, max_tokens)
        steps.append(
            OptimizerStep(
                ranks=tuple(tuple(MicroBatch(chunk) for chunk in rank) for rank in cut),
                denominators=denominators(batch, used, length),
            )
        )
    return UpdatePlan(steps=tuple(steps) * epochs, max_tokens=max_tokens)
