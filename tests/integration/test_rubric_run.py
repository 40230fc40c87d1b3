"""Rules of play that models write and check, through the whole loop."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from delta_belief_rl.algo.scorers.roles import Ask, Failure
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.trainer.rubrics import PolicyWriter
from tests.api_server import KEY, Body, FakeApi, Fault, serving
from tests.runs import (
    Trace,
    assert_same_state,
    games_of,
    metrics_of,
    play,
    state_of,
    words,
    write_world,
)

pytestmark = pytest.mark.slow
STEPS = 2
CHECKED = ("algorithm.orsd.verifier=model",)
WRITTEN = ("algorithm.orsd.writer=model", "algorithm.orsd.writer_tokens=24", *CHECKED)
SERVED = (*CHECKED, "algorithm.orsd.verifier_model=some/model")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    with serving(FakeApi(answer=by_outcome)) as api:
        monkeypatch.setenv("OPENAI_BASE_URL", api.url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        yield api


def by_outcome(body: Body) -> str:
    """A checker that finds every rule kept in the games that were won, and none in others."""
    text = body["messages"][-1]["content"]
    game, _, rules = text.partition("Rules:")
    kept = "yes" if "Finished" in game else "no"
    numbers = re.findall(r"^(\d+): [A-Z]", rules, flags=re.MULTILINE)
    return "\n".join(f"{number}: {kept}" for number in numbers) or "Yes"


def command(out: Path, world: Path, *more: str) -> list[str]:
    """Games that are long enough to be won by some, and room for a prompt."""
    return words(
        out,
        world,
        "algorithm=orsd",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=-1",
        "trainer.final_test=false",
        "multi_turn.max_turns={train: 10, val: 3}",
        "data.max_prompt_length=900",
        "algorithm.orsd.prompt_tokens=700",
        *more,
    )


def trained(out: Path) -> list[dict[str, Any]]:
    """Records of the steps, in each of which the policy moved and some group was asked about."""
    records = [record for record in read_records(out / "metrics.jsonl") if record["step"] > 0]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert record["actor/grad_norm"] > 0
        assert record["orsd/groups_asked"] > 0
        assert record["timing_s/prepare"] > 0
    return records


def test_a_policy_that_writes_nonsense_trains_without_rules(tmp_path: Path, world: Path) -> None:
    out = tmp_path / "run"
    assert play(command(out, world, *WRITTEN))[0] == 0
    for record in trained(out):
        assert record["orsd/groups_written"] == record["orsd/groups_chosen"] == 0
        assert record["orsd/writer_failures"] == record["orsd/verifier_failures"] == 0
        assert record["critic/view_share"] == 0.0
        assert record["critic/correction_size"] == 0.0


def test_R2_rules_that_the_frozen_base_checks_survive_a_resume(tmp_path: Path, world: Path) -> None:
    assert play(command(tmp_path / "straight", world, *CHECKED))[0] == 0
    for record in trained(tmp_path / "straight"):
        assert record["orsd/groups_written"] == record["orsd/groups_asked"]
        assert record["orsd/unread"] == record["orsd/verifier_failures"] == 0
        assert (record["orsd/groups_chosen"] > 0) == (record["critic/view_share"] > 0)
    first = command(tmp_path / "cut", world, *CHECKED)
    assert play([*first, "trainer.total_training_steps=1"])[0] == 0
    assert play(first)[0] == 0
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "straight")
    assert games_of(tmp_path / "cut") == games_of(tmp_path / "straight")
    assert_same_state(state_of(tmp_path / "cut"), state_of(tmp_path / "straight"))


def test_rules_that_a_service_checks_reach_the_advantages(
    tmp_path: Path, world: Path, service: FakeApi
) -> None:
    out = tmp_path / "run"
    assert play(command(out, world, *SERVED))[0] == 0
    for record in trained(out):
        assert record["orsd/groups_chosen"] == record["orsd/groups_written"] > 0
        assert record["orsd/unread"] == 0
        assert record["critic/view_share"] > 0
        assert record["critic/correction_size"] > 0
    assert {body["model"] for body in service.requests} == {"some/model"}


@pytest.mark.fault
def test_J1_a_service_that_fails_or_talks_stops_nothing(
    tmp_path: Path, world: Path, service: FakeApi
) -> None:
    # The look before the run meets the service in good health.
    service.spared, service.chaos, service.kinds = 1, 0.5, ("forbidden",)
    service.answer = lambda _body: "The player did well."
    out = tmp_path / "run"
    assert play(command(out, world, *SERVED))[0] == 0
    records = trained(out)
    assert all(record["orsd/unread"] > 0 for record in records)
    assert all(record["orsd/groups_chosen"] == 0 for record in records)
    failed = sum(record["orsd/verifier_failures"] for record in records)
    assert failed == sum(record["orsd/verifier_failures/service"] for record in records) > 0


@pytest.mark.fault
def test_J1_an_engine_that_dies_while_it_writes_is_replaced_and_training_goes_on(
    tmp_path: Path, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, real = Trace(), PolicyWriter.write

    async def write(writer: PolicyWriter, asks: Sequence[Ask]) -> list[str | Failure]:
        if not trace.deaths:
            step = "EngineWorker.step"
            trace.deaths = {step: [trace.names.count(step)]}
        return await real(writer, asks)

    monkeypatch.setattr(PolicyWriter, "write", write)
    out = tmp_path / "run"
    assert play(command(out, world, *WRITTEN), trace=trace)[0] == 0
    first, second = trained(out)
    assert first["orsd/writer_failures"] == first["orsd/writer_failures/engine"] > 0
    assert second["orsd/writer_failures"] == 0
    events = read_records(out / "events.jsonl")
    lost = [event for event in events if event["kind"] == "recovered"]
    assert [event["lost"] for event in lost] == ["engine"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("algorithm.orsd.writer=model",), "cannot check what a model writes"),
        ((*WRITTEN, "data.max_prompt_length=256"), "raise data.max_prompt_length"),
        (SERVED, "does not answer for the model some/model"),
    ],
)
def test_a_run_that_cannot_work_is_refused_with_one_sentence(
    more: tuple[str, ...],
    said: str,
    tmp_path: Path,
    world: Path,
    service: FakeApi,
    capsys: pytest.CaptureFixture[str],
) -> None:
    service.faults = [Fault("no_model")]
    out = tmp_path / "run"
    assert play(command(out, world, *more))[0] == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
    assert not (out / "metrics.jsonl").exists()
