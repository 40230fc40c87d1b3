"""Judge replicas that are killed, on Ray itself."""

from __future__ import annotations

import asyncio

import pytest
import ray
from ray.exceptions import RayError

from delta_belief_rl.cluster import pools
from delta_belief_rl.cluster.gpus import BookedGpus
from delta_belief_rl.cluster.judge_worker import JudgeWorker
from delta_belief_rl.cluster.judges import JudgeReplicas
from delta_belief_rl.cluster.members import Roster
from delta_belief_rl.cluster.ray_app import ray_session
from delta_belief_rl.config.plan import Placement
from delta_belief_rl.config.schema_trainer import RayInit
from delta_belief_rl.envs.base import JudgeRequest
from delta_belief_rl.judge.build import WorldJudgeSettings
from delta_belief_rl.judge.pool import JudgePool, JudgePoolSettings
from delta_belief_rl.types import Verdict
from tests.worlds import task_for

START_SECONDS = 120.0
SETTINGS = JudgePoolSettings(
    deadline=60.0, max_restarts=1, restart_backoff=0.01, max_attempts=5, max_batch=1
)


@pytest.mark.slow
@pytest.mark.fault
def test_J1_a_killed_judge_is_replaced_and_the_new_one_answers_alone() -> None:
    with ray_session(RayInit(), 3, 0):
        wanted = [Placement("judge", number, (), "world judge") for number in range(2)]
        no_gpus = BookedGpus(())
        places = pools._place("judges", JudgeWorker, wanted, no_gpus, START_SECONDS, 1)
        replicas = JudgeReplicas.start(places, WorldJudgeSettings("everyday"))
        ray.get([actor.answer.remote([]) for actor in replicas.actors], timeout=START_SECONDS)
        pool = JudgePool(
            replicas.calls(),
            SETTINGS,
            failures=(RayError,),
            restart=replicas.restarter(START_SECONDS, None, Roster()),
        )

        async def ask(count: int) -> set[Verdict]:
            request = JudgeRequest(task_for("dog"), "Is it an animal?")
            replies = await asyncio.gather(*(pool.ask(request) for _ in range(count)))
            return {reply.verdict for reply in replies}

        async def main() -> None:
            assert await ask(8) == {Verdict.YES}
            ray.kill(replicas.actors[0])
            assert await ask(8) == {Verdict.YES}
            assert pool.stats().restarts == 1
            # The budget is spent, so what answers from now on is the new replica.
            ray.kill(replicas.actors[1])
            assert await ask(8) == {Verdict.YES}

        asyncio.run(main())
        stats = pool.stats()
        assert (stats.calls, stats.errors, stats.restarts) == (24, 0, 1)
        assert stats.retries >= 2
