"""Which machines of a Ray cluster a run is on, in which order, and which cannot take part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayTaskError

from delta_belief_rl.cluster import machines
from delta_belief_rl.cluster.machines import (
    Machine,
    check_machines,
    find_machines,
    own_problem,
)
from delta_belief_rl.config.compose import load_config
from delta_belief_rl.config.facts import Facts
from delta_belief_rl.config.gpus import Gpu, Holder
from delta_belief_rl.config.memory import GIB
from delta_belief_rl.config.plan import MachineNeeds, Plan, make_plan
from delta_belief_rl.types import UserError

PAIR = (Machine("aa", "node1", "10.0.0.1"), Machine("bb", "10.0.0.2", "10.0.0.2"))


def plan_of(*words: str) -> Plan:
    several = ("trainer.nnodes=2", "ray_init.address=auto")
    return make_plan(load_config([*words, *several])[0], Facts(1000, 198, cores=64, gpus=2))


def node(number: int, name: str = "", gpus: float = 0) -> dict[str, Any]:
    resources = {"GPU": gpus} if gpus else {}
    address = f"10.0.0.{number}"
    return {"NodeID": f"{number:02}", "NodeName": name, "NodeManagerAddress": address} | {
        "Alive": True,
        "Resources": resources,
    }


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """``nodes`` of the cluster, ``own`` of them the driver's."""
    said: dict[str, Any] = {"nodes": [], "own": "00"}
    context = SimpleNamespace(get_node_id=lambda: said["own"])
    fake = SimpleNamespace(nodes=lambda: said["nodes"], get_runtime_context=lambda: context)
    monkeypatch.setattr(machines, "ray", fake)
    return said


def test_N6_the_drivers_machine_is_first_and_the_others_are_in_the_order_of_their_names(
    cluster: dict[str, Any],
) -> None:
    cluster["nodes"] = [node(10), node(9), node(2, "rank-11-b"), node(3, "rank-2-a")]
    cluster["own"] = "03"
    found = [machine.name for machine in find_machines(MachineNeeds(4, 0), 0.0)]
    assert found == ["rank-2-a", "10.0.0.9", "10.0.0.10", "rank-11-b"]
    cluster["nodes"].reverse()
    assert [machine.name for machine in find_machines(MachineNeeds(4, 0), 0.0)] == found
    assert [machine.name for machine in find_machines(MachineNeeds(1, 0), 0.0)] == found[:1]


def test_N6_machines_with_too_few_gpus_or_that_are_gone_are_passed_over(
    cluster: dict[str, Any],
) -> None:
    gone = {**node(4, gpus=8), "Alive": False}
    cluster["nodes"] = [node(0), node(1, gpus=4), node(2, gpus=8), node(3, gpus=8), gone]
    assert [one.node for one in find_machines(MachineNeeds(2, 8), 0.0)] == ["02", "03"]
    with pytest.raises(UserError, match=r"needs 3 machines with 8 GPUs .* has 4, 2 of them with 8"):
        find_machines(MachineNeeds(3, 8), 0.0)
    with pytest.raises(UserError, match=r"needs 5 machines \(.* cluster has 4: start more"):
        find_machines(MachineNeeds(5, 0), 0.0)


def test_a_machine_that_does_not_see_the_runs_folder_says_so(tmp_path: Path) -> None:
    plan = plan_of("experiment=quickstart")
    marker = tmp_path / ".seen-1"
    problem = own_problem(marker, plan, 0, patience=0.0)
    assert problem.startswith(
        f"it does not see the run's folder {tmp_path}; set trainer.output_dir"
    )
    marker.touch()
    assert own_problem(marker, plan, 0) == ""


def test_M1_a_machine_looks_at_its_own_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(
        "experiment=paper_qwen1.7b", "actor_rollout_ref.ngpus=2", "judge_rollout.ngpus=2"
    )
    holder = Holder(7, "other", 79 * GIB)
    gpus = (Gpu(0, "A100", 80 * GIB, GIB, (8, 0), (holder,)),)
    monkeypatch.setattr(machines, "read_gpus", lambda: gpus)
    problem = own_problem(tmp_path, plan, 2)
    assert problem.startswith("GPU 0 (A100) has 1.0 GiB of 80.0 GiB free")
    assert "judge 0" in problem
    assert "process 7 (other) holds 79.0 GiB" in problem
    assert own_problem(tmp_path, plan, 4) == ""
    # The third GPU here is none of the run's, whatever the next machine does with its first.
    taken = (replace(gpus[0], free=80 * GIB), replace(gpus[0], index=2))
    monkeypatch.setattr(machines, "read_gpus", lambda: taken)
    assert own_problem(tmp_path, plan, 0) == ""


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("it does not see it.", "Machine 10.0.0.2 cannot take part in the run: it does not see"),
        (GetTimeoutError(), "Machine 10.0.0.2 did not answer within 5 s"),
        (
            RayTaskError("look", "traceback", ModuleNotFoundError("No module named 'x'")),
            r"cannot take part in the run \(No module named 'x'\): it needs the same",
        ),
    ],
)
def test_N6_the_machine_that_cannot_take_part_is_named_and_no_file_is_left(
    answer: str | Exception,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []

    class Look:
        def options(self, scheduling_strategy: Any) -> Any:
            def remote(marker: Path, plan: Plan, first: int) -> object:
                assert marker.exists()
                asked.append((scheduling_strategy.node_id, first))
                return "" if scheduling_strategy.node_id == "aa" else answer

            return SimpleNamespace(remote=remote)

    def get(said: object, timeout: float) -> object:
        assert timeout == 5
        if isinstance(said, Exception):
            raise said
        return said

    monkeypatch.setattr(machines, "_look", Look())
    monkeypatch.setattr(machines, "NodeAffinitySchedulingStrategy", affinity)
    monkeypatch.setattr(machines, "ray", SimpleNamespace(get=get))
    plan = plan_of(
        "experiment=paper_qwen1.7b", "actor_rollout_ref.ngpus=2", "judge_rollout.ngpus=2"
    )
    with pytest.raises(UserError, match=expected) as refused:
        check_machines(PAIR, plan, tmp_path, 5.0)
    assert "\n" not in str(refused.value)
    assert asked == [("aa", 0), ("bb", 2)]
    assert list(tmp_path.iterdir()) == []


def affinity(node_id: str, soft: bool) -> SimpleNamespace:
    assert not soft
    return SimpleNamespace(node_id=node_id)
