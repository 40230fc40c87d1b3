"""The workers of a run as processes: who is where, who answers, and ending one for good.

Every worker has the method ``present``, which costs nothing and is answered while the worker is
busy, too. Its answer is a sign of life, and says which process on which machine the worker is;
``events.jsonl`` has it as the event ``workers``. Who waits for a long call asks for it meanwhile,
so that a process which stands still is found while the call lasts.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import ray
from ray.exceptions import RayError

from delta_belief_rl.cluster.stacks import answer_as_worker
from delta_belief_rl.obs.events import EventLog

Role = Literal["rank", "engine", "judge"]

DIED = "died"
SILENT = "gave no sign of life"

_SIGNS = "signs"
"""Concurrency group of ``present``: a thread of its own in a worker, an event loop of its own in an
asynchronous one."""

_Answer = TypeVar("_Answer")


class WorkerSilent(RuntimeError):
    """A worker stands still in the middle of a call."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """A worker's process.

    Attributes:
        pid: Its number on its machine.
        node: Address of the machine.
    """

    pid: int
    node: str


class Present:
    """What every worker answers, however it works."""

    @ray.method(concurrency_group=_SIGNS)
    def present(self) -> Whereabouts:
        """Which process this is; from the first call on it answers SIGUSR1 with its stacks."""
        answer_as_worker(type(self).__name__)
        return Whereabouts(os.getpid(), ray.util.get_node_ip_address())


def remote_worker(**options: Any) -> Callable[[type], Any]:
    """``ray.remote`` for a class below ``Present``.

    Args:
        options: Of ``ray.remote``.
    """
    make: Any = ray.remote
    return make(concurrency_groups={_SIGNS: 1}, **options)


class Roster:
    """Which process each worker of a run is, those that were started again in their place."""

    def __init__(self) -> None:
        self._held: dict[tuple[Role, int], Whereabouts] = {}
        self._events: EventLog | None = None

    def note(self, role: Role, index: int, where: Whereabouts) -> None:
        """Take down a worker that has just started."""
        self._held[role, index] = where

    def tell(self, events: EventLog, step: int | None = None) -> None:
        """Record all workers as they are now, and from now on whenever one was replaced."""
        self._events = events
        self.tell_again(step)

    def tell_again(self, step: int | None = None) -> None:
        """Record all workers anew, where they were recorded before."""
        if self._events is None:
            return
        workers = [
            {"role": role, "index": index, "pid": where.pid, "node": where.node}
            for (role, index), where in self._held.items()
        ]
        self._events.write("workers", step, workers=workers)


async def missing(actors: Sequence[Any], seconds: float) -> dict[int, str]:
    """Ask workers for a sign of life.

    Args:
        actors: Handles.
        seconds: That they have for it, all at the same time.

    Returns:
        For each that gave none, by its place, ``DIED`` or ``SILENT``.
    """

    async def ask(actor: Any) -> str:
        asked = asyncio.ensure_future(actor.present.remote())
        # No time-out that cancels: an answer that came while this loop was blocked counts.
        if not (await asyncio.wait({asked}, timeout=seconds))[0]:
            asked.cancel()
            return SILENT
        try:
            asked.result()
        except RayError:
            return DIED
        return ""

    answers = await asyncio.gather(*(ask(actor) for actor in actors))
    return {index: why for index, why in enumerate(answers) if why}


async def answered(call: Awaitable[_Answer], actor: Any, seconds: float) -> _Answer:
    """Wait for a call, however long it takes, as long as its worker gives signs of life.

    Args:
        call: What the worker was asked for.
        actor: The worker's handle.
        seconds: Between two questions for a sign of life, and that each of them may take; infinite
            for none.

    Raises:
        WorkerSilent: It gave none.
    """
    if not math.isfinite(seconds):
        return await call
    waiting = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({waiting}, timeout=seconds))[0]:
            # A worker that has died says so through the call itself.
            if SILENT in (await missing([actor], seconds)).values() and not waiting.done():
                raise WorkerSilent(f"{SILENT} within {seconds:g} s (trainer.heartbeat_timeout)")
        return waiting.result()
    finally:
        waiting.cancel()


def end(actor: Any) -> None:
    """End a worker that is of no more use; one that is gone already is left alone.

    One that is stopped cannot hear it; Ray's own process on its machine then kills it, after 5 s.
    """
    with suppress(RayError):
        ray.kill(actor)
