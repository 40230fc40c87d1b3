"""The pools behind fake handles: order, merging of metrics, and the checks of a sync."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import ray
import torch
import training_fakes as fakes
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError

from delta_belief_rl.algo.shapers.channels import build_table
from delta_belief_rl.belief.branched import ScoreRequest
from delta_belief_rl.cluster.groups import (
    RayEngineGroup,
    RayPolicyGroup,
    SyncMismatch,
    merge_pairs,
    rank_steps,
)
from delta_belief_rl.engines.pump import EngineLost
from delta_belief_rl.models.loading import (
    adapter_state,
    add_lora,
    build_causal_lm,
    state_checksum,
    tiny_qwen3_config,
)
from delta_belief_rl.trainer.actor import AdapterSnapshot, GameScore
from delta_belief_rl.trainer.crosscheck import Bound
from delta_belief_rl.trainer.packing import build_batch
from delta_belief_rl.types import TrainBatch

GROUPS = fakes.make_groups()
REQUESTS = fakes.requests(GROUPS)
PROBE = (3, 1, 4, 1, 5)
LOGPS = -np.arange(1.0, len(PROBE))


class Method:
    """Looks like a method of a Ray handle: ``remote`` returns a future."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(self._call(*args))
        except ActorDiedError as error:
            future.set_exception(error)
        return future


class Handle:
    """A handle of an object in this process."""

    def __init__(self, target: object) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self._target, name))


# --- the training ranks ---------------------------------------------------------------------------


@dataclass
class Rank:
    """A training rank that recognises games by their length and counts its calls."""

    index: int = 0
    calls: list[str] = field(default_factory=list)
    games: list[int] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)
    checksum: str = "same"

    def score(self, games: Sequence[ScoreRequest]) -> list[GameScore]:
        self.games = [len(game.token_ids) for game in games]
        return [
            GameScore(np.array([float(hash(game.token_ids) % 1000)]), float(self.index), {}, {})
            for game in games
        ]

    def update(self, steps: Any, training_step: int) -> dict[str, tuple[float, float]]:
        self.steps = steps
        return {"mean": (10.0 * self.index + training_step, 1.0 + self.index), "none": (0.0, 0.0)}

    def snapshot(self) -> str:
        self.calls.append("snapshot")
        return f"snapshot of {self.index}"

    def probe(self, token_ids: Sequence[int]) -> np.ndarray:
        self.calls.append("probe")
        return np.array([self.index, *token_ids])

    def dump(self) -> bytes:
        self.calls.append("dump")
        return bytes([self.index])

    def load(self, data: bytes) -> str:
        self.calls.append(f"load {data!r}")
        return self.checksum


def policy(ranks: Sequence[Rank]) -> RayPolicyGroup:
    return RayPolicyGroup([Handle(rank) for rank in ranks])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=7), st.integers(1, 4))
def test_scores_come_back_in_the_order_of_the_games(seeds: list[int], ranks: int) -> None:
    games = [ScoreRequest.of(fakes.make_game(seed, 2)) for seed in seeds]
    workers = [Rank(index) for index in range(ranks)]
    scores = asyncio.run(policy(workers).score(games))
    assert [score.logp[0] for score in scores] == [hash(g.token_ids) % 1000 for g in games]
    counts = [len(worker.games) for worker in workers]
    assert max(counts) - min(counts) <= 1


def test_every_rank_takes_part_in_every_collective_and_rank_0_speaks() -> None:
    ranks = [Rank(0), Rank(1), Rank(2)]
    group = policy(ranks)

    async def play() -> None:
        assert await group.snapshot() == "snapshot of 0"
        assert (await group.probe([7, 8])).tolist() == [0, 7, 8]
        assert await group.dump() == b"\0"
        assert await group.load(b"x") == "same"

    asyncio.run(play())
    assert all(rank.calls == ["snapshot", "probe", "dump", "load b'x'"] for rank in ranks)


def test_R11_ranks_that_hold_different_adapters_after_loading_are_refused() -> None:
    with pytest.raises(SyncMismatch, match="training ranks hold different adapters"):
        asyncio.run(policy([Rank(0), Rank(1, checksum="other")]).load(b""))


def some_batch() -> TrainBatch:
    table = build_table(GROUPS)
    old = [np.zeros(len(request.action_positions)) for request in REQUESTS]
    return build_batch(GROUPS, table, *fakes.credit(table), old)


