"""Workers that are killed or stopped by a signal, in runs with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import ray

from delta_belief_rl.cluster import members
from delta_belief_rl.cluster.ray_app import ray_session
from delta_belief_rl.config.schema_trainer import RayInit
from delta_belief_rl.obs.jsonl import read_records
from tests.processes import born
from tests.runs import ROOT, assert_same_run, play, words, write_world

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(1800)]

PATIENCE = 800.0
"""Seconds for anything of a tiny run, on a busy machine."""
SHORT = ("trainer.total_training_steps=3", "trainer.final_test=true")
GAMES = 16
"""Games of a step."""

T = TypeVar("T")


def until(found: Callable[[], T | None], process: subprocess.Popen[str]) -> T:
    """Wait for something that a run leaves."""
    deadline = time.monotonic() + PATIENCE
    while (value := found()) is None:
        assert process.poll() is None, "the run ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def events_of(out: Path, kind: str) -> list[dict[str, Any]]:
    path = out / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def pid_of(out: Path, role: str, index: int) -> int:
    """Process of a worker as it is now."""
    workers = events_of(out, "workers")[-1]["workers"]
    (pid,) = [w["pid"] for w in workers if (w["role"], w["index"]) == (role, index)]
    return pid


def test_H12_a_rank_and_an_engine_that_are_killed_are_replaced_and_the_run_ends_as_the_straight_one(
    tmp_path: Path,
) -> None:
    world, out = write_world(tmp_path / "tiny.yaml"), tmp_path / "run"
    assert play([*words(tmp_path / "straight", world), *SHORT])[0] == 0
    # Short, because Ray's sockets lie below it.
    scratch = Path(tempfile.mkdtemp(prefix="db", dir="/tmp"))
    process = subprocess.Popen(
        [sys.executable, "train.py", *words(out, world), *SHORT],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    killed: list[tuple[int, str]] = []
    try:
        for step, role in ((1, "rank"), (2, "engine")):

            def reached(step: int = step, role: str = role) -> int | None:
                records = read_records(out / "metrics.jsonl")
                if not records or records[-1]["step"] < step:
                    return None
                return len(events_of(out, "recovered")) + 1

            count = until(reached, process)
            pid = pid_of(out, role, 0)
            killed.append((pid, born(pid)))
            os.kill(pid, signal.SIGKILL)
            until(lambda n=count: len(events_of(out, "recovered")) >= n or None, process)
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(scratch, ignore_errors=True)
    assert process.returncode == 0, output[-4000:]
    assert_same_run(tmp_path / "straight", out)
    recovered = events_of(out, "recovered")
    assert [event["lost"] for event in recovered] == ["rank", "engine"]
    assert all(event["steps_lost"] <= 1 for event in recovered)
    assert all(event["games_lost"] <= GAMES for event in recovered)
    assert [pid for pid, birth in killed if birth and born(pid) == birth] == []


@members.remote_worker()
class Worker(members.Present):
    """A worker that is busy for as long as it is told to be."""

    def work(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"


def test_H12_a_worker_that_stands_still_in_a_call_is_found_and_a_busy_one_is_waited_for() -> None:
    signs = 10.0
    with ray_session(RayInit(), 2, 0):
        place = Worker.options(num_cpus=1)
        workers = [place.remote(), place.remote()]
        found = ray.get([worker.present.remote() for worker in workers], timeout=PATIENCE)

        async def ask(index: int, seconds: float) -> str:
            worker = workers[index]
            return await members.answered(worker.work.remote(seconds), worker, signs)

        async def both() -> list[str | BaseException]:
            asked = [asyncio.ensure_future(ask(0, 600.0)), asyncio.ensure_future(ask(1, 4 * signs))]
            # Neither stands still before its call has begun.
            await asyncio.sleep(signs / 2)
            os.kill(found[0].pid, signal.SIGSTOP)
            return await asyncio.gather(*asked, return_exceptions=True)

        stopped, busy = asyncio.run(both())
        assert isinstance(stopped, members.WorkerSilent)
        assert busy == "done"
        os.kill(found[0].pid, signal.SIGCONT)


def test_H12_a_stopped_worker_is_told_from_one_that_answers_and_makes_room_for_another() -> None:
    with ray_session(RayInit(), 2, 0):
        place = Worker.options(num_cpus=1)  # type: ignore[attr-defined]
        workers = [place.remote(), place.remote()]
        stopped = ray.get(workers[0].present.remote(), timeout=PATIENCE).pid
        ray.get(workers[1].present.remote(), timeout=PATIENCE)
        birth = born(stopped)
        os.kill(stopped, signal.SIGSTOP)

        async def missing() -> dict[int, str]:
            return await members.missing(workers, 2.0)

        assert asyncio.run(missing()) == {0: members.SILENT}
        members.end(workers[0])
        # Both CPUs are taken until the stopped one is really gone.
        fresh = place.remote()
        assert ray.get(fresh.present.remote(), timeout=PATIENCE).pid != stopped
        assert born(stopped) != birth
        assert asyncio.run(missing()) == {0: members.DIED}
