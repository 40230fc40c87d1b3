"""A run that ends by itself says so in one sentence (``cluster.endings``)."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from delta_belief_rl.cluster.endings import ENDINGS, OUTSIDE, STOPS, ending_of, tell_ending
from delta_belief_rl.cluster.groups import SyncMismatch
from delta_belief_rl.cluster.ranks import RankFailure, RankOutOfMemory
from delta_belief_rl.cluster.ray_watch import RayLost
from delta_belief_rl.engines.pump import EngineFailure
from delta_belief_rl.judge.pool import JudgePoolFailure
from delta_belief_rl.obs.disk import DiskRefused
from delta_belief_rl.obs.events import EventLog
from delta_belief_rl.obs.exits import ExitStatus, Terminated
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.trainer.crosscheck import CheckFailed
from delta_belief_rl.trainer.health import RunCollapsed, RunStalled
from delta_belief_rl.trainer.own_failures import PluginFailed
from delta_belief_rl.types import UserError

ERRORS = [
    (DiskRefused("no space is left"), "disk_full", ExitStatus.DISK_FULL),
    (RunStalled("nothing is sampled", "zero_tokens"), "stalled", ExitStatus.STALLED),
    (RunCollapsed("the policy repeats itself"), "collapsed", ExitStatus.COLLAPSED),
    (CheckFailed("gap of 3 nats"), "check_failed", ExitStatus.CHECK_FAILED),
    (SyncMismatch("replica 0 differs"), "sync_failed", ExitStatus.CHECK_FAILED),
    (JudgePoolFailure("no judge is left"), "judge_failed", ExitStatus.CHECK_FAILED),
    (EngineFailure("vLLM failed"), "engine_failed", ExitStatus.CHECK_FAILED),
    (RayLost("the raylet is gone"), "ray_lost", ExitStatus.CHECK_FAILED),
    (PluginFailed("mine failed in apply"), "plugin_failed", ExitStatus.CHECK_FAILED),
    (
        RankOutOfMemory("rank 1 ran out of GPU memory", (1,), "update"),
        "out_of_memory",
        ExitStatus.OUT_OF_MEMORY,
    ),
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
    assert ending_of(KeyError("x")) is None
    assert ending_of(SystemExit(1)) is None
    assert ending_of(OSError(errno.EIO, "broken")) is None


@pytest.mark.parametrize(
    ("error", "kind", "status", "sentence"),
    [
        (
            Terminated(),
            "terminated",
            ExitStatus.TERMINATED,
            r"told to end \(SIGTERM\) after step 7",
        ),
        (KeyboardInterrupt(), "interrupted", ExitStatus.INTERRUPTED, "interrupted after step 7"),
        (
            OSError(errno.ENOSPC, "No space left on device", "run/metrics.jsonl"),
            "disk_full",
            ExitStatus.DISK_FULL,
            "No space is left for run/metrics.jsonl: make room",
        ),
    ],
)
def test_an_end_from_outside_is_one_sentence_that_says_how_to_go_on(
    error: BaseException,
    kind: str,
    status: int,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tell_ending(error, 7, EventLog(tmp_path / "events.jsonl", "run")) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(sentence, line)
    assert "trainer.resume_mode=auto" in line
    assert [event["kind"] for event in read_records(tmp_path / "events.jsonl")] == [kind]


def test_bad_input_is_told_by_the_program_and_has_a_status_of_its_own() -> None:
    ending = ending_of(UserError("no such file"))
    assert ending is not None
    assert (ending.status, ending.told) == (ExitStatus.BAD_INPUT, False)
    assert UserError in OUTSIDE


def test_a_run_that_stalled_names_the_rule_as_the_cause() -> None:
    error = RunStalled("nothing is sampled", "zero_tokens")
    ending = ending_of(error)
    assert ending is not None
    assert ending.cause_of(error) == "zero_tokens"
    failure = RankFailure("rank 1 died", (1,), "update")
    ending = ending_of(failure)
    assert ending is not None
    assert ending.cause_of(failure) == "rank_failed"
