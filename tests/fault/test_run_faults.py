"""Runs that go on although something around the training fails, and lose nothing by it."""

from __future__ import annotations

import time
from itertools import cycle
from pathlib import Path

import pytest

from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.judge.pool import JudgePool
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.types import Verdict
from tests.runs import assert_same_run, metrics_of, play, words, write_world

pytestmark = pytest.mark.fault

DAY = 86_400.0
SHORT = ("trainer.total_training_steps=2", "trainer.test_freq=1", "judge_rollout.max_error_rate=1")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, world: Path) -> Path:
    """A run that nothing disturbs."""
    out = tmp_path_factory.mktemp("straight") / "run"
    assert play(words(out, world, *SHORT))[0] == 0
    return out


def test_V7_evaluation_games_that_fail_are_counted_and_training_does_not_notice(
    tmp_path: Path, world: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = read_records(straight / "validation" / "1.jsonl")
    broken = rows[0]["secret"]
    real = JudgePool.ask

    async def ask(self: JudgePool, request: JudgeRequest) -> JudgeReply:
        if request.task.secret == broken:
            return JudgeReply(Verdict.ERROR, reason="the judge is away")
        return await real(self, request)

    monkeypatch.setattr(JudgePool, "ask", ask)
    out = tmp_path / "run"
    status, _ = play(words(out, world, *SHORT))
    assert status == 0
    pairs = list(zip(metrics_of(straight), metrics_of(out), strict=True))
    assert [record["step"] for record, _ in pairs] == [0, 1, 2]
    games = sum(row["secret"] == broken for row in rows)
    for whole, failed in pairs:
        assert whole["val-core/error_games"] == 0
        assert failed["val-core/error_games"] == games > 0
        # Pass@k is of evaluations.
        trained = {name for name in whole if not name.startswith("val") and "pass@k" not in name}
        assert {name: failed[name] for name in trained} == {name: whole[name] for name in trained}
    after = read_records(out / "validation" / "1.jsonl")
    assert len(after) == len(rows)
    assert {row["stop"] for row in after if row["secret"] == broken} == {"judge_failed"}


def test_a_clock_that_jumps_by_days_changes_nothing_and_nothing_hangs(
    tmp_path: Path, world: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, ahead = time.time, cycle((0.0, DAY, -DAY))
    jumps: list[float] = []

    def wall_clock() -> float:
        jumps.append(next(ahead))
        return real() + jumps[-1]

    monkeypatch.setattr(time, "time", wall_clock)
    out = tmp_path / "run"
    assert play(words(out, world, *SHORT))[0] == 0
    assert {-DAY, DAY} <= set(jumps)
    assert_same_run(straight, out)
    # Durations are those of a clock that does not jump.
    for record in read_records(out / "metrics.jsonl"):
        seconds = [value for name, value in record.items() if name.startswith("timing_s/")]
        assert all(0 <= value < 600 for value in seconds)
