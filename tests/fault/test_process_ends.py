"""However a driver ends, no process and no folder of its run stays; no other process is touched.

The driver is a small one with a private Ray, a worker and a child of the worker: what is to go is
the same as in a training run, and it starts in seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from delta_belief_rl.cluster import reaper
from delta_belief_rl.cluster.reaper import GRACE, MARK, Belongings, Reaper, clear, end, look_up

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.fault

ATTEMPTS, RAY_IS_LATE = 3, "timed out during startup"
"""Ray gives its own processes 30 seconds, which a busy machine may exceed."""

GONE_SECONDS = 240.0
"""Longest that anything may outlive the driver."""

DRIVER = """
import json, subprocess, sys, ray
from pathlib import Path
from delta_belief_rl.cluster.members import Present, remote_worker
from delta_belief_rl.cluster.ray_app import ray_session
from delta_belief_rl.config.schema_trainer import RayInit
from delta_belief_rl.obs.exits import exit_on_sigterm
from delta_belief_rl.cluster.stacks import dump_on_signal

@remote_worker()
class Worker(Present):
    def start(self):
        # Its own session and no pipe: nothing tells it that its parent has gone.
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        return child.pid

exit_on_sigterm()
dump_on_signal(Path(sys.argv[1]) / "logs")
with ray_session(RayInit(), 1, 0):
    worker = Worker.options(runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}).remote()
    ray.get(worker.present.remote())
    print(json.dumps(ray.get(worker.start.remote())), flush=True)
    if sys.stdin.readline() == "raise\\n":
        raise RuntimeError("a defect")
"""


@dataclass
class Driver:
    """A driver, its worker's child, and where everything temporary of it lies."""

    process: subprocess.Popen[str]
    child: int
    scratch: Path

    def ours(self) -> dict[int, str]:
        """Command lines of the living processes that mention the scratch folder, or the child."""
        found: dict[int, str] = {}
        for pid in reaper.processes():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                words = line + Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if pid == self.child or str(self.scratch).encode() in words:
                found[pid] = line.replace(b"\0", b" ").decode(errors="replace")
        return found


