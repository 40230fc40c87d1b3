"""Requirements as data, and how they are checked.

A requirement is a story in steps: some events, then a predicate that has to hold::

    {"id": "plus", "weight": 2, "since": "generate", "steps": [
        {"events": [], "holds": ["text", "#count", "0"]},
        {"events": [["click", "#plus"]], "holds": ["text", "#count", "1"]}]}

It is met, ``s = 1``, where every predicate holds, and not, ``s = 0``, where one does not or an
event cannot happen. It is checked twice and the lower number counts. A check that cannot be carried
out counts 0 and is named apart: it is a mistake of the environment, not of the application.

Checks know an application through ``Application`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from delta_belief_rl.types import FloatArray

KINDS = ("reproduce", "generate", "modify", "repair")
"""The tasks of a project, in their order."""
ACTIONS = ("click", "submit", "fill")
PREDICATES = ("exists", "absent", "text", "count")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a user of an application does.

    Attributes:
        kind: One of ``ACTIONS``.
        of: A selector of one visible element.
        value: What is typed, of ``fill``.
    """

    kind: str
    of: str
    value: str = ""


class Seen(Protocol):
    """An application at one moment."""

    def visible(self, selector: str) -> tuple[str, ...]:
        """Texts of the visible elements that a selector means."""
        ...


class Application(Protocol):
    """Something that can be used and looked at; every call begins with a fresh page."""

    def after(self, events: Sequence[Event]) -> Seen | None:
        """What is seen after some events; None where one of them cannot happen in time."""
        ...


class CheckError(Exception):
    """A check could not be carried out, through no fault of the application."""


class Check(Protocol):
    """What ``examine`` needs of a requirement."""

    def check(self, app: Application) -> float:
        """``s`` in [0, 1].

        Raises:
            CheckError: The check itself is broken.
        """
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """Events, and what holds after them.

    Attributes:
        events: What is done, after all that earlier steps did.
        predicate: One of ``PREDICATES``.
        selector: Of the elements that it is about.
        value: The text of ``text``; the number of ``count``.
    """

    events: tuple[Event, ...]
    predicate: str
    selector: str
    value: str = ""

    def holds(self, seen: Seen) -> bool:
        """Whether the predicate does.

        Raises:
            CheckError: There is no such predicate, or its selector or number is none.
        """
        try:
            texts = seen.visible(self.selector)
            if self.predicate == "count":
                return len(texts) == int(self.value)
        except ValueError as error:
            raise CheckError(str(error)) from error
        if self.predicate == "exists":
            return bool(texts)
        if self.predicate == "absent":
            return not texts
        if self.predicate == "text":
            return texts == (self.value,)
        raise CheckError(f"there is no predicate {self.predicate!r}")


@dataclass(frozen=True, slots=True)
class Requirement:
    """One thing that an application has to do.

    Attributes:
        id: Its name.
        weight: ``w``, above 0.
        since: The task from which on it holds.
        until: The task from which on it holds no more; empty where it holds to the end.
        steps: Its story.
    """

    id: str
    weight: float
    since: str
    until: str
    steps: tuple[Step, ...]

    def holds_in(self, kind: str) -> bool:
        """Whether it is a requirement of a task."""
        place = KINDS.index(kind)
        return KINDS.index(self.since) <= place and (
            not self.until or place < KINDS.index(self.until)
        )

    def check(self, app: Application) -> float:
        """``s``, see the module's head.

        Raises:
            CheckError: See ``Step.holds``.
        """
        done: tuple[Event, ...] = ()
        for step in self.steps:
            done += step.events
            try:
                seen = app.after(done)
            except ValueError as error:
                raise CheckError(str(error)) from error
            if seen is None or not step.holds(seen):
                return 0.0
        return 1.0


@dataclass(frozen=True, slots=True)
class Examined:
    """What the checks said.

    Attributes:
        met: ``s`` of each requirement.
        errors: Numbers of those whose check could not be carried out.
    """

    met: tuple[float, ...]
    errors: tuple[int, ...] = ()

    def array(self) -> FloatArray:
        """``met``, ``[Q]``."""
        return np.array(self.met, dtype=np.float64)


def examine(checks: Sequence[Check], app: Application | None) -> Examined:
    """Check each requirement twice.

    Args:
        checks: The requirements.
        app: The application; None where there is none, and nothing is met.
    """
    if app is None:
        return Examined((0.0,) * len(checks))
    met: list[float] = []
    errors: list[int] = []
    for number, check in enumerate(checks):
        try:
            met.append(min(check.check(app), check.check(app)))
        except CheckError:
            met.append(0.0)
            errors.append(number)
    return Examined(tuple(met), tuple(errors))


def requirement_from_json(given: object) -> Requirement:
    """A requirement from data.

    Raises:
        KeyError: A part is missing.
        ValueError: A part is none that it may be.
    """
    entry = cast(Mapping[str, object], given)
    steps = cast(Sequence[Mapping[str, object]], entry["steps"])
    made = Requirement(
        id=str(entry["id"]),
        weight=float(cast(float, entry["weight"])),
        since=str(entry["since"]),
        until=str(entry.get("until", "")),
        steps=tuple(_step_from_json(step) for step in steps),
    )
    good = made.since in KINDS and made.until in ("", *KINDS) and made.steps
    if not good or not 0.0 < made.weight < float("inf"):
        raise ValueError(f"the requirement {made.id!r} has a weight, a task or steps that are none")
    return made


def _step_from_json(given: Mapping[str, object]) -> Step:
    events = cast(Sequence[Sequence[str]], given.get("events", ()))
    predicate, *rest = (str(word) for word in cast(Sequence[object], given["holds"]))
    if predicate not in PREDICATES or any(event[0] not in ACTIONS for event in events):
        raise ValueError(f"there is no predicate {predicate!r}, or one of its events is none")
    if len(rest) != (2 if predicate in ("text", "count") else 1):
        raise ValueError(f"the predicate {predicate!r} has too many words or too few")
    return Step(tuple(Event(*event) for event in events), predicate, *rest)
