"""SDPO's context: what a second try would know.

In this order:

1. the actions of the first other game of the group that succeeded, without the thoughts behind them
   and cut from the right;
2. what the environment said about actions of this game that it refused or found repeated;
3. nothing, and the game is left out.

OPID takes the same view for its skill of a whole game.

Source: SDPO (arXiv 2601.20802). Confidence: the order and the cut are those of its public code, the
wording is ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from delta_belief_rl.algo.base import VIEW, Grain
from delta_belief_rl.algo.scorers.hints import HintScorer, cut_words, exchange, succeeded
from delta_belief_rl.types import Group, Trajectory, Verdict

VIEW_NAME = "retry"


@dataclass(frozen=True, slots=True)
class RetryScorer(HintScorer):
    """See the module's head."""

    provides: ClassVar[tuple[str, ...]] = (VIEW + VIEW_NAME,)
    grain: ClassVar[Grain] = Grain.GROUP

    def hints(self, groups: Sequence[Group]) -> list[str | None]:
        """What each game's second try would know; None where that is nothing."""
        return [hint for group in groups for hint in self._group(group.trajectories)]

    def _group(self, games: Sequence[Trajectory]) -> Iterator[str | None]:
        winners = [place for place, game in enumerate(games) if succeeded(game, self.settings)]
        for place, game in enumerate(games):
            other = next((winner for winner in winners if winner != place), None)
            yield self._feedback(game) if other is None else self._demonstration(games[other])

    def _demonstration(self, game: Trajectory) -> str:
        played = " ".join(" ".join(turn.asked.split()) for turn in game.turns)
        return f"An earlier try succeeded like this: {cut_words(played, self.settings.words)}"

    def _feedback(self, game: Trajectory) -> str | None:
        refused = (Verdict.INVALID, Verdict.REPEATED)
        said = " ".join(exchange(turn) for turn in game.turns if turn.verdict in refused)
        if not said:
            return None
        return f"In an earlier try this was not accepted: {cut_words(said, self.settings.words)}"
