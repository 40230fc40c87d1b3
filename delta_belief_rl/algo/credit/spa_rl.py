"""SPA-RL: the outcome of a game, shared out among its turns by a head that learns to add up to it.

A head beside the policy (``trainer.contributions``) reads a number ``c_k`` off the hidden state at
the last token of turn ``k``. With ``R`` the outcome of the game it is trained on::

    L = mean over games of (sum_k c_k - R)^2

and a turn is paid what it contributed, and a bonus for an action that can be carried out::

    r_k = alpha * c_k + beta * g_k

``g_k`` is 1 where the action took effect (``TurnTable.answered``) and on the last turn of a game, 0
elsewhere. These rewards stand in place of the outcome (``episode_channels``), as the channels
``contribution`` and ``grounding``; what else a run pays is paid as it is. Contributions may be
negative and are not clamped. PPO follows: ``estimator="gae"`` is ``credit.gae``, ``turn_ppo`` is
``credit.turn_ppo``, each on these rewards.

In the first ``warmup_steps`` updates the head learns and the outcome is paid as it is. The head
reads a step's games before it learns from them. With ``refresh=False`` it stops to learn after the
warm-up. Turns that are not valid have no part in the sum and are not paid; nor has a turn without a
sampled token, whose last token does not exist. Evaluations ask no head: there the outcome stands
where it fell, ``alpha`` times, for what its parts add up to.

Source: SPA-RL (arXiv 2505.20732) and its public code. Confidence: exact for a linear head, its loss
and ``beta``; ``alpha`` is used as the paper's text has it. The head's own refresh, its solution in
closed form on scaled states and the channels that stay are choices of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import (
    VALUES,
    Advantage,
    Credit,
    Grain,
    Stateless,
    require_choice,
    require_first,
    require_range,
)
from delta_belief_rl.algo.credit.critics import check_discounts
from delta_belief_rl.algo.credit.gae import Gae, GaeSettings
from delta_belief_rl.algo.credit.groups import total_reward, used_channels
from delta_belief_rl.algo.credit.turn_ppo import TurnPpo, TurnPpoSettings
from delta_belief_rl.types import BoolArray, FloatArray, TurnTable, UserError

COLUMN = "contribution"
"""Token column of the head: its reading at every sampled token, of which a turn's last counts."""
CONTRIBUTION = f"tokens:{COLUMN}"
"""The same as ``requires`` has it."""
TARGET = "contribution_target"
"""Column for the head: the game's outcome at the last token of each turn in the sum, else NaN."""
GAME = "contribution_game"
"""Column for the head: number of the token's game."""
ESTIMATORS = ("gae", "turn_ppo")


@dataclass(frozen=True, slots=True)
class SpaRlSettings:
    """Knobs of ``SpaRl``; ``gamma`` and ``lam`` are those of the estimator.

    ``alpha`` and ``beta`` in units of reward, ``warmup_steps`` in updates.
    """

    alpha: float = 1.0
    beta: float = 0.5
    warmup_steps: int = 10
    refresh: bool = True
    estimator: str = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    normalise: bool = True
    bootstrap_truncated: bool = False
    episode_channels: tuple[str, ...] = ("outcome", "normalised")

    def __post_init__(self) -> None:
        require_range("algorithm.spa_rl.alpha", self.alpha, 0.0)
        require_range("algorithm.spa_rl.beta", self.beta, 0.0)
        require_range("algorithm.spa_rl.warmup_steps", self.warmup_steps, 0)
        require_choice("algorithm.spa_rl.estimator", self.estimator, ESTIMATORS)
        check_discounts(self.gamma, self.lam)
        if not self.refresh and not self.warmup_steps:
            raise UserError(
                "algorithm.spa_rl.refresh=false leaves the head untrained: set "
                "algorithm.spa_rl.warmup_steps to at least 1."
            )


