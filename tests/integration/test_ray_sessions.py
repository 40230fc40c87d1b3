"""Ray as a run uses it: private, placed or refused in time, and ports that nobody takes away."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from delta_belief_rl.cluster import machines, pools
from delta_belief_rl.cluster.gpus import BookedGpus, book_gpus
from delta_belief_rl.cluster.judge_worker import JudgeWorker
from delta_belief_rl.cluster.ranks import meeting_point
from delta_belief_rl.cluster.ray_app import ray_session
from delta_belief_rl.config.plan import MachineNeeds, Placement
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


HOMELESS = """
import ray
from delta_belief_rl.cluster.ray_app import ray_session
from delta_belief_rl.config.schema_trainer import RayInit
for _ in range(2):
    with ray_session(RayInit(), 1, 0):
        print(ray.get(ray.remote(num_cpus=1)(lambda: 7).remote(), timeout=60))
"""


@pytest.mark.slow
def test_N2_a_private_ray_keeps_nothing_in_the_home_folder(tmp_path: Path) -> None:
    """Twice in one process; a file stands where the folder of a home would be."""
    home = tmp_path / "home"
    home.write_text("")
    said = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "HOME")
    kept = {name: value for name, value in os.environ.items() if name not in said}
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS],
        cwd=ROOT,
        env=kept | {"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["7", "7"]


@pytest.mark.slow
def test_N6_what_has_no_room_is_refused_in_time_with_both_numbers() -> None:
    places = [Placement("judge", number, (), "") for number in range(4)]
    with ray_session(RayInit(), 2, 0):
        with pytest.raises(UserError, match=r"judges needs 4 CPUs but only 2 are free"):
            pools._place("judges", JudgeWorker, places, BookedGpus(()), 1.0, 1)
        with pytest.raises(UserError, match=r"needs 1 GPUs but Ray has only 0 more free"):
            book_gpus(1, 1.0)


@pytest.mark.parametrize(
    ("needs", "refused"),
    [
        (MachineNeeds(2, 8), False),
        (MachineNeeds(3, 0), False),
        (MachineNeeds(3, 8), True),
        (MachineNeeds(4, 0), True),
        (None, False),
    ],
)
def test_N6_a_joined_cluster_of_too_few_machines_is_left_at_once(
    needs: MachineNeeds | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    nodes = [
        {
            "NodeID": f"id{number}",
            "NodeName": f"node{number}",
            "NodeManagerAddress": f"10.0.0.{number}",
            "Alive": number < 3,
            "Resources": {"GPU": 8.0} if number < 2 else {},
        }
        for number in range(4)
    ]
    monkeypatch.setattr(machines, "LATE_SECONDS", 0.0)
    monkeypatch.setattr(ray, "init", lambda **_: calls.append("init"))
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    context = SimpleNamespace(get_node_id=lambda: "id1")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    told = pytest.raises(UserError, match="and the Ray cluster has 3") if refused else nullcontext()
    with told, ray_session(RayInit(address="10.0.0.1:6379"), 1, 8, needs=needs):
        calls.append("run")
    assert calls == (["init", "shutdown"] if refused else ["init", "run", "shutdown"])


def test_N2_auto_is_the_cluster_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with (
        pytest.raises(UserError, match="RAY_ADDRESS names, which is not set: set it"),
        ray_session(RayInit(address="auto"), 1, 0),
    ):
        pass


def test_N6_a_cluster_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("nobody listens")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:5")
    with (
        pytest.raises(
            UserError, match=r"no Ray cluster at 10\.0\.0\.1:5 \(ray_init.address=auto\)"
        ),
        ray_session(RayInit(address="auto"), 1, 0),
    ):
        pass


def test_N3_the_port_of_the_meeting_point_is_taken_from_the_first_moment() -> None:
    ports = []
    for _ in range(5):
        store = meeting_point("127.0.0.1")
        ports.append(store.port)
        with socket.socket() as rival, pytest.raises(OSError, match="in use"):
            rival.bind(("127.0.0.1", store.port))
    assert all(0 < port < 65536 for port in ports)
