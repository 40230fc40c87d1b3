"""Pools of Ray actors behind the protocols of ``trainer.services``."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ray.exceptions import RayActorError, RayTaskError

from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.cluster import members
from delta_belief_rl.cluster.ranks import RankFailure, RankLimits, ask_all, lost_ranks
from delta_belief_rl.cluster.restarts import RankRestarter, RestartEngine
from delta_belief_rl.engines.base import EngineState
from delta_belief_rl.engines.pump import EngineLost
from delta_belief_rl.models.adapters import state_checksum
from delta_belief_rl.trainer.actor import AdapterSnapshot, GameScore
from delta_belief_rl.trainer.crosscheck import Bound, Gap
from delta_belief_rl.trainer.packing import UpdatePlan, deal
from delta_belief_rl.trainer.services import PolicyGroup
from delta_belief_rl.trainer.usage import usage_metrics
from delta_belief_rl.types import FloatArray, IntArray, TrainBatch


class SyncMismatch(RuntimeError):
    """An engine replica does not hold the adapter that the trainer sent."""


class RayPolicyGroup:
    """All training ranks; calls go to all of them together, because a sharded model needs all.

    Args:
        ranks: Handles of ``ActorWorker``.
        make_room: Called before the ranks score or update, which take much memory.
        limits: How long the ranks may wait for each other.
        expected_bytes: What the plan expects a rank to take of its GPU at most.
        restarter: How all ranks are replaced; without it a lost one is lost for good.

    Every method raises ``RankFailure`` when a rank is gone, hangs, or ran out of memory.
    """

    def __init__(
        self,
        ranks: Sequence[Any],
        make_room: Callable[[], Awaitable[None]] | None = None,
        limits: RankLimits | None = None,
        expected_bytes: float | None = None,
        restarter: RankRestarter | None = None,
    ) -> None:
        self._restarter = restarter
        self._ranks = list(ranks)
        self._make_room = make_room
        self._limits = limits or RankLimits()
        self._expected_bytes = expected_bytes
        self.num_ranks = len(self._ranks)

    async def score(self, games: Sequence[ScoreRequest]) -> list[GameScore]:
        """Deal games to ranks by length, so that all ranks finish together.

        Ranks may get unequal numbers of games; they agree on the number of forwards by themselves.

        Returns:
            Scores in the order of ``games``.
        """
        if self._make_room is not None:
            await self._make_room()
        parts = deal([len(game.token_ids) for game in games], self.num_ranks)
        answers = await self._each("score", [([games[i] for i in part],) for part in parts])
        out: dict[int, GameScore] = {}
        for part, scores in zip(parts, answers, strict=True):
            out.update(zip(part, scores, strict=True))
        return [out[index] for index in range(len(games))]

    async def update(
        self, batch: TrainBatch, plan: UpdatePlan, training_step: int
    ) -> dict[str, float]:
        """Send each rank its micro-batches and merge the metrics.

        Raises:
            ValueError: The plan is for another number of ranks.
        """
        for step in plan.steps:
            if len(step.ranks) != self.num_ranks:
                raise ValueError(f"a plan for {len(step.ranks)} ranks, not for {self.num_ranks}")
        if self._make_room is not None:
            await self._make_room()
        shares = [(rank_steps(batch, plan, i), training_step) for i in range(self.num_ranks)]
        return merge_pairs(await self._each("update", shares))

    async def usage(self) -> dict[str, float]:
        """Metrics of what the ranks used since the last call."""
        return usage_metrics(await self._all("usage"), self._expected_bytes)

    async def snapshot(self) -> AdapterSnapshot:
        """The adapter, from rank 0; every rank takes part in gathering it."""
        return (await self._all("snapshot"))[0]

    async def probe(self, token_ids: Sequence[int]) -> FloatArray:
        """Log-probs of a fixed sequence."""
        return (await self._all("probe", tuple(token_ids)))[0]

    async def dump(self) -> bytes:
        """The state for a checkpoint, from rank 0."""
        return (await self._all("dump"))[0]

    async def load(self, data: bytes) -> str:
        """Restore every rank; all must end with the same adapter."""
        sums = await self._all("load", data)
        if len(set(sums)) != 1:
            raise SyncMismatch(f"training ranks hold different adapters after loading: {sums}")
        return sums[0]

    async def check(self, seconds: float) -> None:
        """Ask every rank for a sign of life.

        Args:
            seconds: That they have for it.
        """
        found = await members.missing(self._ranks, seconds)
        if found:
            raise lost_ranks(found, self.num_ranks, seconds, self._limits)

    async def restart(self, failure: RankFailure) -> None:
        """Replace all ranks; the new ones hold the model that the run began with.

        Args:
            failure: Why; raised where they cannot be replaced.
        """
        if self._restarter is None:
            raise failure
        self._ranks = await self._restarter(self._ranks)

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return await self._each(method, [args] * self.num_ranks)

    async def _each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        return await ask_all(self._ranks, method, arguments, self._limits)


def rank_steps(
    batch: TrainBatch, plan: UpdatePlan, rank: int
) -> list[tuple[list[TrainBatch | None], Mapping[str, float]]]:
    """One rank's share of an update plan, as ``PolicyActor.update`` takes it."""

    def part(games: IntArray) -> TrainBatch | None:
        return batch.select(games) if len(games) else None

    return [
        ([part(micro.games) for micro in step.ranks[rank]], step.denominators)
        for step in plan.steps
    ]


