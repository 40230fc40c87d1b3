"""The GPUs of the job: what each is, what it has free, and who holds the rest.

Only GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to the job are looked at. They are asked through
``nvidia-smi``, which needs no memory on them itself.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Ask = Callable[[Sequence[str]], str | None]
"""Runs ``nvidia-smi`` with some arguments; None where that is not possible."""

_MIB = 2**20
_FIELDS = "uuid,name,memory.total,memory.free,compute_cap"
_PLAIN = ("--format=csv,noheader,nounits",)
_LONGEST_ANSWER = 30.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process on a GPU.

    Attributes:
        pid: Its number.
        name: Its program.
        bytes: What it holds.
    """

    pid: int
    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of the job.

    Attributes:
        index: Its number inside the job, as the plan counts.
        total: Bytes of it.
        free: Bytes that nobody holds.
        capability: Compute capability.
        holders: Processes that can be seen from here; inside a container often none.
    """

    index: int
    name: str
    total: int
    free: int
    capability: tuple[int, int]
    holders: tuple[Holder, ...] = ()


def read_gpus(
    environ: Mapping[str, str] = os.environ, ask: Ask | None = None
) -> tuple[Gpu, ...] | None:
    """The GPUs of the job, None where they cannot be asked.

    Args:
        environ: ``CUDA_VISIBLE_DEVICES`` in it names the job's GPUs by number or UUID.
        ask: ``nvidia-smi`` unless given.
    """
    ask = ask or ask_nvidia_smi
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    chosen: list[str] = []
    if visible is not None:
        chosen = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
        if not chosen:
            return ()
    only = ["-i", ",".join(chosen)] if chosen else []
    text = ask([*only, f"--query-gpu=index,{_FIELDS}", *_PLAIN])
    if text is None:
        return None
    query = "--query-compute-apps=gpu_uuid,pid,name,used_memory"
    holders = _read_holders(ask([*only, query, *_PLAIN]))
    rows = [_cells(line) for line in text.splitlines() if line.strip()]
    found = {key: row for row in rows for key in row[:2]}
    try:
        ordered = [found[name] for name in chosen] if chosen else rows
        return tuple(_gpu(number, row, holders) for number, row in enumerate(ordered))
    except (KeyError, ValueError):  # a part of a GPU, or a driver that does not tell
        return None


def ask_nvidia_smi(arguments: Sequence[str]) -> str | None:
    """What ``nvidia-smi`` prints; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=_LONGEST_ANSWER,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def lowest_capability(gpus: Sequence[Gpu] | None) -> tuple[int, int] | None:
    """The compute capability that every GPU of the job has; None where there is none."""
    return min((gpu.capability for gpu in gpus), default=None) if gpus else None


def _read_holders(text: str | None) -> dict[str, tuple[Holder, ...]]:
    """Processes by the UUID of their GPU; what the driver does not tell counts as nothing."""
    found: dict[str, tuple[Holder, ...]] = {}
    for line in (text or "").splitlines():
        if not line.strip():
            continue
        uuid, pid, rest = line.split(",", 2)
        name, used = rest.rsplit(",", 1)
        held = int(used) * _MIB if used.strip().isdigit() else 0
        program = name.strip().rsplit("/", 1)[-1]
        found[uuid.strip()] = (*found.get(uuid.strip(), ()), Holder(int(pid), program, held))
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def _gpu(number: int, row: Sequence[str], holders: Mapping[str, tuple[Holder, ...]]) -> Gpu:
    """One GPU from its line; raises ValueError where a cell holds no number."""
    _, uuid, name, total, free, capability = row
    major, minor = capability.split(".")
    return Gpu(
        index=number,
        name=name,
        total=int(total) * _MIB,
        free=int(free) * _MIB,
        capability=(int(major), int(minor)),
        holders=holders.get(uuid, ()),
    )
