"""Scorers that ask models before they can tell their hints, and what they ask them through.

A scorer says with ``prepare`` that it needs this. It is called between play and score, on the games
of one update, and gives back a scorer that knows their hints; nothing is kept for the next update.

A role answers lists of questions. What goes wrong is a ``Failure`` in the place of the answer, so
that neither a model that is gone nor one that talks nonsense can stop a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from delta_belief_rl.algo.base import Scorer
from delta_belief_rl.types import Group, Message


class FailureKind(StrEnum):
    """Why there is no answer."""

    DEADLINE = "deadline"
    """It did not come in time."""
    ENGINE = "engine"
    """The engine is gone, or could not serve the request."""
    SERVICE = "service"
    """The service gave none."""
    PROMPT = "prompt"
    """The question has no room, however much is cut from it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An answer that there is not."""

    kind: FailureKind
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ask:
    """One question to a model.

    Attributes:
        names: Name the random stream of the answer inside a run; a function of step and game.
        render: The question as messages, its games cut to so many words each.
        values: How many things are asked for, of a question that wants numbers.
    """

    names: tuple[str | int, ...]
    render: Callable[[int], tuple[Message, ...]]
    values: int = 0


class Writer(Protocol):
    """A model that writes."""

    async def write(self, asks: Sequence[Ask]) -> list[str | Failure]:
        """A text for each question, in their order."""
        ...


class Checker(Protocol):
    """A frozen model that grades."""

    async def check(self, asks: Sequence[Ask]) -> list[Sequence[float | None] | Failure]:
        """For each question ``Ask.values`` numbers in [0, 1], None where one cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class Roles:
    """The models that a run lends to its scorers; None where the run does not have one."""

    writer: Writer | None = None
    checker: Checker | None = None


@runtime_checkable
class Prepares(Protocol):
    """A scorer that asks models first."""

    async def prepare(
        self, groups: Sequence[Group], roles: Roles, step: int
    ) -> tuple[Scorer, Mapping[str, float]]:
        """A scorer that knows the hints of these games, and what asking came to as metrics."""
        ...
