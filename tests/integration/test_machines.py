"""Runs on two machines, both of them this one: Ray by rank, the run through it, and every end."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import steps_of_starts

from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.trainer import checkpoint
from tests.machines import Machine, machines, until
from tests.processes import arguments, descendants
from tests.runs import ROOT, assert_same_run, play, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SEVERAL = ("trainer.nnodes=2", "ray_init.address=auto")
TWO_ENGINES = "actor_rollout_ref.rollout.replicas=2"
BOOK = """
import json, os, sys
from pathlib import Path
import ray
from delta_belief_rl.cluster import pools
from delta_belief_rl.cluster.gpus import book_gpus
from delta_belief_rl.cluster.machines import find_machines
from delta_belief_rl.cluster.ray_app import ray_session
from delta_belief_rl.config.plan import MachineNeeds, Placement
from delta_belief_rl.config.schema_trainer import RayInit
from delta_belief_rl.types import UserError

@ray.remote
class Worker:
    def where(self):
        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES")

def refusal(work):
    try:
        work()
    except UserError as error:
        return str(error)

needs = MachineNeeds(2, 2)
with ray_session(RayInit(address="auto"), 1, 4, needs=needs):
    machines = find_machines(needs)
    own = ray.get_runtime_context().get_node_id()
    few = refusal(lambda: find_machines(MachineNeeds(2, 3), 0.5))
    booked = book_gpus(4, 60.0, machines, 2)
    places = [(0,), (1,), (2,), (3,), (0, 1), (2, 3), ()]
    plan = [Placement("judge", number, gpus, "") for number, gpus in enumerate(places)]
    workers = [place.remote() for place in pools._place("judges", Worker, plan, booked, 60.0, 1)]
    found = ray.get([worker.where.remote() for worker in workers])
    seen = [([machine.node for machine in machines].index(node), gpus) for node, gpus in found]
    taken = refusal(lambda: book_gpus(1, 2.0, machines, 2))
    one = find_machines(MachineNeeds(1, 2))
    told = {"own": machines[0].node == own, "names": [m.name for m in machines], "seen": seen}
    told |= {"few": few, "taken": taken, "one": one == machines[:1]}
    Path(sys.argv[1]).write_text(json.dumps(told))
"""


def command(out: Path, world: Path) -> list[str]:
    return [sys.executable, "train.py", *words(out, world, TWO_ENGINES, *SEVERAL)]


def workers(out: Path) -> list[int]:
    """Processes of the run's workers; none before they are known."""
    events = read_records(out / "events.jsonl") if (out / "events.jsonl").exists() else []
    told = [event["workers"] for event in events if event["kind"] == "workers"]
    return [worker["pid"] for worker in told[-1]] if told else []


def until_step(out: Path, step: int, first: Machine) -> None:
    """Wait for a checkpoint of a run that still goes on."""
    saved = out / "checkpoints" / f"global_step_{step}" / "manifest.json"
    until(lambda: saved.exists() or first.process.poll() is not None)
    assert first.process.poll() is None, first.output[-4000:]


