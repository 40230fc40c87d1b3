"""What a rule of trees is told of a group's finished games, and what it answers.

A group of one secret is played in rounds. The first round has games that begin at the opening;
after every round the rule is shown all finished games and names further ones, each of which leaves
one of these before one of its turns. A round without a game is the last. A rule is a pure function
of what it is shown and of uniform numbers that have names, so a round that is played again is the
same.

``Draw`` gives the uniform number in [0, 1) with a name; run, secret and step are part of it
already.

Shapes: ``k`` turns of a game, ``n`` games of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from delta_belief_rl.algo.base import require_range

Draw = Callable[..., float]
"""``draw("arpo", game, turn)``: a uniform number in [0, 1)."""

ALONE = -1
"""``Leave.parent`` of a game that begins at the opening and is a tree of its own."""


@dataclass(frozen=True, slots=True)
class Place:
    """A turn, under the game that was first to play it."""

    game: int
    turn: int


@dataclass(frozen=True, slots=True)
class Played:
    """A finished game, as a rule sees it.

    Attributes:
        game: Its number inside the group.
        tree: Number of the game with which its tree began.
        shared: Turns at its beginning that another game had played before.
        surprisal: Mean negative log-prob of each turn's sampled tokens, in nats, ``[k]``.
        onset: The same over the first tokens of each turn, ``[k]``.
        left: The game that was first to play the last of these turns; ``ALONE`` without one.
        round: In which it was played, from 1.
        open: Others may leave it: its environment can be brought back, and no failure ended it.
    """

    game: int
    tree: int
    shared: int
    surprisal: tuple[float, ...]
    onset: tuple[float, ...]
    left: int = ALONE
    round: int = 1
    open: bool = True

    @property
    def num_turns(self) -> int:
        """``k``."""
        return len(self.surprisal)

    def above(self, turn: int) -> Place:
        """The turn before one of the game's own, under the game that was first to play it."""
        return Place(self.game if turn > self.shared else self.left, turn - 1)


@dataclass(frozen=True, slots=True)
class Leave:
    """A game that is to be played.

    Attributes:
        parent: The game that it leaves, or ``ALONE``.
        turn: Before which it leaves; 0 shares the opening alone, in the parent's tree.
    """

    parent: int = ALONE
    turn: int = 0


class BranchRule(Protocol):
    """Which games of a group are played, and which of them are trained on."""

    def first(self, size: int) -> list[Leave]:
        """The games of the first round; game ``i`` is the ``i``-th. A parent is an earlier one.

        Args:
            size: ``n``, games of a group.
        """
        ...

    def more(self, played: Sequence[Played], size: int, rounds: int, draw: Draw) -> list[Leave]:
        """The games of the next round; none when the group is complete.

        Args:
            played: All finished games of the group, by number.
            size: ``n``.
            rounds: Rounds played so far, at least 1.
            draw: Named uniform numbers.
        """
        ...

    def kept(self, played: Sequence[Played], size: int, draw: Draw) -> list[int]:
        """Numbers of the games that are trained on, ``n`` of them, in order."""
        ...


def places(game: Played, low: int, high: int) -> Iterator[Place]:
    """Own turns ``low <= t < high`` of a game before which it may be left."""
    if game.open:
        for turn in range(max(low, game.shared), min(high, game.num_turns)):
            yield Place(game.game, turn)


def round_robin(ordered: Sequence[Place], count: int) -> list[Leave]:
    """The first ``count`` places; from the beginning again where they are fewer."""
    if not ordered:
        return []
    chosen = (ordered[number % len(ordered)] for number in range(count))
    return [Leave(place.game, place.turn) for place in chosen]


def mean_surprisal(logprobs: Sequence[float], first: int = 0) -> float:
    """Mean of ``-logprob`` over a turn, or over its first tokens; infinite where one is impossible.

    Example:
        >>> mean_surprisal([-1.0, -2.0, -6.0]), mean_surprisal([-1.0, -2.0, -6.0], first=2)
        (3.0, 1.5)
    """
    used = logprobs[:first] if first else logprobs
    value = -math.fsum(used) / max(len(used), 1)
    return value if math.isfinite(value) else math.inf


def require_count(name: str, value: int, low: int = 1) -> None:
    """Check a whole number of at least ``low``.

    Raises:
        UserError: It is below.
    """
    require_range(name, value, low)
