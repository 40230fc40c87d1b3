"""iStar: a model of its own, taught which games were won, says what each turn was worth.

The process model ``phi`` reads the sampled tokens as the policy did. With ``l`` its log-prob of a
token and ``o`` the policy's before the update, turn ``k`` of a game is worth, and the game is::

    q_k = beta * sum over the turn's tokens of (l - o),    qbar = mean over the game's turns of q_k

It is taught by all pairs of a game that was won and one that was not, of the same group::

    loss = mean over all pairs of the batch of -log sigmoid(qbar_won - qbar_lost)

and the advantage of a turn is that of its game plus that of its worth::

    A_k = A_grpo + step_advantage_w * a_k

``baseline="rloo"``
    ``a_k = q_k`` less the mean of all other turns of the group.
``baseline="grpo"``
    ``a_k = (q_k - mean) / (std + eps)`` over all turns of the group, std unbiased, eps = 1e-6.
``baseline="reinforce_plus_plus_baseline"``
    ``a_k = whiten(q_k - mean)``, the mean over all turns of the group, whitened over the batch's
    sampled tokens (``credit.whitening``).

With ``normalise`` all ``q_k`` are divided first by the largest ``|q_k + ... + q_K|`` of the batch.
A turn alone in its group, and turns that are all worth the same, have ``a = 0``. Turns that are not
valid have no part in anything.

Pairs join games of different micro-batches and ranks, so the loss is computed here, from what
``phi`` said before its update, and ``phi`` is handed its slope at every token
(``prm_slope``). What ``phi`` says is linear in its log-probs, so that the sum of slope times
log-prob has, at these weights, the gradient of the loss.

Every game of a pair has a valid turn, and with it weight in the update: games that are left out of
the update belong to no pair. A group that ends in one way only has no pair and is scored all the
same.

Source: iStar (arXiv 2509.19199). Confidence: the formula of a digest of the authors' code. Ours:
every pair of the batch weighs the same, whatever its group; ``norm_adv_by_std_in_grpo`` is the
game's part's alone; whitening weighs a turn by its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import (
    LOGP,
    Advantage,
    Grain,
    Stateless,
    require_choice,
    require_first,
    require_range,
)
from delta_belief_rl.algo.credit.groups import finish, group_stats, live_games, used_channels
from delta_belief_rl.algo.credit.grpo import whole_games
from delta_belief_rl.algo.credit.views import LOGP_COLUMN, token_column
from delta_belief_rl.algo.credit.whitening import trained_tokens, whiten
from delta_belief_rl.types import BoolArray, FloatArray, IntArray, TurnTable

PRM_COLUMN = "prm"
"""Column of ``TurnTable.tokens``: log-prob of each sampled token under the process model."""
PRM = f"tokens:{PRM_COLUMN}"
SLOPE = "prm_slope"
"""What the process model is told of every token: the slope of its loss in the log-prob."""
BASELINES = ("rloo", "grpo", "reinforce_plus_plus_baseline")


@dataclass(frozen=True, slots=True)
class IstarSettings:
    """Knobs of ``Istar``; ``epsilon`` guards both divisions by a deviation."""

    beta: float = 0.05
    step_advantage_w: float = 1.0
    baseline: str = "rloo"
    normalise: bool = False
    norm_adv_by_std_in_grpo: bool = True
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        require_range("algorithm.istar.beta", self.beta, 0.0, open_low=True)
        require_range("algorithm.istar.step_advantage_w", self.step_advantage_w, 0.0)
        require_choice("algorithm.istar.baseline", self.baseline, BASELINES)
        require_range("algorithm epsilon", self.epsilon, 0.0)


@dataclass(frozen=True, slots=True)
class PairLoss:
    """The loss of a batch's pairs.

    Attributes:
        loss: Its mean over the pairs; 0 without any.
        slopes: Of the loss in each game's score, ``[N]``.
        pairs: How many there are.
        ordered: Pairs whose won game has the higher score; equal ones count as half.
    """

    loss: float
    slopes: FloatArray
    pairs: int
    ordered: float


def pair_loss(scores: FloatArray, won: BoolArray, live: BoolArray, group: IntArray) -> PairLoss:
    """``-log sigmoid(won - lost)`` over all pairs inside the groups.

    Args:
        scores: ``[N]``.
        won: ``[N]``.
        live: ``[N]``, false for games that are in no pair.
        group: ``[N]``.
    """
    slopes, loss, pairs, ordered = np.zeros(len(scores)), 0.0, 0, 0.0
    for number in np.unique(group[live & won]):
        mine = live & (group == number)
        better, worse = np.flatnonzero(mine & won), np.flatnonzero(mine & ~won)
        lead = scores[better][:, None] - scores[worse][None, :]
        loss += float(np.logaddexp(0.0, -lead).sum())
        pull = np.exp(-np.logaddexp(0.0, lead))
        slopes[better] -= pull.sum(axis=1)
        slopes[worse] += pull.sum(axis=0)
        pairs += lead.size
        ordered += float((lead > 0).sum() + 0.5 * (lead == 0).sum())
    count = max(pairs, 1)
    return PairLoss(loss / count, slopes / count, pairs, ordered)


@dataclass(frozen=True, slots=True)
class Istar(Stateless):
    """See the module's head."""

    settings: IstarSettings = IstarSettings()
    requires: ClassVar[tuple[str, ...]] = (
        *("group", "traj", "turn", "n_tokens", "valid", "won"),
        *("rewards", LOGP, PRM),
    )
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """Games and turns are compared inside a group."""
        return True

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``, and the process model's slopes ``[S]``.

        Raises:
            UserError: It is not the first of its chain.
            ValueError: The table has no log-probs of the process model.
        """
        require_first(previous, "istar")
        knobs = self.settings
        worth = self._worth(table)
        whole = whole_games(table, knobs.norm_adv_by_std_in_grpo, knobs.epsilon)
        turns = whole + knobs.step_advantage_w * self._compared(table, worth)
        found = finish(table, turns, used_channels(table))
        slopes, stats = self._taught(table, worth)
        return replace(found, stats={**found.stats, **stats}, columns={SLOPE: slopes})

    def _worth(self, table: TurnTable) -> FloatArray:
        """``q_k``, ``[R]``; 0 on rows that are not valid."""
        row = table.token_row()
        with np.errstate(invalid="ignore"):
            ratio = token_column(table, PRM_COLUMN) - token_column(table, LOGP_COLUMN)
        kept = np.where(table.valid[row], ratio, 0.0)
        sums = np.bincount(row, weights=kept, minlength=table.num_rows)
        return np.asarray(self.settings.beta * sums, dtype=np.float64)

    def _compared(self, table: TurnTable, worth: FloatArray) -> FloatArray:
        """``a_k``, ``[R]``; 0 on rows that are not valid."""
        if self.settings.normalise:
            worth = worth / _largest_suffix(table, worth)
        stats = group_stats(worth, table.valid, table.group)
        kept, centred = table.valid & ~stats.flat, worth - stats.mean
        if self.settings.baseline == "rloo":
            centred = centred * stats.count / np.maximum(stats.count - 1, 1)
        elif self.settings.baseline == "grpo":
            centred = centred / (stats.std + self.settings.epsilon)
        else:
            return whiten(centred, np.where(kept, trained_tokens(table), 0))
        return np.where(kept, centred, 0.0)

    def _taught(self, table: TurnTable, worth: FloatArray) -> tuple[FloatArray, dict[str, float]]:
        """Slope of the loss at every token, ``[S]``, and what to log of the pairs."""
        count = np.bincount(table.traj[table.valid], minlength=table.num_games)
        turns = np.maximum(count, 1)
        scores = np.bincount(table.traj, weights=worth, minlength=table.num_games) / turns
        won = np.zeros(table.num_games, dtype=np.bool_)
        won[table.traj] = table.won
        pairs = pair_loss(scores, won, live_games(table), table.game_group())
        rows = np.where(table.valid, (self.settings.beta * pairs.slopes / turns)[table.traj], 0.0)
        stats = {"istar_loss": pairs.loss, "istar_pairs": float(pairs.pairs)}
        if pairs.pairs:
            stats["istar_ordered"] = pairs.ordered / pairs.pairs
        if table.valid.any():
            stats["istar_worth_std"] = float(worth[table.valid].std())
        return np.repeat(rows, table.n_tokens), stats


def _largest_suffix(table: TurnTable, worth: FloatArray) -> float:
    """The largest ``|q_k + ... + q_K|`` of all games; 1 where all of them are 0."""
    ahead = np.cumsum(table.grid(worth)[:, ::-1], axis=1)
    return float(np.abs(ahead).max(initial=0.0)) or 1.0
