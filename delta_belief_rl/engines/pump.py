"""From a stepping engine to an asynchronous one, and from several engines to one.

A game wants to ask for its next tokens and wait. A stepping engine wants all new requests at once
and then runs until some request is done. ``EnginePump`` stands between the two. It works in one of
two ways:

* *free*: it steps whenever something waits. Which requests share a forward pass then depends on
  timing.
* *deterministic*: it steps only when every live game waits for this engine, and hands requests over
  sorted by session name. The engine's schedule is then a function of the games alone, however long
  judges take. Games say that they live with ``enter()`` and ``leave()``.

``EngineRouter`` spreads sessions over several engines and keeps each session where its key-value
cache is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from delta_belief_rl.engines.base import Completion, Engine, GenRequest, StepEngine

StepCall = Callable[[list[GenRequest]], Awaitable[list[Completion]]]
ReleaseCall = Callable[[list[str]], Awaitable[None]]


class EngineFailure(RuntimeError):
    """An engine is gone or does not answer; every game that waits for it gets this error."""


@dataclass(slots=True)
class _Waiting:
    request: GenRequest
    future: asyncio.Future[Completion]
    since: float


def local_calls(engine: StepEngine, *, threaded: bool = True) -> tuple[StepCall, ReleaseCall]:
    """The two calls that a pump needs, for an engine that lives in this process.

    Args:
        threaded: Run steps in a worker thread, so that judges are served meanwhile.
    """

    async def step(new: list[GenRequest]) -> list[Completion]:
        return await asyncio.to_thread(engine.step, new) if threaded else engine.step(new)

    async def release(sessions: list[str]) -> None:
        engine.release(sessions)

    return step, release


class EnginePump:
    """Turns a stepping engine into an ``Engine``. Use it inside one event loop.

    Args:
        step: Adds requests and runs until at least one has finished.
        release: Forgets the caches of games; called between steps only.
        deterministic: See the module's head.
        step_deadline: Seconds that one call of ``step`` may take; None for no limit.
    """

    def __init__(
        self,
        step: StepCall,
        release: ReleaseCall | None = None,
        *,
        deterministic: bool = False,
        step_deadline: float | None = None,
    ) -> None:
        self.deterministic = deterministic
        self._step = step
        self._release = release
        self._deadline = step_deadline
        self._new: dict[str, _Waiting] = {}
        self._running: dict[str, _Waiting] = {}
        self._released: list[str] = []
        self._live = 0
        self._stuck = False
        self._task: asyncio.Task[list[Completion]] | None = None
        self._failure: EngineFailure | None = None

    def enter(self) -> None:
        """One more game lives on this engine."""
        self._live += 1

    def leave(self) -> None:
        """One game fewer lives on this engine."""
        if self._live == 0:
            raise RuntimeError("leave() was called more often than enter()")
        self._live -= 1
        self._poke()

    async def generate(self, request: GenRequest) -> Completion:
        """Wait for the completion of one request.

        Raises:
            EngineFailure: The engine failed, now or earlier; or this session already waits.
        """
        if self._failure is not None:
            raise EngineFailure(str(self._failure)) from self._failure
        name = request.session
        if name in self._new or name in self._running:
            raise EngineFailure(f"session {name!r} already waits for an answer")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._new[name] = _Waiting(request, future, time.monotonic())
        self._stuck = False
        self._poke()
        return await future

    async def release(self, session: str) -> None:
        """Forget a game. The engine hears of it before its next step."""
        self._new.pop(session, None)
        self._running.pop(session, None)
        self._released.append(session)
        self._stuck = False
        self._poke()

    async def flush(self) -> None:
        """Let a running step end and tell the engine of every game released so far."""
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._failure is None:
            await self._tell_released()

    def outstanding(self) -> tuple[int, float]:
        """Number of requests that wait, and the age of the oldest in seconds."""
        waits = [*self._new.values(), *self._running.values()]
        if not waits:
            return 0, 0.0
        return len(waits), time.monotonic() - min(w.since for w in waits)

    def _ready(self) -> bool:
        waiting = len(self._new) + len(self._running)
        if self._task is not None or self._failure is not None or self._stuck or waiting == 0:
            return False
        return waiting >= self._live if self.deterministic else True

    def _poke(self) -> None:
        """Start a step in the next round of the event loop if one is due then."""
        if self._ready():
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        # Asked again: games that became runnable in the same round may have moved meanwhile.
        if not self._ready():
            return
        batch = [self._new[name].request for name in self._order()]
        self._running.update(self._new)
        self._new.clear()
        self._task = asyncio.get_running_loop().create_task(self._call(batch))
        self._task.add_done_callback(self._finish)

    def _order(self) -> list[str]:
        return sorted(self._new) if self.deterministic else list(self._new)

    async def _call(self, batch: list[GenRequest]) -> list[Completion]:
        await self._tell_released()
        async with asyncio.timeout(self._deadline):
            return await self._step(batch)

    async def _tell_released(self) -> None:
        names = sorted(self._released) if self.deterministic else list(self._released)
        self._released.clear()
        if names and self._release is not None:
            await self._release(names)

    def _finish(self, task: asyncio.Task[list[Completion]]) -> None:
        self._task = None
        if task.cancelled():
            self._fail(EngineFailure("the engine's step was cancelled"))
            return
        error = task.exception()
        if error is not None:
            self._fail(self._described(error))
            return
        answered = [c for c in task.result() if c.session in self._running]
        for completion in answered:
            future = self._running.pop(completion.session).future
            if not future.done():
                future.set_result(completion)
        if not task.result():
            self._no_progress()
        self._poke()

    def _no_progress(self) -> None:
        """A step without an answer: wait for a game that ends, unless none is left to end."""
        self._stuck = not (self._new or self._released)
        if self._stuck and 0 < self._live <= len(self._running):
            self._fail(
                EngineFailure(
                    f"the engine made no progress although all {self._live} games wait for it"
                )
            )

    def _described(self, error: BaseException) -> EngineFailure:
        if isinstance(error, TimeoutError) and self._deadline is not None:
            text = f"the engine did not answer within {self._deadline:g} s"
        else:
            text = f"the engine's step failed: {type(error).__name__}: {error}"
        failure = EngineFailure(text)
        failure.__cause__ = error
        return failure

    def _fail(self, failure: EngineFailure) -> None:
        self._failure = failure
        waits = [*self._new.values(), *self._running.values()]
        self._new.clear()
        self._running.clear()
        for waiting in waits:
            if not waiting.future.done():
                waiting.future.set_exception(failure)


class EngineRouter:
    """Several engines that look like one. A session stays on the engine that it started on.

    Args:
        engines: Replicas of the same policy.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise ValueError("a router needs at least one engine")
        self._engines = list(engines)
        self._home: dict[str, int] = {}

    @property
    def lanes(self) -> int:
        """Number of engines."""
        return len(self._engines)

    @property
    def deterministic(self) -> bool:
        """Whether every engine's schedule depends on the games alone."""
        return all(isinstance(e, EnginePump) and e.deterministic for e in self._engines)

    def enter(self, lane: int) -> None:
        """One more game lives on engine ``lane``."""
        engine = self._engines[lane]
        if isinstance(engine, EnginePump):
            engine.enter()

    def leave(self, lane: int) -> None:
        """One game fewer lives on engine ``lane``."""
        engine = self._engines[lane]
        if isinstance(engine, EnginePump):
            engine.leave()

    def bind(self, session: str, lane: int) -> None:
        """Send a session to engine ``lane``; unbound ones go where the fewest sessions are."""
        self._home[session] = lane

    async def generate(self, request: GenRequest) -> Completion:
        """Wait for one completion on the session's engine."""
        lane = self._home.get(request.session)
        if lane is None:
            loads = self.sessions()
            lane = loads.index(min(loads))
            self._home[request.session] = lane
        return await self._engines[lane].generate(request)

    async def release(self, session: str) -> None:
        """Forget a game on its engine."""
        lane = self._home.pop(session, None)
        if lane is not None:
            await self._engines[lane].release(session)

    async def flush(self) -> None:
        """Tell every engine of the games released so far."""
        for engine in self._engines:
            if isinstance(engine, EnginePump):
                await engine.flush()

    def sessions(self) -> list[int]:
        """Sessions on each engine."""
        loads = [0] * len(self._engines)
        for lane in self._home.values():
            loads[lane] += 1
        return loads
