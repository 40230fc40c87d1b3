"""The environment protocol, and a checker that any environment can be run through.

An ``Env`` is single-use: one object is one game, there is no ``reset``. It never sees tokens. The
judge is asked by the rollout, not by the environment, so that every judge call goes through one
pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from delta_belief_rl.types import Task, Verdict


@dataclass(frozen=True, slots=True)
class JudgeRequest:
    """What a judge is asked about one action.

    Attributes:
        history: Earlier (question, reply) pairs of this game, oldest first.
        key: Names the random stream and the cache entry of the call.
        attempt: Earlier calls in which a judge read this request and found no answer.
    """

    task: Task
    action: str
    history: tuple[tuple[str, str], ...] = ()
    key: str = ""
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """A judge's answer; where none could be had ``verdict`` is ``ERROR``, with a ``reason``."""

    verdict: Verdict
    text: str = ""
    reason: str = ""
    cached: bool = False
    seconds: float = 0.0
    tokens: int = 0
    """Tokens that the judge read and wrote for this reply, where it says so."""
    score: float | None = None
    """The judge's grade of a task that is done, in [0, 1]; None where it gives none."""
    cost: float = 0.0
    """What a service charged for this reply, in its own currency, where it says so."""
    faults: tuple[str, ...] = ()
    """Kinds of failed attempts at this reply, of a judge that tries again by itself."""


@dataclass(frozen=True, slots=True)
class Action:
    """An agent's text after parsing.

    ``question`` is None when nothing could be parsed; the judge is then not called.
    """

    text: str
    question: str | None
    needs_judge: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the environment made of an action and the judge's reply."""

    verdict: Verdict
    reply: str
    done: bool
    strict_win: bool = False
    compatible_win: bool = False
    is_guess: bool = False
    is_list: bool = False
    action_key: str = ""
    diagnostics: tuple[str, ...] = ()
    score: float | None = None
    """How well the task was done, in [0, 1], where the game is over and win or loss does not say it
    all; None otherwise."""


@runtime_checkable
class Env(Protocol):
    """One game.

    Optional hooks, each with a safe default where missing: ``state_key() -> str``,
    ``progress() -> float`` (before the next action), ``belief() -> Mapping[str, float]`` (posterior
    over answers), ``uncertainty() -> tuple[float, float]`` (its entropy from 0, certain, to 1,
    uniform, and the log-probability of the true answer in nats), ``footprint() ->
    tuple[frozenset[str], frozenset[str]]`` (reads, writes of the last action), ``snapshot() ->
    object`` / ``restore(object)``, ``replayable() -> bool`` (a fresh game of the task that is given
    the same actions and replies comes to the same state), ``reference() -> str``, ``feedback() ->
    str``, ``action_key(text) -> str``.
    """

    task: Task

    def parse(self, text: str) -> Action:
        """Read the agent's text."""
        ...

    def apply(self, action: Action, reply: JudgeReply | None) -> Outcome:
        """Advance the game by one action; ``reply`` is None exactly when no judge was asked."""
        ...

    def judge_request(self, action: Action) -> JudgeRequest:
        """What the judge is to be asked about an action that needs it."""
        ...


@runtime_checkable
class Judge(Protocol):
    """Answers questions about a task.

    A failed call must not raise: its reply has ``Verdict.ERROR``.
    """

    def answer(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        """One reply for each request, in their order."""
        ...


Belief = Mapping[str, float]
