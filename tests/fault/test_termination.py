"""A run that is told to end, in whatever phase, and one whose steps do nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from delta_belief_rl.cluster.workers import EngineWorker
from delta_belief_rl.engines.base import Completion, GenRequest
from delta_belief_rl.obs.exits import ExitStatus
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.trainer import checkpoint
from tests.processes import descendants, mentioning
from tests.runs import ROOT, STEPS, Trace, assert_same_run, play, words, write_world

pytestmark = [pytest.mark.fault, pytest.mark.slow]

END_SECONDS = 240.0
"""After this a run that was told to end hangs."""
RARELY = ("trainer.save_freq=4", "trainer.recovery_freq=-1")
"""Only the first and the last step are saved unless something makes it necessary."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, world: Path) -> Path:
    """The run that nothing disturbs."""
    out = tmp_path_factory.mktemp("straight") / "run"
    assert play(words(out, world))[0] == 0
    return out


@pytest.fixture(autouse=True)
def _sigterm_is_given_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@dataclass
class Told(Trace):
    """SIGTERM comes at the first point of a name after another point has come so often.

    Attributes:
        after: The other point.
        times: How often it comes before.
        name: The point.
    """

    after: str = ""
    times: int = 0
    name: str = ""
    told: list[int] = field(default_factory=list)

    def point(self, name: str) -> None:
        super().point(name)
        if not self.told and name == self.name and self.names.count(self.after) >= self.times:
            self.told.append(len(self.names))
            os.kill(os.getpid(), signal.SIGTERM)


RECORD = "MetricsLog.append done"


@pytest.mark.parametrize(
    ("phase", "after", "times", "name", "settings", "saved"),
    [
        # The record of step 0 is that of the first validation.
        ("sync", RECORD, 2, "EngineWorker.sync", RARELY, 1),
        ("play", RECORD, 2, "EngineWorker.step", RARELY, 1),
        ("score", RECORD, 3, "ActorWorker.score", RARELY, 2),
        ("update", RECORD, 2, "ActorWorker.update", RARELY, 0),
        ("validate", "ActorWorker.update", 2, "EngineWorker.step", RARELY, 0),
        ("save", RECORD, 2, "checkpoint.save", (), 1),
        ("final test", RECORD, STEPS + 1, "EngineWorker.step", RARELY, STEPS),
    ],
)
def test_R14_W7_a_run_told_to_end_saves_what_is_finished_and_resumes_as_the_straight_one(
    phase: str,
    after: str,
    times: int,
    name: str,
    settings: tuple[str, ...],
    saved: int,
    tmp_path: Path,
    world: Path,
    straight: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    trace = Told(after=after, times=times, name=name, threads=phase == "save")
    status, _ = play(words(out, world, *settings), trace=trace)
    assert (status, len(trace.told)) == (ExitStatus.TERMINATED, 1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("The run was told to end (SIGTERM) after step ")
    assert not [line for line in lines if "Traceback" in line]
    end = read_records(out / "events.jsonl")[-1]
    assert (end["kind"], end["status"], end["cause"]) == ("end", 143, "terminated")
    assert json.loads((out / "heartbeat.json").read_text())["status"] == "ended"
    latest = checkpoint.find_latest(out / "checkpoints")
    assert latest is not None
    assert latest.step == saved
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    status, again = play(words(out, world))
    assert (status, again.names.count("ActorWorker.update")) == (0, STEPS - saved)
    assert_same_run(straight, out)


def test_H1_an_engine_that_stays_paused_after_a_validation_ends_the_run_as_stalled(
    tmp_path: Path, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every later step looks like a step: games end, nothing was said in them."""
    worker: Any = EngineWorker.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    real = worker.step
    trace = Trace()

    def step(self: Any, new: list[GenRequest]) -> list[Completion]:
        answers = real(self, new)
        if "validation.write_groups done" not in trace.names:
            return answers
        return [replace(answer, token_ids=(), logprobs=()) for answer in answers]

    monkeypatch.setattr(worker, "step", step)
    out = tmp_path / "run"
    status, _ = play(words(out, world, "trainer.abort.max_invalid_turns=null"), trace=trace)
    assert status == ExitStatus.STALLED
    end = read_records(out / "events.jsonl")[-1]
    assert (end["kind"], end["status"], end["cause"]) == ("end", 5, "zero_tokens")
    tokens = [record.get("state_tokens/sampled") for record in read_records(out / "metrics.jsonl")]
    assert tokens[1:] == [0.0, 0.0, 0.0]


# --- real processes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "sent"),
    [
        ("Ray starts", signal.SIGTERM),
        ("games are played", signal.SIGTERM),
        ("games are played", signal.SIGINT),
    ],
)
def test_H3_W7_a_real_run_told_to_end_leaves_one_line_and_no_process(
    moment: str, sent: signal.Signals, tmp_path: Path, world: Path
) -> None:
    """By the batch system, which tells the driver alone, or by Ctrl-C, which all processes get."""
    said, status, cause = {
        signal.SIGTERM: ("told to end (SIGTERM)", ExitStatus.TERMINATED, "terminated"),
        signal.SIGINT: ("interrupted", ExitStatus.INTERRUPTED, "interrupted"),
    }[sent]
    out = tmp_path / "run"
    # Short, because Ray's sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="db", dir="/tmp") as scratch:
        process = subprocess.Popen(
            [sys.executable, "train.py", *words(out, world, "trainer.total_training_steps=400")],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": scratch},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            awaited = "events.jsonl" if moment == "Ray starts" else "rollout/1.jsonl"
            deadline = time.monotonic() + 300
            while not (out / awaited).exists() and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(1.0)
            family = descendants(process.pid)
            (os.killpg if sent is signal.SIGINT else os.kill)(process.pid, sent)
            output, _ = process.communicate(timeout=END_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == status, output
        assert output.count(f"The run was {said} after step") == 1
        assert "Traceback" not in output
        assert "SIGTERM" not in output.replace("told to end (SIGTERM)", "")
        end = read_records(out / "events.jsonl")[-1]
        assert (end["kind"], end["status"], end["cause"]) == ("end", status, cause)
        if moment == "games are played":
            assert family
            assert end["step"] >= 1
            saved = checkpoint.find_latest(out / "checkpoints")
            assert saved is not None
            # A step is finished once it has its record; one without is done again.
            assert saved.step == read_records(out / "metrics.jsonl")[-1]["step"]
            assert end["step"] - saved.step in (0, 1)
        assert mentioning(scratch) == []
