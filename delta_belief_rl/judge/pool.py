"""One front for many judge replicas: coalescing, deadlines, retries, a cache, and an error budget.

A failed call is not an exception and never an answer: it is tried again on another replica, and
when the attempts are used up it becomes a reply with ``Verdict.ERROR`` and a reason. A retry tells
the judge how often judges found no answer before (``JudgeRequest.attempt``); a replica that did not
reply has not read the request, and neither has a model whose service was out, so these do not
count. Only when too many replies of a window are errors does the pool give up, with
``JudgePoolFailure``.

A replica that is gone gets no further calls. Where the pool was told how, it puts another one in
its place, after a wait that doubles with every death in a row, as often as the budget of the run
allows. Requests meanwhile go to the others, or wait where there are none. When the last replica is
gone and the budget is spent, the pool gives up.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from delta_belief_rl.engines.api_answer import ApiFault
from delta_belief_rl.envs.base import Judge, JudgeReply, JudgeRequest
from delta_belief_rl.types import Verdict

_SPOKE = frozenset({ApiFault.EMPTY, ApiFault.FILTERED})
"""Faults after which the same request would end so again: the model has read it."""
_FAULT = "fault/"
"""Begins the names of counters of ``JudgeReply.faults``."""

ReplicaCall = Callable[[list[JudgeRequest]], Awaitable[list[JudgeReply]]]
RestartReplica = Callable[[int], Awaitable[ReplicaCall]]
"""Starts another replica in the place of a dead one, by its number, and waits until it answers."""
OnRestart = Callable[[int, str], None]
"""Told the number of a replica that is being replaced, and why."""
CacheKey = Callable[[JudgeRequest], Hashable | None]
"""Names the cache entry of a request; None for a request that is not cached."""


class ReplicaFailure(RuntimeError):
    """A replica could not answer; transports raise it for what may pass on a retry."""


class ReplicaGone(ReplicaFailure):
    """The replica's process or connection is dead."""


class JudgePoolFailure(RuntimeError):
    """Too many judge calls fail for the run to go on."""


@dataclass(frozen=True, slots=True)
class JudgePoolSettings:
    """How patient the pool is.

    Attributes:
        deadline: Seconds that one call of a replica may take.
        max_attempts: Most tries of one request, the first included.
        max_batch: Most requests of one call.
        max_outstanding: Most requests that one replica has at a time; further ones wait in the
            pool.
        backoff: Seconds before the first retry; doubles each time, with jitter.
        max_error_rate: Share of error replies in the window above which the pool gives up.
        window: Number of latest replies that the rate is taken over.
        min_replies: No verdict on the rate before so many replies.
        max_restarts: Most replacements of dead replicas, over all of them and the pool's life.
        restart_backoff: Seconds before a replica is replaced; doubles with every further death
            before it has answered a call.
        max_restart_backoff: The wait never exceeds so many seconds.
    """

    deadline: float = 120.0
    max_attempts: int = 3
    max_batch: int = 256
    max_outstanding: int = 1024
    backoff: float = 0.1
    max_error_rate: float = 0.1
    window: int = 500
    min_replies: int = 50
    max_restarts: int = 10
    restart_backoff: float = 1.0
    max_restart_backoff: float = 60.0

    def __post_init__(self) -> None:
        if min(self.max_attempts, self.max_batch, self.max_outstanding, self.window) < 1:
            raise ValueError("attempts, batch, outstanding and window of a judge pool are >= 1")


@dataclass(frozen=True, slots=True)
class JudgeStats:
    """Counters since the pool was made, or since ``JudgePool.reset_stats``.

    Attributes:
        calls: Requests asked, cached ones included.
        errors: Requests that ended as ``Verdict.ERROR``.
        retries: Further attempts after a failed one.
        timeouts: Attempts that missed the deadline.
        restarts: Dead replicas that were replaced, attempts that failed included.
        tokens: Tokens that judges say they spent.
        cost: What services say they charged, in their own currency.
        latency_p50, latency_p95: Seconds from asking to the final reply, cached ones excluded.
        failures: Failed attempts by reason.
        faults: Attempts that failed inside of judges that try again by themselves, by kind.
    """

    calls: int
    cached: int
    errors: int
    retries: int
    timeouts: int
    restarts: int
    tokens: int
    cost: float
    latency_p50: float
    latency_p95: float
    failures: dict[str, int]
    faults: dict[str, int]


MOST_MISSES = 6
"""Doublings of the time that a late replica is left alone for."""


