"""What training ranks use: time of the parts of their work, operations, memory.

Each rank counts for itself and starts anew when it is asked, so the figures are those of one step.
Ranks work side by side: seconds and peaks are the largest of all ranks, operations and host memory
their sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from delta_belief_rl.models.flops import peak_flops
from delta_belief_rl.obs.metrics import StepTimers, resident_bytes

UPDATE = "update"
"""The part of a rank's work that ``perf/mfu/actor`` is about."""


@dataclass(frozen=True, slots=True)
class RankUsage:
    """Of one rank since it was last asked.

    Attributes:
        seconds: By part of the work.
        flops: Operations of its updates (``models.flops``).
        peak: Operations per second that its device is said to reach; None where none is stated.
        allocated, reserved: Peak of device memory in bytes; None without a device of its own.
        resident: Host memory of its process in bytes.
    """

    seconds: Mapping[str, float]
    flops: float
    peak: float | None
    allocated: int | None
    reserved: int | None
    resident: float


class UsageMeter:
    """Counts on one rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timers = StepTimers()
        self._flops = 0.0

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Time a part of the work."""
        with self._timers.measure(part):
            yield

    def add_flops(self, flops: float) -> None:
        """Count operations of an update."""
        self._flops += flops

    def drain(self) -> RankUsage:
        """What was counted; the count begins anew."""
        flops, self._flops = self._flops, 0.0
        seconds = {
            name.removeprefix("timing_s/"): value for name, value in self._timers.drain().items()
        }
        allocated = reserved = peak = None
        if self._device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self._device)
            reserved = torch.cuda.max_memory_reserved(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            peak = peak_flops(torch.cuda.get_device_name(self._device))
        return RankUsage(seconds, flops, peak, allocated, reserved, resident_bytes())


def usage_metrics(
    ranks: Sequence[RankUsage], expected_bytes: float | None = None
) -> dict[str, float]:
    """Metrics of all ranks together.

    ``perf/mfu/actor`` is there when every rank has a stated peak: operations of the update, over
    what the devices could have done in its time.

    Args:
        ranks: One entry for each.
        expected_bytes: What the plan expects a rank to take of its GPU at most; the peak is
            reported against it (``memory/*``).
    """
    parts = sorted({name for rank in ranks for name in rank.seconds})
    slowest = {part: max(rank.seconds.get(part, 0.0) for rank in ranks) for part in parts}
    out = {f"timing_s/{part}": value for part, value in slowest.items() if part != UPDATE}
    peaks = [rank.peak for rank in ranks if rank.peak is not None]
    seconds = slowest.get(UPDATE, 0.0)
    if ranks and len(peaks) == len(ranks) and seconds > 0:
        out["perf/mfu/actor"] = sum(rank.flops for rank in ranks) / (seconds * sum(peaks))
    if ranks and seconds > 0:
        out["perf/update_tflops"] = sum(rank.flops for rank in ranks) / seconds / 1e12
    for name, values in (
        ("allocated", [rank.allocated for rank in ranks if rank.allocated is not None]),
        ("reserved", [rank.reserved for rank in ranks if rank.reserved is not None]),
    ):
        if values:
            out[f"perf/max_memory_{name}_gb"] = max(values) / 2**30
    taken = [rank.allocated for rank in ranks if rank.allocated is not None]
    if taken and expected_bytes:
        out["memory/actor_peak_gib"] = max(taken) / 2**30
        out["memory/actor_estimate_gib"] = expected_bytes / 2**30
        out["memory/actor_peak_over_estimate"] = max(taken) / expected_bytes
    known = [rank.resident for rank in ranks if not math.isnan(rank.resident)]
    if known:
        out["perf/ranks_memory_used_gb"] = sum(known) / 2**30
    return out
