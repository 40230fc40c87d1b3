"""A training under the watchdog, killed again and again, ends as the straight one.

The training is that of ``train.py`` with its workers in one process: what Ray's processes do when
their driver is killed has tests of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conftest import START_SECONDS, steps_of_starts

from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.obs.run_facts import RunFacts, read_run_facts
from delta_belief_rl.trainer import checkpoint
from tests.processes import mentioning
from tests.runs import ROOT, STEPS, assert_same_run, play, words

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(1200)]

TRAIN = "import sys; from tests.runs import play; sys.exit(play(sys.argv[1:])[0])"
KILL_AFTER = (1, 3)
"""Training steps that are recorded when the run is killed, once for each."""


def running(logs: Path) -> RunFacts | None:
    """What the start that goes on has said of itself."""
    numbers = [int(path.stem.removeprefix("start-")) for path in logs.glob("start-*.log")]
    return read_run_facts(logs / f"start-{max(numbers)}.run.json") if numbers else None


def test_R1_H6_a_run_that_is_killed_twice_under_the_watchdog_ends_as_the_straight_one(
    tmp_path: Path, tiny_world: Path
) -> None:
    straight, out, logs = tmp_path / "straight", tmp_path / "run", tmp_path / "logs"
    assert play(words(straight, tiny_world))[0] == 0
    scratch = Path(tempfile.mkdtemp(prefix="db", dir="/tmp"))
    options = ["--log-dir", str(logs), "--backoff", "0.1", "--max-restarts", "9"]
    command = [sys.executable, "-c", TRAIN, *words(out, tiny_world)]
    watchdog = subprocess.Popen(
        ["bash", "watchdog.sh", *options, "--", *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch), "PYTHON": sys.executable},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        killed: list[int] = []
        kept: list[tuple[int, int]] = []
        deadline = time.monotonic() + START_SECONDS
        while watchdog.poll() is None and time.monotonic() < deadline:
            facts = running(logs)
            steps = [record["step"] for record in read_records(out / "metrics.jsonl")]
            wanted = KILL_AFTER[len(killed)] if len(killed) < len(KILL_AFTER) else STEPS + 1
            if facts is not None and facts.pid not in killed and max(steps, default=0) >= wanted:
                killed.append(facts.pid)
                os.kill(facts.pid, signal.SIGKILL)
                latest = checkpoint.find_latest(out / "checkpoints")
                step = 0 if latest is None else latest.step
                kept.append((len(steps_of_starts(out)), step))
            time.sleep(0.05)
        _, said = watchdog.communicate(timeout=120)
    finally:
        if watchdog.poll() is None:
            watchdog.kill()
            watchdog.communicate()
    assert watchdog.returncode == 0, said
    state = json.loads((logs / "state.json").read_text())
    causes = [start["cause"] for start in state["starts"]]
    assert causes == ["killed"] * len(KILL_AFTER) + ["done"], said
    assert state["ended"]["reason"] == "the run is done"
    assert {start["run_dir"] for start in state["starts"] if start["run_dir"]} == {str(out)}
    # What was saved is never trained again.
    for starts, step in kept:
        assert all(begun >= step for begun in steps_of_starts(out)[starts:])
    assert mentioning(str(scratch)) == []
    shutil.rmtree(scratch, ignore_errors=True)
    assert_same_run(straight, out)