@dataclass(slots=True, eq=False)
class _Lane:
    """The place of one replica.

    Attributes:
        call: The replica that is in it, None while there is none.
        load: Requests under way, those of a replica before the present one included.
        deaths: Replicas that died in it since one last answered.
        misses: Deadlines missed in a row.
        rests_until: Until then it is asked only where no other replica has room.
    """

    call: ReplicaCall | None
    load: int = 0
    deaths: int = 0
    misses: int = 0
    rests_until: float = 0.0

    def miss(self, deadline: float) -> None:
        """It was late: the next call would be, too, so it is left alone for longer every time."""
        now = time.monotonic()
        # Calls that were under way together are late together, and count once.
        if now >= self.rests_until:
            self.misses += 1
            self.rests_until = now + deadline * 2 ** min(self.misses - 1, MOST_MISSES)

    def answer(self) -> None:
        """It has answered, so what was is forgotten."""
        self.deaths = self.misses = 0
        self.rests_until = 0.0


@dataclass(slots=True, eq=False)
class _Item:
    request: JudgeRequest
    future: asyncio.Future[JudgeReply]
    since: float
    attempts: int = 0
    tried: set[int] = field(default_factory=lambda: set[int]())


def question_key(request: JudgeRequest) -> Hashable:
    """Cache key for a judge whose answer depends on the secret and the question only."""
    task = request.task
    return task.source, task.secret, task.scenario, " ".join(request.action.lower().split())


def history_key(request: JudgeRequest) -> Hashable:
    """Cache key for a judge that also looks at the earlier questions and replies."""
    return question_key(request), request.history


def request_key(request: JudgeRequest) -> Hashable:
    """Cache key as the environment names it; ``history_key`` where it gives no name."""
    return request.key or history_key(request)


def local_replica(judge: Judge, *, threaded: bool = False) -> ReplicaCall:
    """A judge of this process as a replica.

    Args:
        threaded: Answer in a worker thread; for judges that take long.
    """

    async def answer(requests: list[JudgeRequest]) -> list[JudgeReply]:
        if threaded:
            return await asyncio.to_thread(judge.answer, requests)
        return judge.answer(requests)

    return answer


def _was_out(reply: JudgeReply) -> bool:
    """Whether an error is one of the judge's service, which let no model read the request."""
    return not reply.text and bool(reply.faults) and reply.faults[-1] not in _SPOKE


