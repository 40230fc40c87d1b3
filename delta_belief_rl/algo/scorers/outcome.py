"""RELACE's context: whether the game succeeds.

One sentence for success and failure alike; a single word in it differs, so the two contexts differ
in nothing but the outcome.

Source: RELACE (arXiv 2610.07349). Confidence: in its spirit, the wording is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from delta_belief_rl.algo.base import VIEW
from delta_belief_rl.algo.scorers.hints import HintScorer, games_in, outcome_of
from delta_belief_rl.algo.shapers.channels import WinRule
from delta_belief_rl.types import Group

VIEW_NAME = "outcome"
TEMPLATE = "The outcome of this game will be: {outcome}."
WORDS = {True: "success", False: "failure"}


@dataclass(frozen=True, slots=True)
class OutcomeScorer(HintScorer):
    """See the module's head."""

    provides: ClassVar[tuple[str, ...]] = (VIEW + VIEW_NAME,)

    def hints(self, groups: Sequence[Group]) -> list[str | None]:
        """The outcome of each game; None where it is unknown."""
        rule = WinRule(self.settings.rule)
        # The same word as ``TurnTable.won``, which protects the credit of a game.
        ends = [
            None if outcome_of(game, rule) is None else rule.won(game) for game in games_in(groups)
        ]
        return [None if end is None else TEMPLATE.format(outcome=WORDS[end]) for end in ends]
