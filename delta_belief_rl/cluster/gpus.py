"""GPUs of a run: booked with Ray as a whole, and handed to workers as the plan says.

Ray deals shares of GPUs as it likes: two training ranks that ask for half a GPU each can get the
same one. So the run books whole GPUs, one small actor for each, and every worker is told by
``CUDA_VISIBLE_DEVICES`` which of them are its own. A worker that shares a GPU with another books
nothing for itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

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
    """The GPUs of a run.

    Attributes:
        devices: Names for ``CUDA_VISIBLE_DEVICES``, by the number that the plan gives.
        holders: Keep the GPUs booked while they are referred to.
    """

    devices: tuple[str, ...]
    holders: tuple[Any, ...] = ()

    def environment(self, numbers: Sequence[int]) -> dict[str, str]:
        """What a worker needs to see some of the GPUs and no other; nothing without GPUs."""
        if not self.devices:
            return {}
        names = ",".join(self.devices[number] for number in numbers)
        # Ray sets the variable of a worker by what the worker books, which is nothing.
        return {VISIBLE: names, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def book_gpus(count: int, deadline: float) -> BookedGpus:
    """Book GPUs of the Ray cluster.

    Raises:
        UserError: So many are not free within ``deadline`` seconds.
    """
    if count == 0:
        return BookedGpus(())
    # Typed as any: the decorator hides that the class became an actor class.
    make: Any = GpuHolder
    holders = [make.remote() for _ in range(count)]
    try:
        devices = ray.get([holder.device.remote() for holder in holders], timeout=deadline)
    except GetTimeoutError as error:
        free = ray.available_resources().get("GPU", 0)
        raise UserError(
            f"The run needs {count} GPUs but Ray has only {free:g} more free after "
            f"{deadline:g} s: lower the pools, or end what uses the others."
        ) from error
    return BookedGpus(in_order(devices), tuple(holders))


def in_order(devices: Sequence[str]) -> tuple[str, ...]:
    """Names of GPUs in the order of the machine, so that the plan's numbers are those of the job.

    Example:
        >>> in_order(["10", "9"])
        ('9', '10')
    """
    return tuple(
        sorted(devices, key=lambda device: (int(device) if device.isdigit() else 0, device))
    )
