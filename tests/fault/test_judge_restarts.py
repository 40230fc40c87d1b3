"""Judge replicas that die: they are replaced, their calls go elsewhere, and the budget ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.judge.pool import (
    JudgePool,
    JudgePoolFailure,
    JudgePoolSettings,
    ReplicaCall,
    ReplicaGone,
)
from delta_belief_rl.types import Message, Task, Verdict

pytestmark = pytest.mark.fault

TASK = Task("t0", "tw_q", "cat", (Message("user", "Go."),))
QUICK = JudgePoolSettings(backoff=0.001, restart_backoff=0.001, max_batch=1)


def request(number: int) -> JudgeRequest:
    return JudgeRequest(TASK, str(number))


class Mortal:
    """Answers a number of calls, then is dead."""

    def __init__(self, answers: int = 10**9, delay: float = 0.0) -> None:
        self.left, self.answered, self.delay = answers, 0, delay

    async def __call__(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        await asyncio.sleep(self.delay)
        if self.left <= 0:
            raise ReplicaGone("illegal memory access")
        self.left -= 1
        self.answered += 1
        return [JudgeReply(Verdict.YES, one.action) for one in requests]


class Factory:
    """Makes the next replica for a place; ``make`` may raise."""

    def __init__(self, make: Callable[[int], ReplicaCall], delay: float = 0.0) -> None:
        self.lanes: list[int] = []
        self._make, self._delay = make, delay

    async def __call__(self, lane: int) -> ReplicaCall:
        self.lanes.append(lane)
        await asyncio.sleep(self._delay)
        return self._make(len(self.lanes))


def play(pool: JudgePool, count: int, at_once: int = 4) -> list[JudgeReply]:
    """Ask for the answers to ``count`` questions, some at a time, as games do."""

    async def game(numbers: range) -> list[JudgeReply]:
        return [await pool.ask(request(number)) for number in numbers]

    async def main() -> list[JudgeReply]:
        games = (game(range(start, count, at_once)) for start in range(at_once))
        return [reply for replies in await asyncio.gather(*games) for reply in replies]

    return asyncio.run(main())


def test_J1_a_dead_replica_is_replaced_and_its_calls_are_answered_elsewhere() -> None:
    dying, healthy, fresh = Mortal(answers=3), Mortal(), Mortal()
    factory = Factory(lambda _: fresh)
    told: list[tuple[int, str]] = []
    pool = JudgePool(
        [dying, healthy],
        QUICK,
        restart=factory,
        on_restart=lambda lane, reason: told.append((lane, reason)),
    )
    replies = play(pool, 200)
    assert {reply.verdict for reply in replies} == {Verdict.YES}
    assert sorted(int(reply.text) for reply in replies) == list(range(200))
    assert factory.lanes == [0]
    assert told == [(0, "illegal memory access")]
    assert dying.answered == 3
    assert fresh.answered > 0
    stats = pool.stats()
    assert (stats.restarts, stats.errors) == (1, 0)
    assert 0 < stats.retries <= 4


def test_J1_a_replica_that_is_away_gets_no_call() -> None:
    dying, healthy = Mortal(answers=0), Mortal(delay=0.0005)
    pool = JudgePool([dying, healthy], QUICK, restart=Factory(lambda _: Mortal(), delay=3600))
    assert {reply.verdict for reply in play(pool, 40, at_once=8)} == {Verdict.YES}
    # Those that were with it when it died, and none later.
    assert pool.stats().retries <= 8
    assert healthy.answered == 40


def test_J3_where_the_only_replica_is_away_calls_wait_for_the_next_one() -> None:
    fresh = Mortal()
    pool = JudgePool([Mortal(answers=2)], QUICK, restart=Factory(lambda _: fresh, delay=0.05))
    began = time.monotonic()
    replies = play(pool, 20)
    assert {reply.verdict for reply in replies} == {Verdict.YES}
    assert time.monotonic() - began >= 0.05
    assert fresh.answered == 18
    assert pool.stats().errors == 0


def test_many_calls_that_one_death_fails_are_one_restart() -> None:
    pool = JudgePool([Mortal(answers=0, delay=0.001)], QUICK, restart=Factory(lambda _: Mortal()))
    assert len(play(pool, 30, at_once=30)) == 30
    assert pool.stats().restarts == 1


def test_a_late_failure_of_a_replaced_replica_does_not_end_its_successor() -> None:
    async def old(requests: list[JudgeRequest]) -> list[JudgeReply]:
        # The second call notices the death only after the place has been filled again.
        await asyncio.sleep(0.05 if requests[0].action == "1" else 0.0)
        raise ReplicaGone("dead")

    fresh = Mortal()
    factory = Factory(lambda _: fresh)
    pool = JudgePool([old], QUICK, restart=factory)
    replies = play(pool, 2, at_once=2)
    assert {reply.verdict for reply in replies} == {Verdict.YES}
    assert factory.lanes == [0]
    assert fresh.answered == 2


def test_J3_a_replica_never_has_more_than_its_share_while_another_is_away() -> None:
    busy = most = 0

    async def healthy(requests: list[JudgeRequest]) -> list[JudgeReply]:
        nonlocal busy, most
        busy += len(requests)
        most = max(most, busy)
        await asyncio.sleep(0.001)
        busy -= len(requests)
        return [JudgeReply(Verdict.YES, "yes") for _ in requests]

    settings = JudgePoolSettings(
        backoff=0.001, restart_backoff=0.001, max_batch=1, max_outstanding=3
    )
    slow = Factory(lambda _: Mortal(), delay=3600)
    pool = JudgePool([Mortal(answers=0), healthy], settings, restart=slow)
    assert len(play(pool, 60, at_once=20)) == 60
    assert most == 3


def test_J5_the_deadline_of_a_call_stays_and_a_replica_that_only_hangs_is_not_replaced() -> None:
    settings = JudgePoolSettings(deadline=0.1, backoff=0.001, restart_backoff=0.001)
    factory = Factory(lambda _: Mortal())
    pool = JudgePool([Mortal(delay=60), Mortal()], settings, restart=factory)
    assert play(pool, 1)[0].verdict is Verdict.YES
    assert (pool.stats().timeouts, pool.stats().restarts) == (1, 0)


def test_J2_when_all_are_gone_and_the_budget_is_spent_the_pool_gives_up_in_one_sentence() -> None:
    settings = JudgePoolSettings(backoff=0.001, restart_backoff=0.001, max_restarts=4)
    factory = Factory(lambda _: Mortal(answers=0))
    pool = JudgePool([Mortal(answers=0), Mortal(answers=0)], settings, restart=factory)
    with pytest.raises(JudgePoolFailure) as caught:
        play(pool, 50)
    assert str(caught.value) == (
        "No judge replica is left and all 4 restarts (judge_rollout.max_restarts) are used up; the "
        "last one: illegal memory access"
    )
    assert len(factory.lanes) == 4
    with pytest.raises(JudgePoolFailure):
        play(pool, 1)


def test_a_replica_that_stays_away_leaves_the_rest_at_work() -> None:
    settings = JudgePoolSettings(backoff=0.001, restart_backoff=0.001, max_restarts=0)
    factory = Factory(lambda _: Mortal())
    pool = JudgePool([Mortal(answers=1), Mortal()], settings, restart=factory)
    assert {reply.verdict for reply in play(pool, 50)} == {Verdict.YES}
    assert factory.lanes == []
    assert pool.stats().restarts == 0


def test_a_restart_that_fails_is_tried_again_and_counts() -> None:
    fresh = Mortal()

    def third(attempt: int) -> ReplicaCall:
        if attempt < 3:
            raise ReplicaGone("no memory")
        return fresh

    told: list[str] = []
    pool = JudgePool(
        [Mortal(answers=0)],
        QUICK,
        restart=Factory(third),
        on_restart=lambda _lane, reason: told.append(reason),
    )
    assert play(pool, 1)[0].verdict is Verdict.YES
    assert pool.stats().restarts == 3
    assert told[1:] == ["judge 0 did not start again: ReplicaGone: no memory"] * 2


def test_restarts_that_all_fail_stop_the_run_with_the_last_reason() -> None:
    def never(attempt: int) -> ReplicaCall:
        raise ConnectionError(f"attempt {attempt}")

    settings = JudgePoolSettings(backoff=0.001, restart_backoff=0.001, max_restarts=3)
    pool = JudgePool([Mortal(answers=0)], settings, restart=Factory(never))
    with pytest.raises(JudgePoolFailure, match=r"all 3 restarts .*: attempt 3$"):
        play(pool, 5)


def test_H2_a_defect_in_the_start_of_a_replica_is_raised() -> None:
    def typo(attempt: int) -> ReplicaCall:
        raise KeyError("typo")

    pool = JudgePool([Mortal(answers=0)], QUICK, restart=Factory(typo))
    with pytest.raises(KeyError, match="typo"):
        play(pool, 1)


def test_the_wait_before_a_restart_doubles_until_a_replica_answers_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    real = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds:
            waits.append(seconds)
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    settings = JudgePoolSettings(
        backoff=0.0001, restart_backoff=2.0, max_restart_backoff=5.0, max_attempts=9
    )
    # The third replica answers twice, so that its death is a first one again.
    later = [Mortal(answers=0), Mortal(answers=0), Mortal(answers=2), Mortal()]
    factory = Factory(lambda attempt: later[attempt - 1])
    pool = JudgePool([Mortal(answers=0)], settings, restart=factory)
    assert {reply.verdict for reply in play(pool, 4, at_once=1)} == {Verdict.YES}
    assert waits == [2.0, 4.0, 5.0, 2.0]


def test_J16_restarts_are_counted_anew_but_the_budget_is_that_of_the_run() -> None:
    settings = JudgePoolSettings(backoff=0.001, restart_backoff=0.001, max_restarts=2)

    async def main() -> None:
        pool = JudgePool([Mortal(answers=1)], settings, restart=Factory(lambda _: Mortal(1)))
        for number in range(3):
            assert (await pool.ask(request(number))).verdict is Verdict.YES
            pool.reset_stats()
        assert pool.stats().restarts == 0
        with pytest.raises(JudgePoolFailure, match="all 2 restarts"):
            await pool.ask(request(3))

    asyncio.run(main())
