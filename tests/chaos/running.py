"""A run under chaos as seen from outside: its processes, its records, and who starts it again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from delta_belief_rl.obs.exits import ExitStatus
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.trainer import checkpoint
from tests.processes import arguments, born, descendants, mentioning
from tests.runs import ROOT

FUTILE = 6
"""So many starts in a row that finish no step are a run that does not recover."""
FINAL = (ExitStatus.BAD_INPUT, ExitStatus.COLLAPSED)
"""Starting again leads to the same end."""


class NotKept(AssertionError):
    """A promise of ``docs/reliability.md`` was broken."""


class Keeper(Protocol):
    """Whoever starts the run again when it ends before its time."""

    process: subprocess.Popen[bytes]
    command: Sequence[str]
    environ: dict[str, str]

    def tend(self) -> bool:
        """Start the run again where that is due; True once it has come to its end."""
        ...


@dataclass
class Starter:
    """Starts ``train.py`` itself, again and again, as a batch system that requeues would.

    Attributes:
        command: Arguments of ``train.py``.
        out: The run's folder.
        environ: Environment of every start.
        log: Gets the output of all starts.
        statuses: Exit statuses so far; negative for a signal.
    """

    command: Sequence[str]
    environ: dict[str, str]
    out: Path
    log: Path
    statuses: list[int] = field(default_factory=list)
    _reached: int = -2
    _futile: int = 0

    def __post_init__(self) -> None:
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """One more process of the run, in a session of its own."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "train.py", *self.command],
                cwd=ROOT,
                env=self.environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def tend(self) -> bool:
        """See ``Keeper``.

        Raises:
            NotKept: The run gave up, or does not get on.
        """
        status = self.process.poll()
        if status is None:
            return False
        self.statuses.append(status)
        if status == 0:
            return True
        if status in FINAL:
            raise NotKept(f"the run gave up with status {status}: {tail(self.log)}")
        reached = last_step(self.out)
        self._futile = 0 if reached > self._reached else self._futile + 1
        self._reached = reached
        if self._futile >= FUTILE:
            raise NotKept(f"{FUTILE} starts in a row finished no step: {tail(self.log)}")
        self.process = self.start()
        return False


@dataclass
class Watched:
    """Starts ``watchdog.sh``, which starts the run; told to end, it is started again itself.

    Attributes:
        command: Arguments of ``train.py``.
        environ: Environment of every start.
        log: Gets what the watchdog says, and names its folder of logs.
    """

    command: Sequence[str]
    environ: dict[str, str]
    log: Path

    def __post_init__(self) -> None:
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """One more watchdog, in a session of its own."""
        words = ["bash", "watchdog.sh", "--backoff", "1", "--max-restarts", str(FUTILE)]
        words += ["--log-dir", str(self.log.with_suffix(".logs")), "--"]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*words, sys.executable, "train.py", *self.command],
                cwd=ROOT,
                env=self.environ | {"PYTHON": sys.executable},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def tend(self) -> bool:
        """See ``Keeper``.

        Raises:
            NotKept: The watchdog gave up.
        """
        status = self.process.poll()
        if status == ExitStatus.TERMINATED:
            # As a batch system does that requeues a job which it has told to end.
            self.process = self.start()
        elif status not in (None, 0):
            raise NotKept(f"the watchdog gave up with status {status}: {tail(self.log)}")
        return status == 0


@dataclass
class Running:
    """The run and everything around it.

    Attributes:
        out: Its folder.
        scratch: Folder of everything temporary.
        keeper: Who starts it again.
    """

    out: Path
    scratch: Path
    keeper: Keeper

    def driver(self) -> int | None:
        """Process of ``train.py``, None while there is none."""
        top = self.keeper.process.pid
        for pid in [top, *descendants(top)]:
            words = arguments(pid)
            if len(words) > 1 and words[1].endswith("train.py") and born(pid):
                return pid
        return None

    def has_begun(self) -> bool:
        """Whether the driver of now has recorded its start, and so plays the run."""
        driver = self.driver()
        events = self.events()
        if driver is None or not events:
            return False
        began = os.stat(f"/proc/{driver}").st_mtime
        return any(e["kind"] == "start" and e["time"] > began for e in events)

    def worker(self, role: str, index: int) -> int | None:
        """Process of a worker, None where it is not up."""
        driver = self.driver()
        found = [event for event in self.events() if event["kind"] == "workers"]
        if driver is None or not found:
            return None
        alive = set(descendants(driver))
        places = [w["pid"] for w in found[-1]["workers"] if w["role"] == role]
        places = [pid for pid in places if pid in alive and born(pid)]
        return places[index % len(places)] if places else None

    def helper(self, name: str) -> int | None:
        """One of Ray's own processes of the run, by the name of its program."""
        driver = self.driver()
        below = [] if driver is None else descendants(driver)
        named = [pid for pid in below if Path((arguments(pid) or [""])[0]).name == name]
        return named[0] if named else None

    def events(self) -> list[dict[str, Any]]:
        """``events.jsonl`` so far."""
        path = self.out / "events.jsonl"
        return read_records(path) if path.exists() else []

    def send(self, pid: int | None, number: signal.Signals) -> bool:
        """Send a signal; False where there is nobody to get it."""
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def end(self) -> None:
        """End whatever is left of it, by process number."""
        own = {self.keeper.process.pid, *descendants(self.keeper.process.pid)}
        for pid in own | set(mentioning(str(self.scratch))):
            self.send(pid, signal.SIGKILL)
        self.keeper.process.wait()


def last_step(out: Path) -> int:
    """Step of the last record, -1 before the first."""
    path = out / "metrics.jsonl"
    records = read_records(path) if path.exists() else []
    return int(records[-1]["step"]) if records else -1


def saved_step(out: Path) -> int:
    """Step of the checkpoint saved last, -1 before the first."""
    latest = checkpoint.find_latest(out / "checkpoints")
    return -1 if latest is None else latest.step


def tail(log: Path, size: int = 3000) -> str:
    """The end of a log."""
    return log.read_bytes()[-size:].decode(errors="replace")


def wait_until(
    condition: Callable[[], object], seconds: float, tend: Callable[[], bool] | None = None
) -> bool:
    """Poll a condition; False when the time is up, or when ``tend`` says that the run is over."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit or (tend is not None and tend()):
            return bool(condition())
        time.sleep(0.1)
    return True
