"""Workers that hang, as real processes that are stopped: deadlines, and names in the errors."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import pytest
import ray
from ray.exceptions import RayError

from delta_belief_rl.cluster import pools
from delta_belief_rl.cluster.gpus import BookedGpus
from delta_belief_rl.cluster.judge_worker import JudgeWorker
from delta_belief_rl.cluster.judges import JudgeReplicas
from delta_belief_rl.cluster.ray_app import ray_session
from delta_belief_rl.config.plan import Placement
from delta_belief_rl.config.schema_trainer import RayInit
from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.judge.build import WorldJudgeSettings
from delta_belief_rl.judge.pool import JudgePool, JudgePoolSettings
from delta_belief_rl.types import UserError, Verdict
from tests.worlds import task_for

pytestmark = [pytest.mark.fault, pytest.mark.slow]

START_SECONDS = 400.0
DEADLINE = 3.0
QUESTIONS = 12


@pytest.fixture(scope="module")
def judges() -> Iterator[JudgeReplicas]:
    """Two judges, both up."""
    with ray_session(RayInit(), 2, 0):
        wanted = [Placement("judge", number, (), "world judge") for number in range(2)]
        places = pools._place("judges", JudgeWorker, wanted, BookedGpus(()), START_SECONDS, 1)
        replicas = JudgeReplicas.start(places, WorldJudgeSettings("everyday"))
        ray.get([actor.answer.remote([]) for actor in replicas.actors], timeout=START_SECONDS)
        yield replicas


@pytest.fixture
def stopped(judges: JudgeReplicas) -> Iterator[int]:
    """The process of the first judge, which stands still."""
    pid = ray.get(judges.actors[0].present.remote(), timeout=START_SECONDS).pid
    os.kill(pid, signal.SIGSTOP)
    yield pid
    os.kill(pid, signal.SIGCONT)


def test_J5_a_stopped_judge_misses_its_deadline_and_every_question_is_answered_elsewhere(
    judges: JudgeReplicas, stopped: int
) -> None:
    pool = JudgePool(
        judges.calls(), JudgePoolSettings(deadline=DEADLINE, max_batch=1), failures=(RayError,)
    )
    request = JudgeRequest(task_for("dog"), "Is it an animal?")

    async def ask() -> list[JudgeReply]:
        return await asyncio.gather(*(pool.ask(request) for _ in range(QUESTIONS)))

    began = time.monotonic()
    replies = asyncio.run(ask())
    seconds = time.monotonic() - began
    assert {reply.verdict for reply in replies} == {Verdict.YES}
    stats = pool.stats()
    assert (stats.errors, stats.timeouts) == (0, stats.retries)
    assert 0 < stats.timeouts < QUESTIONS
    assert pool.outstanding() == (0, 0.0)
    assert DEADLINE <= seconds < 4 * DEADLINE
    # It is not dead: it answers again once it goes on.
    os.kill(stopped, signal.SIGCONT)
    replies = asyncio.run(ask())
    assert {reply.verdict for reply in replies} == {Verdict.YES}


@pytest.mark.usefixtures("stopped")
def test_H9_a_worker_that_is_late_at_the_start_ends_it_in_time_and_is_named(
    judges: JudgeReplicas,
) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match=r"The judges did not start within 3 s"):
        pools._wait_for_judges(judges.actors, DEADLINE)
    assert time.monotonic() - began < DEADLINE + 10
