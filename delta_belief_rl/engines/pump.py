"""From a stepping engine to an asynchronous one, and from several engines to one.

A game wants to ask for its next tokens and wait. A stepping engine wants all new requests at once
and then runs until some request is done. ``EnginePump`` stands between the two. It works in one of
two ways:

* *free*: it steps whenever something waits. Which requests share a forward pass then depends on
  timing.
* *deterministic*: it steps only when every live game waits for this engine, and hands requests over
  sorted by session name. The engine's schedule is then a function of the games alone, however long
  judges take. Games say that they live with ``enter()`` and ``leave()``.

A game that tries several actions asks for all of them in one call, and for the scores of all texts
in another; it waits for one call at a time, whatever the number of its requests. Scoring and
stepping never overlap: texts that wait are scored first, because their games go on after that.

``EngineRouter`` spreads sessions over several engines and keeps each session where its key-value
cache is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delta_belief_rl.engines.base import (
    BranchEngine,
    BranchStepEngine,
    Completion,
    Engine,
    GenRequest,
    StepEngine,
    TailRequest,
)

StepCall = Callable[[list[GenRequest]], Awaitable[list[Completion]]]
ReleaseCall = Callable[[list[str]], Awaitable[None]]
ScoreCall = Callable[[list[TailRequest]], Awaitable[list[NDArray[np.float64]]]]


class EngineFailure(RuntimeError):
    """An engine is gone or does not answer; every game that waits for it gets this error."""


class EngineLost(EngineFailure):
    """The engine's process is dead or hangs; another one in its place can do the same work."""


@dataclass(slots=True)
class _Waiting:
    request: GenRequest
    future: asyncio.Future[Completion]
    since: float
    call: int
    """Number of the call that the request belongs to; a game has one call at a time."""


@dataclass(slots=True)
class _Scoring:
    requests: tuple[TailRequest, ...]
    future: asyncio.Future[list[NDArray[np.float64]]]
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


def local_score(engine: BranchStepEngine, *, threaded: bool = True) -> ScoreCall:
    """The call for scores that a pump needs, for an engine that lives in this process."""

    async def score(requests: list[TailRequest]) -> list[NDArray[np.float64]]:
        if threaded:
            return await asyncio.to_thread(engine.score_tails, requests)
        return engine.score_tails(requests)

    return score