def test_A19_each_rank_gets_its_own_micro_batches_and_the_global_denominators() -> None:
    batch = some_batch()
    plan = fakes.one_step(batch, ranks=2, max_tokens=40)
    ranks = [Rank(0), Rank(1)]
    metrics = asyncio.run(policy(ranks).update(batch, plan, training_step=3))
    assert metrics == {"mean": (3.0 + 13.0) / 3.0}
    seen: list[tuple[int, ...]] = []
    for index, rank in enumerate(ranks):
        ((micro_batches, counts),) = rank.steps
        assert counts == plan.steps[0].denominators
        for micro, planned in zip(micro_batches, plan.steps[0].ranks[index], strict=True):
            assert (micro is None) == (len(planned.games) == 0)
            if micro is not None:
                seen += [tuple(micro.token_ids[span].tolist()) for span in micro.games()]
    assert sorted(seen) == sorted(tuple(request.token_ids) for request in REQUESTS)


def test_A18_an_empty_plan_reaches_all_ranks_alike() -> None:
    batch = replace(some_batch(), weight=np.zeros(len(some_batch().weight)))
    plan = fakes.one_step(batch, ranks=2)
    assert [rank_steps(batch, plan, rank) for rank in (0, 1)] == [[], []]


def test_H7_a_plan_for_another_number_of_ranks_is_refused() -> None:
    batch = some_batch()
    with pytest.raises(ValueError, match="a plan for 2 ranks, not for 1"):
        asyncio.run(policy([Rank()]).update(batch, fakes.one_step(batch, ranks=2), 1))


def test_A12_metrics_are_means_over_all_tokens_and_not_means_of_means() -> None:
    merged = merge_pairs([{"a": (1.0, 1.0), "b": (0.0, 0.0)}, {"a": (0.0, 3.0), "c": (2.0, 2.0)}])
    assert merged == {"a": 0.25, "c": 1.0}
    assert merge_pairs([]) == {}


# --- the engines ----------------------------------------------------------------------------------


@dataclass
class Report:
    version: int
    checksum: str
    probe: np.ndarray


@dataclass
class Replica:
    """An engine replica that reports what it got, changed by ``fault``."""

    fault: Callable[[Report], Report] = lambda report: report
    received: list[tuple[dict[str, np.ndarray], int, tuple[int, ...]]] = field(default_factory=list)

    def sync(self, state: dict[str, np.ndarray], version: int, probe_ids: Sequence[int]) -> Report:
        self.received.append((state, version, tuple(probe_ids)))
        return self.fault(Report(version, state_checksum(state), LOGPS.copy()))


@dataclass
class Policy:
    """The trainer's side, with an adapter of one array."""

    state: dict[str, np.ndarray] = field(default_factory=lambda: {"w": np.ones(3, np.float32)})
    version: int = 0
    logps: np.ndarray = field(default_factory=LOGPS.copy)
    checksum: str = ""
    probes: int = 0
    num_ranks: int = 1

    async def snapshot(self) -> AdapterSnapshot:
        return AdapterSnapshot(
            self.state, self.version, self.checksum or state_checksum(self.state)
        )

    async def probe(self, token_ids: Sequence[int]) -> np.ndarray:
        assert tuple(token_ids) == PROBE
        self.probes += 1
        return self.logps

    def learn(self) -> None:
        self.state = {name: value + 1 for name, value in self.state.items()}
        self.version += 1


BOUND = Bound(mean=1e-3, largest=1e-3)


def engines(replicas: Sequence[Replica], bound: Bound = BOUND) -> RayEngineGroup:
    return RayEngineGroup([Handle(replica) for replica in replicas], PROBE, bound)


def sync(group: RayEngineGroup, trainer: Any) -> Mapping[str, float]:
    return asyncio.run(group.sync(trainer))


@dataclass
class Sleeper(Replica):
    """A replica that sleeps, and writes down in which order it is called."""

    calls: list[str] = field(default_factory=list)

    def sync(self, state: dict[str, np.ndarray], version: int, probe_ids: Sequence[int]) -> Report:
        self.calls.append("sync")
        return super().sync(state, version, probe_ids)

    state: str = "asleep"

    def sleep(self) -> str:
        self.calls.append("sleep")
        return self.state

    def wake(self) -> None:
        self.calls.append("wake")


