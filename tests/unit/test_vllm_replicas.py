"""The vLLM pool without vLLM: what a replica is started with, and how its death reaches games."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from delta_belief_rl.cluster import pools
from delta_belief_rl.cluster.remote_engine import Outbox, RemoteEngine
from delta_belief_rl.cluster.vllm_replicas import VllmEngineWorker, VllmSettings
from delta_belief_rl.config.availability import unavailable
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.engines.base import (
    BranchEngine,
    Completion,
    EngineStateError,
    FinishReason,
    GenRequest,
    SamplingParams,
    TailRequest,
)
from delta_belief_rl.engines.pump import EngineFailure, EngineLost, EngineRouter
from delta_belief_rl.trainer.crosscheck import BOUNDS
from delta_belief_rl.trainer.vllm_policy import engine_format

VLLM = ("experiment=quickstart", "actor_rollout_ref.rollout.name=vllm")
REQUEST = GenRequest("g", (1, 2), 0, SamplingParams())


class Replica:
    """A handle whose every call ends as it is told."""

    def __init__(self, outcome: Any) -> None:
        self._outcome = outcome

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if isinstance(self._outcome, Exception):
            future.set_exception(self._outcome)
        else:
            future.set_result(self._outcome)
        return future


class Call:
    """One method of a handle: ``remote`` begins it."""

    def __init__(self, method: Any, made: list[str]) -> None:
        self._method, self._made = method, made

    def remote(self, *args: Any) -> asyncio.Task[Any]:
        self._made.append(self._method.__name__)
        return asyncio.get_running_loop().create_task(self._method(*args))


class Desk:
    """What ``VllmEngineWorker`` does with requests, around an engine of the test."""

    def __init__(self, generate: Any) -> None:
        self._generate, self._outbox = generate, Outbox[Completion]()

    async def submit(self, numbered: list[tuple[int, GenRequest]]) -> None:
        for number, request in numbered:
            self._outbox.add(number, self._generate(request))

    async def collect(self) -> Any:
        return await self._outbox.collect()

    async def release(self, session: str) -> None:
        pass


class Worker:
    """A handle of a ``Desk``; ``made`` lists the calls that went through it."""

    def __init__(self, generate: Any) -> None:
        self._desk, self.made = Desk(generate), list[str]()

    def __getattr__(self, name: str) -> Call:
        return Call(getattr(self._desk, name), self.made)


def answer_to(request: GenRequest) -> Completion:
    return Completion(request.session, (3,), (-0.5,), FinishReason.STOP, 4)


def requests(count: int) -> list[GenRequest]:
    return [GenRequest(f"g{i}", (1, 2), i, SamplingParams()) for i in range(count)]


async def at_once(request: GenRequest) -> Completion:
    return answer_to(request)


def test_a_remote_engine_is_an_engine_and_hands_answers_on() -> None:
    engine = RemoteEngine(Worker(at_once))
    assert isinstance(engine, BranchEngine)

    async def play() -> Completion:
        router = EngineRouter([engine])
        completion = await router.generate(REQUEST)
        await router.release("g")
        return completion

    assert asyncio.run(play()) == answer_to(REQUEST)


def test_requests_of_one_round_travel_together_and_so_do_their_answers() -> None:
    worker = Worker(at_once)
    asked = requests(200)

    async def play() -> list[Completion]:
        engine = RemoteEngine(worker)
        return list(await asyncio.gather(*(engine.generate(request) for request in asked)))

    assert asyncio.run(play()) == [answer_to(request) for request in asked]
    assert worker.made.count("submit") == 1
    assert worker.made.count("collect") <= 2


def test_a_game_goes_on_with_its_own_answer_while_a_slow_one_is_waited_for() -> None:
    async def play() -> list[str]:
        gate, order = asyncio.Event(), list[str]()

        async def generate(request: GenRequest) -> Completion:
            if request.session == "g0":
                await gate.wait()
            return answer_to(request)

        engine = RemoteEngine(Worker(generate))

        async def game(request: GenRequest, turns: int) -> None:
            for _ in range(turns):
                await engine.generate(request)
            order.append(request.session)

        slow, fast = requests(2)
        running = asyncio.gather(game(slow, 1), game(fast, 3))
        while not order:
            await asyncio.sleep(0.001)
        gate.set()
        await running
        return order

    assert asyncio.run(asyncio.wait_for(play(), 10)) == ["g1", "g0"]


@pytest.mark.parametrize("error", [EngineFailure("gone"), EngineStateError("asleep"), KeyError(1)])
def test_H2_a_request_that_fails_fails_alone(error: Exception) -> None:
    async def generate(request: GenRequest) -> Completion:
        if request.session == "g1":
            raise error
        return answer_to(request)

    async def play() -> list[Any]:
        engine = RemoteEngine(Worker(generate))
        calls = (engine.generate(request) for request in requests(3))
        return list(await asyncio.gather(*calls, return_exceptions=True))

    first, second, third = asyncio.run(asyncio.wait_for(play(), 10))
    assert isinstance(second, EngineFailure)
    assert [first.session, third.session] == ["g0", "g2"]


def test_a_game_that_is_cancelled_leaves_the_others_alone() -> None:
    async def play() -> Completion:
        gate = asyncio.Event()

        async def generate(request: GenRequest) -> Completion:
            await gate.wait()
            return answer_to(request)

        engine = RemoteEngine(Worker(generate))
        one, other = (asyncio.create_task(engine.generate(request)) for request in requests(2))
        await asyncio.sleep(0.01)
        one.cancel()
        gate.set()
        return await other

    assert asyncio.run(asyncio.wait_for(play(), 10)).session == "g1"


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (ActorDiedError(), "process is gone"),
        (RayTaskError("generate", "trace", ValueError("vLLM failed")), "vLLM failed"),
    ],
)
def test_H2_a_replica_that_dies_is_an_error_of_every_game_that_waits(
    outcome: Exception, said: str
) -> None:
    async def play() -> list[Any]:
        engine = RemoteEngine(Replica(outcome))
        calls = (engine.generate(REQUEST), engine.generate(REQUEST), engine.score_all([]))
        return await asyncio.gather(*calls, return_exceptions=True)

    for told in asyncio.run(play()):
        assert isinstance(told, EngineFailure)
        assert said in str(told)


@pytest.mark.parametrize(
    ("outcome", "lost"),
    [
        (ActorDiedError(), True),
        (RayTaskError("generate", "trace", EngineLost("the engine core died")), True),
        (RayTaskError("generate", "trace", EngineFailure("one answer is missing")), False),
    ],
)
def test_H12_a_replica_whose_process_or_engine_is_gone_is_lost_and_can_be_replaced(
    outcome: Exception, lost: bool
) -> None:
    async def play() -> EngineRouter:
        router = EngineRouter([RemoteEngine(Replica(None)), RemoteEngine(Replica(outcome))])
        router.bind("g0", 1)
        with pytest.raises(EngineFailure):
            await router.score_all([TailRequest("g0", (1, 2), 1)])
        return router

    router = asyncio.run(play())
    assert list(router.lost()) == ([1] if lost else [])
    router.replace(1, RemoteEngine(Replica(None)))
    assert router.lost() == {}
    assert router.sessions() == [0, 0]


def test_H12_a_request_that_an_engine_died_at_tells_of_the_loss() -> None:
    async def generate(request: GenRequest) -> Completion:
        raise EngineLost("the engine core died")

    async def play() -> RemoteEngine:
        engine = RemoteEngine(Worker(generate))
        with pytest.raises(EngineLost, match="core died"):
            await engine.generate(REQUEST)
        return engine

    assert isinstance(asyncio.run(play()).failure, EngineLost)


def test_on_cpus_the_engine_takes_the_trainers_format() -> None:
    cfg = load_config([*VLLM, "actor_rollout_ref.rollout.dtype=bfloat16"])[0]
    assert engine_format(cfg, "cpu") == "float32"
    assert engine_format(cfg, "cuda") == "bfloat16"


def test_L9_the_probe_is_held_to_the_coarser_number_format() -> None:
    cfg = load_config([*VLLM, "actor_rollout_ref.rollout.dtype=bfloat16"])[0]
    assert pools.run_bound(cfg, "cpu") == BOUNDS["float32"]
    assert pools.run_bound(cfg, "cuda") == BOUNDS["bfloat16"]


def test_only_engines_on_gpus_that_are_told_to_sleep_do() -> None:
    cfg = load_config([*VLLM])[0]
    awake = load_config([*VLLM, "actor_rollout_ref.rollout.free_cache_engine=false"])[0]
    plain = load_config(["experiment=quickstart"])[0]
    assert [pools._sleeps(c, "cuda") for c in (cfg, awake, plain)] == [True, False, False]
    assert not pools._sleeps(cfg, "cpu")


def test_what_vllm_cannot_do_is_refused() -> None:
    gpus = ["actor_rollout_ref.device=auto", "actor_rollout_ref.ngpus=2"]
    wide = unavailable(load_config([*VLLM, *gpus])[0])
    assert any("fixed order" in line for line in wide)
    fine = ["actor_rollout_ref.rollout.deterministic=false"]
    assert unavailable(load_config([*VLLM, *gpus, *fine])[0]) == []


def test_J15_a_replica_tells_its_health_while_requests_and_a_sync_wait() -> None:
    class Busy:
        """An engine that never finishes anything."""

        async def generate(self, request: GenRequest) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError("nobody wakes it")

        async def load_adapter(self, state: Any, version: int) -> None:
            await asyncio.Event().wait()

        def health(self) -> str:
            return "alive"

    actor: Any = VllmEngineWorker
    worker = actor.__ray_metadata__.modified_class(VllmSettings(load_config([*VLLM])[0], "cpu"))
    worker._started = Busy()

    async def play() -> str:
        await worker.submit([(0, REQUEST)])
        waiting = [
            asyncio.create_task(worker.collect()),
            asyncio.create_task(worker.sync({}, 1, (1, 2))),
        ]
        await asyncio.sleep(0)
        told = await asyncio.wait_for(worker.health(), 5)
        for task in waiting:
            assert not task.done()
            task.cancel()
        return told

    assert asyncio.run(play()) == "alive"
