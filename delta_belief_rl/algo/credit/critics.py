"""What the methods with a critic share: values and rewards of turns, the recursion, the report.

``V`` of a token is the critic's value of the state in which it is sampled; the environment's tokens
have none. With steps ``t`` (tokens or turns), a reward ``r_t`` and a mask of steps that count::

    delta_t = r_t + gamma * V' - V_t
    A_t     = delta_t + gamma * lam * A'

where ``V'`` and ``A'`` belong to the next step of the game that counts. Behind the last one ``A'``
is 0 and ``V'`` is 0, or the value of the state after the last reply, where a game that was cut off
shall be valued as if it went on.

A turn that is not valid is neither paid nor trained and is stepped over, whatever its values are:
the turn before it looks at the next valid one, without a further discount. A turn without any
sampled token has no value; its reward is paid to the last turn before it that has one.

Source: GAE (arXiv 1506.02438).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from delta_belief_rl.algo.base import Advantage, paid_rewards, require_range
from delta_belief_rl.algo.credit.groups import finish, used_channels
from delta_belief_rl.types import BoolArray, FloatArray, IntArray, TurnTable, UserError

COLUMN = "values"
"""Token column of the critic's values."""
END_COLUMN = "end_value"
"""Token column of the value after the game's last reply, the same on all tokens of a game."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Steps behind which the recursion does not simply go on; ``[N, L]`` each.

    Attributes:
        where: At these steps ``A'`` is ``carry``.
        carry: What ``A'`` is there.
        forgets: ``V'`` is 0 there as well.
    """

    where: BoolArray
    carry: FloatArray
    forgets: bool = False


def backwards(
    rewards: FloatArray,
    values: FloatArray,
    mask: BoolArray,
    end: FloatArray,
    gamma: float,
    lam: float,
    restart: Restart | None = None,
) -> FloatArray:
    """``A_t`` of the module's head, ``[N, L]``, 0 where the mask is false.

    Args:
        rewards: ``[N, L]``.
        values: ``[N, L]``; free where the mask is false.
        mask: ``[N, L]``, steps that count.
        end: ``[N]``, the value behind a game's last step.
        gamma: Discount of one step.
        lam: How far the recursion reaches.
        restart: Where it does not go on.
    """
    out = np.zeros(rewards.shape)
    following, carry = end.astype(np.float64), np.zeros(len(end))
    for t in range(rewards.shape[1] - 1, -1, -1):
        if restart is not None:
            here = restart.where[:, t]
            carry = np.where(here, restart.carry[:, t], carry)
            following = np.where(here & restart.forgets, 0.0, following)
        value, used = np.where(mask[:, t], values[:, t], 0.0), mask[:, t]
        step = rewards[:, t] + gamma * following - value + gamma * lam * carry
        out[:, t] = np.where(used, step, 0.0)
        following, carry = np.where(used, value, following), np.where(used, step, carry)
    return out


def following_turn(grid: FloatArray, mask: BoolArray) -> FloatArray:
    """Value of the next masked turn of each game, 0 where there is none. ``[N, K] -> [N, K]``."""
    out, seen = np.zeros(grid.shape), np.zeros(len(grid))
    for k in range(grid.shape[1] - 1, -1, -1):
        out[:, k] = seen
        seen = np.where(mask[:, k], grid[:, k], seen)
    return out


@dataclass(frozen=True, slots=True)
class ValuedTurns:
    """Turns and tokens of a table with a critic's values.

    Attributes:
        table: The turns.
        row: ``[S]``, row of each sampled token.
        used: ``[S]``, whether it counts.
        values: ``[S]``, 0 where it does not.
        taught: ``[R]``, valid turns with a token.
        rewards: ``[R]``, as they are paid to these turns.
        first, last: ``[R]``, index of the first and last token; free where not taught.
        end: ``[N]``, value behind each game.
        tokens: ``[U]``, the used tokens in the order of games, turns and tokens.
        game, column: ``[U]``, where each of them stands on the grid of games and tokens.
    """

    table: TurnTable
    row: IntArray
    used: BoolArray
    values: FloatArray
    taught: BoolArray
    rewards: FloatArray
    first: IntArray
    last: IntArray
    end: FloatArray
    tokens: IntArray
    game: IntArray
    column: IntArray

    @property
    def exists(self) -> BoolArray:
        """``taught`` on the grid of games and turns, ``[N, K]``."""
        return self.table.grid(self.taught).astype(np.bool_)

    def at(self, index: IntArray) -> FloatArray:
        """Values at one token of each turn, ``[R]``; 0 where a turn is not taught."""
        if not len(self.values):
            return np.zeros(len(index))
        return np.where(self.taught, self.values[np.where(self.taught, index, 0)], 0.0)

    def turn_advantages(self, values: FloatArray, gamma: float, lam: float) -> FloatArray:
        """The recursion over turns, ``[R]``.

        Args:
            values: Of each turn, ``[R]``.
            gamma: Discount of one turn.
            lam: How far it reaches.
        """
        table = self.table
        grid = backwards(
            table.grid(self.rewards), table.grid(values), self.exists, self.end, gamma, lam
        )
        return grid[table.traj, table.turn]

    def grid(self, each: FloatArray) -> FloatArray:
        """``[S] -> [N, L]``, the used tokens of each game side by side."""
        width = int(self.column.max()) + 1 if len(self.column) else 0
        out = np.zeros((self.table.num_games, width))
        out[self.game, self.column] = each[self.tokens]
        return out

    def from_grid(self, grid: FloatArray) -> FloatArray:
        """The inverse of ``grid``, 0 at tokens that are not used."""
        out = np.zeros(len(self.row))
        out[self.tokens] = grid[self.game, self.column]
        return out

    def token_advantages(
        self,
        rewards: FloatArray,
        gamma: float,
        lam: float,
        carry: FloatArray | None = None,
        *,
        forgets: bool = False,
    ) -> FloatArray:
        """The recursion over tokens, ``[S]``; each reward falls on the last token of its turn.

        Args:
            rewards: ``[R]``.
            gamma: Discount of one token.
            lam: How far it reaches.
            carry: ``[R]``, what ``A'`` is at the last token of each turn; None lets the recursion
                run on.
            forgets: With ``carry``: ``V'`` is 0 there.
        """
        paid, ends, entry = (np.zeros(len(self.row)) for _ in range(3))
        paid[self.last[self.taught]] = rewards[self.taught]
        restart = None
        if carry is not None:
            ends[self.last[self.taught]] = 1.0
            entry[self.last[self.taught]] = carry[self.taught]
            restart = Restart(self.grid(ends) > 0, self.grid(entry), forgets)
        mask = self.grid(self.used.astype(np.float64)) > 0
        grid = self.grid(self.values)
        return self.from_grid(backwards(self.grid(paid), grid, mask, self.end, gamma, lam, restart))