@dataclass(frozen=True, slots=True)
class SpaRl(Stateless):
    """See the module's head."""

    settings: SpaRlSettings = SpaRlSettings()
    requires: ClassVar[tuple[str, ...]] = (
        *("traj", "turn", "n_tokens", "valid", "terminal", "truncated", "answered"),
        *("rewards", VALUES, CONTRIBUTION),
    )
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.TOKEN

    @property
    def needs_group(self) -> bool:
        """The critic is the baseline."""
        return False

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages and targets of the estimator, and what the head is trained towards.

        Raises:
            UserError: It is not the first of its chain, or there is no critic or no head.
        """
        require_first(previous, "spa_rl")
        if COLUMN not in table.tokens:
            raise UserError(
                f"spa_rl needs the token column {COLUMN} of a head, which nothing in this run "
                "makes: choose another algorithm.adv_estimator."
            )
        found = self._estimator().apply(replace(table, rewards=self._channels(table)))
        columns: dict[str, FloatArray] = {}
        if self.settings.refresh or self._warms_up(table):
            columns[TARGET] = self._targets(table)
            columns[GAME] = np.repeat(table.traj, table.n_tokens).astype(np.float64)
        return replace(
            found, columns={**found.columns, **columns}, stats={**found.stats, **self._stats(table)}
        )

    def paid(self, table: TurnTable) -> FloatArray:
        """The reward of each row, ``[R]``; of an evaluation, with the outcome where it fell."""
        paid = replace(table, rewards=self._channels(table))
        return total_reward(used_channels(paid), paid)

    def _estimator(self) -> Credit:
        knobs = self.settings
        shared = (knobs.gamma, knobs.lam, knobs.normalise, knobs.bootstrap_truncated)
        if knobs.estimator == "gae":
            return Gae(GaeSettings(*shared))
        return TurnPpo(TurnPpoSettings(*shared))

    def _warms_up(self, table: TurnTable) -> bool:
        return table.update < self.settings.warmup_steps

    def _channels(self, table: TurnTable) -> Mapping[str, FloatArray]:
        """The channels that the estimator sees, ``[R]`` each."""
        if self._warms_up(table):
            return table.rewards
        kept = {
            name: column
            for name, column in table.rewards.items()
            if name not in self.settings.episode_channels
        }
        known = COLUMN in table.tokens
        shares = contributions(table) if known else self._episode(table)
        return {
            **kept,
            "contribution": self.settings.alpha * shares,
            "grounding": self.settings.beta * executed(table),
        }

    def _episode(self, table: TurnTable) -> FloatArray:
        """The channels of the whole game where they fell, ``[R]``."""
        used = used_channels(table)
        late = {name: used[name] for name in self.settings.episode_channels if name in used}
        return total_reward(late, table)

    def _outcome(self, table: TurnTable) -> FloatArray:
        """``R`` of each game, ``[N]``."""
        return _per_game(table, self._episode(table))

    def _targets(self, table: TurnTable) -> FloatArray:
        """``TARGET``, ``[S]``."""
        out = np.full(int(table.n_tokens.sum()), np.nan)
        counted = summed(table)
        last = np.cumsum(table.n_tokens) - 1
        out[last[counted]] = self._outcome(table)[table.traj[counted]]
        return out

    def _stats(self, table: TurnTable) -> dict[str, float]:
        """How well the head added up to the outcomes before it learns from them."""
        live = np.unique(table.traj[summed(table)])
        if not len(live):
            return {}
        outcome = self._outcome(table)[live]
        total = _per_game(table, contributions(table))[live]
        out = {
            "executed_turns": float(executed(table)[table.valid].mean()),
            "contribution_error": float(((total - outcome) ** 2).mean()),
        }
        spread = float(outcome.var())
        if spread > 1e-12:
            out["contribution_explained"] = 1.0 - float((outcome - total).var()) / spread
        return out


def summed(table: TurnTable) -> BoolArray:
    """Turns that have a part in the sum of their game: valid ones with a token, ``[R]``."""
    return table.valid & (table.n_tokens > 0)


def contributions(table: TurnTable) -> FloatArray:
    """``c_k``, ``[R]``: the head's reading at the last token; 0 for turns outside the sum."""
    out = np.zeros(table.num_rows)
    counted = summed(table)
    out[counted] = table.tokens[COLUMN][np.cumsum(table.n_tokens)[counted] - 1]
    return out


def executed(table: TurnTable) -> FloatArray:
    """``g_k``, ``[R]``: 1 where the action took effect and on a game's last turn."""
    return (table.valid & (table.answered | table.terminal)).astype(np.float64)


def _per_game(table: TurnTable, values: FloatArray) -> FloatArray:
    """Sum of a column over the turns of each game, ``[R] -> [N]``."""
    out = np.zeros(table.num_games)
    np.add.at(out, table.traj, values)
    return out
