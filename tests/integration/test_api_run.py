"""Runs of ``train.py`` through Ray whose judge is a service that misbehaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ATTEMPTS, RAY_IS_LATE, START_SECONDS, start, to_end

from delta_belief_rl.envs.base import JudgeRequest
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.judge.rules_judge import WorldJudge
from delta_belief_rl.judge.selftest import FACTS
from delta_belief_rl.obs.exits import ExitStatus
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.types import Verdict
from tests.api_server import KEY, MODEL, Body, FakeApi, guessing, serving, world_answer

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(1200)]

JUDGE = "judge_rollout"
SETTINGS = (
    "judge=api",
    f"{JUDGE}.model.api_model_name={MODEL}",
    f"{JUDGE}.replicas=2",
    "trainer.total_training_steps=1",
    "trainer.final_test=false",
    "trainer.validation.greedy=false",
)


@pytest.fixture
def api(tiny_world: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    with serving(FakeApi(answer=world_answer(str(tiny_world)))) as service:
        monkeypatch.setenv("OPENAI_BASE_URL", service.url)
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        yield service


def is_probe(body: Body) -> bool:
    """Whether it is the look at the service before the run: every question names a secret."""
    return not body["messages"][-1]["content"].startswith("Secret word:")


def held(folder: Path) -> bytes:
    """Everything that a run has written."""
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_J1_J2_J16_a_run_outlives_a_service_that_misbehaves_and_counts_every_fault(
    api: FakeApi, tiny_world: Path, tmp_path: Path
) -> None:
    # Every tenth question is always withheld; of all other calls a fifth goes wrong.
    api.cursed, api.chaos, api.seed, api.cost = 0.1, 0.2, 11, 0.001
    out = tmp_path / "run"
    untested = (f"{JUDGE}.self_test.enabled=false", f"{JUDGE}.max_error_rate=0.5")
    done = to_end(out, tiny_world, *SETTINGS, *untested)
    assert "Traceback" not in done.output
    assert KEY not in done.output
    assert KEY.encode() not in held(out)

    judge = WorldJudge(load_world(str(tiny_world)))
    files = [*out.glob("rollout/[!.]*.jsonl"), *out.glob("validation/*.jsonl")]
    turns = [
        (game.task, turn)
        for file in files
        for game in read_trajectories(file).trajectories
        for turn in game.turns
    ]
    verdicts = Counter(turn.verdict for _, turn in turns)
    assert verdicts[Verdict.ERROR] > 0
    assert verdicts[Verdict.YES] + verdicts[Verdict.NO] > 20
    for task, turn in turns:
        if turn.verdict is Verdict.ERROR:
            assert turn.raw_verdict.startswith("error: filtered: ")
        elif turn.verdict in (Verdict.YES, Verdict.NO):
            truth = judge.answer([JudgeRequest(task, turn.action)])[0].verdict
            assert turn.verdict is truth

    records = read_records(out / "metrics.jsonl")
    told = Counter[str]()
    for record in records:
        for head in ("judge/", "val-aux/judge/"):
            for name, value in record.items():
                if name.startswith(f"{head}api_faults/"):
                    told[name.removeprefix(f"{head}api_faults/")] += int(value)
    # All but the faults and the costs of the probes: a start that Ray was late for has one, too.
    assert told["filtered"] == api.met.count("filtered")
    answered = [body for body in api.well if not is_probe(body)]
    probes = len(api.well) - len(answered)
    probe_faults = sum(is_probe(body) for body in api.requests) - probes
    assert sum(told.values()) == len(api.met) - probe_faults
    costs = sum(r.get("judge/cost", 0) + r.get("val-aux/judge/cost", 0) for r in records)
    assert costs == pytest.approx(0.001 * len(answered))


def test_J2_a_run_ends_with_one_sentence_when_its_service_fails_too_often(
    api: FakeApi, tiny_world: Path, tmp_path: Path
) -> None:
    # The probe and the self-test go well, and the first questions, too.
    api.spared, api.chaos = 1 + len(FACTS) + 20, 1.0
    api.kinds = ("no_money",)
    out = tmp_path / "run"
    for _ in range(ATTEMPTS):
        run = start(out, tiny_world, *SETTINGS)
        output, _ = run.process.communicate(timeout=START_SECONDS)
        if RAY_IS_LATE not in output:
            break
    assert run.process.returncode == ExitStatus.CHECK_FAILED, output[-4000:]
    assert f"judge 0: {len(FACTS)} of {len(FACTS)} plain facts answered rightly" in output
    assert "judge 1: " not in output
    (line,) = [line for line in output.splitlines() if "judge replies are errors" in line]
    assert "more than the allowed 5%; the last one: " in line
    assert "refused: HTTP 402: Insufficient credits" in line
    assert "Traceback" not in output
    assert KEY not in output
    assert KEY.encode() not in held(out)


def test_J9_a_policy_and_a_judge_behind_apis_play_an_evaluation(
    api: FakeApi, tiny_world: Path, tmp_path: Path
) -> None:
    world = load_world(str(tiny_world))
    judge, player = world_answer(str(tiny_world)), guessing(world.splits["val"])

    def answer(body: Body) -> str:
        return judge(body) if body["model"] == MODEL else player(body)

    api.answer, api.chaos, api.seed = answer, 0.2, 4
    out = tmp_path / "run"
    done = to_end(
        out,
        tiny_world,
        *SETTINGS,
        "actor_rollout_ref.model.api_model_name=stand-in/player",
        "trainer.val_only=true",
        "multi_turn.logprob_reward.enabled=false",
        "multi_turn.max_turns={train: 5, val: 5}",
    )
    assert "Traceback" not in done.output
    assert f"judge 0: {len(FACTS)} of {len(FACTS)} plain facts answered rightly" in done.output
    (record,) = read_records(out / "metrics.jsonl")
    # Three things are guessed one after the other, and one of them is the secret.
    assert record["val-core/strict_success_rate"] == 1.0
    assert record["val-core/error_games"] == 0
    assert record["val-aux/player/api_faults"] > 0
    assert record["val-aux/judge/api_faults"] > 0
    assert KEY not in done.output
    assert KEY.encode() not in held(out)
