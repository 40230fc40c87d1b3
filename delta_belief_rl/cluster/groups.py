"""Pools of Ray actors behind the protocols of ``trainer.services``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.cluster.ranks import RankLimits, ask_all
from delta_belief_rl.engines.base import EngineState
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

    Every method raises ``RankFailure`` when a rank is gone, hangs, or ran out of memory.
    """

    def __init__(
        self,
        ranks: Sequence[Any],
        make_room: Callable[[], Awaitable[None]] | None = None,
        limits: RankLimits | None = None,
        expected_bytes: float | None = None,
    ) -> None:
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
    and compare them with the trainer's own.

    Args:
        replicas: Handles of ``EngineWorker``.
        probe_ids: The fixed token sequence, at least two tokens.
        bound: What log-probs of the probe may differ by.
        sleeps: The replicas give their memory back in ``rest`` and take it again in ``sync``.
        judges: Handles of ``JudgeWorker`` that do the same; replicas that were restarted belong to
            it as soon as it says so.
    """

    def __init__(
        self,
        replicas: Sequence[Any],
        probe_ids: Sequence[int],
        bound: Bound,
        *,
        sleeps: bool = False,
        judges: Sequence[Any] = (),
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

    async def sync(self, policy: PolicyGroup) -> Mapping[str, float]:
        """Bring every replica to the policy's adapter; nothing is sent when nothing has changed.

        Returns:
            Metrics of the adapter in place, whether it was sent now or before: a resumed run, which
            has to send it, records what the straight one does.

        Raises:
            SyncMismatch: A replica reports another version, another checksum, or a probe outside
                the bound.
        """
        if self._asleep:
            await asyncio.gather(*(member.wake.remote() for member in self._sleepers()))
            self._asleep = False
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
        reports = await asyncio.gather(
            *(
                replica.sync.remote(dict(snapshot.state), snapshot.version, self._probe_ids)
                for replica in self._replicas
            )
        )
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
        members = self._sleepers()
        if not members or self._asleep:
            return
        states = await asyncio.gather(*(member.sleep.remote() for member in members))
        # One that stays awake keeps its memory, and the ranks run out of it much later.
        awake = [index for index, state in enumerate(states) if state != EngineState.ASLEEP]
        if awake:
            raise SyncMismatch(
                f"engine {awake[0]} of {len(members)} is {states[awake[0]]} after it was told to "
                "sleep: its memory is not free for the training ranks"
            )
        self._asleep = True

    def _sleepers(self) -> list[Any]:
        return [*(self._replicas if self._sleeps else ()), *self._judges]


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