def merge_pairs(parts: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Means from (sum, count) pairs of all ranks; a name without any count is left out."""
    totals: dict[str, tuple[float, float]] = {}
    for metrics in parts:
        for name, (total, count) in metrics.items():
            old = totals.get(name, (0.0, 0.0))
            totals[name] = (old[0] + total, old[1] + count)
    return {name: total / count for name, (total, count) in totals.items() if count}


class RayEngineGroup:
    """All engine replicas.

    ``sync`` is the same for the first time and the n-th: send the adapter, then demand of every
    replica the version, the checksum of the bytes it received and the log-probs of a fixed probe,
    and compare them with the trainer's own. A replica that is lost is noted, and the next ``sync``
    replaces it: until then nobody needs it, and the ranks may need its memory.

    Args:
        replicas: Handles of ``EngineWorker``.
        probe_ids: The fixed token sequence, at least two tokens.
        bound: What log-probs of the probe may differ by.
        sleeps: The replicas give their memory back in ``rest`` and take it again in ``sync``.
        judges: Handles of ``JudgeWorker`` that do the same; replicas that were restarted belong to
            it as soon as it says so.
        restart: How a lost replica is replaced; without it the loss of one is a failure.
        signs: Seconds in which a replica must give a sign of life while it works on a call.

    Attributes:
        may_restart: Asked before lost replicas are replaced; raises what it is given, or another
            failure, where the run has had enough.
        on_restart: Told of what was lost once it is replaced, and how many seconds that took.
    """

    def __init__(
        self,
        replicas: Sequence[Any],
        probe_ids: Sequence[int],
        bound: Bound,
        *,
        sleeps: bool = False,
        judges: Sequence[Any] = (),
        restart: RestartEngine | None = None,
        signs: float = math.inf,
    ) -> None:
        if len(probe_ids) < 2:
            raise ValueError(f"a probe needs at least 2 tokens, not {len(probe_ids)}")
        self._replicas = list(replicas)
        self._probe_ids = tuple(probe_ids)
        self._bound = bound
        self._sleeps = sleeps
        self._judges = judges
        self._asleep = False
        self._synced: tuple[int, str] | None = None
        self._metrics: dict[str, float] = {}
        self._restart, self._signs = restart, signs
        self._lost: dict[int, str] = {}
        self.may_restart: Callable[[EngineLost], None] = _always
        self.on_restart: Callable[[EngineLost, float], None] = _silent

    async def sync(self, policy: PolicyGroup) -> Mapping[str, float]:
        """Bring every replica to the policy's adapter; nothing is sent when nothing has changed.

        Returns:
            Metrics of the adapter in place, whether it was sent now or before: a resumed run, which
            has to send it, records what the straight one does.

        Raises:
            SyncMismatch: A replica reports another version, another checksum, or a probe outside
                the bound.
            EngineLost: A replica is lost, and may not or cannot be replaced.
        """
        while True:
            if self._asleep:
                await self._each("wake", sleepers=True)
                self._asleep = False
            # After the others woke: one that has just started is awake.
            await self._replace_lost()
            try:
                return await self._sync(policy)
            except EngineLost:
                if self._restart is None:
                    raise

    @property
    def adapter(self) -> str:
        """Checksum of the adapter that all replicas hold; empty where that is not known."""
        return self._synced[1] if self._synced else ""

    @property
    def lost(self) -> Mapping[int, str]:
        """Replicas that wait to be replaced, and how they were lost."""
        return self._lost

    async def check(self, seconds: float) -> None:
        """Ask every replica for a sign of life; one that gives none is lost.

        Args:
            seconds: That they have for it.
        """
        self.note_lost(await members.missing(self._replicas, seconds))

    def note_lost(self, lost: Mapping[int, str]) -> None:
        """End replicas that are of no more use; the next ``sync`` replaces them.

        Args:
            lost: How they were lost, by number.
        """
        for lane in lost.keys() - self._lost.keys():
            members.end(self._replicas[lane])
        self._lost = {**lost, **self._lost}

    def forget(self) -> None:
        """Send and check the adapter in the next ``sync``, whatever the replicas hold."""
        self._synced = None

    async def _replace_lost(self) -> None:
        """Put another replica in the place of each that is lost, as often as the run allows."""
        while self._lost:
            loss, began = self._loss(), time.monotonic()
            if self._restart is None:
                raise loss
            self.may_restart(loss)
            for lane in sorted(self._lost):
                try:
                    self._replicas[lane] = await self._restart(lane)
                except EngineLost as again:
                    self._lost[lane] = str(again)
                    break
                del self._lost[lane]
            self._synced = None
            if not self._lost:
                self.on_restart(loss, time.monotonic() - began)

    def _loss(self) -> EngineLost:
        """What is lost, as a sentence."""
        count = len(self._replicas)
        parts = [f"policy engine {lane} of {count} {how}" for lane, how in self._lost.items()]
        return EngineLost(f"{'; '.join(parts)[:1].upper()}{'; '.join(parts)[1:]}.")

    async def _sync(self, policy: PolicyGroup) -> Mapping[str, float]:
        if not self._replicas:  # the policy is somebody else's
            return {}
        snapshot = await policy.snapshot()
        if state_checksum(snapshot.state) != snapshot.checksum:
            raise SyncMismatch("the adapter changed on its way from the trainer")
        if self._synced == (snapshot.version, snapshot.checksum):
            return self._metrics
        # What the replicas hold is unknown until the last check has passed.
        self._synced = None
        # One after the other: trainer and engine both use all cores of a machine without a GPU, and
        # two thread pools on the same cores are many times slower than one.
        expected = await policy.probe(self._probe_ids)
        reports = await self._each("sync", dict(snapshot.state), snapshot.version, self._probe_ids)
        if self._lost:
            raise self._loss()
        gaps = [
            check_report(index, report, snapshot, expected, self._bound)
            for index, report in enumerate(reports)
        ]
        self._synced = (snapshot.version, snapshot.checksum)
        self._metrics = {
            "sync/adapter_version": float(snapshot.version),
            "sync/probe_gap": max(gap.largest for gap in gaps),
            "sync/probe_gap_mean": max(gap.mean for gap in gaps),
            "sync/adapter_mb": sum(part.nbytes for part in snapshot.state.values()) / 2**20,
        }
        return self._metrics

    async def rest(self) -> None:
        """Let replicas that sleep give their memory back until the next ``sync``.

        Raises:
            SyncMismatch: One of them says that it is awake.
        """
        if self._asleep or not (self._sleeps or self._judges):
            return
        states = await self._each("sleep", sleepers=True)
        # One that stays awake keeps its memory, and the ranks run out of it much later.
        awake = [index for index, state in enumerate(states) if state != EngineState.ASLEEP]
        if awake:
            raise SyncMismatch(
                f"engine {awake[0]} of {len(states)} is {states[awake[0]]} after it was told to "
                "sleep: its memory is not free for the training ranks"
            )
        self._asleep = True

    async def _each(self, method: str, *args: Any, sleepers: bool = False) -> list[Any]:
        """Call a method of every replica, or of every sleeper; takes down those that are lost.

        A judge that is lost is its pool's business.

        Returns:
            Answers of those that gave one, those of judges last.
        """
        replicas = self._replicas if self._sleeps or not sleepers else []
        asked = [*replicas, *(self._judges if sleepers else ())]
        outcomes = await asyncio.gather(
            *(
                members.answered(getattr(member, method).remote(*args), member, self._signs)
                for member in asked
            ),
            return_exceptions=True,
        )
        lost = {lane: how for lane, outcome in enumerate(outcomes) if (how := _how_lost(outcome))}
        for lane, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException) and lane not in lost:
                raise outcome
        for lane, how in lost.items():
            # One that stands still holds its memory until it is gone.
            if lane >= len(replicas) and how != members.DIED:
                members.end(asked[lane])
        self.note_lost({lane: how for lane, how in lost.items() if lane < len(replicas)})
        return [outcome for lane, outcome in enumerate(outcomes) if lane not in lost]


def _how_lost(outcome: object) -> str:
    """How a worker was lost, from what its call came to; empty for one that is there."""
    if isinstance(outcome, RayActorError):
        return members.DIED
    if isinstance(outcome, members.WorkerSilent):
        return members.SILENT
    if isinstance(outcome, RayTaskError) and isinstance(outcome.cause, EngineLost):
        return f"lost its engine ({' '.join(str(outcome.cause).split())})"
    return ""


def _always(failure: EngineLost) -> None:
    """Lost replicas may be replaced without end."""
    del failure


def _silent(loss: EngineLost, seconds: float) -> None:
    """Nobody is told."""
    del loss, seconds


def check_report(
    index: int, report: Any, snapshot: AdapterSnapshot, expected: FloatArray, bound: Bound
) -> Gap:
    """How far the probe of one replica is from the trainer's.

    Raises:
        SyncMismatch: Anything differs; the message names the replica and the number.
    """
    if report.version != snapshot.version:
        raise SyncMismatch(
            f"engine replica {index} holds adapter version {report.version}, "
            f"the trainer {snapshot.version}"
        )
    if report.checksum != snapshot.checksum:
        raise SyncMismatch(
            f"engine replica {index} received other adapter bytes than the trainer sent: checksum "
            f"{report.checksum[:12]}, not {snapshot.checksum[:12]}"
        )
    if len(report.probe) != len(expected):
        raise SyncMismatch(
            f"engine replica {index} gave {len(report.probe)} log-probs of the probe, "
            f"the trainer {len(expected)}"
        )
    gap = Gap.of(np.asarray(report.probe), np.asarray(expected))
    if not gap.within(bound):
        raise SyncMismatch(
            f"engine replica {index} differs from the trainer by {gap} on the probe, more than "
            f"{bound.mean:g} and {bound.largest:g}: its adapter is not the trainer's"
        )
    return gap
