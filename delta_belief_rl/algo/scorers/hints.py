"""What the scorers share: how a game went, told in few words.

A hint stands at the end of a game's opening message while its played tokens are read again. It is
plain text, kept short for small models and short contexts, and is never part of what is trained.
Words are cut from the right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from delta_belief_rl.algo.base import VIEW, Grain, Stateless, require_choice, require_range
from delta_belief_rl.algo.shapers.channels import WinRule, is_void, iter_games
from delta_belief_rl.types import Group, Trajectory, Turn, Verdict

READERS = ("policy", "base", "ema")
"""Who can read a view: the policy, the model without adapter, or the slow adapter."""


@dataclass(frozen=True, slots=True)
class HintSettings:
    """What every scorer knows.

    Attributes:
        rule: Which of the two outcomes counts as a win.
        model: Who reads the view, one of ``READERS``.
        words: Bound on the words of a hint's variable part.
        threshold: The least grade that counts as a success, for environments that grade.
    """

    rule: str = WinRule.COMPATIBLE
    model: str = "policy"
    words: int = 80
    threshold: float = 0.5

    def __post_init__(self) -> None:
        require_choice("The win rule", self.rule, tuple(WinRule))
        require_choice("The teacher of a view", self.model, READERS)
        require_range("The number of words of a hint", self.words, 1)
        require_range("The least grade of a success", self.threshold, 0.0, 1.0, open_low=True)


PLAIN = HintSettings()
"""What holds where a method says nothing else."""


@dataclass(frozen=True, slots=True)
class HintScorer(Stateless):
    """The part that all scorers have in common; each has its own ``provides`` and ``hints``."""

    settings: HintSettings = PLAIN
    requires: ClassVar[tuple[str, ...]] = ()
    provides: ClassVar[tuple[str, ...]]
    grain: ClassVar[Grain] = Grain.TRAJECTORY

    @property
    def view(self) -> str:
        """Name of the view."""
        return self.provides[0].removeprefix(VIEW)

    @property
    def model(self) -> str:
        """Who reads it."""
        return self.settings.model


def outcome_of(game: Trajectory, rule: str) -> float | None:
    """How the game ended, in [0, 1]; None where that is unknown."""
    chosen = WinRule(rule)
    if not game.turns or is_void(game, chosen):
        return None
    return float(chosen.won(game)) if game.score is None else game.score


def succeeded(game: Trajectory, settings: HintSettings) -> bool | None:
    """Whether the game counts as a success; None where its end is unknown."""
    outcome = outcome_of(game, settings.rule)
    return None if outcome is None else outcome >= settings.threshold


def games_in(groups: Sequence[Group]) -> list[Trajectory]:
    """All games, in the order in which hints are given."""
    return [game for _, game in iter_games(groups)]


def cut_words(text: str, words: int) -> str:
    """The first words of a text, with a mark where more followed.

    Example:
        >>> cut_words("Is it a very big dog?", 4)
        'Is it a very ...'
    """
    found = text.split()
    return " ".join(found if len(found) <= words else [*found[:words], "..."])


def exchange(turn: Turn) -> str:
    """A turn as it was read and answered, without the thoughts behind it."""
    return f"{' '.join(turn.asked.split())} {' '.join(turn.reply.split())}".strip()


def learnt(turns: Iterable[Turn]) -> list[str]:
    """The exchanges that told something: neither refused nor repeated nor failed."""
    silent = (Verdict.INVALID, Verdict.REPEATED, Verdict.ERROR)
    return [exchange(turn) for turn in turns if turn.verdict not in silent]
