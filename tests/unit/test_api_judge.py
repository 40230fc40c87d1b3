"""A judge behind an API: its replies, its pool, its settings, and the look at its service."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import train
from delta_belief_rl.cli.main import main as cli
from delta_belief_rl.cluster import app
from delta_belief_rl.cluster.judges import is_self_tested, least_accuracy
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.rules import problems
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.engines.api_client import ApiSettings, Endpoint
from delta_belief_rl.engines.api_text import ApiTextEngine
from delta_belief_rl.engines.base import SamplingParams
from delta_belief_rl.envs.base import Judge, JudgeReply, JudgeRequest
from delta_belief_rl.envs.worlds.table import World, load_world
from delta_belief_rl.eval.judge_trial import world_questions
from delta_belief_rl.judge.api_judge import ApiJudge, ApiJudgeSettings, probe_service
from delta_belief_rl.judge.build import build_judge
from delta_belief_rl.judge.llm_judge import LlmJudge, LlmJudgeSettings
from delta_belief_rl.judge.pool import (
    JudgePool,
    JudgePoolFailure,
    JudgePoolSettings,
    local_replica,
)
from delta_belief_rl.judge.prompts import opening_key
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.judge.selftest import self_test
from delta_belief_rl.trainer.doctor import CHECKS, examine
from delta_belief_rl.trainer.doctor_engine import DoctorSettings
from delta_belief_rl.trainer.judge_settings import judge_calls, judge_settings, pool_settings
from delta_belief_rl.trainer.settings import judge_cache_key
from delta_belief_rl.types import UserError, Verdict
from tests.api_server import KEY, MODEL, FakeApi, Fault, serving, world_answer
from tests.runs import words, write_world

JUDGE = "judge_rollout"
LIMIT = "judge_rollout.rollout.response_length"
ASKED = LlmJudgeSettings(with_history=False)
SAMPLING = SamplingParams(temperature=0.7, top_k=20, max_tokens=50)
QUICK = JudgePoolSettings(deadline=120.0, backoff=0.001, max_batch=4, max_outstanding=16)


@pytest.fixture(scope="module")
def world() -> World:
    return load_world("everyday")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    """A service that answers from the world's table, named by the environment."""
    with serving(FakeApi(answer=world_answer("everyday"))) as service:
        monkeypatch.setenv("OPENAI_BASE_URL", service.url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        yield service


@pytest.fixture
def judges(api: FakeApi) -> Iterator[list[LlmJudge]]:
    """Two replicas with short waits."""
    with ExitStack() as open_engines:
        out: list[LlmJudge] = []
        for _ in range(2):
            quick = {"backoff": 0.001, "max_backoff": 0.01, "max_attempts": 20}
            settings = ApiSettings(MODEL, deadline=60.0, concurrency=8, **quick)
            engine = ApiTextEngine(Endpoint(api.url, KEY), settings)
            open_engines.callback(engine.close)
            out.append(LlmJudge(engine, ASKED))
        yield out


def questions(world: World, count: int) -> list[JudgeRequest]:
    """Distinct questions of the table."""
    return [
        JudgeRequest(one.task, one.text, key=f"{one.task.id}/{one.text}")
        for one in world_questions(world, count)
    ]


def ask_all(
    judges: Sequence[Judge], asked: Sequence[JudgeRequest], settings: JudgePoolSettings = QUICK
) -> tuple[list[JudgeReply], JudgePool]:
    replicas = [local_replica(judge, threaded=True) for judge in judges]
    pool = JudgePool(replicas, settings)

    async def main() -> list[JudgeReply]:
        return list(await asyncio.gather(*(pool.ask(request) for request in asked)))

    return asyncio.run(main()), pool


def config(*more: str) -> RunConfig:
    return load_config(["experiment=quickstart", "judge=api", *more])[0]


# --- replies --------------------------------------------------------------------------------------


@pytest.mark.fault
def test_J1_every_answer_through_a_service_that_misbehaves_is_that_of_the_table(
    api: FakeApi, judges: list[LlmJudge], world: World
) -> None:
    api.chaos, api.seed, api.cost = 0.3, 3, 0.001
    asked = questions(world, 120)
    replies, pool = ask_all(judges, asked)
    truth = WorldJudge(world).answer(asked)
    assert [reply.verdict for reply in replies] == [reply.verdict for reply in truth]
    assert {reply.verdict for reply in replies} == {Verdict.YES, Verdict.NO}
    stats = pool.stats()
    assert len(api.met) > 30
    assert sum(stats.faults.values()) == len(api.met)
    assert (stats.errors, stats.retries, stats.calls) == (0, 0, len(asked))
    # Each answer was paid for once.
    assert stats.cost == pytest.approx(0.001 * len(asked))
    assert stats.tokens == 100 * len(asked)


@pytest.mark.fault
def test_J1_what_the_service_withholds_is_an_error_with_its_reason_and_the_others_count(
    api: FakeApi, judges: list[LlmJudge], world: World
) -> None:
    api.chaos, api.kinds = 0.1, ("filtered", "bad_request")
    asked = questions(world, 80)
    lenient = JudgePoolSettings(deadline=120.0, backoff=0.001, max_attempts=1, max_error_rate=1.0)
    replies, pool = ask_all(judges, asked, lenient)
    failed = [reply for reply in replies if reply.verdict is Verdict.ERROR]
    truth = WorldJudge(world).answer(asked)
    good = [(a.verdict, b.verdict) for a, b in zip(replies, truth, strict=True) if a not in failed]
    assert all(ours is theirs for ours, theirs in good)
    assert 0 < len(failed) == len(api.met) == pool.stats().errors
    reasons = {
        "filtered": "filtered: the service's content filter withholds the answer",
        "bad_request": "refused: HTTP 400: This is bad_request",
    }
    assert Counter(reply.reason for reply in failed) == Counter(reasons[k] for k in api.met)
    assert pool.stats().failures == Counter(reply.reason for reply in failed)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("kind", "temperature"),
    [
        *(dict.fromkeys(("server_error", "too_many", "drop", "html", "forbidden"), 0.0).items()),
        *(dict.fromkeys(("filtered", "empty_content"), 0.7).items()),
    ],
)
def test_R15_a_service_that_was_out_does_not_change_what_a_greedy_judge_is_asked(
    kind: str, temperature: float, api: FakeApi, world: World
) -> None:
    api.faults = [Fault(kind)]
    settings = ApiSettings(MODEL, deadline=60.0, max_attempts=1)
    with closing(ApiTextEngine(Endpoint(api.url, KEY), settings)) as engine:
        (reply,), pool = ask_all([LlmJudge(engine, ASKED)], questions(world, 1))
    assert reply.verdict in (Verdict.YES, Verdict.NO)
    assert pool.stats().retries == 1
    # What the model itself gave no answer to is drawn anew.
    assert [body["temperature"] for body in api.requests] == [0.0, temperature]


