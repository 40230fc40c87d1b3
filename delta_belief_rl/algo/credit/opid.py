"""OPID: what a skill would have said is added to another method's advantages, token by token.

With ``d_t`` the log-prob of a played token behind the ``retry`` view less that without it::

    A_t <- A_t + skill_w * d_t

The skill of a game is what its second try would know: the actions of a game of the same secret that
succeeded, else what the environment refused. It holds for the whole game; there is no skill of
single critical steps here. Games without the view keep their advantages.

Source: OPID (arXiv 2606.26790). Confidence: the form of the correction is that of its public code;
skills of whole games only, and taken from the group instead of written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import Advantage, Grain, Scorer, Stateless, require_range
from delta_belief_rl.algo.credit.reading import gap_behind, gap_requires, require_teacher
from delta_belief_rl.algo.credit.views import with_tokens
from delta_belief_rl.algo.scorers.hints import HintSettings
from delta_belief_rl.algo.scorers.retry import VIEW_NAME, RetryScorer
from delta_belief_rl.types import TurnTable


@dataclass(frozen=True, slots=True)
class OpidSettings:
    """Knobs of ``Opid``; ``threshold`` is the least grade of a game worth showing."""

    skill_w: float = 0.001
    teacher: str = "policy"
    threshold: float = 0.5
    hint_words: int = 80

    def __post_init__(self) -> None:
        require_range("algorithm.opid.skill_w", self.skill_w, 0.0)
        require_teacher("opid", self.teacher)
        require_range("algorithm.opid.threshold", self.threshold, 0.0, 1.0, open_low=True)
        require_range("algorithm.opid.hint_words", self.hint_words, 1)


@dataclass(frozen=True, slots=True)
class Opid(Stateless):
    """See the module's head."""

    settings: OpidSettings = OpidSettings()
    requires: ClassVar[tuple[str, ...]] = gap_requires(VIEW_NAME)
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """A lone game still has what the environment said."""
        return False

    def scorers(self, rule: str) -> tuple[Scorer, ...]:
        """What tells the skill."""
        knobs = self.settings
        hints = HintSettings(rule, knobs.teacher, knobs.hint_words, knobs.threshold)
        return (RetryScorer(hints),)

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages with one for each token.

        Raises:
            UserError: It is the first of its chain.
            ValueError: The table has no such view.
        """
        read = gap_behind(table, previous, "opid", VIEW_NAME)
        correction = self.settings.skill_w * read.gap
        used = np.repeat(table.valid & read.seen[table.traj], table.n_tokens)
        stats = {
            "view_share": read.share,
            "correction_size": float(np.abs(correction[used]).mean()) if used.any() else 0.0,
        }
        return with_tokens(table, read.before, read.tokens + correction, stats)
