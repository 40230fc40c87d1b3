"""Bi-level GAE: a recursion over turns, and inside it one over tokens.

``version="v1"``
    Turns have the critic's values ``V_{e_k}`` at their last tokens::

        delta_k = r_k + gamma_turn * V_{e_{k+1}} - V_{e_k}
        H_k     = delta_k + gamma_turn * lam_turn * H_{k+1}

    ``H_k + V_{e_k}`` is the reward of the turn's last token in a recursion over the tokens of that
    turn alone, with ``gamma`` and ``lam`` and nothing behind its end. A turn's last token has
    ``H_k`` as its advantage.
``version="v2"``
    The same recursion over turns with the values at their *first* tokens. The recursion over tokens
    runs through the whole game on the turns' own rewards; at a turn's last token it takes
    ``H_{k+1}`` as the advantage of what follows.

The critic's targets are ``A_t + V_t`` for every trained token; ``normalise`` then whitens over all
trained tokens. Ends and beginnings of turns come from the table, never from rewards that are not 0.
``lam_turn = None`` is ``lam``. With turns of one token, v1 is the recursion over turns alone, and
so is v2 where both levels have the same ``gamma`` and ``lam``.

Source: VAGEN and RAGEN. Confidence: v1 exact, the formula of public code; v2 follows later code of
the same projects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import (
    VALUES,
    Advantage,
    Grain,
    Stateless,
    require_choice,
    require_first,
    require_range,
)
from delta_belief_rl.algo.credit.critics import (
    ValuedTurns,
    check_discounts,
    finish_valued,
    following_turn,
    turn_means,
    valued_turns,
)
from delta_belief_rl.algo.credit.whitening import whiten
from delta_belief_rl.types import FloatArray, TurnTable

VERSIONS = ("v1", "v2")


@dataclass(frozen=True, slots=True)
class BilevelGaeSettings:
    """Knobs of ``BilevelGae``; ``gamma`` and ``lam`` count per token."""

    gamma: float = 1.0
    lam: float = 1.0
    gamma_turn: float = 0.95
    lam_turn: float | None = None
    version: str = "v1"
    normalise: bool = True
    bootstrap_truncated: bool = False

    def __post_init__(self) -> None:
        check_discounts(self.gamma, self.lam)
        require_range("algorithm.bilevel_gae.gamma_turn", self.gamma_turn, 0.0, 1.0)
        if self.lam_turn is not None:
            require_range("algorithm.bilevel_gae.lam_turn", self.lam_turn, 0.0, 1.0)
        require_choice("algorithm.bilevel_gae.version", self.version, VERSIONS)


@dataclass(frozen=True, slots=True)
class BilevelGae(Stateless):
    """See the module's head."""

    settings: BilevelGaeSettings = BilevelGaeSettings()
    requires: ClassVar[tuple[str, ...]] = (
        *("traj", "turn", "n_tokens", "valid", "truncated"),
        *("rewards", VALUES),
    )
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.TOKEN

    @property
    def needs_group(self) -> bool:
        """The critic is the baseline."""
        return False

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages of single tokens, their means over turns, and targets.

        Raises:
            UserError: It is not the first of its chain, or there is no critic.
        """
        require_first(previous, "bilevel_gae")
        turns = valued_turns(table, "bilevel_gae", bootstrap=self.settings.bootstrap_truncated)
        each = self._first(turns) if self.settings.version == "v1" else self._second(turns)
        targets = each + turns.values
        if self.settings.normalise:
            each = whiten(each, turns.used.astype(np.int64))
        return finish_valued(turns, turn_means(turns, each), targets, each)

    def _turn_level(self, turns: ValuedTurns, values: FloatArray) -> FloatArray:
        lam = self.settings.lam if self.settings.lam_turn is None else self.settings.lam_turn
        return turns.turn_advantages(values, self.settings.gamma_turn, lam)

    def _first(self, turns: ValuedTurns) -> FloatArray:
        """v1, ``[S]``."""
        values, nothing = turns.at(turns.last), np.zeros(turns.table.num_rows)
        returns = self._turn_level(turns, values) + values
        gamma, lam = self.settings.gamma, self.settings.lam
        return turns.token_advantages(returns, gamma, lam, nothing, forgets=True)

    def _second(self, turns: ValuedTurns) -> FloatArray:
        """v2, ``[S]``."""
        table = turns.table
        level = table.grid(self._turn_level(turns, turns.at(turns.first)))
        carry = following_turn(level, turns.exists)[table.traj, table.turn]
        gamma, lam = self.settings.gamma, self.settings.lam
        return turns.token_advantages(turns.rewards, gamma, lam, carry)
