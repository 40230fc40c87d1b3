"""A small process that outlives the run's driver and clears away what the driver leaves.

A driver that is killed cannot tidy up, and Ray's own processes do not all end with it. So a process
of its own session waits for the end of a pipe that the driver holds: the pipe closes however the
driver ends. Then everything that carries the run's mark in its environment, and all that came from
it, has ``GRACE`` seconds to end by itself, is killed after that, and the scratch folder goes.

Processes are told apart by their number and their start time, so that one which got a number anew
is none of ours. Nothing is ever chosen by its name.

This file is started by its path and imports the standard library only: it takes little memory and
is there before Ray is.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MARK = "DELTA_BELIEF_RUN_MARK"
"""Environment variable that names the run a process belongs to."""

GRACE = 5.0
"""Seconds that processes have to end by themselves."""

_LOOK_EVERY = 10.0
"""Seconds between two looks at what there is, while the driver lives."""

_KILLED_WITHIN = 5.0
"""Seconds after which a killed process that is still there counts as stuck in the kernel."""

Born = int
"""Start time of a process in clock ticks since the machine's start."""


@dataclass(frozen=True, slots=True)
class Process:
    """What ``/proc`` says of a process that is no zombie."""

    parent: int
    born: Born


def processes() -> dict[int, Process]:
    """All living processes of this machine, by their number."""
    found: dict[int, Process] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := look_up(int(name))) is not None:
            found[int(name)] = process
    return found


def look_up(pid: int) -> Process | None:
    """One process; None where it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name in brackets may hold blanks and brackets itself.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else Process(int(fields[1]), int(fields[19]))


def is_marked(pid: int, mark: str) -> bool:
    """Whether a process of our own user was started with the run's mark."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{MARK}={mark}".encode() in words


@dataclass
class Belongings:
    """What belongs to a run, so far.

    Attributes:
        mark: Value of ``MARK`` in the environment of its processes.
        spared: Processes that only look like it: the driver and the reaper.
        held: Start time by number.
    """

    mark: str
    spared: frozenset[int] = frozenset()
    held: dict[int, Born] = field(default_factory=dict[int, Born])

    def look(self) -> None:
        """Take down what has come since the last look: marked, or a child of something held."""
        seen = processes()
        self.held = {pid: born for pid, born in self.held.items() if _is(seen, pid, born)}
        new = {
            pid: seen[pid].born
            for pid in seen
            if pid not in self.held and pid not in self.spared and is_marked(pid, self.mark)
        }
        self.held |= new
        while new := {
            pid: process.born
            for pid, process in seen.items()
            if process.parent in self.held and pid not in self.held and pid not in self.spared
        }:
            self.held |= new

    def alive(self) -> dict[int, Born]:
        """Those that are there still, children that were born meanwhile included."""
        self.look()
        return self.held


def _is(seen: Mapping[int, Process], pid: int, born: Born) -> bool:
    return pid in seen and seen[pid].born == born


def end(pid: int, born: Born) -> None:
    """Kill the process that has this number and this start time; no other one."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:
        # A kernel before 5.3 has no handles of processes.
        handle = None
    try:
        process = look_up(pid)
        if process is None or process.born != born:
            return
        with suppress(ProcessLookupError):
            if handle is None:
                os.kill(pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        if handle is not None:
            os.close(handle)


def clear(belongings: Belongings, folders: Iterable[Path], grace: float = GRACE) -> None:
    """Leave nothing of a run: first its processes, then its folders.

    Args:
        belongings: Its processes.
        folders: Removed with all that is in them, whether they are there or not.
        grace: Seconds that the processes have to end by themselves.
    """
    deadline = time.monotonic() + grace
    while belongings.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = time.monotonic() + _KILLED_WITHIN
    while (left := belongings.alive()) and time.monotonic() < deadline:
        for pid, born in left.items():
            end(pid, born)
        time.sleep(0.05)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


class Reaper:
    """The driver's side: starts the process, and waits for it at the end.

    Args:
        mark: Of the run; what is started with it in its environment belongs to the run.
        folders: To be removed at the end.
    """

    def __init__(self, mark: str, folders: Iterable[Path]) -> None:
        self._mark, self._folders = mark, tuple(folders)
        # Neither the site's packages nor the user's settings: a bare interpreter starts at once.
        command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), mark]
        # Its own session, so that no signal to the driver's terminal or group reaches it.
        self._process = subprocess.Popen(
            [*command, *map(str, self._folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Number of its process."""
        return self._process.pid

    def finish(self) -> None:
        """Let it clear up, and wait until it has; where it is gone, clear up here."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            done = self._process.wait(GRACE + _KILLED_WITHIN + 5.0) == 0
        except subprocess.TimeoutExpired:
            done = False
        if not done:
            self._process.kill()
            self._process.wait()
            spared = frozenset({os.getpid()})
            clear(Belongings(self._mark, spared), self._folders)


def main(words: list[str]) -> int:
    """Wait until nobody holds the other end of stdin, then clear up.

    Args:
        words: The run's mark, then folders.
    """
    # Batch systems send their signals to every process of a job, and this one must be the last.
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
    )
    mark, *folders = words
    belongings = Belongings(mark, frozenset({os.getpid(), os.getppid()}))
    while not _has_ended(_LOOK_EVERY):
        belongings.look()
    clear(belongings, map(Path, folders))
    return 0


def _has_ended(seconds: float) -> bool:
    """Wait for the end of stdin, at most so long."""
    ready, _, _ = select.select([0], [], [], seconds)
    return bool(ready) and not os.read(0, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
