"""A check as processes: started in a group of their own, ended at a deadline, nothing left behind.

A command gets SIGTERM first, alone, so that it can put its house in order (a training run saves its
last step); after ``GRACE`` seconds its whole group is killed. Then everything goes that came from
it, wherever it went: all of it carries the check's mark in its environment. Nothing is ever chosen
by its name. When this process dies, the commands get SIGTERM as well.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from delta_belief_rl.cluster.reaper import end, look_up, processes
from validation.gpu.site import ROOT

MARK = "DELTA_BELIEF_GPU_CHECK"
"""Environment variable that names the check which a process belongs to."""
GRACE = 25.0
"""Seconds between SIGTERM and the kill."""
KILLED_WITHIN = 10.0
"""Seconds after which a killed process that is still there counts as stuck in the kernel."""
LEASH = ROOT / "delta_belief_rl" / "cli" / "leash.py"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "PYTHONUNBUFFERED": "1",
    # Ray ends workers when the machine's memory fills up, and here several runs share it.
    "RAY_memory_monitor_refresh_ms": "0",
}
"""Of every command."""


@dataclass
class Job:
    """The commands of one check.

    Attributes:
        folder: Gets ``stdout-<n>.txt`` and ``stderr-<n>.txt`` of the n-th command.
        deadline: Time (monotonic) at which they are ended.
        visible: Value of ``CUDA_VISIBLE_DEVICES``.
        statuses: Exit status of each command that is over; negative for a signal, as Python says.
        late: The deadline has passed.
        leftover: Processes that were still there after the last command.
    """

    commands: Sequence[Sequence[str]]
    folder: Path
    deadline: float
    visible: str
    statuses: list[int] = field(default_factory=list)
    late: bool = False
    leftover: int = 0
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    _mark: str = field(default_factory=lambda: f"{os.getpid()}-{secrets.token_hex(8)}")
    _process: subprocess.Popen[bytes] | None = None
    _asked: float = 0.0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in (*self.folder.glob("std*-*.txt"), self.folder / "junit.xml"):
            old.unlink(missing_ok=True)
        self._start()

    @property
    def seconds(self) -> float:
        """From its beginning to its end, or until now."""
        return (self.ended or time.monotonic()) - self.began

    @property
    def succeeded(self) -> bool:
        """Whether every command ended with 0."""
        return not self.late and self.statuses == [0] * len(self.commands)

    def poll(self) -> bool:
        """Look after the processes; returns whether all is over."""
        if self.ended:
            return True
        assert self._process is not None
        now = time.monotonic()
        status = self._process.poll()
        if status is None:
            if now >= self.deadline:
                self._hurry(now)
            return False
        self.statuses.append(status)
        if status == 0 and not self.late and len(self.statuses) < len(self.commands):
            self._start()
            return False
        self.leftover = clear(self._mark)
        self.ended = time.monotonic()
        return True

    def end_at(self, moment: float) -> None:
        """Bring the deadline forward."""
        self.deadline = min(self.deadline, moment)

    def _hurry(self, now: float) -> None:
        """SIGTERM once, a kill of the whole group later."""
        assert self._process is not None
        self.late = True
        with suppress(ProcessLookupError):
            if not self._asked:
                self._asked = now
                self._process.send_signal(signal.SIGTERM)
            elif now - self._asked >= GRACE:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self) -> None:
        number = len(self.statuses)
        leash = [sys.executable, "-I", str(LEASH), "run", str(os.getpid())]
        with self._open("stdout", number) as out, self._open("stderr", number) as err:
            self._process = subprocess.Popen(
                [*leash, *self.commands[number]],
                cwd=ROOT,
                env=environment(self.visible, self._mark),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                process_group=0,
            )

    def _open(self, stream: str, number: int) -> IO[bytes]:
        return (self.folder / f"{stream}-{number}.txt").open("wb")


def environment(visible: str, mark: str, before: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of a command: this one's, the GPUs of the check, and the check's mark."""
    paths = [str(ROOT), *filter(None, [before.get("PYTHONPATH")])]
    own = {"CUDA_VISIBLE_DEVICES": visible, MARK: mark, "PYTHONPATH": os.pathsep.join(paths)}
    return {**before, **ENVIRONMENT, **own}


def clear(mark: str) -> int:
    """Kill what carries a mark until nothing does; returns how many there were at first."""
    found = marked(mark)
    first = len(found)
    limit = time.monotonic() + KILLED_WITHIN
    while found and time.monotonic() < limit:
        for pid, born in found.items():
            end(pid, born)
        time.sleep(0.05)
        found = marked(mark)
    return first


def marked(mark: str) -> dict[int, int]:
    """Living processes with a mark in their environment: number to start time."""
    word = f"{MARK}={mark}".encode()
    found: dict[int, int] = {}
    for pid in processes():
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if word in words and (process := look_up(pid)) is not None:
            found[pid] = process.born
    return found
