"""Many games at once.

Games are coroutines of a few workers, at most ``max_games`` alive at a time. All of them live in
one task group: the first unexpected failure cancels the rest and is raised. The groups that come
back are in the order of the tasks, whatever the order in which games ended.

In deterministic mode each engine replica has its own queue of games and its own workers, and a
worker counts as a live game from its first to its last. The engine then steps at points that depend
on the games alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from delta_belief_rl.engines.base import (
    Completion,
    Engine,
    GenRequest,
    SamplingParams,
    TailRequest,
)
from delta_belief_rl.engines.pump import EngineFailure, EngineRouter
from delta_belief_rl.envs.base import Env, JudgeReply, JudgeRequest
from delta_belief_rl.rollout.game import (
    OPENING,
    AsyncJudge,
    Beginning,
    Chat,
    Chooser,
    GameId,
    GameSettings,
    Witness,
    play_game,
)
from delta_belief_rl.types import Group, Task, Trajectory

T = TypeVar("T")

NO_GAMES: Mapping[tuple[str, int], Trajectory] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a rollout is waiting for, at one moment.

    Attributes:
        engine_age, judge_age: Seconds that the oldest outstanding call has waited.
    """

    phase: str
    step: int
    games_done: int
    games_total: int
    games_live: int
    engine_calls: int
    engine_age: float
    judge_calls: int
    judge_age: float


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Counts over games that were played together."""

    games: int
    turns: int
    sampled_tokens: int
    stream_tokens: int
    truncated_turns: int
    stops: dict[str, int]
    verdicts: dict[str, int]
    adapter_versions: dict[int, int]
    """Turns by the adapter version that sampled them."""
    seconds: float


class _Tracked:
    """Calls under way: when each began."""

    def __init__(self) -> None:
        self._began: dict[int, float] = {}
        self._next = 0

    async def run(self, call: Awaitable[T]) -> T:
        key = self._next
        self._next += 1
        self._began[key] = time.monotonic()
        try:
            return await call
        finally:
            del self._began[key]

    def oldest(self) -> tuple[int, float]:
        """Number of calls, and the age of the oldest in seconds."""
        # One copy, because calls come and go while another thread asks.
        began = list(self._began.values())
        return len(began), time.monotonic() - began[0] if began else 0.0


class _TrackedEngine:
    def __init__(self, engine: EngineRouter, calls: _Tracked) -> None:
        self._engine = engine
        self._calls = calls

    async def generate(self, request: GenRequest) -> Completion:
        return await self._calls.run(self._engine.generate(request))

    async def generate_all(self, requests: Sequence[GenRequest]) -> list[Completion]:
        return await self._calls.run(self._engine.generate_all(requests))

    async def score_all(self, requests: Sequence[TailRequest]) -> list[NDArray[np.float64]]:
        return await self._calls.run(self._engine.score_all(requests))

    async def release(self, session: str) -> None:
        await self._engine.release(session)


class _TrackedJudge:
    def __init__(self, judge: AsyncJudge, calls: _Tracked) -> None:
        self._judge = judge
        self._calls = calls

    async def ask(self, request: JudgeRequest) -> JudgeReply:
        return await self._calls.run(self._judge.ask(request))


@dataclass(frozen=True, slots=True)
class Start:
    """One game that is to be played, where it does not begin like every other one.

    Attributes:
        game: Its number inside its group.
        beginning: What was played before.
        restore: Brings a fresh environment to the state after that; None for the opening.
        witness: Makes what sees the game, anew each time that it is played.
    """

    task: Task
    game: int
    beginning: Beginning = OPENING
    restore: Callable[[Env], None] | None = None
    witness: Callable[[], Witness] | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    order: int
    start: Start


@dataclass(slots=True)
class _Round:
    """One ``play`` under way."""

    phase: str
    step: int
    settings: GameSettings
    on_game: Callable[[Trajectory], None] | None
    results: list[Trajectory | None]
    done: int = 0
    live: int = 0


class Replay(Protocol):
    """What to do when an engine fails while games are played."""

    def begin(self) -> None:
        """Games are about to be played together; once for each ``play``."""
        ...

    async def failed(self, failure: EngineFailure, games: int) -> None:
        """Mend the engine, after which all games of the ``play`` are played again.

        Args:
            failure: Raised where it cannot be mended.
            games: That had ended.
        """
        ...


class RolloutDriver:
    """Plays the games of a step.

    Args:
        engine: One engine, or an ``EngineRouter`` over several.
        judge: The judge pool.
        make_env: A fresh environment for one game of a task.
        settings: Limits of every game; sampling is given anew with each ``collect``.
        max_games: Most games alive at a time.
        run_seed: Root of every random number.
        run_id: Stamped on every trajectory.
        make_chooser: What takes the turns of one game of a task; None takes what is sampled.
        on_progress: Called after each game with (games done, games in all).

    Attributes:
        replay: What mends an engine that failed; without it the failure is raised.
        played: Games that have ended, in all.
    """

    def __init__(
        self,
        engine: Engine,
        judge: AsyncJudge,
        chat: Chat,
        make_env: Callable[[Task], Env],
        settings: GameSettings,
        *,
        max_games: int,
        run_seed: int,
        run_id: str = "",
        make_chooser: Callable[[Task], Chooser] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if max_games < 1:
            raise ValueError("max_games must be at least 1")
        self._router = engine if isinstance(engine, EngineRouter) else EngineRouter([engine])
        self._engine_calls, self._judge_calls = _Tracked(), _Tracked()
        self._engine = _TrackedEngine(self._router, self._engine_calls)
        self._judge = _TrackedJudge(judge, self._judge_calls)
        self._chat = chat
        self._make_env = make_env
        self._settings = settings
        self._max_games = max_games
        self._run_seed = run_seed
        self._run_id = run_id
        self._make_chooser = make_chooser
        self._on_progress = on_progress
        self._round: _Round | None = None
        self.replay: Replay | None = None
        self.played = 0
        self.stats: RolloutStats | None = None
        """Counts of the latest ``play``."""

    async def collect(
        self,
        tasks: Sequence[Task],
        games_per_task: int,
        step: int,
        sampling: SamplingParams,
        *,
        phase: str = "train",
        known: Mapping[tuple[str, int], Trajectory] = NO_GAMES,
        on_game: Callable[[Trajectory], None] | None = None,
    ) -> list[Group]:
        """Play ``games_per_task`` games of each task.

        Args:
            tasks: What is played.
            known: Games by task id and number that were played before and are not again.
            on_game: Told every game that is played, as it ends.

        Returns:
            One group per task, in the order of ``tasks``; games in the order of their index.

        Raises:
            Exception: The first unexpected failure of a game, an engine or the judge pool, after
                every other game has been cancelled.
        """
        if len({task.id for task in tasks}) != len(tasks):
            raise ValueError("task ids of one rollout must differ")
        starts = [Start(task, game) for task in tasks for game in range(games_per_task)]
        games = await self.play(starts, step, sampling, phase=phase, known=known, on_game=on_game)
        size = games_per_task
        return [
            Group(task, tuple(games[i * size : (i + 1) * size])) for i, task in enumerate(tasks)
        ]

    async def play(
        self,
        starts: Sequence[Start],
        step: int,
        sampling: SamplingParams,
        *,
        phase: str = "train",
        known: Mapping[tuple[str, int], Trajectory] = NO_GAMES,
        on_game: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Play games wherever they begin; see ``collect``.

        Returns:
            One game per start, in their order.
        """
        began = time.monotonic()
        jobs = [_Job(order, start) for order, start in enumerate(starts)]
        settings = replace(self._settings, sampling=sampling)
        if self._router.deterministic:
            # Timings are the one part of a trajectory that is not a function of the games.
            settings = replace(settings, clock=_no_clock)
        given = [known.get((start.task.id, start.game)) for start in starts]
        current = _Round(phase, step, settings, on_game, given, len(given) - given.count(None))
        current = await self._play_all(jobs, current)
        games = [t for t in current.results if t is not None]
        if len(games) != len(jobs):
            raise RuntimeError(f"{len(jobs) - len(games)} of {len(jobs)} games gave no trajectory")
        self.stats = count_games(games, time.monotonic() - began)
        return games

    def new_env(self, task: Task) -> Env:
        """A fresh environment, as every game of the task gets one."""
        return self._make_env(task)

    def heartbeat(self) -> Heartbeat:
        """What the rollout waits for now; any thread may ask at any time."""
        current = self._round
        engine_calls, engine_age = self._engine_calls.oldest()
        judge_calls, judge_age = self._judge_calls.oldest()
        return Heartbeat(
            phase=current.phase if current else "idle",
            step=current.step if current else 0,
            games_done=current.done if current else 0,
            games_total=len(current.results) if current else 0,
            games_live=current.live if current else 0,
            engine_calls=engine_calls,
            engine_age=engine_age,
            judge_calls=judge_calls,
            judge_age=judge_age,
        )

    async def _play_all(self, jobs: list[_Job], current: _Round) -> _Round:
        """Play all games, again from their beginning when an engine was mended meanwhile."""
        if self.replay is not None:
            self.replay.begin()
        given, played = list(current.results), current.done
        jobs = [job for job in jobs if given[job.order] is None]
        while True:
            self._round = current
            try:
                await self._run_workers(jobs, current)
                await self._router.flush()
            except EngineFailure as failure:
                if self.replay is None:
                    raise
                await self.replay.failed(failure, current.done - played)
                current = replace(current, results=list(given), done=played, live=0)
            else:
                return current

    async def _run_workers(self, jobs: list[_Job], current: _Round) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for queue, lane in self._queues(jobs):
                    # Every worker lives before the first one asks. It leaves by a callback: a task
                    # that is cancelled before it starts runs no code of its own.
                    self._router.enter(lane)
                    worker = group.create_task(self._work(queue, lane, current))
                    worker.add_done_callback(partial(self._left, lane))
        except BaseExceptionGroup as failures:
            raise _first(failures) from failures

    def _queues(self, jobs: list[_Job]) -> list[tuple[deque[_Job], int]]:
        """One entry per worker: the queue that it takes jobs from, and its engine."""
        lanes = self._router.lanes
        if not self._router.deterministic:
            shared = deque(jobs)
            return [(shared, i % lanes) for i in range(min(self._max_games, len(jobs)))]
        workers: list[tuple[deque[_Job], int]] = []
        for lane in range(lanes):
            own = deque(jobs[lane::lanes])
            share = max(1, self._max_games // lanes + (lane < self._max_games % lanes))
            workers += [(own, lane)] * min(share, len(own))
        return workers

    def _left(self, lane: int, _worker: asyncio.Task[None]) -> None:
        self._router.leave(lane)

    async def _work(self, queue: deque[_Job], lane: int, current: _Round) -> None:
        while queue:
            job = queue.popleft()
            current.live += 1
            game = await self._play(job, lane, current)
            current.results[job.order] = game
            current.live -= 1
            current.done += 1
            self.played += 1
            if current.on_game is not None:
                current.on_game(game)
            if self._on_progress is not None:
                self._on_progress(current.done, len(current.results))

    async def _play(self, job: _Job, lane: int, current: _Round) -> Trajectory:
        start, task = job.start, job.start.task
        identity = GameId(self._run_seed, current.step, start.game, self._run_id, current.phase)
        if self._router.deterministic:
            self._router.bind(identity.session(task.id), lane)
        env = self._make_env(task)
        if start.restore is not None:
            start.restore(env)
        chooser = self._make_chooser(task) if self._make_chooser is not None else None
        return await play_game(
            env,
            self._engine,
            self._judge,
            self._chat,
            current.settings,
            identity,
            chooser,
            beginning=start.beginning,
            witness=start.witness() if start.witness is not None else None,
        )


def count_games(games: Sequence[Trajectory], seconds: float = 0.0) -> RolloutStats:
    """Counts over finished games."""
    turns = [turn for game in games for turn in game.turns]
    return RolloutStats(
        games=len(games),
        turns=len(turns),
        sampled_tokens=sum(turn.n_tokens for turn in turns),
        stream_tokens=sum(len(game.token_ids) for game in games),
        truncated_turns=sum(turn.truncated for turn in turns),
        stops=dict(Counter(game.stop.value for game in games)),
        verdicts=dict(Counter(turn.verdict.value for turn in turns)),
        adapter_versions=dict(Counter(turn.adapter_version for turn in turns)),
        seconds=seconds,
    )


def _no_clock() -> float:
    return 0.0


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first single exception inside nested groups."""
    inner = failures.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
