"""Processes of the watchdog: starting them, waiting for signals, and leaving nothing behind.

Everything is addressed by process id, session and kinship. No process is looked for by its name,
and no handler is set: the watchdog's signals are blocked and waited for, which works the same at
any moment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from delta_belief_rl.cli import leash
from delta_belief_rl.cli.leash import process_stat, send

PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.1
KILL_SECONDS = 10.0
"""How long a killed process may take to be gone, e.g. while a driver frees its GPU's memory."""


class Signals:
    """Waits for the signals of this process, which must be its main thread.

    Attributes:
        told: The signal that told the watchdog to end; None before.
        announced: SIGUSR1 came, by which a batch system announces the end of the job's time.
    """

    def __init__(self) -> None:
        ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        # One that is ignored is meant to be, e.g. SIGHUP under nohup.
        self._ends = {one for one in ends if signal.getsignal(one) is not signal.SIG_IGN}
        self._waited = self._ends | {signal.SIGCHLD, signal.SIGUSR1}
        self.told: signal.Signals | None = None
        self.announced = False
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, self._waited)

    def close(self) -> None:
        """Let signals act as before."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def wait(self, seconds: float) -> signal.Signals | None:
        """The next signal, or None after so many seconds."""
        found = signal.sigtimedwait(self._waited, seconds)
        if found is None:
            return None
        signum = signal.Signals(found.si_signo)
        if signum in self._ends and self.told is None:
            self.told = signum
        self.announced |= signum == signal.SIGUSR1
        return signum


def spawn(command: Sequence[str], output: int, environ: Mapping[str, str]) -> int:
    """Start a command in a session of its own, which gets SIGTERM when this process dies.

    Args:
        output: File descriptor of its stdout and stderr; its stdin is empty.

    Returns:
        The process id, that of the command and of its session and group.
    """
    script = [str(Path(leash.__file__)), "run", str(os.getpid())]
    return _spawn([*script, *command], output, environ, os.devnull)


def _spawn(words: Sequence[str], output: int, environ: Mapping[str, str], stdin: str | int) -> int:
    first = (
        (os.POSIX_SPAWN_OPEN, 0, stdin, os.O_RDONLY, 0)
        if isinstance(stdin, str)
        else (os.POSIX_SPAWN_DUP2, stdin, 0)
    )
    duplicates = [(os.POSIX_SPAWN_DUP2, output, number) for number in (1, 2)]
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", *words],
        environ,
        file_actions=[first, *duplicates],
        setsid=True,
        setsigmask=[],
    )


class Guard:
    """A process that ends the current session should the watchdog be killed."""

    def __init__(self, grace: float) -> None:
        """Args: ``grace`` seconds between asking and killing."""
        reading, self._pipe = os.pipe()
        script = str(Path(leash.__file__))
        try:
            self.pid = _spawn([script, "guard", str(grace)], 2, os.environ, reading)
        finally:
            os.close(reading)

    def watch(self, pid: int, birth: str) -> None:
        """Name the session's leader; 0 for none."""
        # A guard that was killed is missed only when the watchdog is killed as well.
        with suppress(BrokenPipeError):
            os.write(self._pipe, f"{pid} {birth or 0}\n".encode())

    def close(self) -> None:
        """Let it go."""
        self.watch(0, "0")
        os.close(self._pipe)
        os.waitpid(self.pid, 0)


