"""Turn-level PPO: one turn is one action, and the critic is read once for each.

With ``V_k`` the critic's value at the first token of turn ``k``::

    delta_k = r_k + gamma * V_{k+1} - V_k
    A_k     = delta_k + gamma * lam * A_{k+1}

All tokens of a turn share ``A_k``. The critic's target is ``A_k + V_k``, at the first token of each
turn and nowhere else. ``normalise`` standardises over turns afterwards, so that a long turn counts
once like a short one. The policy loss may use token ratios or one ratio for a turn
(``turn_ratio``).

Source: StepPO (arXiv 2604.18401) and Turn-PPO (arXiv 2512.17008). Confidence: exact for the
advantage, the formula of public code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import VALUES, Advantage, Grain, Stateless, require_first
from delta_belief_rl.algo.credit.critics import check_discounts, finish_valued, valued_turns
from delta_belief_rl.algo.credit.whitening import whiten
from delta_belief_rl.types import TurnTable


@dataclass(frozen=True, slots=True)
class TurnPpoSettings:
    """Knobs of ``TurnPpo``; ``gamma`` and ``lam`` count per turn."""

    gamma: float = 1.0
    lam: float = 1.0
    normalise: bool = True
    bootstrap_truncated: bool = False

    def __post_init__(self) -> None:
        check_discounts(self.gamma, self.lam)


@dataclass(frozen=True, slots=True)
class TurnPpo(Stateless):
    """See the module's head."""

    settings: TurnPpoSettings = TurnPpoSettings()
    requires: ClassVar[tuple[str, ...]] = (
        *("traj", "turn", "n_tokens", "valid", "truncated"),
        *("rewards", VALUES),
    )
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.TRAJECTORY

    @property
    def needs_group(self) -> bool:
        """The critic is the baseline."""
        return False

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]`` and targets at first tokens.

        Raises:
            UserError: It is not the first of its chain, or there is no critic.
        """
        require_first(previous, "turn_ppo")
        settings = self.settings
        turns = valued_turns(table, "turn_ppo", bootstrap=settings.bootstrap_truncated)
        value = turns.at(turns.first)
        advantages = turns.turn_advantages(value, settings.gamma, settings.lam)
        targets = np.full(len(turns.row), np.nan)
        targets[turns.first[turns.taught]] = (advantages + value)[turns.taught]
        if settings.normalise:
            advantages = whiten(advantages, turns.taught.astype(np.int64))
        return finish_valued(turns, advantages, targets)