def test_L8_replicas_rest_while_the_ranks_work_and_wake_before_each_sync() -> None:
    replica, trainer = Sleeper(), Policy()
    group = RayEngineGroup([Handle(replica)], PROBE, BOUND, sleeps=True)
    ranks = RayPolicyGroup([Handle(Rank())], group.rest)

    async def play() -> None:
        for _ in range(2):
            await group.sync(trainer)
            await ranks.score([])
            await ranks.score([])
        trainer.learn()
        await group.sync(trainer)

    asyncio.run(play())
    # The second sync has nothing to send, yet the games after it need the engine.
    assert replica.calls == ["sync", "sleep", "wake", "sleep", "wake", "sync"]


@pytest.mark.fault
def test_M3_a_replica_that_stays_awake_stops_the_run_before_the_ranks_take_memory() -> None:
    replicas = [Sleeper(), Sleeper(state="ready")]
    group = RayEngineGroup([Handle(replica) for replica in replicas], PROBE, BOUND, sleeps=True)
    with pytest.raises(SyncMismatch, match="engine 1 of 2 is ready after it was told to sleep"):
        asyncio.run(group.rest())


@dataclass
class Mortal(Sleeper):
    """A replica that is gone from some call on."""

    dies_in: str = ""

    def sleep(self) -> str:
        if self.dies_in == "sleep":
            raise ActorDiedError()
        return super().sleep()

    def wake(self) -> None:
        if self.dies_in == "wake":
            raise ActorDiedError()
        super().wake()


