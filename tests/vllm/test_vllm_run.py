"""vLLM under Ray on CPUs: a judge whose engine is killed, and a training run that checks itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.engine.arg_utils", reason="vLLM is not installed: use make test-vllm")

import ray
import tiny
from owner import engine_pids

from delta_belief_rl.cli.front import prepare
from delta_belief_rl.cluster import pools
from delta_belief_rl.cluster.gpus import book_gpus
from delta_belief_rl.cluster.members import Roster
from delta_belief_rl.cluster.ray_app import ray_session
from delta_belief_rl.config.schema_trainer import RayInit
from delta_belief_rl.envs.base import JudgeRequest
from delta_belief_rl.judge.pool import JudgePool, JudgePoolSettings
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.trainer.steps import judge_metrics
from delta_belief_rl.types import Verdict
from tests.runs import words, write_world
from tests.worlds import task_for

START_SECONDS = 800.0
PATIENCE = JudgePoolSettings(
    deadline=120.0, max_restarts=2, restart_backoff=0.1, max_attempts=5, max_batch=1
)
CACHE = 64 << 20

pytestmark = pytest.mark.timeout(900)


def judge_words(folder: Path) -> list[str]:
    """Two replicas of a tiny judge; the published parser takes its babble for invalid questions."""
    return [
        "judge_rollout.name=vllm",
        "judge_rollout.replicas=2",
        f"judge_rollout.model.path={folder}",
        "judge_rollout.parser=published",
        "judge_rollout.cot=false",
        "judge_rollout.rollout.prompt_length=1000",
        "judge_rollout.rollout.response_length=8",
        "judge_rollout.rollout.max_num_seqs=16",
        "judge_rollout.rollout.max_num_batched_tokens=1024",
        f"judge_rollout.rollout.kv_cache_memory_bytes={CACHE}",
    ]


@pytest.fixture
def cluster() -> Iterator[None]:
    with ray_session(RayInit(), 4, 0):
        yield


def engine_of(actor: Any) -> int:
    """Process id of a judge's engine."""
    owner = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=START_SECONDS)
    return engine_pids(owner)[0]


@pytest.mark.fault
def test_J1_J2_a_judge_whose_engine_is_killed_is_replaced_and_every_question_is_answered(
    cluster: None, tmp_path: Path
) -> None:
    folder = tiny.save_model(tmp_path, 1024)
    cfg, plan, _ = prepare(["experiment=quickstart", *judge_words(folder)])
    judges = pools._start_judges(cfg, plan, book_gpus(0, START_SECONDS), START_SECONDS)
    ray.get([actor.answer.remote([]) for actor in judges.actors], timeout=START_SECONDS)
    restarts: list[int] = []
    pool = JudgePool(
        judges.calls(),
        PATIENCE,
        failures=(ray.exceptions.RayError,),
        restart=judges.restarter(START_SECONDS, None, Roster()),
        on_restart=lambda lane, _: restarts.append(lane),
    )
    victim, other = (engine_of(actor) for actor in judges.actors)
    assert victim != other
    numbers = iter(range(1000))

    async def ask(count: int) -> set[Verdict]:
        asked = [JudgeRequest(task_for("dog"), f"Is it {next(numbers)}?") for _ in range(count)]
        return {reply.verdict for reply in await asyncio.gather(*map(pool.ask, asked))}

    async def play() -> None:
        assert await ask(8) == {Verdict.INVALID}
        os.kill(victim, signal.SIGKILL)
        # The other replica answers what the dead one was asked.
        assert await ask(8) == {Verdict.INVALID}
        assert pool.stats().restarts == 1
        while pool._lanes[0].call is None:
            await asyncio.sleep(0.1)
        os.kill(other, signal.SIGKILL)
        # The replica that was started again is alone with these.
        assert await ask(8) == {Verdict.INVALID}

    asyncio.run(asyncio.wait_for(play(), START_SECONDS))
    assert restarts == [0, 1]
    run: Any = SimpleNamespace(judge=pool, cfg=cfg)
    metrics = judge_metrics(run, games=3)
    assert metrics["judge/restarts"] == 2.0
    assert metrics["judge/calls"] == 24.0
    assert metrics["judge/call_error_rate"] == 0.0
    assert metrics["judge/retries"] >= 2.0
    for actor in judges.actors:
        ray.kill(actor)


def test_P3_B1_a_run_on_vllm_checks_every_step_against_the_trainer(tmp_path: Path) -> None:
    import train

    out = tmp_path / "run"
    command = words(
        out,
        write_world(tmp_path / "tiny.yaml"),
        "trainer.total_training_steps=2",
        "trainer.check_freq=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.final_test=false",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.replicas=1",
        "actor_rollout_ref.rollout.deterministic=false",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        "actor_rollout_ref.rollout.max_num_batched_tokens=512",
        f"actor_rollout_ref.rollout.kv_cache_memory_bytes={CACHE}",
    )
    assert train.main(command) == 0
    records = read_records(out / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["sync/adapter_version"] == record["step"] - 1
        assert 0 < record["sync/probe_gap"] < 1e-3
        assert record["check/sampled_tokens"] == record["state_tokens/sampled"] > 0
        assert 0 < record["check/sampled_gap_max"] < 1e-3
        # Four games are asked for their prior and at least one turn.
        assert record["check/beliefs"] >= 4 * 2
        assert 0 < record["check/belief_gap_max"] < 1e-3
