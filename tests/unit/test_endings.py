"""A run that ends by itself says so in one sentence (``cluster.endings``)."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from delta_belief_rl.cluster.endings import ENDINGS, STOPS, tell_ending
from delta_belief_rl.cluster.groups import SyncMismatch
from delta_belief_rl.cluster.ranks import RankFailure
from delta_belief_rl.engines.pump import EngineFailure
from delta_belief_rl.judge.pool import JudgePoolFailure
from delta_belief_rl.obs.events import EventLog
from delta_belief_rl.obs.exits import ExitStatus
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.trainer.crosscheck import CheckFailed
from delta_belief_rl.trainer.health import RunCollapsed

ERRORS = [
    (RunCollapsed("the policy repeats itself"), "collapsed", ExitStatus.COLLAPSED),
    (CheckFailed("gap of 3 nats"), "check_failed", ExitStatus.CHECK_FAILED),
    (SyncMismatch("replica 0 differs"), "sync_failed", ExitStatus.CHECK_FAILED),
    (JudgePoolFailure("no judge is left"), "judge_failed", ExitStatus.CHECK_FAILED),
    (EngineFailure("vLLM failed"), "engine_failed", ExitStatus.CHECK_FAILED),
    (RankFailure("rank 1 died", (1,), "update"), "rank_failed", ExitStatus.CHECK_FAILED),
]


@pytest.mark.parametrize(("error", "kind", "status"), ERRORS, ids=[kind for _, kind, _ in ERRORS])
def test_each_ending_is_one_line_one_event_and_a_status(
    error: Exception, kind: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(error, STOPS)
    log = EventLog(tmp_path / "events.jsonl", "run")
    assert tell_ending(error, 7, log) == status
    assert capsys.readouterr().err == f"{error}\n"
    (event,) = read_records(tmp_path / "events.jsonl")
    assert (event["kind"], event["step"], event["reason"]) == (kind, 7, str(error))


def test_every_ending_is_tried_here() -> None:
    assert {type(error) for error, _, _ in ERRORS} == set(ENDINGS)


def test_L1_a_failure_in_another_process_is_told_without_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cause = EngineFailure("vLLM holds\nno adapter")
    error = RayTaskError("sync", "a long\ntraceback", cause).as_instanceof_cause()
    assert isinstance(error, STOPS)
    tell_ending(error, 0, EventLog(tmp_path / "events.jsonl", "run"))
    assert capsys.readouterr().err == "vLLM holds no adapter\n"


def test_a_defect_is_no_ending() -> None:
    assert not isinstance(KeyError("x"), STOPS)
    assert not isinstance(RuntimeError("x"), STOPS)