@pytest.mark.fault
@pytest.mark.parametrize("dies_in", ["sleep", "wake"])
def test_H12_a_replica_that_dies_asleep_is_replaced_when_games_need_it(
    dies_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(ray, "kill", ended.append)
    old, judge, fresh, trainer = (
        Mortal(dies_in=dies_in),
        Mortal(dies_in="wake"),
        Sleeper(),
        Policy(),
    )
    started: list[int] = []

    async def restart(lane: int) -> Any:
        started.append(lane)
        return Handle(fresh)

    handle = Handle(old)
    group = RayEngineGroup(
        [Handle(Sleeper()), handle],
        PROBE,
        BOUND,
        sleeps=True,
        judges=[Handle(judge)],
        restart=restart,
    )

    async def play() -> None:
        await group.sync(trainer)
        await group.rest()
        # The ranks may need the memory, so nothing is started yet.
        assert started == []
        await group.sync(trainer)

    asyncio.run(play())
    assert started == [1]
    assert ended == [handle]
    assert fresh.calls == ["sync"]
    assert group.lost == {}


@pytest.mark.fault
def test_H12_a_lost_replica_that_nothing_replaces_is_a_failure_with_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    group = RayEngineGroup([Handle(Sleeper()), Handle(Sleeper())], PROBE, BOUND)
    group.note_lost({1: "died"})
    with pytest.raises(EngineLost, match=r"^Policy engine 1 of 2 died\.$"):
        sync(group, Policy())


def test_judges_on_the_same_gpus_sleep_and_wake_with_the_engines() -> None:
    engine, judge, trainer = Sleeper(), Sleeper(), Policy()
    group = RayEngineGroup([Handle(engine)], PROBE, BOUND, judges=[Handle(judge)])

    async def play() -> None:
        await group.sync(trainer)
        await group.rest()
        await group.sync(trainer)

    asyncio.run(play())
    assert (engine.calls, judge.calls) == (["sync"], ["sleep", "wake"])


def test_replicas_that_do_not_sleep_are_left_alone() -> None:
    replica = Sleeper()
    group = RayEngineGroup([Handle(replica)], PROBE, BOUND)
    asyncio.run(RayPolicyGroup([Handle(Rank())], group.rest).score([]))
    assert replica.calls == []


def test_L3_M5_the_first_sync_is_made_and_checked_like_every_other() -> None:
    replicas, trainer = [Replica(), Replica()], Policy()
    group = engines(replicas)
    for n in range(3):
        assert sync(group, trainer) == {
            "sync/adapter_version": float(n),
            "sync/probe_gap": 0.0,
            "sync/probe_gap_mean": 0.0,
            "sync/adapter_mb": 3 * 4 / 2**20,
        }
        assert trainer.probes == n + 1
        trainer.learn()
    for replica in replicas:
        assert [version for _, version, _ in replica.received] == [0, 1, 2]
        assert all(state.keys() == {"w"} for state, _, _ in replica.received)
        assert all(probe == PROBE for _, _, probe in replica.received)


@pytest.mark.parametrize("n", [0, 2])
def test_L3_a_fault_is_found_in_the_first_sync_as_in_the_n_th(n: int) -> None:
    replica, trainer = Replica(), Policy()
    group = engines([replica])
    for _ in range(n):
        sync(group, trainer)
        trainer.learn()
    replica.fault = lambda report: replace(report, version=7)
    with pytest.raises(SyncMismatch):
        sync(group, trainer)


def test_a_sync_is_skipped_when_nothing_has_changed() -> None:
    replica, trainer = Replica(), Policy()
    group = engines([replica])
    first = sync(group, trainer)
    assert sync(group, trainer) == first
    assert len(replica.received) == trainer.probes == 1


def test_a_sync_is_made_when_only_the_weights_or_only_the_version_changed() -> None:
    replica, trainer = Replica(), Policy()
    group = engines([replica])
    sync(group, trainer)
    trainer.version = 5
    sync(group, trainer)
    trainer.state = {"w": np.zeros(3, np.float32)}
    sync(group, trainer)
    assert len(replica.received) == 3


def faulty(fault: Callable[[Report], Report]) -> RayEngineGroup:
    """Three replicas, of which number 1 has the fault."""
    return engines([Replica(), Replica(fault), Replica()])


def test_L1_a_replica_with_another_version_stops_the_run() -> None:
    group = faulty(lambda report: replace(report, version=4))
    with pytest.raises(SyncMismatch, match="replica 1 holds adapter version 4, the trainer 0"):
        sync(group, Policy())


def test_L6_L16_a_replica_that_received_other_bytes_stops_the_run() -> None:
    other = state_checksum({"w": np.zeros(3, np.float32)})
    group = faulty(lambda report: replace(report, checksum=other))
    with pytest.raises(SyncMismatch, match=f"replica 1 received other .* {other[:12]}"):
        sync(group, Policy())


@pytest.mark.parametrize(
    ("change", "number"), [(0.002, "0.002"), (np.nan, "nan"), (-np.inf, "inf")]
)
def test_L9_a_replica_whose_probe_differs_stops_the_run(change: float, number: str) -> None:
    def fault(report: Report) -> Report:
        report.probe[2] += change
        return report

    with pytest.raises(SyncMismatch, match=f"replica 1 differs .* {number} at most"):
        sync(faulty(fault), Policy())


def test_L9_a_broken_probe_of_the_trainer_stops_the_run() -> None:
    with pytest.raises(SyncMismatch, match=r"replica 0 differs .* nan"):
        sync(engines([Replica()]), Policy(logps=LOGPS * np.nan))


def test_L9_a_probe_of_another_length_stops_the_run() -> None:
    group = faulty(lambda report: replace(report, probe=report.probe[:1]))
    with pytest.raises(SyncMismatch, match="replica 1 gave 1 log-probs of the probe, the trainer"):
        sync(group, Policy())


def test_L9_a_gap_within_the_bound_passes_and_is_reported() -> None:
    near = Replica(lambda report: replace(report, probe=report.probe + 5e-4))
    metrics = sync(engines([Replica(), near]), Policy())
    assert metrics["sync/probe_gap"] == pytest.approx(5e-4)


def test_L9_a_probe_that_could_not_show_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 tokens"):
        RayEngineGroup([], (3,), BOUND)


def test_L16_an_adapter_that_changed_on_its_way_from_the_trainer_stops_the_run() -> None:
    replica = Replica()
    with pytest.raises(SyncMismatch, match="on its way"):
        sync(engines([replica]), Policy(checksum=state_checksum({})))
    assert not replica.received


def test_L9_after_a_failed_sync_the_adapter_of_before_is_sent_again() -> None:
    replica, trainer = Replica(), Policy()
    group = engines([replica])
    sync(group, trainer)
    before = (dict(trainer.state), trainer.version)
    trainer.learn()
    replica.fault = lambda report: replace(report, probe=report.probe + 1.0)
    with pytest.raises(SyncMismatch):
        sync(group, trainer)
    replica.fault = lambda report: report
    trainer.state, trainer.version = before
    assert sync(group, trainer)["sync/adapter_version"] == 0.0
    assert [version for _, version, _ in replica.received] == [0, 1, 0]


def test_L6_what_is_sent_is_owned_memory_that_later_training_does_not_touch() -> None:
    model = add_lora(build_causal_lm(tiny_qwen3_config(fakes.VOCAB)), 2, 4.0, name="actor")
    replica, trainer = Replica(), Policy(state=adapter_state(model, "actor"))
    sync(engines([replica]), trainer)
    ((state, _, _),) = replica.received
    checksum = state_checksum(state)
    assert all(value.flags.owndata for value in state.values())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert state_checksum(state) == checksum
    assert state_checksum(adapter_state(model, "actor")) != checksum
