"""Ray as a run uses it: private, placed or refused in time, and ports that nobody takes away."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from delta_belief_rl.cluster import pools
from delta_belief_rl.cluster.gpus import BookedGpus, book_gpus
from delta_belief_rl.cluster.ranks import meeting_point
from delta_belief_rl.cluster.ray_app import ray_session
from delta_belief_rl.cluster.workers import JudgeWorker
from delta_belief_rl.config.plan import Placement
from delta_belief_rl.config.schema_trainer import RayInit
from delta_belief_rl.types import UserError

ROOT = Path(__file__).resolve().parents[2]
OTHER = """
import sys, ray
from delta_belief_rl.cluster.ray_app import ray_session
from delta_belief_rl.config.schema_trainer import RayInit
with ray_session(RayInit(), 3, 0):
    print(int(ray.cluster_resources()["CPU"]), len(ray.nodes()), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_N2_two_runs_on_one_host_do_not_meet() -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        seen = other.stdout.readline().split()
        with ray_session(RayInit(), 2, 0):
            assert int(ray.cluster_resources()["CPU"]) == 2
            assert len(ray.nodes()) == 1
        # Ours is over, and the other one is still there.
        assert seen == ["3", "1"]
        assert other.poll() is None
    finally:
        other.communicate("\n", timeout=60)


@pytest.mark.slow
def test_N6_what_has_no_room_is_refused_in_time_with_both_numbers() -> None:
    places = [Placement("judge", number, (), "") for number in range(4)]
    with ray_session(RayInit(), 2, 0):
        with pytest.raises(UserError, match=r"judges needs 4 CPUs but only 2 are free"):
            pools._place("judges", JudgeWorker, places, BookedGpus(()), 1.0, 1)
        with pytest.raises(UserError, match=r"needs 1 GPUs but Ray has only 0 more free"):
            book_gpus(1, 1.0)


@pytest.mark.parametrize(
    ("machines", "gpus", "refused"), [(2, 8, True), (2, 0, False), (1, 8, False)]
)
def test_N6_gpus_on_a_cluster_of_several_machines_are_refused_at_once(
    machines: int, gpus: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    nodes = [{"Alive": number < machines} for number in range(3)]
    monkeypatch.setattr(ray, "init", lambda **_: calls.append("init"))
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    context = SimpleNamespace(get_node_id=lambda: "own")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    told = pytest.raises(UserError, match="has 2 machines") if refused else nullcontext()
    with told, ray_session(RayInit(address="10.0.0.1:6379"), 1, gpus):
        calls.append("run")
    assert calls == (["init", "shutdown"] if refused else ["init", "run", "shutdown"])


def test_N3_the_port_of_the_meeting_point_is_taken_from_the_first_moment() -> None:
    ports = []
    for _ in range(5):
        store = meeting_point("127.0.0.1")
        ports.append(store.port)
        with socket.socket() as rival, pytest.raises(OSError, match="in use"):
            rival.bind(("127.0.0.1", store.port))
    assert all(0 < port < 65536 for port in ports)
