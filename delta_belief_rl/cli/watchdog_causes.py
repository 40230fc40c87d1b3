"""Why a start of a run ended, and what is to be done: from numbers and records, never from words.

A log holds whatever a model said; a judge that reasons about a mushroom has no memory problem.
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from delta_belief_rl.obs.exits import ExitStatus

MOST_LOWERINGS = 3
"""How often settings are lowered over the life of a watchdog."""
LONGEST_PAUSE = 60
"""Upper bound of a pause, in multiples of the first one."""
DISK_FULL_FACTOR = 10
"""A full disk is emptied by people or by other programs, which takes longer."""
JITTER = 0.2
TAIL_BYTES = 1 << 20
"""What is read of the end of a file of records; a record is far shorter."""


class Cause(StrEnum):
    """Why one start ended."""

    DONE = "done"
    FAILED = "failed"
    BAD_INPUT = "bad input"
    COLLAPSED = "collapsed"
    OUT_OF_MEMORY = "out of GPU memory"
    STALLED = "stalled"
    DISK_FULL = "disk full"
    TERMINATED = "terminated"
    KILLED = "killed"
    HOST_OUT_OF_MEMORY = "killed for want of host memory"
    HUNG = "hung"
    NO_COMMAND = "not startable"


FINAL = frozenset({Cause.DONE, Cause.BAD_INPUT, Cause.COLLAPSED, Cause.NO_COMMAND})
"""The same start again would end in the same way."""

BY_STATUS: dict[int, Cause] = {
    ExitStatus.DONE: Cause.DONE,
    ExitStatus.BAD_INPUT: Cause.BAD_INPUT,
    ExitStatus.COLLAPSED: Cause.COLLAPSED,
    ExitStatus.OUT_OF_MEMORY: Cause.OUT_OF_MEMORY,
    ExitStatus.STALLED: Cause.STALLED,
    ExitStatus.DISK_FULL: Cause.DISK_FULL,
    126: Cause.NO_COMMAND,
    127: Cause.NO_COMMAND,
}
"""Every other exit status is a failure that a new start may mend."""


@dataclass(frozen=True, slots=True)
class End:
    """The event ``end`` of a run.

    Attributes:
        status: Exit status that the run meant to have; None where it did not say.
        cause: Kind of failure, e.g. ``"rank_failed"``; empty where it did not say.
    """

    status: int | None
    cause: str = ""


def as_shell(status: int) -> int:
    """An exit status as a shell counts it: 128 and the signal for a process that was killed."""
    return 128 - status if status < 0 else status


def signal_of(status: int) -> signal.Signals | None:
    """The signal that ended a process, also where a shell around it reports it as a number."""
    number = as_shell(status) - 128
    return signal.Signals(number) if number in {*signal.Signals} else None


def classify(status: int, end: End | None, *, oom_kills: int = 0, hung: bool = False) -> Cause:
    """Why a start ended.

    What the run recorded of itself comes before the exit status, which belongs to whatever was
    started: ``make`` reports each failure as 2, and a pipe that of its last part.

    Args:
        status: Of the process: its exit status, or minus the signal that killed it.
        end: The run's last event ``end`` of this start.
        oom_kills: Processes that the kernel killed for want of memory in our cgroup meanwhile.
        hung: The watchdog ended it because its heartbeat had stopped.
    """
    if hung:
        return Cause.HUNG
    if end is not None and end.status:
        status = end.status
    signum = signal_of(status)
    if signum == signal.SIGTERM:
        return Cause.TERMINATED
    if signum == signal.SIGKILL and oom_kills > 0:
        return Cause.HOST_OUT_OF_MEMORY
    if signum is not None:
        return Cause.KILLED
    return BY_STATUS.get(status, Cause.FAILED)


# --- restarts -------------------------------------------------------------------------------------


class Budget:
    """Restarts that are left: so many within a time, unless there is progress."""

    def __init__(self, most: int, window: float) -> None:
        """Args: ``most`` restarts in ``window`` seconds without progress."""
        self.most = most
        self.window = window
        self._times: list[float] = []
        self._best: int | None = None

    @property
    def used(self) -> int:
        """Restarts that count against the budget, as of the last ``take``."""
        return len(self._times)

    def progress(self, step: int | None) -> bool:
        """Note the newest step of a start; True, and a full budget, where none came so far."""
        if step is None or (self._best is not None and step <= self._best):
            return False
        self._best = step
        self._times = []
        return True

    def take(self, now: float) -> bool:
        """Use one restart; False when none is left. ``now`` is of a monotonic clock, seconds."""
        self._times = [time for time in self._times if now - time < self.window]
        if len(self._times) >= self.most:
            return False
        self._times.append(now)
        return True


def pause_seconds(base: float, used: int, cause: Cause, name: str) -> float:
    """How long to wait before a restart: doubled each time up to a bound, and a little random.

    Args:
        base: The first pause, in seconds.
        used: Restarts without progress, this one included.
        name: Names the random part, so that runs that fell together do not start together.
    """
    doubled = min(base * 2.0 ** max(used - 1, 0), base * LONGEST_PAUSE)
    if cause is Cause.DISK_FULL:
        doubled = min(doubled * DISK_FULL_FACTOR, base * LONGEST_PAUSE)
    return doubled * random.Random(f"watchdog/{name}/{used}").uniform(1 - JITTER, 1 + JITTER)


# --- what the run has written ---------------------------------------------------------------------


def tail_records(path: Path, start: int = 0) -> list[dict[str, Any]]:
    """Whole records at the end of a file of JSON lines, behind byte ``start``; [] without a file.

    A line that is no record is passed over.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            begin = max(start, size - TAIL_BYTES)
            # One byte more tells whether the part begins with a line.
            file.seek(max(begin - 1, 0))
            data = file.read()
    except OSError:
        return []
    lines = data.split(b"\n")
    first = 1 if begin > 0 else 0
    records: list[dict[str, Any]] = []
    for line in lines[first:-1]:
        try:
            record: object = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(cast("dict[str, Any]", record))
    return records


