"""The vLLM pool without vLLM: what a replica is started with, and how its death reaches games."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from delta_belief_rl.cluster import pools
from delta_belief_rl.cluster.vllm_replicas import RemoteEngine
from delta_belief_rl.config.availability import unavailable
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.engines.base import (
    BranchEngine,
    Completion,
    FinishReason,
    GenRequest,
    SamplingParams,
)
from delta_belief_rl.engines.pump import EngineFailure, EngineRouter
from delta_belief_rl.trainer.crosscheck import BOUNDS
from delta_belief_rl.trainer.vllm_policy import (
    CPU_BLOCK,
    CPU_CACHE_BYTES,
    cpu_arguments,
    engine_format,
)

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


def test_a_remote_engine_is_an_engine_and_hands_answers_on() -> None:
    answer = Completion("g", (3,), (-0.5,), FinishReason.STOP, 4)
    engine = RemoteEngine(Replica(answer))
    assert isinstance(engine, BranchEngine)

    async def play() -> Completion:
        router = EngineRouter([engine])
        completion = await router.generate(REQUEST)
        await router.release("g")
        return completion

    assert asyncio.run(play()) == answer


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


def test_on_cpus_the_engine_takes_the_trainers_format_and_a_bounded_cache() -> None:
    cfg = load_config([*VLLM, "actor_rollout_ref.rollout.dtype=bfloat16"])[0]
    assert engine_format(cfg, "cpu") == "float32"
    assert engine_format(cfg, "cuda") == "bfloat16"
    assert cpu_arguments(cfg)["kv_cache_memory_bytes"] == CPU_CACHE_BYTES
    assert cpu_arguments(cfg)["enable_sleep_mode"] is False
    assert cpu_arguments(cfg)["block_size"] == CPU_BLOCK
    block = "actor_rollout_ref.rollout.engine_kwargs.vllm={block_size: 64}"
    assert cpu_arguments(load_config([*VLLM, block])[0])["block_size"] == 64
    small = load_config([*VLLM, "actor_rollout_ref.rollout.kv_cache_memory_bytes=1000000"])[0]
    assert cpu_arguments(small)["kv_cache_memory_bytes"] == 1_000_000


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
    assert any("an engine of its own" in line for line in wide)
    assert any("fixed order" in line for line in wide)
    fine = [
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.deterministic=false",
    ]
    assert unavailable(load_config([*VLLM, *gpus, *fine])[0]) == []