@dataclass
class Kin:
    """Which processes are whose.

    Attributes:
        apart: Children of the watchdog that are no part of the run, with their sessions.
    """

    apart: set[int] = field(default_factory=set)
    adopts: bool = False

    def adopt(self) -> None:
        """Become the parent of whatever the run's processes leave behind, where that is safe.

        A program that another program became may have children that it knows nothing of; then
        nothing is adopted.
        """
        if not _children(os.getpid()):
            libc = ctypes.CDLL(None, use_errno=True)
            self.adopts = libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0

    def family(self, leader: int) -> list[int]:
        """Living processes of a run but its leader: its session, descendants and orphans."""
        table = _table()
        own = table.get(os.getpid(), _NOBODY).session
        found: set[int] = {pid for pid, row in table.items() if row.session == leader}
        front = {leader}
        if self.adopts:
            front |= {
                pid
                for pid, row in table.items()
                if row.parent == os.getpid() and self._is_orphan(pid, row, own)
            }
        while front:
            found |= front
            front = {pid for pid, row in table.items() if row.parent in front} - found
        return sorted(pid for pid in found - {leader} if pid in table and table[pid].lives)

    def reap_orphans(self, leader: int) -> None:
        """Take note of the end of adopted processes; the leader's end stays to be read."""
        for pid in _children(os.getpid()) if self.adopts else ():
            if pid != leader and pid not in self.apart:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _is_orphan(self, pid: int, row: _Row, own: int) -> bool:
        return pid not in self.apart and row.session not in self.apart and row.session != own


@dataclass(frozen=True, slots=True)
class _Row:
    parent: int
    session: int
    lives: bool


_NOBODY = _Row(0, 0, False)


def _table() -> dict[int, _Row]:
    table: dict[int, _Row] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = process_stat(int(folder.name))
        if fields:
            row = _Row(int(fields[1]), int(fields[3]), fields[0] not in "ZX")
            table[int(folder.name)] = row
    return table


def _children(pid: int) -> list[int]:
    return [child for child, row in _table().items() if row.parent == pid]


def has_ended(pid: int) -> bool:
    """Whether a child has ended; its number stays its own, because its end stays to be read."""
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, pid, how) is not None


def collect(pid: int) -> int:
    """Read the end of a child that has ended: exit status, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@dataclass
class Session:
    """The processes of one start.

    Attributes:
        pid: Of the leader, the command itself.
        birth: Its start time.
        driver: Process of the run inside, where it has said so; 0 before.
    """

    pid: int
    birth: str
    kin: Kin
    signals: Signals
    driver: int = 0

    def show_stacks(self, seconds: float) -> None:
        """Have the run write the stacks of its processes, for which it has so many seconds."""
        send([self._driver() or self.pid], signal.SIGUSR1)
        self._until(lambda: has_ended(self.pid), seconds)

    def end(self, grace: float) -> bool:
        """Have every process of the start end, and return when they are gone.

        A run that has said which process it is, is asked alone: its helpers must answer while it
        saves. What is left when it is gone is asked next, and killed after ``grace`` seconds from
        the beginning.

        Returns:
            False where something had to be killed.
        """
        deadline = time.monotonic() + grace
        if not has_ended(self.pid):
            driver = self._driver()
            send([driver] if driver else [self.pid, *self.kin.family(self.pid)], signal.SIGTERM)
            self._until(lambda: has_ended(self.pid), grace)
        asked: set[int] = set()

        def gone() -> bool:
            self.kin.reap_orphans(self.pid)
            left = self.kin.family(self.pid)
            send([pid for pid in left if pid not in asked], signal.SIGTERM)
            asked.update(left)
            return not left and has_ended(self.pid)

        # What was asked just now needs a moment, however long the run itself took.
        if self._until(gone, max(deadline - time.monotonic(), min(grace, 1.0))):
            return True

        def killed() -> bool:
            self.kin.reap_orphans(self.pid)
            left = self.kin.family(self.pid)
            alive = [] if has_ended(self.pid) else [self.pid]
            send([*alive, *left], signal.SIGKILL)
            return not left and not alive

        self._until(killed, KILL_SECONDS)
        return False

    def _driver(self) -> int:
        """The run's own process, where it is known to be one of ours; otherwise 0."""
        ours = self.driver == self.pid or self.driver in self.kin.family(self.pid)
        return self.driver if ours else 0

    def _until(self, holds: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() >= deadline:
                return False
            self.signals.wait(POLL_SECONDS)
        return True
