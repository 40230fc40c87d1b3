"""The games of a group that rules of play are read from: the best and the worst."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from delta_belief_rl.types import FloatArray, Task, Trajectory

NAME_WORDS = 4
"""A secret of more words describes something, and most of its content words tell it."""
CONTENT_LETTERS = 4
"""Shorter words, such as articles, are no content."""

_WORD = re.compile(r"[^\W_]+[+#]*")
"""Signs behind a word belong to it, as in C++."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """A group whose games ended differently.

    Attributes:
        games: Those whose end is known.
        outcome: Of each of them, in [0, 1], ``[n]``.
        best: The best games, none as bad as the worst one.
        worst: The worst games, none as good as the best one.
    """

    games: tuple[Trajectory, ...]
    outcome: FloatArray
    best: tuple[Trajectory, ...]
    worst: tuple[Trajectory, ...]

    @classmethod
    def of(
        cls, games: Sequence[Trajectory], outcome: FloatArray, num_best: int, num_worst: int
    ) -> Contrast | None:
        """The contrast of some games; None where all of them ended alike."""
        if len(games) < 2 or np.ptp(outcome) == 0:
            return None
        order: list[int] = np.argsort(-outcome, kind="stable").tolist()
        # A game as bad as the worst one teaches nothing good, however few are better.
        better = [place for place in order if outcome[place] > outcome.min()]
        lesser = [place for place in reversed(order) if outcome[place] < outcome.max()]
        return cls(
            tuple(games),
            outcome,
            tuple(games[place] for place in better[:num_best]),
            tuple(games[place] for place in lesser[:num_worst]),
        )

    @property
    def task(self) -> Task:
        """What was played."""
        return self.games[0].task


def quotes_answer(text: str, task: Task) -> bool:
    """Whether a text tells the secret of a task, or another name of it.

    Case, accents, hyphens, spaces and a plural make no difference. What stands before a comma of a
    name, as in "Paris, France", is a name too, and a description is told by most of its content
    words.
    """
    names = [name for name in (task.secret, *task.aliases) if name.strip()]
    return any(_tells(text, part) for name in names for part in _parts(name))


def _parts(name: str) -> Iterator[str]:
    """A name, and what stands before each of its commas."""
    pieces = name.split(",")
    return (part for end in range(len(pieces)) if (part := ",".join(pieces[: end + 1])).strip())


def _tells(text: str, name: str) -> bool:
    said, words = _words(text), _words(name)
    if not words:
        return name.strip().casefold() in text.casefold()
    *head, last = words
    # A hyphen may have joined two words.
    whole = " ?".join(map(re.escape, (*head, _singular(last))))
    if re.search(rf"(?<!\w){whole}(?:s|es)?(?!\w)", " ".join(said)):
        return True
    content = {_singular(word) for word in words if len(word) >= CONTENT_LETTERS}
    return len(words) > NAME_WORDS and len(content & {*map(_singular, said)}) > len(content) / 2


def _words(text: str) -> list[str]:
    """The words of a text without case and accents."""
    plain = unicodedata.normalize("NFKD", text).casefold()
    return _WORD.findall("".join(one for one in plain if not unicodedata.combining(one)))


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and word[-2] != "s" else word
