"""Judge replicas as the pool sees them, with actors that stand in for Ray's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError

from delta_belief_rl.cluster.judges import (
    JudgeReplicas,
    judge_call,
    restart_teller,
    tell_self_tests,
)
from delta_belief_rl.cluster.members import Roster, Whereabouts
from delta_belief_rl.config.schema_judge import SelfTest
from delta_belief_rl.engines.pump import EngineFailure
from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.judge.pool import ReplicaGone
from delta_belief_rl.judge.selftest import FACTS, Miss, SelfTestReport
from delta_belief_rl.obs.events import EventLog
from delta_belief_rl.types import Message, Task, UserError, Verdict

REQUEST = JudgeRequest(Task("t0", "tw_q", "cat", (Message("user", "Go."),)), "Is it big?")
GOOD = SelfTestReport(4, (), 0, True, tokens=1000, seconds=0.5)
BAD = SelfTestReport(4, (Miss(FACTS[0], "no"), Miss(FACTS[2], "no")), 0, True)


class Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    async def remote(self, *args: Any) -> Any:
        result = self._call(*args)
        return await result if asyncio.iscoroutine(result) else result


class Actor:
    """A handle of a replica that answers no to everything."""

    def __init__(self, name: str, report: SelfTestReport = GOOD, hangs: bool = False) -> None:
        self.name, self.report, self.hangs = name, report, hangs
        self.dead = False
        self.answer, self.self_test = Method(self._answer), Method(self._self_test)
        self.present = Method(self._present)

    async def _present(self) -> Whereabouts:
        if self.hangs:
            await asyncio.sleep(60)
        if self.dead:
            raise ActorDiedError()
        return Whereabouts(1, self.name)

    async def _answer(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        if self.hangs:
            await asyncio.sleep(60)
        if self.dead:
            raise ActorDiedError()
        return [JudgeReply(Verdict.NO, self.name) for _ in requests]

    async def _self_test(self) -> SelfTestReport:
        if self.hangs:
            await asyncio.sleep(60)
        return self.report


class Place:
    """An actor class bound to its bundle: makes one actor after the other."""

    def __init__(self, *actors: Actor) -> None:
        self._actors = list(actors)
        self.settings: list[Any] = []

    def remote(self, settings: Any) -> Actor:
        self.settings.append(settings)
        return self._actors.pop(0)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(ray, "kill", lambda actor: names.append(actor.name))
    return names


def test_every_place_starts_one_replica_with_the_same_settings() -> None:
    places = [Place(Actor("a")), Place(Actor("b"))]
    replicas = JudgeReplicas.start(places, "settings")
    assert [actor.name for actor in replicas.actors] == ["a", "b"]
    assert [place.settings for place in places] == [["settings"], ["settings"]]

    async def ask() -> list[str]:
        return [(await call([REQUEST]))[0].text for call in replicas.calls()]

    assert asyncio.run(ask()) == ["a", "b"]


def test_J1_the_death_of_an_actor_is_told_apart_on_one_line() -> None:
    actor = Actor("a")
    actor.dead = True
    with pytest.raises(ReplicaGone) as caught:
        asyncio.run(judge_call(actor)([REQUEST]))
    assert "\n" not in str(caught.value)
    assert str(caught.value)


def test_J1_a_replica_whose_engine_died_is_ended_and_gone(killed: list[str]) -> None:
    actor = Actor("a")
    for cause, kind in ((EngineFailure("worker 0 died"), ReplicaGone), (KeyError(), RayTaskError)):

        def fails(_requests: list[JudgeRequest], cause: Exception = cause) -> None:
            raise RayTaskError("answer", "a long trace", cause)

        actor.answer = Method(fails)
        with pytest.raises(kind):
            asyncio.run(judge_call(actor)([REQUEST]))  # type: ignore[arg-type]
    assert killed == ["a"]


@pytest.mark.parametrize("least", [None, 0.8])
def test_a_dead_replica_is_replaced_in_its_own_place(
    least: float | None, killed: list[str]
) -> None:
    places = [Place(Actor("a")), Place(Actor("b"), Actor("c"))]
    replicas = JudgeReplicas.start(places, "settings")

    async def replace() -> str:
        call = await replicas.restarter(5.0, least, Roster())(1)
        return (await call([REQUEST]))[0].text

    assert asyncio.run(replace()) == "c"
    assert places[1].settings == ["settings", "settings"]
    assert killed == []


def test_Q2_Q6_a_replica_that_comes_back_broken_is_not_used(killed: list[str]) -> None:
    replicas = JudgeReplicas.start([Place(Actor("a"), Actor("b", BAD))], "settings")
    with pytest.raises(ReplicaGone, match=r"2 of 4 plain facts answered rightly \(50%\)"):
        asyncio.run(replicas.restarter(5.0, 0.8, Roster())(0))  # type: ignore[arg-type]
    assert killed == ["b"]


@pytest.mark.parametrize("least", [None, 0.8])
def test_J5_a_replica_that_does_not_come_up_in_time_is_ended(
    least: float | None, killed: list[str]
) -> None:
    replicas = JudgeReplicas.start([Place(Actor("a"), Actor("b", hangs=True))], "settings")
    with pytest.raises(ReplicaGone, match=r"did not start within 0\.01 s"):
        asyncio.run(replicas.restarter(0.01, least, Roster())(0))  # type: ignore[arg-type]
    assert killed == ["b"]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_H12_a_replica_that_hangs_is_ended_and_a_dead_one_is_left_to_its_pool(
    killed: list[str],
) -> None:
    actors = [Actor("a"), Actor("b", hangs=True), Actor("c")]
    actors[2].dead = True
    replicas = JudgeReplicas.start([Place(actor) for actor in actors], "settings")
    asyncio.run(replicas.check(0.01))
    assert killed == ["b"]


def test_Q2_Q3_self_tests_are_printed_and_recorded_and_then_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = EventLog(tmp_path / "events.jsonl", "run")
    tell_self_tests([GOOD], SelfTest(min_accuracy=1.0), events)
    assert capsys.readouterr().err == (
        "judge 0: 4 of 4 plain facts answered rightly (100%), 0 without an answer; "
        "2,000 tokens/s over 0.5 s\n"
    )
    with pytest.raises(UserError, match=r"^Judge replica 1 fails .* at least 80% are demanded"):
        tell_self_tests([GOOD, BAD], SelfTest(min_accuracy=0.8), events)
    found = records(tmp_path / "events.jsonl")
    assert [event["replica"] for event in found] == [0, 0, 1]
    assert [event["accuracy"] for event in found] == [1.0, 1.0, 0.5]
    assert [event["tokens_per_second"] for event in found] == [2000.0, 2000.0, 0.0]
    assert found[2]["misses"] == ["dog: Is it an animal? no", "dog: Does it have four legs? no"]
    tell_self_tests([], SelfTest(min_accuracy=1.0), events)


@pytest.mark.parametrize(("floor", "warned"), [(0.0, False), (1999.0, False), (2001.0, True)])
def test_Q3_a_judge_below_the_floor_of_speed_is_warned_of(
    floor: float, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = SelfTest(min_accuracy=1.0, min_tokens_per_second=floor)
    tell_self_tests([GOOD], settings, EventLog(tmp_path / "events.jsonl", "run"))
    assert ("WARNING: judge 0 is slower" in capsys.readouterr().err) is warned


def test_Q2_logits_that_are_not_finite_are_refused_whatever_the_bound(tmp_path: Path) -> None:
    broken = SelfTestReport(4, (), 0, finite=False)
    with pytest.raises(UserError, match="logits were not finite"):
        tell_self_tests([broken], SelfTest(min_accuracy=0.0), EventLog(tmp_path / "e.jsonl", "run"))


def test_every_restart_is_printed_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell = restart_teller(EventLog(tmp_path / "events.jsonl", "run"))
    tell(3, "out of memory")
    assert capsys.readouterr().err == "judge 3 died and is started again: out of memory\n"
    (event,) = records(tmp_path / "events.jsonl")
    assert (event["kind"], event["replica"], event["reason"]) == (
        "judge_restart",
        3,
        "out of memory",
    )
