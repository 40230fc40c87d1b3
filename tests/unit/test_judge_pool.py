"""The judge pool when all goes well: coalescing, spreading, caching and counting."""

from __future__ import annotations

import asyncio

import pytest
from rollout_fakes import make_task

from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.judge.pool import (
    JudgePool,
    JudgePoolSettings,
    history_key,
    local_replica,
    question_key,
    request_key,
)
from delta_belief_rl.types import Verdict


def request(
    action: str, secret: str = "cat", history: tuple[tuple[str, str], ...] = ()
) -> JudgeRequest:
    return JudgeRequest(make_task(secret=secret), action, history)


class Replica:
    """Says yes, after a delay; notes its batches."""

    def __init__(self, delay: float = 0.0, tokens: int = 0) -> None:
        self.batches: list[list[str]] = []
        self.busy = 0
        self.most_busy = 0
        self._delay = delay
        self._tokens = tokens

    async def __call__(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        self.batches.append([r.action for r in requests])
        self.busy += len(requests)
        self.most_busy = max(self.most_busy, self.busy)
        await asyncio.sleep(self._delay)
        self.busy -= len(requests)
        return [JudgeReply(Verdict.YES, r.action, tokens=self._tokens) for r in requests]


def ask_all(pool: JudgePool, requests: list[JudgeRequest]) -> list[JudgeReply]:
    async def main() -> list[JudgeReply]:
        return await asyncio.gather(*(pool.ask(r) for r in requests))

    return asyncio.run(main())


def test_calls_of_one_moment_share_one_batch_and_replies_find_their_way_back() -> None:
    replica = Replica()
    replies = ask_all(JudgePool([replica]), [request(a) for a in "abc"])
    assert [r.text for r in replies] == ["a", "b", "c"]
    assert replica.batches == [["a", "b", "c"]]


def test_calls_are_spread_to_the_replica_with_the_fewest_outstanding() -> None:
    slow, fast = Replica(0.05), Replica(0.0)
    pool = JudgePool([slow, fast])

    async def main() -> None:
        first = [asyncio.create_task(pool.ask(request(a))) for a in "abcd"]
        await asyncio.sleep(0.02)
        await asyncio.gather(*(pool.ask(request(a)) for a in "ef"))
        await asyncio.gather(*first)

    asyncio.run(main())
    assert slow.batches == [["a", "c"]]
    assert fast.batches == [["b", "d"], ["e", "f"]]


def test_a_batch_has_a_largest_size() -> None:
    replica = Replica()
    ask_all(JudgePool([replica], JudgePoolSettings(max_batch=2)), [request(a) for a in "abcde"])
    assert replica.batches == [["a", "b"], ["c", "d"], ["e"]]


def test_J3_a_replica_never_has_more_than_its_share_outstanding() -> None:
    replica = Replica(0.001)
    pool = JudgePool([replica], JudgePoolSettings(max_outstanding=3))
    replies = ask_all(pool, [request(str(i)) for i in range(20)])
    assert [r.text for r in replies] == [str(i) for i in range(20)]
    assert replica.most_busy == 3


def test_a_question_is_cached_by_secret_and_normalised_text() -> None:
    replica = Replica()
    pool = JudgePool([replica], cache_key=question_key)
    first = ask_all(pool, [request("Is it  BIG?")])[0]
    again = ask_all(pool, [request("is it big?")])[0]
    other = ask_all(pool, [request("is it big?", secret="dog")])[0]
    assert (first.cached, again.cached, other.cached) == (False, True, False)
    assert again.verdict is first.verdict
    assert again.text == first.text
    assert len(replica.batches) == 2
    assert pool.stats().cached == 1
    assert pool.stats().calls == 3


def test_a_judge_that_reads_the_history_is_not_answered_from_another_history() -> None:
    replica = Replica()
    pool = JudgePool([replica], cache_key=history_key)
    ask_all(pool, [request("is it big?")])
    ask_all(pool, [request("is it big?", history=(("is it big?", "yes"),))])
    assert pool.stats().cached == 0
    assert request_key(JudgeRequest(make_task(), "a", key="named")) == "named"
    assert request_key(request("a")) == history_key(request("a"))


def test_without_a_cache_key_nothing_is_cached() -> None:
    replica = Replica()
    pool = JudgePool([replica])
    for _ in range(2):
        ask_all(pool, [request("a")])
    assert len(replica.batches) == 2


def test_J16_latency_and_tokens_are_counted() -> None:
    pool = JudgePool([Replica(0.01, tokens=7)])
    replies = ask_all(pool, [request(a) for a in "ab"])
    stats = pool.stats()
    assert stats.tokens == 14
    assert 0.005 < stats.latency_p50 <= stats.latency_p95
    assert replies[0].seconds > 0.005
    pool.reset_stats()
    assert pool.stats().calls == 0
    assert pool.stats().latency_p95 == 0.0


def test_H11_outstanding_calls_are_counted_with_their_age() -> None:
    pool = JudgePool([Replica(0.05)])

    async def main() -> tuple[int, float]:
        task = asyncio.create_task(pool.ask(request("a")))
        await asyncio.sleep(0.02)
        found = pool.outstanding()
        await task
        return found

    count, age = asyncio.run(main())
    assert count == 1
    assert age > 0.01
    assert pool.outstanding() == (0, 0.0)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_judge_of_this_process_is_a_replica(threaded: bool) -> None:
    class Local:
        def answer(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
            return [JudgeReply(Verdict.NO, "no") for _ in requests]

    pool = JudgePool([local_replica(Local(), threaded=threaded)])
    assert ask_all(pool, [request("a")])[0].verdict is Verdict.NO


def test_a_cancelled_call_does_not_disturb_the_others() -> None:
    pool = JudgePool([Replica(0.01)])

    async def main() -> JudgeReply:
        lost = asyncio.create_task(pool.ask(request("a")))
        kept = asyncio.create_task(pool.ask(request("b")))
        await asyncio.sleep(0)
        lost.cancel()
        return await kept

    assert asyncio.run(main()).text == "b"
    assert pool.outstanding() == (0, 0.0)


def test_a_pool_without_replicas_or_with_senseless_limits_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        JudgePool([])
    with pytest.raises(ValueError, match=">= 1"):
        JudgePoolSettings(max_attempts=0)