def read_end(run_dir: Path, events_bytes: int) -> End | None:
    """The last event ``end`` behind a byte of ``events.jsonl``; None where there is none."""
    for record in reversed(tail_records(run_dir / "events.jsonl", events_bytes)):
        if record.get("kind") == "end":
            status = record.get("status")
            known = status if isinstance(status, int) else None
            return End(known, str(record.get("cause") or ""))
    return None


def newest_step(run_dir: Path, events_bytes: int) -> int | None:
    """The highest step in the records of a run that this start can have written."""
    records = tail_records(run_dir / "events.jsonl", events_bytes)
    records += tail_records(run_dir / "metrics.jsonl")[-1:]
    steps = [step for one in records if isinstance(step := one.get("step"), int)]
    return max(steps, default=None)


def oom_kills(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Processes of our cgroup that the kernel killed for want of memory, since it was made.

    Reads ``memory.events`` (cgroup v2) or ``memory.oom_control`` (v1); 0 where there is neither.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in lines:
        _, controllers, place = line.split(":", 2)
        below = place.lstrip("/")
        if controllers == "":
            file = root / below / "memory.events"
        elif "memory" in controllers.split(","):
            file = root / "memory" / below / "memory.oom_control"
        else:
            continue
        try:
            counts = dict(row.split() for row in file.read_text(encoding="utf-8").splitlines())
        except (OSError, ValueError):
            continue
        return int(counts.get("oom_kill", 0))
    return 0


# --- settings that are lowered after an out-of-memory ---------------------------------------------

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


def default_lowerings(config: Mapping[str, Any]) -> dict[str, float]:
    """Factors of those settings that have an effect in a configuration."""
    factors: dict[str, float] = {}
    if setting(config, f"{_ACTOR}.use_dynamic_bsz"):
        factors[f"{_ACTOR}.ppo_max_token_len_per_gpu"] = 0.8
    else:
        factors[f"{_ACTOR}.ppo_micro_batch_size_per_gpu"] = 0.5
    by_bytes = setting(config, f"{_ROLLOUT}.kv_cache_memory_bytes")
    if setting(config, f"{_ROLLOUT}.name") == "vllm" and by_bytes is None:
        factors[f"{_ROLLOUT}.gpu_memory_utilization"] = 0.9
    return factors


def setting(config: Mapping[str, Any], name: str) -> object:
    """A value by its dotted name; None where there is none."""
    value: object = config
    for part in name.split("."):
        value = cast("Mapping[str, Any]", value).get(part) if isinstance(value, Mapping) else None
    return value


def lowered(config: Mapping[str, Any], factors: Mapping[str, float]) -> dict[str, float | int]:
    """New values of settings that are numbers and become smaller; integers stay integers, from 1.

    Example:
        >>> lowered({"a": {"tokens": 70000, "share": 0.5}}, {"a.tokens": 0.8, "a.share": 0.9})
        {'a.tokens': 56000, 'a.share': 0.45}
    """
    found: dict[str, float | int] = {}
    for name, factor in factors.items():
        old = setting(config, name)
        if isinstance(old, bool) or not isinstance(old, int | float):
            continue
        new = max(1, int(old * factor)) if isinstance(old, int) else float(f"{old * factor:.4g}")
        if new < old:
            found[name] = new
    return found