def valued_turns(table: TurnTable, name: str, *, bootstrap: bool = False) -> ValuedTurns:
    """The table with its critic's values.

    Args:
        table: With the token columns ``values`` and, for ``bootstrap``, ``end_value``.
        name: Of the method, for the error.
        bootstrap: Games that did not end by themselves go on behind their last reply.

    Raises:
        UserError: There are no values.
    """
    wanted = (COLUMN, END_COLUMN) if bootstrap else (COLUMN,)
    for column in wanted:
        if column not in table.tokens:
            raise UserError(
                f"{name} needs the token column {column} of a critic, which nothing in this run "
                "makes: choose another algorithm.adv_estimator."
            )
    row = table.token_row()
    taught = table.valid & (table.n_tokens > 0)
    used = taught[row]
    stop = np.cumsum(table.n_tokens)
    first, last = stop - table.n_tokens, stop - 1
    within = np.arange(len(row)) - first[row]
    order = np.lexsort((within, table.turn[row], table.traj[row]))
    tokens = order[used[order]].astype(np.int64)
    game = table.traj[row[tokens]]
    starts = np.searchsorted(game, game)
    return ValuedTurns(
        table=table,
        row=row,
        used=used,
        values=np.where(used, table.tokens[COLUMN], 0.0),
        taught=taught,
        rewards=_handed_on(table, taught),
        first=first,
        last=last,
        end=_end_values(table, taught, last) if bootstrap else np.zeros(table.num_games),
        tokens=tokens,
        game=game,
        column=(np.arange(len(game)) - starts).astype(np.int64),
    )


def _handed_on(table: TurnTable, taught: BoolArray) -> FloatArray:
    """Rewards with those of turns without a token on the turn before, ``[R]``."""
    grid, exists = table.grid(paid_rewards(table)), table.grid(taught) > 0
    out, carry = np.zeros(grid.shape), np.zeros(len(grid))
    for k in range(grid.shape[1] - 1, -1, -1):
        total = grid[:, k] + carry
        out[:, k] = np.where(exists[:, k], total, 0.0)
        carry = np.where(exists[:, k], 0.0, total)
    return out[table.traj, table.turn]


def _end_values(table: TurnTable, taught: BoolArray, last: IntArray) -> FloatArray:
    """Value behind each game that was cut off, ``[N]``; 0 for games that ended."""
    out = np.zeros(table.num_games)
    cut = table.grid(table.truncated).any(axis=1)
    column = table.tokens[END_COLUMN]
    rows = np.flatnonzero(taught)
    out[table.traj[rows]] = column[last[rows]]
    return np.where(cut, out, 0.0)


def critic_stats(values: FloatArray, targets: FloatArray) -> dict[str, float]:
    """How well the critic's values told their targets before the update.

    ``explained_variance`` is ``1 - var(target - value) / var(target)`` over the trained values: 1
    for a perfect critic, 0 for one that says the same of every state, below 0 for a worse one. It
    is left out where the targets do not differ.
    """
    kept = np.isfinite(targets)
    if not kept.any():
        return {}
    value, target = values[kept], targets[kept]
    out = {"values_mean": float(value.mean()), "returns_mean": float(target.mean())}
    spread = float(target.var())
    if spread > 1e-12:
        out["explained_variance"] = 1.0 - float((target - value).var()) / spread
    return out


def finish_valued(
    turns: ValuedTurns,
    advantages: FloatArray,
    targets: FloatArray,
    each: FloatArray | None = None,
) -> Advantage:
    """The method's result, with what an experimenter must see of the critic.

    Args:
        turns: What it was made from.
        advantages: ``[R]``.
        targets: ``[S]``; NaN where a value is not trained.
        each: ``[S]``, advantages of single tokens.
    """
    out = finish(turns.table, advantages, used_channels(turns.table))
    targets = np.where(turns.used, targets, np.nan)
    return replace(
        out,
        stats={**out.stats, **critic_stats(turns.values, targets)},
        tokens=each,
        targets=targets,
    )


def turn_means(turns: ValuedTurns, each: FloatArray) -> FloatArray:
    """Mean over the tokens of each turn, ``[S] -> [R]``."""
    rows = turns.table.num_rows
    total = np.bincount(turns.row, weights=each, minlength=rows)
    return total / np.maximum(turns.table.n_tokens, 1)


def check_discounts(gamma: float, lam: float) -> None:
    """Ranges of the two shared settings."""
    require_range("algorithm.gamma", gamma, 0.0, 1.0)
    require_range("algorithm.lam", lam, 0.0, 1.0)
