"""The pump between games and a stepping engine, and the router over several."""

from __future__ import annotations

import asyncio

import pytest

from delta_belief_rl.engines.base import (
    Completion,
    Engine,
    FinishReason,
    GenRequest,
    SamplingParams,
)
from delta_belief_rl.engines.fake_engine import FakeEngine
from delta_belief_rl.engines.pump import EngineFailure, EnginePump, EngineRouter


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


def test_a_router_is_deterministic_only_when_all_of_its_engines_are() -> None:
    step = Recorder().step
    exact: list[Engine] = [EnginePump(step, deterministic=True) for _ in range(2)]
    assert EngineRouter(exact).deterministic
    assert not EngineRouter([*exact, EnginePump(step)]).deterministic
    with pytest.raises(ValueError, match="at least one"):
        EngineRouter([])
