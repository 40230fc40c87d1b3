"""The pump between games and a stepping engine, and the router over several."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

import numpy as np
import pytest

from delta_belief_rl.engines.base import (
    Completion,
    Engine,
    FinishReason,
    GenRequest,
    SamplingParams,
    TailRequest,
)
from delta_belief_rl.engines.fake_engine import FakeEngine
from delta_belief_rl.engines.pump import EngineFailure, EngineLost, EnginePump, EngineRouter

T = TypeVar("T")


def request(session: str) -> GenRequest:
    return GenRequest(session, (1, 2), 0, SamplingParams(stop_token_ids=(9,)))


def done(session: str) -> Completion:
    return Completion(session, (9,), (-0.1,), FinishReason.STOP, 0)


class Recorder:
    """A stepping engine that finishes one request a step, and notes what it was handed."""

    def __init__(self, at_once: int = 1) -> None:
        self.batches: list[list[str]] = []
        self.released: list[list[str]] = []
        self._at_once = at_once
        self._running: list[str] = []

    async def step(self, new: list[GenRequest]) -> list[Completion]:
        self.batches.append([r.session for r in new])
        self._running += [r.session for r in new]
        ended, self._running = self._running[: self._at_once], self._running[self._at_once :]
        await asyncio.sleep(0)
        return [done(s) for s in ended]

    async def release(self, names: list[str]) -> None:
        self.released.append(names)


def test_requests_of_one_moment_share_a_step() -> None:
    async def main() -> list[list[str]]:
        engine = Recorder(at_once=9)
        pump = EnginePump(engine.step)
        await asyncio.gather(*(pump.generate(request(s)) for s in "cab"))
        return engine.batches

    assert asyncio.run(main()) == [["c", "a", "b"]]


def test_the_pump_steps_on_until_every_request_is_answered() -> None:
    async def main() -> tuple[list[Completion], list[list[str]]]:
        engine = Recorder()
        pump = EnginePump(engine.step)
        answers = await asyncio.gather(*(pump.generate(request(s)) for s in "abc"))
        return answers, engine.batches

    answers, batches = asyncio.run(main())
    assert [a.session for a in answers] == ["a", "b", "c"]
    assert batches == [["a", "b", "c"], [], []]


@pytest.mark.parametrize("slow", ["a", "b", "c"])
def test_R15_deterministic_mode_waits_for_every_live_game_and_sorts_by_session(slow: str) -> None:
    async def main() -> tuple[list[list[str]], list[list[str]]]:
        engine = Recorder(at_once=9)
        pump = EnginePump(engine.step, engine.release, deterministic=True)

        async def game(name: str) -> None:
            for _ in range(2):
                await pump.generate(request(name))
                await asyncio.sleep(0.02 if name == slow else 0)  # the judge
            await pump.release(name)
            pump.leave()

        for _ in range(3):
            pump.enter()
        await asyncio.gather(*(game(n) for n in ("c", "a", "b")))
        await pump.flush()
        return engine.batches, engine.released

    assert asyncio.run(main()) == ([["a", "b", "c"]] * 2, [["a", "b", "c"]])


def test_deterministic_mode_goes_on_when_a_game_leaves() -> None:
    async def main() -> list[list[str]]:
        engine = Recorder(at_once=9)
        pump = EnginePump(engine.step, deterministic=True)
        pump.enter()
        pump.enter()
        waiting = asyncio.create_task(pump.generate(request("a")))
        await asyncio.sleep(0.01)
        assert engine.batches == []
        pump.leave()
        await waiting
        return engine.batches

    assert asyncio.run(main()) == [["a"]]


def test_H2_a_failing_step_is_raised_into_every_waiting_game_and_into_later_calls() -> None:
    async def step(new: list[GenRequest]) -> list[Completion]:
        raise ValueError("CUDA is gone")

    async def main() -> list[object]:
        pump = EnginePump(step)
        calls = (pump.generate(request(s)) for s in "ab")
        results = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(EngineFailure, match="CUDA is gone"):
            await pump.generate(request("c"))
        return list(results)

    results = asyncio.run(main())
    assert all(isinstance(r, EngineFailure) for r in results)
    assert "ValueError: CUDA is gone" in str(results[0])
    assert isinstance(results[0], EngineFailure)
    assert isinstance(results[0].__cause__, ValueError)


def test_J5_a_step_that_hangs_misses_its_deadline() -> None:
    async def step(new: list[GenRequest]) -> list[Completion]:
        await asyncio.sleep(60)
        return []

    async def main() -> None:
        await EnginePump(step, step_deadline=0.02).generate(request("a"))

    with pytest.raises(EngineFailure, match=r"within 0\.02 s"):
        asyncio.run(main())


def test_a_step_without_progress_is_an_error_when_every_game_waits() -> None:
    async def step(new: list[GenRequest]) -> list[Completion]:
        return []

    async def main() -> None:
        pump = EnginePump(step, deterministic=True)
        pump.enter()
        await pump.generate(request("a"))

    with pytest.raises(EngineFailure, match="no progress"):
        asyncio.run(main())


def test_a_step_without_progress_is_repeated_after_a_release() -> None:
    """An engine whose slots are all held by idle games answers nothing until one is released."""
    free: list[str] = []

    async def step(new: list[GenRequest]) -> list[Completion]:
        return [done("new")] if free else []

    async def release(names: list[str]) -> None:
        free.extend(names)

    async def main() -> Completion:
        pump = EnginePump(step, release)
        waiting = asyncio.create_task(pump.generate(request("new")))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await pump.release("old")
        return await waiting

    assert asyncio.run(main()).session == "new"


def test_a_session_cannot_wait_twice() -> None:
    async def main() -> None:
        pump = EnginePump(Recorder().step)
        await asyncio.gather(pump.generate(request("a")), pump.generate(request("a")))

    with pytest.raises(EngineFailure, match="already waits"):
        asyncio.run(main())


def test_a_cancelled_game_does_not_disturb_the_others() -> None:
    async def main() -> Completion:
        engine = Recorder()
        pump = EnginePump(engine.step, engine.release)
        lost = asyncio.create_task(pump.generate(request("a")))
        kept = asyncio.create_task(pump.generate(request("b")))
        await asyncio.sleep(0)
        lost.cancel()
        await pump.release("a")
        return await kept

    assert asyncio.run(main()).session == "b"


def test_H11_outstanding_requests_are_counted_with_their_age() -> None:
    async def main() -> tuple[int, float]:
        pump = EnginePump(Recorder().step, deterministic=True)
        pump.enter()
        pump.enter()
        task = asyncio.create_task(pump.generate(request("a")))
        await asyncio.sleep(0.02)
        found = pump.outstanding()
        task.cancel()
        return found

    count, age = asyncio.run(main())
    assert count == 1
    assert age > 0.01


def test_leaving_more_often_than_entering_is_refused() -> None:
    with pytest.raises(RuntimeError, match="more often"):
        EnginePump(Recorder().step).leave()


def engines(count: int) -> list[FakeEngine]:
    return [FakeEngine(lambda r: [9], lambda t: [9], version=i) for i in range(count)]


def test_the_router_is_sticky_and_takes_the_engine_with_the_fewest_sessions() -> None:
    fakes = engines(2)
    router = EngineRouter(fakes)

    async def main() -> None:
        for session in "abcab":
            await router.generate(request(session))
        await router.release("a")
        await router.release("c")
        await router.generate(request("d"))

    asyncio.run(main())
    assert [r.session for r in fakes[0].requests] == ["a", "c", "a", "d"]
    assert [r.session for r in fakes[1].requests] == ["b", "b"]
    assert fakes[0].released == ["a", "c"]
    assert router.sessions() == [1, 1]


def test_a_bound_session_goes_where_it_was_bound() -> None:
    fakes = engines(3)
    router = EngineRouter(fakes)
    router.bind("a", 2)
    assert asyncio.run(router.generate(request("a"))).adapter_version == 2


def test_H2_a_replica_that_cannot_forget_keeps_no_other_from_it() -> None:
    recorders = [Recorder() for _ in range(4)]

    async def lost(names: list[str]) -> None:
        raise EngineLost(f"gone with {', '.join(names)}")

    async def broken(names: list[str]) -> None:
        raise EngineFailure("broken")

    async def main() -> EngineRouter:
        releases = [recorders[0].release, lost, broken, recorders[3].release]
        router = EngineRouter(
            [EnginePump(r.step, release) for r, release in zip(recorders, releases, strict=True)]
        )
        for lane, session in enumerate("abcd"):
            router.bind(session, lane)
            await router.generate(request(session))
            await router.release(session)
        with pytest.raises(EngineLost, match="gone with b"):
            await router.flush()
        await router.flush()
        router.bind("e", 1)
        with pytest.raises(EngineLost, match="gone with b"):
            await router.generate(request("e"))
        return router

    router = asyncio.run(main())
    assert [r.released for r in recorders] == [[["a"]], [], [], [["d"]]]
    assert router.lost() == {1: "gone with b"}


def test_flushing_waits_for_the_steps_of_all_replicas_though_one_fails() -> None:
    ended: list[str] = []

    async def lost(names: list[str]) -> None:
        raise EngineLost("gone")

    async def main() -> None:
        may_end = asyncio.Event()

        async def slow(new: list[GenRequest]) -> list[Completion]:
            await may_end.wait()
            ended.extend(r.session for r in new)
            return [done(r.session) for r in new]

        router = EngineRouter([EnginePump(Recorder().step, lost), EnginePump(slow)])
        router.bind("a", 0)
        router.bind("b", 1)
        await router.generate(request("a"))
        await router.release("a")
        game = asyncio.create_task(router.generate(request("b")))
        flush = asyncio.create_task(router.flush())
        for _ in range(9):
            await asyncio.sleep(0)
        assert not flush.done()
        may_end.set()
        with pytest.raises(EngineLost, match="gone"):
            await flush
        assert ended == ["b"]
        await game

    asyncio.run(main())


def test_a_router_is_deterministic_only_when_all_of_its_engines_are() -> None:
    step = Recorder().step
    exact: list[Engine] = [EnginePump(step, deterministic=True) for _ in range(2)]
    assert EngineRouter(exact).deterministic
    assert not EngineRouter([*exact, EnginePump(step)]).deterministic
    with pytest.raises(ValueError, match="at least one"):
        EngineRouter([])


# --- games that try several actions ---------------------------------------------------------------


def tail(session: str) -> TailRequest:
    return TailRequest(session, (1, 2, 3), 2)


class Scorer(Recorder):
    """A recorder that also scores, and notes whether two of its calls ever overlap."""

    def __init__(self, at_once: int = 1) -> None:
        super().__init__(at_once)
        self.calls: list[tuple[str, list[str]]] = []
        self.inside = 0

    async def step(self, new: list[GenRequest]) -> list[Completion]:
        self.calls.append(("step", [r.session for r in new]))
        return await self._alone(super().step(new))

    async def score(self, requests: list[TailRequest]) -> list[np.ndarray]:
        self.calls.append(("score", [r.session for r in requests]))
        return await self._alone(self._values(requests))

    async def _values(self, requests: list[TailRequest]) -> list[np.ndarray]:
        await asyncio.sleep(0.001)
        return [np.array([float(ord(r.session[0]))]) for r in requests]

    async def _alone(self, call: Coroutine[None, None, T]) -> T:
        assert self.inside == 0
        self.inside += 1
        try:
            return await call
        finally:
            self.inside -= 1


def test_R15_a_game_with_several_requests_waits_as_one() -> None:
    async def main() -> list[list[str]]:
        engine = Recorder(at_once=9)
        pump = EnginePump(engine.step, deterministic=True)
        pump.enter()
        pump.enter()
        several = asyncio.create_task(pump.generate_all([request("b"), request("b1")]))
        await asyncio.sleep(0.01)
        assert engine.batches == []
        assert pump.outstanding()[0] == 2
        await pump.generate(request("a"))
        assert [c.session for c in await several] == ["b", "b1"]
        return engine.batches

    assert asyncio.run(main()) == [["a", "b", "b1"]]


def test_completions_come_in_the_order_of_the_requests_whenever_they_end() -> None:
    async def main() -> list[Completion]:
        class Backwards(Recorder):
            async def step(self, new: list[GenRequest]) -> list[Completion]:
                self._running += [r.session for r in new]
                return [done(self._running.pop())]

        return await EnginePump(Backwards().step).generate_all([request(s) for s in "abc"])

    assert [c.session for c in asyncio.run(main())] == ["a", "b", "c"]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("slow", ["a", "b", "c"])
def test_R15_scoring_and_stepping_never_overlap_and_their_order_is_that_of_the_games(
    slow: str, deterministic: bool
) -> None:
    async def main() -> list[tuple[str, list[str]]]:
        engine = Scorer(at_once=9)
        pump = EnginePump(
            engine.step, engine.release, score=engine.score, deterministic=deterministic
        )

        async def game(name: str) -> None:
            for _ in range(2):
                await pump.generate_all([request(name), request(name + "1")])
                await asyncio.sleep(0.01 if name == slow else 0)  # the judge
                values = await pump.score_all([tail(name), tail(name + "1")])
                assert [float(v[0]) for v in values] == [float(ord(name))] * 2
            await pump.release(name)
            pump.leave()

        for _ in range(3):
            pump.enter()
        await asyncio.gather(*(game(n) for n in ("c", "a", "b")))
        await pump.flush()
        return engine.calls

    calls = asyncio.run(main())
    everyone = ["a", "a1", "b", "b1", "c", "c1"]
    if deterministic:
        assert calls == [("step", everyone), ("score", everyone)] * 2
    for kind in ("step", "score"):
        assert sorted(s for name, row in calls if name == kind for s in row) == sorted(everyone * 2)


def test_H2_a_failing_score_is_raised_into_every_waiting_game() -> None:
    async def score(requests: list[TailRequest]) -> list[np.ndarray]:
        raise ValueError("CUDA is gone")

    async def main() -> list[object]:
        pump = EnginePump(Recorder().step, score=score, deterministic=True)
        pump.enter()
        pump.enter()
        calls = (pump.score_all([tail("a")]), pump.generate(request("b")))
        results = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(EngineFailure, match="CUDA is gone"):
            await pump.score_all([tail("a")])
        return list(results)

    results = asyncio.run(main())
    assert all(isinstance(r, EngineFailure) for r in results)


def test_B6_a_missing_score_is_a_failure() -> None:
    async def score(requests: list[TailRequest]) -> list[np.ndarray]:
        return []

    with pytest.raises(EngineFailure, match="0 scores for 1 texts"):
        asyncio.run(EnginePump(Recorder().step, score=score).score_all([tail("a")]))


def test_J5_a_score_that_hangs_misses_its_deadline() -> None:
    async def score(requests: list[TailRequest]) -> list[np.ndarray]:
        await asyncio.sleep(60)
        return []

    pump = EnginePump(Recorder().step, score=score, step_deadline=0.02)
    with pytest.raises(EngineFailure, match=r"within 0\.02 s"):
        asyncio.run(pump.score_all([tail("a")]))


def test_an_engine_that_cannot_score_says_so() -> None:
    with pytest.raises(EngineFailure, match="cannot score"):
        asyncio.run(EnginePump(Recorder().step).score_all([tail("a")]))

    class Plain:
        async def generate(self, request: GenRequest) -> Completion:
            return done(request.session)

        async def release(self, session: str) -> None: ...

    with pytest.raises(EngineFailure, match="a Plain neither samples"):
        asyncio.run(EngineRouter([Plain()]).generate_all([request("a")]))


def test_a_cancelled_game_takes_its_texts_out_of_the_line() -> None:
    async def main() -> list[tuple[str, list[str]]]:
        engine = Scorer(at_once=9)
        pump = EnginePump(engine.step, score=engine.score, deterministic=True)
        pump.enter()
        pump.enter()
        lost = asyncio.create_task(pump.score_all([tail("a")]))
        await asyncio.sleep(0)
        lost.cancel()
        await asyncio.sleep(0)
        await pump.release("a")
        pump.leave()
        await pump.score_all([tail("b")])
        return engine.calls

    assert asyncio.run(main()) == [("score", ["b"])]


def test_the_branches_of_a_game_stay_on_one_engine() -> None:
    fakes = engines(2)
    router = EngineRouter(fakes)

    async def main() -> None:
        for name in "ab":
            await router.generate_all([request(name), request(name + "1")])
        await router.score_all([tail("b1"), tail("b")])
        await router.release("a")
        await router.release("a1")
        await router.generate_all([request("c"), request("c1")])

    asyncio.run(main())
    assert [r.session for r in fakes[0].requests] == ["a", "a1", "c", "c1"]
    assert [r.session for r in fakes[1].requests] == ["b", "b1"]
    assert [r.session for r in fakes[1].scored] == ["b1", "b"]
    assert fakes[0].released == ["a", "a1"]
    assert router.sessions() == [2, 2]