@pytest.mark.fault
def test_J2_a_service_that_fails_too_often_ends_it_with_its_reason(
    api: FakeApi, judges: list[LlmJudge], world: World
) -> None:
    api.chaos, api.kinds = 1.0, ("no_money",)
    with pytest.raises(JudgePoolFailure, match=r"more than the allowed 10%.*Insufficient credits"):
        ask_all(judges, questions(world, 100))


@pytest.mark.fault
def test_J10_a_judge_whose_connections_have_gone_stale_answers_the_first_question(
    api: FakeApi, judges: list[LlmJudge], world: World
) -> None:
    asked = questions(world, 16)
    ask_all(judges, asked)
    older = set(api.ports)
    api.ports.clear()
    # The first call after a pause meets a dead connection, on either replica.
    api.faults = [Fault("drop"), Fault("reset")]
    replies, pool = ask_all(judges, asked)
    assert Verdict.ERROR not in {reply.verdict for reply in replies}
    assert pool.stats().faults == {"connection": 2}
    assert set(api.ports) - older


def test_J16_the_first_of_equal_questions_bears_cost_and_faults(
    api: FakeApi, judges: list[LlmJudge], world: World
) -> None:
    api.cost = 0.5
    api.faults = [Fault("server_error")]
    (request,) = questions(world, 1)
    first, second = judges[0].answer([request, request])
    assert (first.cost, first.faults, first.tokens) == (0.5, ("server",), 100)
    assert (second.cost, second.faults, second.tokens) == (0.0, (), 0)
    assert second.verdict is first.verdict
    assert len(api.requests) == 2


