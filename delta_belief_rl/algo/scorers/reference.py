"""A teacher's context: the answer itself.

Source: OPSD (arXiv 2601.18734), whose teacher sees the reference solution. Confidence: the idea is
theirs, the wording is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from delta_belief_rl.algo.base import VIEW
from delta_belief_rl.algo.scorers.hints import HintScorer, cut_words, games_in
from delta_belief_rl.types import Group

VIEW_NAME = "reference"
TEMPLATE = "The answer that you are looking for is: {secret}."


@dataclass(frozen=True, slots=True)
class ReferenceScorer(HintScorer):
    """See the module's head."""

    provides: ClassVar[tuple[str, ...]] = (VIEW + VIEW_NAME,)

    def hints(self, groups: Sequence[Group]) -> list[str | None]:
        """The secret of each game; None for a task that has none."""
        words = self.settings.words
        secrets = [cut_words(game.task.secret, words).rstrip(".") for game in games_in(groups)]
        return [TEMPLATE.format(secret=secret) if secret else None for secret in secrets]