class EnginePump:
    """Turns a stepping engine into an ``Engine``. Use it inside one event loop.

    Args:
        step: Adds requests and runs until at least one has finished.
        release: Forgets the caches of games; called between steps only.
        score: Scores texts; None for an engine that cannot.
        deterministic: See the module's head.
        step_deadline: Seconds that one call of ``step`` or ``score`` may take; None for no limit.
    """

    def __init__(
        self,
        step: StepCall,
        release: ReleaseCall | None = None,
        *,
        score: ScoreCall | None = None,
        deterministic: bool = False,
        step_deadline: float | None = None,
    ) -> None:
        self.deterministic = deterministic
        self._step = step
        self._release = release
        self._score = score
        self._deadline = step_deadline
        self._calls = count()
        self._new: dict[str, _Waiting] = {}
        self._running: dict[str, _Waiting] = {}
        self._scores: list[_Scoring] = []
        self._in_score: list[_Scoring] = []
        self._released: list[str] = []
        self._live = 0
        self._stuck = False
        self._task: asyncio.Task[Any] | None = None
        self._failure: EngineFailure | None = None

    @property
    def failure(self) -> EngineFailure | None:
        """What every call raises from now on; None while the engine works."""
        return self._failure

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
        (future,) = self._submit([request])
        return await future

    async def generate_all(self, requests: Sequence[GenRequest]) -> list[Completion]:
        """Wait for the completions of one game's requests, in their order.

        Raises:
            EngineFailure: As ``generate``.
        """
        return list(await asyncio.gather(*self._submit(requests)))

    async def score_all(self, requests: Sequence[TailRequest]) -> list[NDArray[np.float64]]:
        """Wait for the scores of one game's texts, in their order.

        Raises:
            EngineFailure: The engine failed, now or earlier; or it cannot score.
        """
        if self._score is None:
            raise EngineFailure("this engine cannot score texts")
        self._require_engine()
        if not requests:
            return []
        future = asyncio.get_running_loop().create_future()
        self._scores.append(_Scoring(tuple(requests), future, time.monotonic()))
        self._stuck = False
        self._poke()
        return await future

    def _submit(self, requests: Sequence[GenRequest]) -> list[asyncio.Future[Completion]]:
        """Put the requests of one call in line."""
        self._require_engine()
        number, now = next(self._calls), time.monotonic()
        futures: list[asyncio.Future[Completion]] = []
        for request in requests:
            name = request.session
            if name in self._new or name in self._running:
                raise EngineFailure(f"session {name!r} already waits for an answer")
            futures.append(asyncio.get_running_loop().create_future())
            self._new[name] = _Waiting(request, futures[-1], now, number)
        self._stuck = False
        self._poke()
        return futures

    def _require_engine(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure

    async def release(self, session: str) -> None:
        """Forget a game. The engine hears of it before its next step."""
        self._new.pop(session, None)
        self._running.pop(session, None)
        self._scores = [s for s in self._scores if not s.future.cancelled()]
        self._released.append(session)
        self._stuck = False
        self._poke()

    async def flush(self) -> None:
        """Let a running step end and tell the engine of every game released so far.

        Raises:
            EngineFailure: It cannot be told; every later call raises this, too.
        """
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._failure is not None:
            return
        try:
            await self._tell_released()
        except EngineFailure as failure:
            self._fail(failure)
            raise

    def outstanding(self) -> tuple[int, float]:
        """Number of requests that wait, and the age of the oldest in seconds."""
        waits = self._all_waiting()
        if not waits:
            return 0, 0.0
        return len(waits), time.monotonic() - min(w.since for w in waits)

    def _all_waiting(self) -> list[_Waiting | _Scoring]:
        return [*self._new.values(), *self._running.values(), *self._scores, *self._in_score]

    def _ready(self) -> bool:
        waits = (*self._new.values(), *self._running.values())
        waiting = len({w.call for w in waits}) + len(self._scores)
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
        if self._scores:
            self._start_scoring()
            return
        batch = [self._new[name].request for name in self._order()]
        self._running.update(self._new)
        self._new.clear()
        self._task = asyncio.get_running_loop().create_task(self._call(batch))
        self._task.add_done_callback(self._finish)

    def _start_scoring(self) -> None:
        self._in_score, self._scores = self._scores, []
        if self.deterministic:
            self._in_score.sort(key=lambda scoring: scoring.requests[0].session)
        texts = [request for scoring in self._in_score for request in scoring.requests]
        self._task = asyncio.get_running_loop().create_task(self._call_score(texts))
        self._task.add_done_callback(self._finish_scoring)

    def _order(self) -> list[str]:
        return sorted(self._new) if self.deterministic else list(self._new)

    async def _call_score(self, texts: list[TailRequest]) -> list[NDArray[np.float64]]:
        assert self._score is not None, "score_all() has checked it"
        await self._tell_released()
        async with asyncio.timeout(self._deadline):
            scores = await self._score(texts)
        if len(scores) != len(texts):
            raise ValueError(f"{len(scores)} scores for {len(texts)} texts")
        return scores

    async def _call(self, batch: list[GenRequest]) -> list[Completion]:
        await self._tell_released()
        async with asyncio.timeout(self._deadline):
            return await self._step(batch)

    async def _tell_released(self) -> None:
        names = sorted(self._released) if self.deterministic else list(self._released)
        self._released.clear()
        if names and self._release is not None:
            await self._release(names)

    def _ended_well(self, task: asyncio.Task[Any]) -> bool:
        """Whether the call that has ended gave a result; a failure reaches every waiting game."""
        self._task = None
        if task.cancelled():
            self._fail(EngineFailure("the engine's step was cancelled"))
            return False
        error = task.exception()
        if error is not None:
            self._fail(self._described(error))
        return error is None

    def _finish_scoring(self, task: asyncio.Task[list[NDArray[np.float64]]]) -> None:
        if not self._ended_well(task):
            return
        scores = iter(task.result())
        for scoring in self._in_score:
            own = [next(scores) for _ in scoring.requests]
            if not scoring.future.done():
                scoring.future.set_result(own)
        self._in_score = []
        self._poke()

    def _finish(self, task: asyncio.Task[list[Completion]]) -> None:
        if not self._ended_well(task):
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
        self._stuck = not (self._new or self._released or self._scores)
        calls = {waiting.call for waiting in self._running.values()}
        if self._stuck and 0 < self._live <= len(calls):
            self._fail(
                EngineFailure(
                    f"the engine made no progress although all {self._live} games wait for it"
                )
            )

    def _described(self, error: BaseException) -> EngineFailure:
        if isinstance(error, EngineFailure):
            failure = type(error)(str(error))
        elif isinstance(error, TimeoutError) and self._deadline is not None:
            failure = EngineLost(f"the engine did not answer within {self._deadline:g} s")
        else:
            failure = EngineFailure(f"the engine's step failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    def _fail(self, failure: EngineFailure) -> None:
        self._failure = failure
        waits = self._all_waiting()
        self._new.clear()
        self._running.clear()
        self._scores, self._in_score = [], []
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

    def lost(self) -> dict[int, str]:
        """Engines whose process is dead or hangs, as far as games have met them, and how."""
        failures = {lane: getattr(e, "failure", None) for lane, e in enumerate(self._engines)}
        return {lane: str(f) for lane, f in failures.items() if isinstance(f, EngineLost)}

    def replace(self, lane: int, engine: Engine) -> None:
        """Put another engine in the place of one that is lost; nothing of a game is on it."""
        self._engines[lane] = engine
        self._home = {session: home for session, home in self._home.items() if home != lane}

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
        lane = self._lane_of([request.session])
        return await self._engines[lane].generate(request)

    async def generate_all(self, requests: Sequence[GenRequest]) -> list[Completion]:
        """Wait for one game's completions, all on the engine of the first one's session."""
        lane = self._lane_of([request.session for request in requests])
        return await self._branching(lane).generate_all(requests)

    async def score_all(self, requests: Sequence[TailRequest]) -> list[NDArray[np.float64]]:
        """Wait for the scores of one game's texts on the engine of the first one's session."""
        lane = self._lane_of([request.session for request in requests])
        return await self._branching(lane).score_all(requests)

    async def release(self, session: str) -> None:
        """Forget a game on its engine."""
        lane = self._home.pop(session, None)
        if lane is not None:
            await self._engines[lane].release(session)

    async def flush(self) -> None:
        """Tell every engine of the games released so far, whatever becomes of the others.

        Raises:
            EngineFailure: Of the first engine that cannot be told, after all others were.
        """
        pumps = [engine for engine in self._engines if isinstance(engine, EnginePump)]
        for failure in await asyncio.gather(*(p.flush() for p in pumps), return_exceptions=True):
            if failure is not None:
                raise failure

    def sessions(self) -> list[int]:
        """Sessions on each engine."""
        loads = [0] * len(self._engines)
        for lane in self._home.values():
            loads[lane] += 1
        return loads

    def _lane_of(self, sessions: Sequence[str]) -> int:
        """The engine of the first session; the others join it."""
        lane = self._home.get(sessions[0])
        if lane is None:
            loads = self.sessions()
            lane = loads.index(min(loads))
        self._home.update(dict.fromkeys(sessions, lane))
        return lane

    def _branching(self, lane: int) -> BranchEngine:
        engine = self._engines[lane]
        if not isinstance(engine, BranchEngine):
            raise EngineFailure(
                f"a {type(engine).__name__} neither samples several actions nor scores texts"
            )
        return engine
