"""ARPO: games are left where the policy hesitates after a reply, more than it did at first.

A group of ``n`` games begins with ``initial`` games. With ``H_t`` the hesitation at the first
tokens of turn ``t``, as a share of the greatest possible, a game is left before each of its turns
``t >= 1`` with probability::

    p_t = clip(base_probability + entropy_weight * (H_t - H_0), 0, 1)

A game is left at most ``beam - 1`` times. Branches are looked at in their turn, at the places that
they are the first to reach. What the budget does not allow is left out, late turns first; what it
leaves over when nobody is left any more is played as games from the opening.

``H`` is ``onset / log(vocab)``: the mean of ``-logprob`` over the first tokens that were sampled,
whose expectation is their entropy. The public code takes the ten most likely tokens instead, which
engines would have to report: its ``H`` has less noise and an upper bound of ``log(10) / log(V)``.

Source: ARPO (arXiv 2507.19849). Confidence: probability, beam and budget are those of the public
code, but that decides while games are played, and this after each round of games.
"""

from __future__ import annotations

import math
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
)
from delta_belief_rl.types import UserError


@dataclass(frozen=True, slots=True)
class ArpoSettings:
    """Knobs of ``Arpo``.

    Attributes:
        initial: Games that begin at the opening; None for half of the group, rounded up.
        beam: A game becomes at most so many: itself and ``beam - 1`` that leave it.
        base_probability: ``p`` where a turn is as uncertain as the first one.
        entropy_weight: How much of the difference is added to it.
        vocab: Tokens of the policy's vocabulary.
    """

    vocab: int
    initial: int | None = None
    beam: int = 2
    base_probability: float = 0.5
    entropy_weight: float = 0.2

    def __post_init__(self) -> None:
        if self.initial is not None:
            require_count("algorithm.tree.arpo.initial", self.initial)
        require_count("algorithm.tree.arpo.beam", self.beam)
        require_range("algorithm.tree.arpo.base_probability", self.base_probability, 0.0, 1.0)
        require_range("algorithm.tree.arpo.entropy_weight", self.entropy_weight, 0.0)
        if self.vocab < 2:
            raise UserError(
                f"The policy's vocabulary has {self.vocab} tokens, so nothing can be uncertain: "
                "give a model with a vocabulary."
            )


def branch_probability(settings: ArpoSettings, rise: float) -> float:
    """``p`` for a rise of ``H`` above that of the first turn.

    Example:
        >>> [branch_probability(ArpoSettings(vocab=100), rise) for rise in (0.0, 0.5, -0.5)]
        [0.5, 0.6, 0.4]
    """
    wanted = settings.base_probability + settings.entropy_weight * rise
    return min(1.0, max(0.0, wanted))


@dataclass(frozen=True, slots=True)
class Arpo:
    """See the module's head."""

    settings: ArpoSettings

    def first(self, size: int) -> list[Leave]:
        """Games from the opening, each a tree of its own."""
        initial = self.settings.initial
        return [Leave()] * min(size, (size + 1) // 2 if initial is None else initial)

    def more(self, played: Sequence[Played], size: int, rounds: int, draw: Draw) -> list[Leave]:
        """Branches of the last round's games; games from the opening when nobody is left."""
        room = size - len(played)
        # A game is looked at once, right after it was played.
        latest = [game for game in played if game.round == rounds]
        wanted = [place for game in latest for place in self._left(game, draw)]
        wanted.sort(key=lambda place: (place.turn, place.game))
        branches = [Leave(place.game, place.turn) for place in wanted[:room]]
        return branches or [Leave()] * room

    def kept(self, played: Sequence[Played], size: int, draw: Draw) -> list[int]:
        """All games."""
        return [game.game for game in played]

    def _left(self, game: Played, draw: Draw) -> list[Place]:
        """Where a game is left."""
        scale, knobs = math.log(self.settings.vocab), self.settings
        found: list[Place] = []
        # A branch's first own turn is the same place as that of the game it left.
        for place in places(game, game.shared + 1, game.num_turns):
            rise = (game.onset[place.turn] - game.onset[0]) / scale
            if len(found) < knobs.beam - 1 and math.isfinite(rise):
                probability = branch_probability(knobs, rise)
                if draw("arpo", place.game, place.turn) < probability:
                    found.append(place)
        return found