class JudgePool:
    """Asks replicas. Use it inside one event loop.

    Args:
        replicas: Each answers a list of requests with as many replies.
        cache_key: Only for a judge whose reply is a function of the key.
        failures: Further exception types of the transport that mean "try again elsewhere".
            Any other exception is a defect and is raised to the games that wait.
        restart: Without it a replica that is gone keeps its place and is asked again.
        on_restart: Told of every replacement.
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaCall],
        settings: JudgePoolSettings | None = None,
        *,
        cache_key: CacheKey | None = None,
        failures: tuple[type[Exception], ...] = (ConnectionError,),
        restart: RestartReplica | None = None,
        on_restart: OnRestart | None = None,
    ) -> None:
        if not replicas:
            raise ValueError("a judge pool needs at least one replica")
        self._lanes = [_Lane(replica) for replica in replicas]
        self._restart_one = restart
        self.on_restart = on_restart
        self._settings = settings or JudgePoolSettings()
        self._cache_key = cache_key
        # A missed deadline is the pool's own finding, whatever the transport raises.
        self._failures = (ReplicaFailure, TimeoutError, *failures)
        self._cache: dict[Hashable, JudgeReply] = {}
        self._pending: deque[_Item] = deque()
        self._open: dict[_Item, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._scheduled = False
        self._failure: JudgePoolFailure | None = None
        self._restarts = 0
        self._restarting = 0
        self._recent: deque[bool] = deque(maxlen=self._settings.window)
        self._last_reason = ""
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._latency: deque[float] = deque(maxlen=10_000)
        self._jitter = random.Random(0)

    async def ask(self, request: JudgeRequest) -> JudgeReply:
        """The judge's reply, or one with ``Verdict.ERROR`` when no replica could give any.

        Raises:
            JudgePoolFailure: The error rate is above its bound.
        """
        if self._failure is not None:
            raise JudgePoolFailure(str(self._failure)) from self._failure
        self._counts["calls"] += 1
        hit = self._cache.get(self._key(request))
        if hit is not None:
            self._counts["cached"] += 1
            return replace(hit, cached=True, seconds=0.0, tokens=0, cost=0.0, faults=())
        future: asyncio.Future[JudgeReply] = asyncio.get_running_loop().create_future()
        item = _Item(request, future, time.monotonic())
        self._open[item] = None
        self._queue(item)
        try:
            return await future
        finally:
            self._open.pop(item, None)

    def stats(self) -> JudgeStats:
        """Counters so far."""
        latency = np.array(self._latency) if self._latency else np.zeros(1)
        p50, p95 = np.percentile(latency, [50, 95])
        return JudgeStats(
            calls=self._counts["calls"],
            cached=self._counts["cached"],
            errors=self._counts["errors"],
            retries=self._counts["retries"],
            timeouts=self._counts["timeouts"],
            restarts=self._counts["restarts"],
            tokens=self._counts["tokens"],
            cost=self._counts["nano_cost"] / 1e9,
            latency_p50=float(p50),
            latency_p95=float(p95),
            failures=dict(self._reasons),
            faults={
                name.removeprefix(_FAULT): count
                for name, count in sorted(self._counts.items())
                if name.startswith(_FAULT)
            },
        )

    def reset_stats(self) -> None:
        """Start counting anew; the window of the error rate goes on."""
        self._counts.clear()
        self._reasons.clear()
        self._latency.clear()

    def mark(self) -> tuple[Counter[str], Counter[str]]:
        """The counters as they stand, for ``rewind``."""
        return self._counts.copy(), self._reasons.copy()

    def rewind(self, mark: tuple[Counter[str], Counter[str]]) -> None:
        """Take back what was counted since a ``mark``, but for replaced replicas.

        For games that are played again: the calls of the first time are not the step's.
        """
        restarts = self._counts["restarts"]
        self._counts, self._reasons = mark[0].copy(), mark[1].copy()
        self._counts["restarts"] = restarts

    def outstanding(self) -> tuple[int, float]:
        """Number of calls that wait, and the age of the oldest in seconds."""
        if not self._open:
            return 0, 0.0
        return len(self._open), time.monotonic() - next(iter(self._open)).since

    # -- dispatch ----------------------------------------------------------------------------

    def _queue(self, item: _Item) -> None:
        self._pending.append(item)
        if not self._scheduled:
            # One round later: the requests of this round share their calls.
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        batches: dict[int, list[_Item]] = {}
        while self._pending:
            lane = self._choose(self._pending[0])
            if lane is None:
                break
            item = self._pending.popleft()
            if item.future.done():  # its game was cancelled meanwhile
                continue
            self._lanes[lane].load += 1
            item.attempts += 1
            item.tried.add(lane)
            batches.setdefault(lane, []).append(item)
        size = self._settings.max_batch
        for lane, items in batches.items():
            for start in range(0, len(items), size):
                self._spawn(self._call(lane, items[start : start + size]))

    def _choose(self, item: _Item) -> int | None:
        """The least loaded replica with room; if possible one that has not failed the request.

        One that was late comes last for a while.
        """
        limit = self._settings.max_outstanding
        room = [i for i, lane in enumerate(self._lanes) if lane.call and lane.load < limit]
        now = time.monotonic()

        def rank(lane: int) -> tuple[bool, bool, int, int]:
            place = self._lanes[lane]
            return place.rests_until > now, lane in item.tried, place.load, lane

        return min(room, key=rank, default=None)

    async def _call(self, lane: int, items: list[_Item]) -> None:
        try:
            replies, read = await self._attempt(lane, [item.request for item in items])
        finally:
            self._lanes[lane].load -= len(items)
        for item, reply in zip(items, replies, strict=True):
            self._spent(reply)
            if reply.verdict is Verdict.ERROR:
                if read and not _was_out(reply):
                    item.request = replace(item.request, attempt=item.request.attempt + 1)
                self._failed(item, reply)
            else:
                self._answered(item, reply)
        if self._pending and not self._scheduled:
            self._dispatch()

    async def _attempt(
        self, lane: int, requests: list[JudgeRequest]
    ) -> tuple[list[JudgeReply], bool]:
        """One call of one replica; its failure becomes error replies.

        Returns:
            The replies, and whether they are the replica's own.
        """
        limit = asyncio.timeout(self._settings.deadline)
        call = self._lanes[lane].call
        try:
            if call is None:
                raise ReplicaGone("it died before it was asked")
            async with limit:
                replies = await call(requests)
        except self._failures as error:
            if isinstance(error, ReplicaGone):
                self._lost(lane, call, str(error))
            if isinstance(error, TimeoutError) and limit.expired():
                self._counts["timeouts"] += len(requests)
                self._lanes[lane].miss(self._settings.deadline)
                reason = f"judge {lane} did not answer within {self._settings.deadline:g} s"
            else:
                reason = f"judge {lane} failed: {type(error).__name__}: {error}"
            return [JudgeReply(Verdict.ERROR, reason=reason)] * len(requests), False
        if len(replies) != len(requests):
            reason = f"judge {lane} gave {len(replies)} replies to {len(requests)} requests"
            return [JudgeReply(Verdict.ERROR, reason=reason)] * len(requests), False
        self._lanes[lane].answer()
        return replies, True

    # -- supervision -------------------------------------------------------------------------

    def _lost(self, lane: int, call: ReplicaCall | None, reason: str) -> None:
        """Take a dead replica out of its place; of several calls that it fails the first counts."""
        place = self._lanes[lane]
        if self._restart_one is None or call is None or place.call is not call:
            return
        place.call = None
        place.deaths += 1
        self._restart_or_stop(self._restart_one, lane, reason)

    def _restart_or_stop(self, restart: RestartReplica, lane: int, reason: str) -> None:
        if self._restarts < self._settings.max_restarts:
            self._restarts += 1
            self._counts["restarts"] += 1
            self._restarting += 1
            if self.on_restart is not None:
                self.on_restart(lane, reason)
            self._spawn(self._restart(restart, lane))
        elif not self._restarting and not any(place.call for place in self._lanes):
            self._give_up(
                JudgePoolFailure(
                    f"No judge replica is left and all {self._restarts} restarts "
                    f"(judge_rollout.max_restarts) are used up; the last one: {reason}"
                )
            )

    async def _restart(self, restart: RestartReplica, lane: int) -> None:
        """Put another replica in a place, or see to the next attempt."""
        place, settings = self._lanes[lane], self._settings
        wait = settings.restart_backoff * 2 ** (place.deaths - 1)
        failed = ""
        try:
            await asyncio.sleep(min(wait, settings.max_restart_backoff))
            place.call = await restart(lane)
            place.misses, place.rests_until = 0, 0.0
        except self._failures as error:
            failed = f"judge {lane} did not start again: {type(error).__name__}: {error}"
        finally:
            self._restarting -= 1
        if failed:
            place.deaths += 1
            self._restart_or_stop(restart, lane, failed)
        elif self._pending and not self._scheduled:
            self._dispatch()

    def _key(self, request: JudgeRequest) -> Hashable | None:
        return None if self._cache_key is None else self._cache_key(request)

    def _failed(self, item: _Item, reply: JudgeReply) -> None:
        self._reasons[reply.reason] += 1
        if item.attempts >= self._settings.max_attempts:
            self._settle(item, reply)
        elif not item.future.done():
            self._counts["retries"] += 1
            wait = self._settings.backoff * 2 ** (item.attempts - 1)
            wait *= self._jitter.uniform(0.5, 1.5)
            asyncio.get_running_loop().call_later(wait, self._queue, item)

    def _answered(self, item: _Item, reply: JudgeReply) -> None:
        key = self._key(item.request)
        if key is not None:
            self._cache[key] = reply
        self._settle(item, reply)

    def _spent(self, reply: JudgeReply) -> None:
        """Count what an attempt took, whatever came of it."""
        self._counts["tokens"] += reply.tokens
        # Whole numbers, so that the sum does not depend on the order.
        self._counts["nano_cost"] += round(reply.cost * 1e9)
        self._counts.update(_FAULT + kind for kind in reply.faults)

    def _settle(self, item: _Item, reply: JudgeReply) -> None:
        seconds = time.monotonic() - item.since
        error = reply.verdict is Verdict.ERROR
        self._latency.append(seconds)
        self._counts["errors"] += error
        self._recent.append(error)
        if not item.future.done():
            item.future.set_result(replace(reply, seconds=seconds))
        if error:
            self._last_reason = reply.reason
            self._watch_rate()

    def _watch_rate(self) -> None:
        replies, errors = len(self._recent), sum(self._recent)
        limit = self._settings.max_error_rate
        if replies < min(self._settings.min_replies, self._settings.window):
            return
        if errors > limit * replies:
            self._give_up(
                JudgePoolFailure(
                    f"{errors} of the last {replies} judge replies are errors, more than the "
                    f"allowed {limit:.0%}; the last one: {self._last_reason}"
                )
            )

    def _give_up(self, failure: JudgePoolFailure) -> None:
        self._failure = failure
        self._raise_into(failure)

    def _raise_into(self, error: BaseException) -> None:
        """Every waiting game gets the error, so that none waits for ever."""
        self._pending.clear()
        for item in list(self._open):
            if not item.future.done():
                item.future.set_exception(error)

    def _spawn(self, call: Awaitable[None]) -> None:
        task = asyncio.ensure_future(call)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self._raise_into(ReplicaGone("a judge call was cancelled"))
        elif (error := task.exception()) is not None:
            self._raise_into(error)
