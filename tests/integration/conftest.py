"""One straight run of ``train.py`` through Ray, shared by the tests of this folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from delta_belief_rl.obs.jsonl import read_records
from tests.processes import born, descendants, mentioning
from tests.runs import ROOT, words, write_world

START_SECONDS = 600.0
"""Longest that a tiny run may take on a busy machine."""
GONE_SECONDS = 60.0
"""Longest that processes may outlive a killed driver."""
ATTEMPTS, RAY_IS_LATE = 3, "timed out during startup"
"""Ray gives its own processes 30 seconds, which a busy machine may exceed."""


@dataclass
class RealRun:
    """A process of ``train.py`` in a process group of its own.

    Attributes:
        scratch: Folder of everything temporary, Ray's included.
        output: What it printed, once it is over.
    """

    process: subprocess.Popen[str]
    scratch: Path
    output: str = ""

    def kill(self) -> bool:
        """SIGKILL to the whole group; returns when every descendant is gone, too.

        Returns:
            False where the run had come to its own end before.
        """
        family = {pid: born(pid) for pid in [self.process.pid, *descendants(self.process.pid)]}
        alive = self.process.poll() is None
        if alive:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.output, _ = self.process.communicate(timeout=GONE_SECONDS)
        deadline = time.monotonic() + GONE_SECONDS
        while left := [pid for pid, birth in family.items() if birth and born(pid) == birth]:
            assert time.monotonic() < deadline, f"still alive: {left}"
            time.sleep(0.2)
        assert mentioning(str(self.scratch)) == []
        shutil.rmtree(self.scratch, ignore_errors=True)
        return alive and self.process.returncode == -signal.SIGKILL


@dataclass
class Finished:
    """A run that is over, and how long it took."""

    out: Path
    output: str
    seconds: float
    scratch: Path


def start(out: Path, world: Path, *more: str) -> RealRun:
    """Start ``train.py`` through Ray."""
    # Short, because Ray's sockets lie below it.
    scratch = Path(tempfile.mkdtemp(prefix="db", dir="/tmp"))
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}
    process = subprocess.Popen(
        [sys.executable, "train.py", *words(out, world, *more)],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return RealRun(process, scratch)


def to_end(out: Path, world: Path, *more: str) -> Finished:
    """Run ``train.py`` through Ray to its end; it must end well."""
    for _ in range(ATTEMPTS):
        began = time.monotonic()
        run = start(out, world, *more)
        output, _ = run.process.communicate(timeout=START_SECONDS)
        done = Finished(out, output, time.monotonic() - began, run.scratch)
        if run.process.returncode == 0 or RAY_IS_LATE not in output:
            break
    assert run.process.returncode == 0, output[-4000:]
    return done


def steps_of_starts(out: Path) -> list[int]:
    """Steps after which the starts of a run so far went on."""
    path = out / "events.jsonl"
    events = read_records(path) if path.exists() else []
    return [event["step"] for event in events if event["kind"] == "start"]


@pytest.fixture(scope="session")
def tiny_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("world") / "tiny.yaml")


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, tiny_world: Path) -> Iterator[Finished]:
    """A run through Ray that nothing disturbs."""
    done = to_end(tmp_path_factory.mktemp("straight") / "run", tiny_world)
    yield done
    shutil.rmtree(done.scratch, ignore_errors=True)
