"""``delta-belief compare`` over real runs: a method of one's own, and a run that is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ATTEMPTS, RAY_IS_LATE, START_SECONDS

from delta_belief_rl.cli.compare_plan import OURS
from delta_belief_rl.obs.jsonl import read_records
from tests.processes import arguments, descendants
from tests.runs import ROOT, metrics_of, words

EXAMPLE = ROOT / "docs" / "examples" / "late_turns.py"
STEPS = 2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Short, because Ray's sockets lie below it."""
    folder = Path(tempfile.mkdtemp(prefix="db", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def start(out: Path, world: Path, scratch: Path, *more: str) -> subprocess.Popen[str]:
    changed = {*OURS, "trainer.test_freq"}
    own = [word for word in words(out, world) if word.split("=")[0] not in changed]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "delta_belief_rl.cli.main", "compare", "--out", str(out)),
            *("--steps", str(STEPS), *more, *own, "trainer.test_freq=1"),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def to_end(out: Path, world: Path, scratch: Path, *more: str) -> str:
    """Give the command until it ends well; a Ray that was too slow is no finding."""
    for _ in range(ATTEMPTS):
        process = start(out, world, scratch, *more)
        output, _ = process.communicate(timeout=2 * START_SECONDS)
        logs = "".join(path.read_text() for path in out.glob("runs/*/*.log"))
        if process.returncode == 0 or RAY_IS_LATE not in logs:
            break
    assert process.returncode == 0, output[-4000:]
    return output


def test_a_method_of_ones_own_is_compared_with_grpo(
    tmp_path: Path, tiny_world: Path, scratch: Path
) -> None:
    out = tmp_path / "out"
    more = ["--methods", "grpo,late_turns", "--seeds", "1", f"plugins=[{EXAMPLE}]"]
    output = to_end(out, tiny_world, scratch, *more)
    found = json.loads((out / "compare.json").read_text())
    assert [one["method"] for one in found["methods"]] == ["grpo", "late_turns"]
    assert [one["form"] for one in found["methods"]] == ["CODE", "OWN"]
    for one in found["methods"]:
        assert one["steps"] == STEPS
        assert one["games"] == STEPS * 16
        assert one["tokens"] > 0
        assert one["host_gib"] > 0
        assert [point["step"] for point in one["curve"]] == [0, 1, STEPS]
        assert 1 <= one["turns"] <= 3
    assert [one["method"] for one in found["differences"]] == ["late_turns"]
    assert "late_turns differs from grpo in more than credit" in output
    # The same validation secrets, and the same games of the policy that both began with.
    first = [
        [(row["task_id"], row["token_ids"]) for row in read_records(path)]
        for path in sorted(out.glob("runs/*/seed1/validation/0.jsonl"))
    ]
    assert len(first) == 2
    assert first[0] == first[1]
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*.log")}
    to_end(out, tiny_world, scratch, *more)
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.fault
def test_R2_a_run_that_is_killed_in_the_middle_goes_on_with_the_same_command(
    tmp_path: Path, tiny_world: Path, scratch: Path
) -> None:
    out, more = tmp_path / "out", ["--methods", "opo", "--seeds", "3"]
    run = out / "runs" / "opo" / "seed3"
    killed = False
    for _ in range(ATTEMPTS):
        process = start(out, tiny_world, scratch, *more)
        deadline = time.monotonic() + START_SECONDS
        while len(read_records(run / "metrics.jsonl")) < 2 and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        drivers = [pid for pid in descendants(process.pid) if is_driver(pid, run)]
        for pid in drivers:
            os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=START_SECONDS)
        killed = process.returncode == 1 and bool(drivers)
        if killed or process.returncode == 0:
            break
    if killed:
        assert "opo with seed 3 failed: killed: " in output
        assert json.loads((out / "compare.json").read_text())["methods"] == []
    to_end(out, tiny_world, scratch, *more)
    record: dict[str, Any] = json.loads(run.with_name("seed3.json").read_text())
    assert record["status"] == 0
    assert record["cause"] == ""
    assert [one["step"] for one in read_records(run / "metrics.jsonl")] == [0, 1, STEPS]
    straight = tmp_path / "straight"
    to_end(straight, tiny_world, scratch, *more)
    assert metrics_of(run) == metrics_of(straight / "runs" / "opo" / "seed3")


def is_driver(pid: int, run: Path) -> bool:
    """Whether a process is the ``train.py`` of a run."""
    said = arguments(pid)
    return any(word.endswith("train.py") for word in said) and any(str(run) in w for w in said)
