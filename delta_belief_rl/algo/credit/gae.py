"""PPO's advantages: generalised advantage estimation over single tokens.

The recursion of ``credit.critics`` runs over the sampled tokens of a game, across its turns; the
sum of a turn's rewards falls on the turn's last token. The critic's targets are ``A_t + V_t`` for
every trained token, taken before ``normalise`` whitens the advantages over all trained tokens.

With ``gamma = lam = 1`` a token's advantage is the reward still to come less the critic's value.

Source: PPO (arXiv 1707.06347), GAE (arXiv 1506.02438). Confidence: exact, the formula of public
code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import VALUES, Advantage, Grain, Stateless, require_first
from delta_belief_rl.algo.credit.critics import (
    check_discounts,
    finish_valued,
    turn_means,
    valued_turns,
)
from delta_belief_rl.algo.credit.whitening import whiten
from delta_belief_rl.types import TurnTable


@dataclass(frozen=True, slots=True)
class GaeSettings:
    """Knobs of ``Gae``; ``gamma`` and ``lam`` count per token."""

    gamma: float = 1.0
    lam: float = 1.0
    normalise: bool = True
    bootstrap_truncated: bool = False

    def __post_init__(self) -> None:
        check_discounts(self.gamma, self.lam)


@dataclass(frozen=True, slots=True)
class Gae(Stateless):
    """See the module's head."""

    settings: GaeSettings = GaeSettings()
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
        require_first(previous, "gae")
        settings = self.settings
        turns = valued_turns(table, "gae", bootstrap=settings.bootstrap_truncated)
        each = turns.token_advantages(turns.rewards, settings.gamma, settings.lam)
        targets = each + turns.values
        if settings.normalise:
            each = whiten(each, turns.used.astype(np.int64))
        return finish_valued(turns, turn_means(turns, each), targets, each)
