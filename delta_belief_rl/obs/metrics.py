"""Metrics of one step: sums with their counts, timers, and the figures derived from them.

A mean over ranks or micro-batches is exact because sums and counts travel, not means.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SumCount = tuple[float, float]

NESTED_TIMINGS = frozenset({"ref", "belief_model", "views", "values", "learners", "update_ema"})
"""Parts of a step that lie inside another part, so that a split of the step must not add them."""
TOKEN_PARTS = ("gen", "old_log_prob", "ref", "adv", "update_actor")
"""Parts of a step whose time is also given for each token."""


class MetricSums:
    """Means by name, kept as ``(sum, count)`` until :meth:`means` is asked.

    Example:
        >>> sums = MetricSums()
        >>> sums.add("loss", 6.0, count=3)
        >>> sums.add("loss", 2.0)
        >>> sums.means()
        {'loss': 2.0}
    """

    def __init__(self, parts: Mapping[str, SumCount] | None = None) -> None:
        self.parts: dict[str, SumCount] = dict(parts or {})

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Add a sum over ``count`` items; a count of 0 adds nothing but makes the name known."""
        old_total, old_count = self.parts.get(name, (0.0, 0.0))
        self.parts[name] = (old_total + total, old_count + count)

    def merge(self, other: MetricSums) -> None:
        """Take over another collection, e.g. that of another rank."""
        for name, (total, count) in other.parts.items():
            self.add(name, total, count)

    def means(self) -> dict[str, float]:
        """Sum over count by name; NaN where nothing was counted."""
        return {
            name: total / count if count else float("nan")
            for name, (total, count) in self.parts.items()
        }


class StepTimers:
    """Seconds of each part of one step.

    Parts of the same name add up within a step; :meth:`drain` ends the step and forgets them, so a
    value is always that of one step alone.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time a block; it counts when the block raises, too."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def drain(self) -> dict[str, float]:
        """``timing_s/<name>`` of the step that ends now; the next step begins at zero."""
        seconds, self._seconds = self._seconds, {}
        return {f"timing_s/{name}": value for name, value in seconds.items()}


def perf_metrics(
    total_tokens: int, step_seconds: float, num_devices: int = 1, ranks_gb: float = 0.0
) -> dict[str, float]:
    """``perf/*`` of a step.

    Args:
        total_tokens: Tokens of all games of the step, prompts included.
        num_devices: Training devices; throughput is tokens per second and device.
        ranks_gb: Host memory of the training ranks' own processes, added to this one's.
    """
    return {
        "perf/total_num_tokens": float(total_tokens),
        "perf/time_per_step": step_seconds,
        "perf/throughput": total_tokens / max(step_seconds, 1e-9) / max(num_devices, 1),
        "perf/cpu_memory_used_gb": resident_bytes() / 2**30 + ranks_gb,
    }


def token_timings(
    timings: Mapping[str, float], sampled_tokens: float, all_tokens: float
) -> dict[str, float]:
    """``timing_per_token_ms/<part>`` of the parts whose time grows with tokens.

    Args:
        timings: ``timing_s/<part>`` of one step; other names are passed over.
        sampled_tokens: What ``gen`` is divided by.
        all_tokens: What every other part is divided by.
    """
    out: dict[str, float] = {}
    for part in TOKEN_PARTS:
        seconds = timings.get(f"timing_s/{part}")
        tokens = sampled_tokens if part == "gen" else all_tokens
        if seconds is not None and tokens > 0:
            out[f"timing_per_token_ms/{part}"] = 1000.0 * seconds / tokens
    return out


def resident_bytes() -> float:
    """Resident memory of this process in bytes; NaN on systems without ``/proc``."""
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    for line in status.read_text().splitlines():
        if line.startswith("VmRSS:"):
            return float(line.split()[1]) * 1024
    return float("nan")
