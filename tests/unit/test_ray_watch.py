"""Ray that dies under a run is told of, once; Ray that lives is not."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from delta_belief_rl.cluster import ray_watch
from delta_belief_rl.cluster.machines import Machine
from delta_belief_rl.cluster.ray_watch import RayLost, watched

OWN = {"NodeID": "own", "Alive": True}
OTHER = {"NodeID": "other", "Alive": True}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the head of Ray answers: ``nodes``, a list or an error."""
    said: dict[str, Any] = {"nodes": [OWN, OTHER], "asked": threading.Semaphore(0)}

    def nodes() -> list[dict[str, Any]]:
        said["asked"].release()
        if isinstance(said["nodes"], Exception):
            raise said["nodes"]
        return said["nodes"]

    context = SimpleNamespace(get_node_id=lambda: "own")
    fake = SimpleNamespace(nodes=nodes, get_runtime_context=lambda: context)
    monkeypatch.setattr(ray_watch, "ray", fake)
    return said


@pytest.mark.parametrize(
    ("nodes", "what"),
    [
        ([{**OWN, "Alive": False}, OTHER], "the raylet"),
        ([OTHER], "the raylet"),
        (RuntimeError("no answer"), "The head of Ray does not answer"),
    ],
)
def test_H2_ray_that_is_gone_is_told_of_once(
    cluster: dict[str, Any], nodes: Any, what: str
) -> None:
    told: list[BaseException] = []
    heard = threading.Event()

    def on_lost(error: BaseException) -> None:
        told.append(error)
        heard.set()

    with watched(on_lost, seconds=0.01):
        for _ in range(3):
            assert cluster["asked"].acquire(timeout=60)
        assert told == []
        cluster["nodes"] = nodes
        assert heard.wait(60)
    (error,) = told
    assert isinstance(error, RayLost)
    assert what in str(error)


def test_H2_a_machine_of_the_run_that_is_gone_is_told_by_name_and_no_other(
    cluster: dict[str, Any],
) -> None:
    told: list[BaseException] = []
    heard = threading.Event()

    def on_lost(error: BaseException) -> None:
        told.append(error)
        heard.set()

    cluster["nodes"] = [OWN, OTHER, {"NodeID": "third", "Alive": True}]
    with watched(on_lost, [Machine("other", "node7", "10.0.0.7")], seconds=0.01):
        cluster["nodes"] = [OWN, OTHER]
        for _ in range(3):
            assert cluster["asked"].acquire(timeout=60)
        assert told == []
        cluster["nodes"] = [OWN, {**OTHER, "Alive": False}]
        assert heard.wait(60)
    (error,) = told
    assert isinstance(error, RayLost)
    assert str(error).startswith("Machine node7 (10.0.0.7) is gone: the last checkpoint")


def test_a_watch_ends_with_its_block(cluster: dict[str, Any]) -> None:
    told: list[BaseException] = []
    with watched(told.append, seconds=0.01):
        assert cluster["asked"].acquire(timeout=60)
    cluster["nodes"] = []
    threading.Event().wait(0.1)
    assert told == []
