"""HCAPO's context: what the end of the game looked like.

The hint names the last exchange and what was learnt before it, as the game itself showed it. It
says neither what the game was paid nor, unless an exchange did, what the secret is.

Source: HCAPO (arXiv 2603.08754). Confidence: the idea is theirs, the wording is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from delta_belief_rl.algo.base import VIEW
from delta_belief_rl.algo.scorers.hints import (
    HintScorer,
    cut_words,
    exchange,
    games_in,
    learnt,
    outcome_of,
)
from delta_belief_rl.types import Group, Trajectory

VIEW_NAME = "hindsight"


@dataclass(frozen=True, slots=True)
class HindsightScorer(HintScorer):
    """See the module's head."""

    provides: ClassVar[tuple[str, ...]] = (VIEW + VIEW_NAME,)

    def hints(self, groups: Sequence[Group]) -> list[str | None]:
        """The end of each game; None where it is unknown."""
        return [self._hint(game) for game in games_in(groups)]

    def _hint(self, game: Trajectory) -> str | None:
        if outcome_of(game, self.settings.rule) is None:
            return None
        end = f"The last exchange of this game will be: {exchange(game.turns[-1])}"
        known = " ".join(learnt(game.turns[:-1]))
        if not known:
            return cut_words(end, self.settings.words)
        return cut_words(f"{end} Before it you will have learnt: {known}", self.settings.words)