def test_Q2_the_self_test_asks_an_api_judge_like_any_other(api: FakeApi) -> None:
    api.chaos = 0.05
    judge = build_judge(ApiJudgeSettings(MODEL, ASKED, deadline=60.0))
    assert isinstance(judge, ApiJudge)
    report = self_test(judge)
    judge.close()
    assert (report.accuracy, report.errors) == (1.0, 0)
    api.chaos, api.kinds = 1.0, ("forbidden",)
    judge = build_judge(ApiJudgeSettings(MODEL, ASKED, deadline=60.0))
    assert isinstance(judge, ApiJudge)
    report = self_test(judge)
    judge.close()
    assert (report.errors, report.passes(0.8)) == (report.asked, False)


# --- settings -------------------------------------------------------------------------------------


def test_settings_say_what_the_configuration_does_and_hold_no_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    body = "{provider: {order: [one, two]}, usage: {include: true}}"
    cfg = config(
        f"{JUDGE}.replicas=3",
        f"{JUDGE}.timeout_s=40",
        f"{JUDGE}.model.api_extra_body={body}",
        f"{JUDGE}.rollout.response_length=77",
    )
    assert list(problems(cfg)) == []
    settings = judge_settings(cfg, 1)
    assert isinstance(settings, ApiJudgeSettings)
    assert (settings.model, settings.deadline) == ("qwen/qwen3-235b-a22b-2507", 40.0)
    # 200 calls over three replicas; the pool waits longer than a replica does.
    pool = pool_settings(cfg)
    assert settings.concurrency == pool.max_outstanding == judge_calls(cfg) == 67
    assert (pool.max_batch, pool.deadline) == (1, 55.0)
    assert settings.extra == {"provider": {"order": ["one", "two"]}, "usage": {"include": True}}
    assert (settings.asked.mode, settings.asked.response_length) == ("cot", 77)
    assert KEY.encode() not in pickle.dumps((settings, cfg))


def test_an_api_judge_is_tested_once_cached_and_not_tested_again_when_it_is_replaced() -> None:
    assert is_self_tested(config())
    assert not is_self_tested(config(f"{JUDGE}.self_test.enabled=false"))
    assert least_accuracy(config()) is None
    assert judge_cache_key(config()) is opening_key


@pytest.mark.parametrize("name", ["messages", "model", "stream", "n", "max_tokens", "seed"])
def test_U2_what_the_run_decides_is_no_part_of_the_extra_body(name: str) -> None:
    (sentence,) = problems(config(f"{JUDGE}.model.api_extra_body={{{name}: 1}}"))
    assert sentence.startswith(f"judge_rollout.model.api_extra_body must not hold {name}")


# --- the start ------------------------------------------------------------------------------------


@pytest.mark.fault
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("forbidden", "(HTTP 403: Your key may not use this model"),
        ("no_model", "(HTTP 404: The model `stand-in/judge` does not exist"),
        ("html", "(the reply is not JSON: '<!DOCTYPE html>"),
    ],
)
def test_a_service_that_does_not_answer_is_refused_with_its_own_reason(
    kind: str, said: str, api: FakeApi
) -> None:
    api.faults = [Fault(kind)] * 9
    settings = ApiSettings(MODEL, backoff=0.001)
    with pytest.raises(UserError) as refused:
        probe_service(settings, SAMPLING, JUDGE, LIMIT)
    text = str(refused.value)
    assert text.startswith(f"The service at {api.url.split('/')[2]} does not answer for the model ")
    assert said in text
    assert KEY not in text


