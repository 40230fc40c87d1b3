"""How games reach an engine in another process: many requests in one call, answers as they come.

A call through Ray costs the driver about a millisecond, and a step of the published runs has 76,800
requests. So the requests of one round of the event loop travel together, and one call at a time
waits for whatever finishes next. A game still goes on as soon as its own answer is there.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from itertools import count
from typing import Any, Generic, TypeVar

import numpy as np
from ray.exceptions import RayError, RayTaskError

from delta_belief_rl.cluster.members import WorkerSilent, answered
from delta_belief_rl.engines.base import Completion, EngineStateError, GenRequest, TailRequest
from delta_belief_rl.engines.pump import EngineFailure, EngineLost, EnginePump

T = TypeVar("T")

LINGER = 0.003
"""Seconds that a collecting call waits for more after the first answer: much less than a token of a
large batch takes, and enough for the answers of one decoding step to travel together."""


class Outbox(Generic[T]):
    """Finished work on the engine's side, until it is collected."""

    def __init__(self) -> None:
        self._done: asyncio.Queue[tuple[int, T | EngineFailure]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, number: int, work: Coroutine[Any, Any, T]) -> None:
        """Begin work; its result, or why the engine failed at it, goes out by the number."""
        task = asyncio.get_running_loop().create_task(self._finish(number, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def collect(self) -> list[tuple[int, T | EngineFailure]]:
        """Everything that has finished; waits until something has."""
        found = [await self._done.get()]
        await asyncio.sleep(LINGER)
        while not self._done.empty():
            found.append(self._done.get_nowait())
        return found

    async def _finish(self, number: int, work: Coroutine[Any, Any, T]) -> None:
        answer: T | EngineFailure = EngineFailure("the engine ended a request without an answer")
        try:
            answer = await work
        except EngineFailure as error:
            answer = type(error)(str(error))
        except EngineStateError as error:
            answer = EngineFailure(str(error))
        finally:
            # Whatever else went wrong, nobody may wait for ever.
            self._done.put_nowait((number, answer))


class RemoteEngine:
    """A replica as the rollout sees it (``BranchEngine``); use it inside one event loop.

    Args:
        replica: Handle of ``VllmEngineWorker``, which nobody else collects from.
        signs: See ``ask``.
    """

    def __init__(self, replica: Any, signs: float = math.inf) -> None:
        self._replica, self._signs = replica, signs
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._unsent: list[tuple[int, GenRequest]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._collecting = False
        self.failure: EngineLost | None = None
        """How the replica was lost, once it was."""

    async def generate(self, request: GenRequest) -> Completion:
        """Wait for the completion of one request.

        Raises:
            EngineFailure: The replica or its engine is gone.
        """
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        self._waiting[number] = future
        if not self._unsent:
            # One round later: the requests of this round share the call.
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append((number, request))
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    async def generate_all(self, requests: Sequence[GenRequest]) -> list[Completion]:
        """Wait for all completions, in the order of the requests; raises as ``generate``."""
        return list(await asyncio.gather(*(self.generate(request) for request in requests)))

    async def score_all(self, requests: Sequence[TailRequest]) -> list[np.ndarray]:
        """Wait for the log-probs of each tail, in order; raises as ``generate``."""
        return await self._ask("score_all", list(requests))

    async def release(self, session: str) -> None:
        """Forget a game; raises as ``generate``."""
        await self._ask("release", session)

    def _send(self) -> None:
        numbered, self._unsent = self._unsent, []
        self._spawn(self._submit(numbered))
        if not self._collecting:
            self._collecting = True
            self._spawn(self._collect())

    async def _submit(self, numbered: list[tuple[int, GenRequest]]) -> None:
        try:
            await self._ask("submit", numbered)
        except EngineFailure as error:
            self._fail(error, [number for number, _ in numbered])

    async def _collect(self) -> None:
        """Ask for answers as long as somebody waits."""
        try:
            while self._waiting:
                for number, answer in await self._ask("collect"):
                    future = self._waiting.get(number)
                    if future is None or future.done():  # its game was cancelled meanwhile
                        continue
                    if isinstance(answer, EngineFailure):
                        if isinstance(answer, EngineLost):
                            self.failure = answer
                        future.set_exception(answer)
                    else:
                        future.set_result(answer)
                # The games that have their answers go on, and may ask again, before the next call.
                await asyncio.sleep(0)
        except EngineFailure as error:
            self._fail(error, list(self._waiting))
        finally:
            self._collecting = False

    def _fail(self, error: EngineFailure, numbers: Sequence[int]) -> None:
        for number in numbers:
            future = self._waiting.get(number)
            if future is not None and not future.done():
                future.set_exception(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, method: str, *args: Any) -> Any:
        try:
            return await ask(self._replica, method, *args, signs=self._signs)
        except EngineLost as error:
            self.failure = error
            raise


async def ask(replica: Any, method: str, *args: Any, signs: float = math.inf) -> Any:
    """Call a method of an engine's worker.

    Args:
        replica: Its handle.
        method: Its method.
        args: Of the method.
        signs: Seconds in which it must give a sign of life while it works on the call.

    Raises:
        EngineLost: Its process is gone or stands still, or its engine's is gone.
        EngineFailure: Anything else went wrong.
    """
    try:
        return await answered(getattr(replica, method).remote(*args), replica, signs)
    except WorkerSilent as error:
        raise EngineLost(f"the engine's process {error}") from error
    except RayTaskError as error:
        kind = EngineLost if isinstance(error.cause, EngineLost) else EngineFailure
        raise kind(f"the engine's {method} failed: {error.cause}") from error
    except RayError as error:
        text = " ".join(str(error).split())
        raise EngineLost(f"the engine's process is gone: {text}") from error


def remote_pump(replica: Any, *, deterministic: bool, signs: float = math.inf) -> EnginePump:
    """A replica that steps when it is told to (``EngineWorker``) as the rollout sees it.

    Args:
        replica: Its handle.
        deterministic: See ``EnginePump``.
        signs: See ``ask``.
    """

    async def step(new: list[GenRequest]) -> list[Completion]:
        return await ask(replica, "step", new, signs=signs)

    async def release(sessions: list[str]) -> None:
        await ask(replica, "release", sessions, signs=signs)

    async def score(requests: list[TailRequest]) -> list[np.ndarray]:
        return await ask(replica, "score_tails", requests, signs=signs)

    return EnginePump(step, release, score=score, deterministic=deterministic)