def launch(logs: Path, scratch: str) -> tuple[subprocess.Popen[str], str]:
    """A driver, and the first line that it printed."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(logs)],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": scratch},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline()


@contextmanager
def driver(logs: Path) -> Iterator[Driver]:
    # Short, because Ray's sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="db", dir="/tmp", ignore_cleanup_errors=True) as folder:
        for _ in range(ATTEMPTS):
            process, line = launch(logs, folder)
            if line:
                break
            error = process.communicate(timeout=GONE_SECONDS)[1]
            assert RAY_IS_LATE in error, error[-2000:]
            # A start that failed leaves nothing either.
            assert list(Path(folder).iterdir()) == []
        assert line, "Ray was late every time"
        try:
            yield Driver(process, json.loads(line), Path(folder))
        finally:
            process.kill()
            process.communicate(timeout=GONE_SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("cause", "status"),
    [("SIGKILL", -signal.SIGKILL), ("SIGTERM", 143), ("exception", 1), ("gcs_server", 1)],
)
def test_H3_H4_nothing_is_left_after_any_end_of_the_driver(
    cause: str, status: int, tmp_path: Path
) -> None:
    with driver(tmp_path) as run:
        before = run.ours()
        assert run.child in before
        assert any(run.scratch.iterdir())
        assert run.process.stdin is not None
        if cause == "exception":
            run.process.stdin.write("raise\n")
            run.process.stdin.flush()
        elif cause == "gcs_server":
            (head,) = [pid for pid, line in before.items() if line.split()[0].endswith(cause)]
            os.kill(head, signal.SIGKILL)
        else:
            run.process.send_signal(signal.Signals[cause])
        assert run.process.wait(GONE_SECONDS) == status
        deadline = time.monotonic() + GONE_SECONDS
        if cause in ("SIGTERM", "exception"):
            # Whoever waited for the driver finds nothing any more.
            deadline = 0.0
        while (left := run.ours()) or any(run.scratch.iterdir()):
            assert time.monotonic() < deadline, (left, list(run.scratch.iterdir()))
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_H11_sigusr1_writes_the_stacks_of_driver_and_workers_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    with driver(tmp_path) as run:
        run.process.send_signal(signal.SIGUSR1)
        assert run.process.stderr is not None
        told = next(line for line in run.process.stderr if line.startswith("stacks of"))
        (path,) = (tmp_path / "logs").iterdir()
        assert told == f"stacks of the driver and of 1 workers: {path}\n"
        text = path.read_text()
        driver_part, worker_part = text.split("== Worker, process ")
        assert driver_part.startswith(f"== driver, process {run.process.pid}\n")
        assert 'File "<string>"' in driver_part
        assert "default_worker.py" in worker_part
        assert run.process.poll() is None
        # It is as able to end well as before.
        run.process.communicate("\n", timeout=GONE_SECONDS)
        assert run.process.returncode == 0
        assert run.ours() == {}


# --- the reaper by itself -------------------------------------------------------------------------


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that a test starts."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def sleeper(mark: str | None, command: str = "exec sleep 600") -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if name != MARK}
    return subprocess.Popen(["/bin/sh", "-c", command], env=env | ({MARK: mark} if mark else {}))


def test_H4_only_the_processes_of_the_own_run_are_ended(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / "file").write_text("x")
    sleepers += [sleeper(mark) for mark in ("one", "two", "one-more", None)]
    # The mark is in the environment as soon as the shell runs.
    while not reaper.is_marked(sleepers[0].pid, "one"):
        time.sleep(0.01)
    clear(Belongings("one"), [folder], grace=0.0)
    assert [process.poll() for process in sleepers] == [-signal.SIGKILL, None, None, None]
    assert not folder.exists()
    assert tmp_path.exists()


def test_H4_a_child_that_lost_the_mark_and_its_parent_is_still_known(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    parent = sleeper("one", f"env -u {MARK} sleep 600 & echo; wait")
    sleepers.append(parent)
    belongings = Belongings("one")
    deadline = time.monotonic() + 20
    while len(belongings.alive()) < 2 or any(
        pid != parent.pid and reaper.is_marked(pid, "one") for pid in belongings.held
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (child,) = belongings.held.keys() - {parent.pid}
    parent.kill()
    parent.wait()
    assert child in belongings.alive()
    clear(belongings, [], grace=0.0)
    assert look_up(child) is None


def test_H4_a_number_that_was_given_anew_is_left_alone(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    sleepers.append(sleeper(None))
    process = look_up(sleepers[0].pid)
    assert process is not None
    end(sleepers[0].pid, process.born - 1)
    assert sleepers[0].poll() is None
    end(sleepers[0].pid, process.born)
    assert sleepers[0].wait(10) == -signal.SIGKILL


def test_H4_the_reaper_outlives_what_a_batch_system_sends_and_loads_nothing(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    own = Reaper("nobody", [folder])
    deadline = time.monotonic() + 20
    blocked = 0
    while not blocked & (1 << (signal.SIGTERM - 1)):
        assert time.monotonic() < deadline
        status = Path(f"/proc/{own.pid}/status").read_text()
        blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    os.kill(own.pid, signal.SIGTERM)
    os.kill(own.pid, signal.SIGHUP)
    assert os.getsid(own.pid) != os.getsid(0)
    maps = Path(f"/proc/{own.pid}/maps").read_text()
    assert "/site-packages/" not in maps
    assert look_up(own.pid) is not None
    began = time.monotonic()
    own.finish()
    assert not folder.exists()
    assert time.monotonic() - began < GRACE


def test_H4_the_driver_clears_up_itself_where_the_reaper_is_gone(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "GRACE", 0.0)
    monkeypatch.setattr(clear, "__defaults__", (0.0,))
    folder = tmp_path / "scratch"
    folder.mkdir()
    own = Reaper("one", [folder])
    sleepers.append(sleeper("one"))
    while not reaper.is_marked(sleepers[0].pid, "one"):
        time.sleep(0.01)
    os.kill(own.pid, signal.SIGKILL)
    own.finish()
    assert sleepers[0].wait(10) == -signal.SIGKILL
    assert not folder.exists()
