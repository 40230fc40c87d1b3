"""The games of a group that rules of play are read from: the best and the worst."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from delta_belief_rl.types import FloatArray, Task, Trajectory


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
    """Whether a text holds the secret of a task, or another name of it, as words."""
    names = [name for name in (task.secret, *task.aliases) if name]
    return any(re.search(rf"\b{re.escape(name)}\b", text, re.IGNORECASE) for name in names)
