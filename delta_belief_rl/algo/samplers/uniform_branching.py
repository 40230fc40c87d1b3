"""Tree-GRPO: each tree grows at turns that are drawn uniformly.

A group of ``n`` games has ``trees`` trees, each of which begins with one game. In each of
``rounds`` rounds, ``expand`` turns of each tree are drawn that are not the last of their game, and
the tree goes on anew after each of them. That makes ``1 + rounds * expand`` leaves of each tree, of
which ``n / trees`` are drawn; the others are played and not trained on.

Turns are drawn without repetition, and all of them once more where they are fewer than ``expand``.
A tree without such a turn is begun anew from the opening, inside the tree.

Source: Tree-GRPO (arXiv 2509.21240). Confidence: the growth is that of the public code; that the
opening is not among the turns that are drawn is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from delta_belief_rl.algo.samplers.branches import (
    Draw,
    Leave,
    Played,
    places,
    require_count,
    round_robin,
)


@dataclass(frozen=True, slots=True)
class TreeGrowthSettings:
    """Knobs of ``TreeGrowth``; see the module's head.

    Attributes:
        expand: None for as few as make the games of a group.
    """

    trees: int = 2
    rounds: int = 1
    expand: int | None = None

    def __post_init__(self) -> None:
        require_count("algorithm.tree.tree_grpo.trees", self.trees)
        require_count("algorithm.tree.tree_grpo.rounds", self.rounds, 0)
        if self.expand is not None:
            require_count("algorithm.tree.tree_grpo.expand", self.expand)

    def expansions(self, size: int) -> int:
        """Branches of each tree in a round.

        Example:
            >>> TreeGrowthSettings().expansions(6), TreeGrowthSettings(rounds=2).expansions(8)
            (2, 2)
        """
        if self.expand is not None:
            return self.expand
        return -(-(size // self.trees - 1) // max(self.rounds, 1))


@dataclass(frozen=True, slots=True)
class TreeGrowth:
    """See the module's head."""

    settings: TreeGrowthSettings = TreeGrowthSettings()

    def first(self, size: int) -> list[Leave]:
        """One game for each tree."""
        return [Leave()] * self.settings.trees

    def more(self, played: Sequence[Played], size: int, rounds: int, draw: Draw) -> list[Leave]:
        """``expand`` branches of each tree."""
        if rounds > self.settings.rounds:
            return []
        out, count = list[Leave](), self.settings.expansions(size)
        for tree in range(self.settings.trees):
            # Who leaves before turn t goes on after turn t - 1, which the game was first to play.
            found = [
                place
                for game in played
                if game.tree == tree
                for place in places(game, game.shared + 1, game.num_turns)
            ]
            found.sort(key=lambda place: draw("expand", rounds, place.game, place.turn))
            out += round_robin(found, count) or [Leave(tree, 0)] * count
        return out

    def kept(self, played: Sequence[Played], size: int, draw: Draw) -> list[int]:
        """``n / trees`` games of each tree, drawn."""
        out: list[int] = []
        for tree in range(self.settings.trees):
            leaves = [game for game in played if game.tree == tree]
            # Games that a failure ended teach nothing: they come last.
            leaves.sort(key=lambda game: (not game.open, draw("leaf", game.game)))
            out += [game.game for game in leaves[: size // self.settings.trees]]
        return sorted(out)
