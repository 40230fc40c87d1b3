"""The judge pool when replicas fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from ray.exceptions import RayError

from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.judge.pool import (
    JudgePool,
    JudgePoolFailure,
    JudgePoolSettings,
    ReplicaGone,
)
from delta_belief_rl.types import Message, Task, Verdict

pytestmark = pytest.mark.fault

TASK = Task("t0", "tw_q", "cat", (Message("user", "Go."),))
QUICK = JudgePoolSettings(backoff=0.001, deadline=5.0)


def request(action: str) -> JudgeRequest:
    return JudgeRequest(TASK, action)


class Replica:
    """Answers yes unless ``fail`` does something else first."""

    def __init__(self, fail: Callable[[int], JudgeReply | None] | None = None) -> None:
        self.calls = 0
        self._fail = fail

    async def __call__(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        self.calls += 1
        reply = self._fail(self.calls) if self._fail is not None else None
        return [reply or JudgeReply(Verdict.YES, "yes") for _ in requests]


def raising(error: Exception, times: int = 10**9) -> Callable[[int], None]:
    def fail(call: int) -> None:
        if call <= times:
            raise error

    return fail


def error_reply(call: int) -> JudgeReply:
    return JudgeReply(Verdict.ERROR, reason="could not be parsed")


def ask_all(pool: JudgePool, count: int) -> list[JudgeReply]:
    async def main() -> list[JudgeReply]:
        return await asyncio.gather(*(pool.ask(request(str(i))) for i in range(count)))

    return asyncio.run(main())


@pytest.mark.parametrize("error", [ReplicaGone("dead"), ConnectionResetError("reset")])
def test_J1_J3_a_failed_call_is_answered_by_another_replica(error: Exception) -> None:
    broken, healthy = Replica(raising(error)), Replica()
    pool = JudgePool([broken, healthy], QUICK)
    replies = ask_all(pool, 1)
    assert replies[0].verdict is Verdict.YES
    assert (broken.calls, healthy.calls) == (1, 1)
    assert pool.stats().retries == 1
    assert pool.stats().errors == 0


def test_J1_an_error_reply_is_retried_on_another_replica() -> None:
    pool = JudgePool([Replica(error_reply), Replica()], QUICK)
    assert ask_all(pool, 1)[0].verdict is Verdict.YES


def test_J3_a_lone_replica_is_tried_again() -> None:
    replica = Replica(raising(ReplicaGone("restarting"), times=2))
    assert ask_all(JudgePool([replica], QUICK), 1)[0].verdict is Verdict.YES
    assert replica.calls == 3


def test_J1_when_every_attempt_fails_the_reply_is_a_typed_error_with_the_reason() -> None:
    replicas = [Replica(raising(ReplicaGone("dead"))) for _ in range(2)]
    pool = JudgePool(replicas, QUICK)
    reply = ask_all(pool, 1)[0]
    assert reply.verdict is Verdict.ERROR
    assert "dead" in reply.reason
    assert sum(r.calls for r in replicas) == QUICK.max_attempts
    assert pool.stats().errors == 1


def test_J1_a_failure_is_never_cached() -> None:
    replica = Replica(raising(ReplicaGone("dead"), times=1))
    settings = JudgePoolSettings(max_attempts=1)
    pool = JudgePool([replica], settings, cache_key=lambda r: r.action)
    assert ask_all(pool, 1)[0].verdict is Verdict.ERROR
    assert ask_all(pool, 1)[0].verdict is Verdict.YES


def test_J5_a_replica_that_hangs_costs_few_deadlines_and_is_used_again_once_it_answers() -> None:
    """Questions come one after another, as in a game; every second one would wait in vain."""
    state = {"hangs": True}
    asked: list[str] = []

    async def first(requests: list[JudgeRequest]) -> list[JudgeReply]:
        asked.append(requests[0].action)
        if state["hangs"]:
            await asyncio.sleep(600)
        return [JudgeReply(Verdict.NO, "no")] * len(requests)

    async def second(requests: list[JudgeRequest]) -> list[JudgeReply]:
        return [JudgeReply(Verdict.NO, "no")] * len(requests)

    deadline = 0.05
    pool = JudgePool([first, second], JudgePoolSettings(deadline=deadline, backoff=0.001))

    async def play() -> None:
        for number in range(200):
            reply = await pool.ask(request(f"Question {number}?"))
            assert reply.verdict is Verdict.NO
        assert len(asked) == pool.stats().timeouts <= 10
        state["hangs"] = False
        while pool.stats().timeouts == len(asked):
            await pool.ask(request("Are you there?"))
            await asyncio.sleep(deadline / 5)
        late = pool.stats().timeouts
        for _ in range(5):
            await pool.ask(request("And now?"))
        assert pool.stats().timeouts == late
        assert asked.count("And now?") == 5

    asyncio.run(play())


def test_J5_a_call_that_hangs_misses_its_deadline_and_is_answered_elsewhere() -> None:
    async def hangs(requests: list[JudgeRequest]) -> list[JudgeReply]:
        await asyncio.sleep(60)
        return []

    settings = JudgePoolSettings(deadline=0.02, backoff=0.001)
    # Whatever a transport calls its failures, the deadline is the pool's own.
    for transport in ((ConnectionError,), (RayError,), ()):
        pool = JudgePool([hangs, Replica()], settings, failures=transport)
        assert ask_all(pool, 1)[0].verdict is Verdict.YES
        assert pool.stats().timeouts == 1


def test_J5_when_every_replica_hangs_the_reply_says_what_was_waited_for() -> None:
    async def hangs(requests: list[JudgeRequest]) -> list[JudgeReply]:
        await asyncio.sleep(60)
        return []

    pool = JudgePool([hangs], JudgePoolSettings(deadline=0.01, backoff=0.001, max_attempts=2))
    reply = ask_all(pool, 1)[0]
    assert reply.verdict is Verdict.ERROR
    assert "did not answer within 0.01 s" in reply.reason


def test_J2_single_failures_never_abort() -> None:
    def every_twentieth(call: int) -> JudgeReply | None:
        return error_reply(call) if call % 20 == 0 else None

    settings = JudgePoolSettings(
        max_attempts=1, max_error_rate=0.1, window=50, min_replies=20, max_batch=1
    )
    pool = JudgePool([Replica(every_twentieth)], settings)
    replies = ask_all(pool, 200)
    assert sum(r.verdict is Verdict.ERROR for r in replies) == 10


def test_J2_a_rate_above_the_bound_stops_the_run_with_the_reason() -> None:
    settings = JudgePoolSettings(
        max_attempts=1, max_error_rate=0.1, window=50, min_replies=20, max_batch=1
    )
    pool = JudgePool([Replica(error_reply)], settings)
    with pytest.raises(JudgePoolFailure, match=r"20 of the last 20.*10%.*could not be parsed"):
        ask_all(pool, 200)
    with pytest.raises(JudgePoolFailure):
        ask_all(pool, 1)


def test_J2_the_rate_is_that_of_the_latest_window() -> None:
    def early_and_one_late(call: int) -> JudgeReply | None:
        return error_reply(call) if call <= 5 or call == 20 else None

    settings = JudgePoolSettings(
        max_attempts=1, max_error_rate=0.2, window=10, min_replies=10, max_batch=1
    )
    # Six errors in twenty replies are above the bound, but one in the latest ten is not.
    replies = ask_all(JudgePool([Replica(early_and_one_late)], settings), 40)
    assert sum(r.verdict is Verdict.ERROR for r in replies) == 6


def test_J1_a_wrong_number_of_replies_is_a_failure() -> None:
    async def short(requests: list[JudgeRequest]) -> list[JudgeReply]:
        return [JudgeReply(Verdict.YES, "yes")]

    pool = JudgePool([short, Replica()], QUICK)

    replies = ask_all(pool, 4)
    assert all(r.verdict is Verdict.YES for r in replies)
    assert pool.stats().failures == {"judge 0 gave 1 replies to 2 requests": 2}


def test_H2_a_defect_in_a_judge_is_raised_and_never_becomes_a_verdict() -> None:
    pool = JudgePool([Replica(raising(KeyError("typo")))], QUICK)
    with pytest.raises(KeyError, match="typo"):
        ask_all(pool, 3)


def test_J1_random_failures_lose_no_call() -> None:
    def odd(call: int) -> None:
        if call % 2:
            raise ReplicaGone("flaky")

    settings = JudgePoolSettings(backoff=0.0005, max_attempts=8, max_batch=3, max_error_rate=1.0)
    pool = JudgePool([Replica(odd) for _ in range(3)], settings)
    assert len(ask_all(pool, 300)) == 300
    assert pool.outstanding() == (0, 0.0)
