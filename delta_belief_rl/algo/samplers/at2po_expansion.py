"""AT2PO: one tree of a group grows at the turns that the policy was least sure of.

A group of ``n`` games begins with ``n - rounds * beam`` games from the opening, all in one tree. In
each of ``rounds`` rounds the ``beam`` turns with the largest score get a sibling: the tree is left
before such a turn, which is sampled anew. With ``H`` the mean surprisal of the turn's tokens in
nats::

    score = H - branch_penalty * (siblings of the turn)

Only turns that are not the last of their game are looked at. Where they are fewer than ``beam``
they are taken once more, in the same order; without any, a game is begun from the opening.

Source: AT2PO (arXiv 2601.04767). Confidence: score, siblings and rounds are those of the public
code, but that the opening itself, which nobody sampled, is not among the turns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from delta_belief_rl.algo.base import require_range
from delta_belief_rl.algo.samplers.branches import (
    Draw,
    Leave,
    Place,
    Played,
    places,
    require_count,
    round_robin,
)


@dataclass(frozen=True, slots=True)
class ExpansionSettings:
    """Knobs of ``Expansion``; ``branch_penalty`` in nats.

    Attributes:
        beam: None for as many as make 6 of 11 games branches, the published share.
    """

    rounds: int = 2
    beam: int | None = None
    branch_penalty: float = 0.05

    def __post_init__(self) -> None:
        require_count("algorithm.tree.at2po.rounds", self.rounds, 0)
        if self.beam is not None:
            require_count("algorithm.tree.at2po.beam", self.beam)
        require_range("algorithm.tree.at2po.branch_penalty", self.branch_penalty, 0.0)

    def siblings(self, size: int) -> int:
        """Turns that get a sibling in a round.

        Example:
            >>> [ExpansionSettings().siblings(size) for size in (22, 8, 2)]
            [6, 2, 1]
        """
        if self.beam is not None:
            return self.beam
        return max(1, 6 * size // 11 // max(self.rounds, 1))


@dataclass(frozen=True, slots=True)
class Expansion:
    """See the module's head."""

    settings: ExpansionSettings = ExpansionSettings()

    def first(self, size: int) -> list[Leave]:
        """Games from the opening, all in the tree of the first one."""
        count = max(size - self.settings.rounds * self.settings.siblings(size), 1)
        return [Leave(), *[Leave(0, 0)] * (count - 1)]

    def more(self, played: Sequence[Played], size: int, rounds: int, draw: Draw) -> list[Leave]:
        """``beam`` siblings of the least sure turns."""
        count = min(self.settings.siblings(size), size - len(played))
        if rounds > self.settings.rounds:
            return []
        # In a tree of one group the opening is the turn -1 of nobody.
        children = Counter(
            game.above(turn) for game in played for turn in range(game.shared, game.num_turns)
        )
        scores: dict[Place, float] = {}
        for game in played:
            for place in places(game, 0, game.num_turns - 1):
                surprisal = game.surprisal[place.turn]
                if math.isfinite(surprisal):
                    others = children[game.above(place.turn)] - 1
                    scores[place] = surprisal - self.settings.branch_penalty * others
        ordered = sorted(scores, key=lambda place: (-scores[place], place.game, place.turn))
        return round_robin(ordered, count) or [Leave(0, 0)] * count

    def kept(self, played: Sequence[Played], size: int, draw: Draw) -> list[int]:
        """All games."""
        return [game.game for game in played]
