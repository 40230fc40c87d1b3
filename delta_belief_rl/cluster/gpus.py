"""GPUs of a run: booked with Ray as a whole, and handed to workers as the plan says.

Ray deals shares of GPUs as it likes: two training ranks that ask for half a GPU each can get the
same one. So the run books whole GPUs, one small actor for each, and every worker is told by
``CUDA_VISIBLE_DEVICES`` which of them are its own. A worker that shares a GPU with another books
nothing for itself. On several machines a worker is bound to the machine of its GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from delta_belief_rl.cluster.machines import NODE_LABEL, Machine
from delta_belief_rl.types import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@ray.remote(num_cpus=0, num_gpus=1)
class GpuHolder:
    """Holds one GPU for as long as it lives, without a byte on it."""

    def device(self) -> str:
        """The GPU as ``CUDA_VISIBLE_DEVICES`` names it."""
        return os.environ[VISIBLE]


@dataclass(frozen=True, slots=True)
class BookedGpus:
    """The GPUs of a run, and the machines that they are in.

    Attributes:
        devices: Names for ``CUDA_VISIBLE_DEVICES``, by the number that the plan gives.
        holders: Keep the GPUs booked while they are referred to.
        machines: Those of the run; none for a private Ray, which has only one.
        homes: Index in ``machines`` for each of the devices.
    """

    devices: tuple[str, ...]
    holders: tuple[Any, ...] = ()
    machines: tuple[Machine, ...] = ()
    homes: tuple[int, ...] = ()

    def environment(self, numbers: Sequence[int]) -> dict[str, str]:
        """What a worker needs to see some of the GPUs and no other; nothing without GPUs."""
        if not self.devices:
            return {}
        names = ",".join(self.devices[number] for number in numbers)
        # Ray sets the variable of a worker by what the worker books, which is nothing.
        return {VISIBLE: names, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}

    def place(self, numbers: Sequence[int]) -> dict[str, str]:
        """Labels of the machines that a worker with some of the GPUs, or with none, may be on."""
        if not self.machines:
            return {}
        if numbers:
            (home,) = {self.homes[number] for number in numbers}
            return {NODE_LABEL: self.machines[home].node}
        return {NODE_LABEL: f"in({','.join(machine.node for machine in self.machines)})"}


def book_gpus(
    count: int, deadline: float, machines: Sequence[Machine] = (), each: int = 0
) -> BookedGpus:
    """Book GPUs of the Ray cluster.

    Args:
        count: Of all machines.
        deadline: Seconds until they must be free.
        machines: Those of the run, in the order of the numbers; none for a private Ray.
        each: GPUs of each machine.

    Raises:
        UserError: So many are not free within ``deadline`` seconds.
    """
    if count == 0:
        return BookedGpus((), machines=tuple(machines))
    # Typed as any: the decorator hides that the class became an actor class.
    make: Any = GpuHolder
    homes = [number // each if machines else 0 for number in range(count)]
    holders = [
        make.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(machines[home].node, soft=False)
        ).remote()
        if machines
        else make.remote()
        for home in homes
    ]
    try:
        devices = ray.get([holder.device.remote() for holder in holders], timeout=deadline)
    except GetTimeoutError as error:
        free = ray.available_resources().get("GPU", 0)
        raise UserError(
            f"The run needs {count} GPUs but Ray has only {free:g} more free after "
            f"{deadline:g} s: lower the pools, or end what uses the others."
        ) from error
    ordered = [
        device
        for home in range(homes[-1] + 1)
        for device in in_order(
            [name for name, own in zip(devices, homes, strict=True) if own == home]
        )
    ]
    return BookedGpus(tuple(ordered), tuple(holders), tuple(machines), tuple(homes))


def in_order(devices: Sequence[str]) -> tuple[str, ...]:
    """Names of GPUs in the order of the machine, so that the plan's numbers are those of the job.

    Example:
        >>> in_order(["10", "9"])
        ('9', '10')
    """
    return tuple(
        sorted(devices, key=lambda device: (int(device) if device.isdigit() else 0, device))
    )