def fall(machine: Machine) -> None:
    """End all processes of a machine at once, but the one that clears up."""
    for pid in [machine.process.pid, *descendants(machine.process.pid)]:
        if not any(word.endswith("reaper.py") for word in arguments(pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_R15_N2_H3_two_machines_play_the_run_of_one_and_leave_nothing(
    tmp_path: Path, tiny_world: Path
) -> None:
    out = tmp_path / "run"
    with machines(tmp_path) as start:
        run = command(out, tiny_world)
        ranks = [start(rank, 2, run, "--cpus", "3") for rank in (1, 0)]
        until(lambda: bool(workers(out)) or ranks[1].process.poll() is not None)
        held = [[pid for pid in workers(out) if machine.holds(pid)] for machine in ranks]
        assert all(held), f"workers {held}; {ranks[1].output[-4000:]}"
        assert ranks[1].end() == 0, ranks[1].output[-4000:]
        assert ranks[0].end() == 0, ranks[0].output[-4000:]
        assert all(machine.is_clear() for machine in ranks)
    assert not (tmp_path / "meet").exists()
    assert list(out.glob(".seen-*")) == []
    assert "on 2 machines" in (out / "plan.txt").read_text()
    status, _ = play(words(tmp_path / "one", tiny_world, TWO_ENGINES))
    assert status == 0
    assert_same_run(out, tmp_path / "one")


@pytest.mark.fault
def test_H6_R2_a_machine_that_is_killed_ends_the_run_and_a_new_start_goes_on(
    tmp_path: Path, tiny_world: Path
) -> None:
    out, steps = tmp_path / "run", "trainer.total_training_steps=12"
    with machines(tmp_path) as start:
        run = [*command(out, tiny_world), steps]
        first, second = (start(rank, 2, run, "--cpus", "3") for rank in (0, 1))
        until_step(out, 1, first)
        fall(second)
        assert first.end() == 1, first.output[-4000:]
        assert "Traceback" not in first.output
        end = read_records(out / "events.jsonl")[-1]
        assert (end["kind"], end["status"]) == ("end", 1)
        assert end["cause"] in ("ray_lost", "rank_failed", "engine_failed")
        # What was killed cannot tidy up; its reaper does.
        until(second.is_clear)
        assert first.is_clear()
        saved = checkpoint.find_latest(out / "checkpoints")
        assert saved is not None

        again = [start(rank, 2, run, "--cpus", "3") for rank in (0, 1)]
        assert [machine.end() for machine in again] == [0, 0], again[0].output[-4000:]
        assert "resumed run" in again[0].output
    assert steps_of_starts(out) == [0, saved.step]
    status, _ = play([*words(tmp_path / "one", tiny_world, TWO_ENGINES), steps])
    assert status == 0
    assert_same_run(out, tmp_path / "one")


@pytest.mark.fault
def test_H6_any_machine_that_is_told_to_end_lets_the_run_save_first(
    tmp_path: Path, tiny_world: Path
) -> None:
    out = tmp_path / "run"
    with machines(tmp_path) as start:
        run = [*command(out, tiny_world), "trainer.total_training_steps=500"]
        first, second = (start(rank, 2, run, "--cpus", "3") for rank in (0, 1))
        until_step(out, 1, first)
        os.kill(second.process.pid, signal.SIGTERM)
        assert first.end() == 143, first.output[-4000:]
        assert second.end() == 143, second.output
        end = read_records(out / "events.jsonl")[-1]
        assert (end["status"], end["cause"]) == (143, "terminated")
        last = read_records(out / "metrics.jsonl")[-1]["step"]
        assert (out / "checkpoints" / f"global_step_{last}" / "manifest.json").exists()
        assert first.is_clear()
        assert second.is_clear()


@pytest.mark.fault
def test_H3_a_killed_rank_0_takes_all_machines_along(tmp_path: Path) -> None:
    up = tmp_path / "up"
    script = f"import pathlib, time; pathlib.Path({str(up)!r}).touch(); time.sleep(3600)"
    with machines(tmp_path) as start:
        run = [sys.executable, "-c", script]
        first, second = (start(rank, 2, run, "--cpus", "1") for rank in (0, 1))
        until(up.exists)
        family = descendants(first.process.pid)
        assert len(family) > 2
        os.kill(first.process.pid, signal.SIGKILL)
        assert second.end() == 1
        assert "its head on rank 0 is gone" in second.output
        until(first.is_clear)
        until(second.is_clear)


def test_N6_gpus_of_two_machines_are_numbered_and_workers_are_where_theirs_are(
    tmp_path: Path,
) -> None:
    told = tmp_path / "told.json"
    script = tmp_path / "book.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{BOOK}")
    with machines(tmp_path) as start:
        run = [sys.executable, str(script), str(told)]
        ranks = [start(rank, 2, run, "--cpus", "6", "--gpus", "2") for rank in (1, 0)]
        statuses = [machine.end() for machine in ranks]
        assert statuses == [0, 0], ranks[1].output[-4000:]
    found = json.loads(told.read_text())
    assert found["own"]
    assert found["one"]
    assert [name[:7] for name in found["names"]] == ["rank-0-", "rank-1-"]
    *bound, free = found["seen"]
    assert bound == [[0, "0"], [0, "1"], [1, "0"], [1, "1"], [0, "0,1"], [1, "0,1"]]
    assert free[1] == ""
    assert "2 machines with 3 GPUs" in found["few"]
    assert "has 2, 0 of them with 3 GPUs" in found["few"]
    assert "needs 1 GPUs but Ray has only 0 more free" in found["taken"]