@pytest.mark.fault
def test_a_service_that_answers_in_the_end_is_taken_after_one_cheap_call(api: FakeApi) -> None:
    api.faults = [Fault("unavailable"), Fault("garbled")]
    probe_service(ApiSettings(MODEL, backoff=0.001), SAMPLING, JUDGE, LIMIT)
    assert len(api.requests) == 3
    last = api.requests[-1]
    # It says all that a request of the run may say, so that nothing is refused later.
    assert (last["max_tokens"], last["temperature"], last["top_k"]) == (50, 0.7, 20)
    assert len(json.dumps(last["messages"])) < 100


@pytest.mark.fault
def test_a_model_that_thinks_until_its_tokens_are_spent_is_refused_at_the_start(
    api: FakeApi,
) -> None:
    api.faults = [Fault("thought_only")]
    with pytest.raises(UserError) as refused:
        probe_service(ApiSettings(MODEL), SAMPLING, JUDGE, LIMIT)
    text = str(refused.value)
    assert "spends all 50 tokens of an answer before its text begins" in text
    assert "judge_rollout.model.api_extra_body" in text
    assert text.endswith(f"raise the limit {LIMIT}.")
    assert "\n" not in text
    # A word that is merely cut off after its beginning is one.
    api.faults = [Fault("cut")]
    probe_service(ApiSettings(MODEL), SAMPLING, JUDGE, LIMIT)


def run_words(folder: Path, *more: str) -> list[str]:
    world = write_world(folder / "tiny.yaml")
    name = f"{JUDGE}.model.api_model_name={MODEL}"
    return words(folder / "run", world, "judge=api", name, *more)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("environ", "part"),
    [
        ({"OPENAI_API_KEY": ""}, "The environment variable OPENAI_API_KEY is not set"),
        ({"OPENAI_BASE_URL": ""}, "The environment variable OPENAI_BASE_URL is not set"),
        ({"OPENAI_API_KEY": "sk-some-wrong-key"}, "HTTP 401: Incorrect API key provided: [key]."),
        ({"OPENAI_BASE_URL": "{url}/nowhere"}, "HTTP 404: Not Found"),
    ],
)
def test_U2_a_wrong_key_or_address_ends_the_run_before_anything_starts(
    environ: dict[str, str],
    part: str,
    api: FakeApi,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reached(*_args: Any) -> None:
        raise AssertionError("Ray was about to start")

    monkeypatch.setattr(app, "ray_session", reached)
    monkeypatch.setattr(app, "exit_on_sigterm", lambda: None)
    for name, value in environ.items():
        monkeypatch.setenv(name, value.format(url=api.url.removesuffix("/v1")))
    assert train.main(run_words(tmp_path)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert part in line
    assert "sk-" not in line
    assert not (tmp_path / "run" / "plan.txt").exists()


def test_the_audit_asks_an_api_judge(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    api.chaos, api.seed = 0.2, 1
    name = f"{JUDGE}.model.api_model_name={MODEL}"
    asked = ["env=everyday", "judge=api", name]
    status = cli(["audit", "judge", "--json", "--questions", "24", "--rounds", "1", *asked])
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert status == 0
    (made,) = document["made"].values()
    assert made == {"engine": "api", "model": MODEL}
    assert KEY not in shown.out + shown.err


def test_the_doctor_examines_an_api_judge_and_has_no_check_of_an_api_policy(api: FakeApi) -> None:
    name = f"{JUDGE}.model.api_model_name={MODEL}"
    others = tuple(check for check in CHECKS if check != "judge")
    found = examine(config(name), "cpu", 1, DoctorSettings(skip=others))
    (facts,) = [check for check in found if check.name == "judge_facts"]
    assert (facts.passed, facts.value) == (True, 0.0)
    policy = config(name, "actor_rollout_ref.model.api_model_name=stand-in/player")
    found = examine(policy, "cpu", 1, DoctorSettings(skip=("judge", "versions")))
    assert {check.passed for check in found} == {None}
    assert any("actor_rollout_ref.model.api_model_name" in check.note for check in found)
