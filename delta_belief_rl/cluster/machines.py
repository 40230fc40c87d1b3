"""The machines of a run in a Ray cluster that it has joined: which they are, and whether they do.

The driver's machine comes first, the others in the order of their names, so that GPUs have the same
numbers at every start. The run's workers are placed on these machines and on no other.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from delta_belief_rl.config.gpu_memory import check_gpus
from delta_belief_rl.config.gpus import read_gpus
from delta_belief_rl.config.plan import MachineNeeds, Plan
from delta_belief_rl.types import UserError

NODE_LABEL = "ray.io/node-id"
"""The label that Ray itself gives to every machine."""

LATE_SECONDS = 10.0
"""How long a machine that has just joined may take to be seen."""

SEEN_WITHIN = 10.0
"""Seconds in which a new file must show on every machine of a shared file system."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine of a Ray cluster.

    Attributes:
        node: Ray's id of it, in hexadecimal digits.
        name: That it was started with; its address where it was given none.
        address: Of its network interface.
    """

    node: str
    name: str
    address: str

    def __str__(self) -> str:
        return f"Machine {self.name}" + (f" ({self.address})" if self.name != self.address else "")


def find_machines(needs: MachineNeeds, patience: float | None = None) -> tuple[Machine, ...]:
    """The machines that a run is on; the same ones at every call.

    Args:
        needs: How many, and how many GPUs each must have.
        patience: Seconds that they have to be there; ``LATE_SECONDS`` unless given.

    Raises:
        UserError: The cluster has too few of them.
    """
    deadline = time.monotonic() + (LATE_SECONDS if patience is None else patience)
    while True:
        fit = _in_order([node for node in ray.nodes() if node["Alive"] and _has(node, needs.gpus)])
        if len(fit) >= needs.count:
            return tuple(fit[: needs.count])
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    there = sum(bool(node["Alive"]) for node in ray.nodes())
    with_gpus = f", {len(fit)} of them with {needs.gpus} GPUs" if needs.gpus else ""
    raise UserError(
        f"The run needs {needs.count} machine{'s' if needs.count > 1 else ''}"
        f"{f' with {needs.gpus} GPUs' if needs.gpus else ''} (trainer.nnodes, "
        f"trainer.n_gpus_per_node), and the Ray cluster has {there}{with_gpus}: start more, or "
        "lower the pools."
    )


def _has(node: dict[str, Any], gpus: int) -> bool:
    return node["Resources"].get("GPU", 0) >= gpus


def _in_order(nodes: Sequence[dict[str, Any]]) -> list[Machine]:
    own = ray.get_runtime_context().get_node_id()
    machines = [
        Machine(node["NodeID"], node["NodeName"] or node["NodeManagerAddress"], address)
        for node in nodes
        for address in [node["NodeManagerAddress"]]
    ]
    return sorted(machines, key=lambda one: (one.node != own, _natural(one.name), one.node))


def _natural(name: str) -> list[tuple[int, str]]:
    """A key by which numbers inside names count as numbers.

    Example:
        >>> sorted(["node10", "node9"], key=_natural)
        ['node9', 'node10']
    """
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _PARTS.split(name)]


_PARTS = re.compile(r"(\d+)")


# --- whether they can take part -------------------------------------------------------------------


def check_machines(machines: Sequence[Machine], plan: Plan, folder: Path, deadline: float) -> None:
    """Refuse machines that do not see the run's folder, or whose GPUs are too small or taken.

    Args:
        machines: Of the run, the driver's first; none for a private Ray, which is checked before.
        plan: Of the run.
        folder: Of the run; it exists.
        deadline: Seconds that a machine has to answer.

    Raises:
        UserError: The first that cannot take part, and why.
    """
    marker = folder.absolute() / f".seen-{secrets.token_hex(8)}"
    marker.touch()
    try:
        asked = [
            _look.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(machine.node, soft=False)
            ).remote(marker, plan, number * plan.machines.gpus)
            for number, machine in enumerate(machines)
        ]
        for machine, answer in zip(machines, asked, strict=True):
            if problem := _answer(machine, answer, deadline):
                raise UserError(f"{machine} cannot take part in the run: {problem}")
    finally:
        marker.unlink(missing_ok=True)


def _answer(machine: Machine, answer: Any, deadline: float) -> str:
    try:
        return ray.get(answer, timeout=deadline)
    except GetTimeoutError as error:
        raise UserError(
            f"{machine} did not answer within {deadline:g} s: look at it, or raise "
            "trainer.ray_wait_register_center_timeout."
        ) from error
    except RayError as error:
        said = " ".join(str(getattr(error, "cause", error)).split())[:200].rstrip(". ")
        raise UserError(
            f"{machine} cannot take part in the run ({said}): it needs the same Python environment "
            "and the same files as the driver's."
        ) from error


@ray.remote(num_cpus=0, max_retries=0)
def _look(marker: Path, plan: Plan, first: int) -> str:
    """What speaks against this machine, in one sentence; empty for nothing."""
    return own_problem(marker, plan, first)


def own_problem(marker: Path, plan: Plan, first: int, patience: float = SEEN_WITHIN) -> str:
    """What speaks against this machine; empty for nothing.

    Args:
        marker: A new file in the run's folder.
        plan: Of the run.
        first: Number of this machine's first GPU in the plan.
        patience: Seconds in which the file must show.
    """
    deadline = time.monotonic() + patience
    while not marker.exists():
        if time.monotonic() > deadline:
            return (
                f"it does not see the run's folder {marker.parent}; set trainer.output_dir to a "
                "folder on a file system that all machines share."
            )
        time.sleep(0.2)
    found = (read_gpus() or ()) if plan.gpus else ()
    # Of a machine that has more, the plan's numbers go on with the next machine's.
    counted = [gpu for gpu in found if gpu.index < plan.machines.gpus]
    try:
        check_gpus(plan, counted, first)
    except UserError as error:
        return str(error)
    return ""
