"""The runs of a comparison as processes: started where there is room, watched, ended, recorded.

Each run is ``train.py`` in a session of its own. ``seed<k>.json`` beside its folder says what it
was started with and how it ended; a run that is done is not started again, and one that was cut
goes on from its checkpoint, because ``trainer.resume_mode`` is ``auto``.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from delta_belief_rl.cli.leash import born, send
from delta_belief_rl.cli.watchdog_causes import classify, oom_kills, read_end, signal_of
from delta_belief_rl.cli.watchdog_processes import (
    POLL_SECONDS,
    Kin,
    Session,
    Signals,
    collect,
    has_ended,
    spawn,
)
from delta_belief_rl.types import UserError

GRACE_SECONDS = 60.0
"""For a run that is asked to end, which saves its step before."""
LEFTOVER_SECONDS = 10.0
"""For what a run has left behind."""
LAST_SECONDS = 1.0
"""For the same where all runs are to end and their time is up."""
TAIL_BYTES = 8192
LONGEST_DETAIL = 300

Slot = Mapping[str, str]
"""Variables of the environment that give a run its part of the machine."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One method with one seed.

    Attributes:
        words: Its settings but for the place.
        folder: The run's folder.
        plugins: Digest of each file of a user's that it runs, by path.
    """

    method: str
    seed: int
    words: tuple[str, ...]
    folder: Path
    plugins: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def log(self) -> Path:
        """Everything that the run printed, over all of its starts."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def file(self) -> Path:
        """The record."""
        return self.folder.with_name(f"{self.folder.name}.json")

    @property
    def result(self) -> Path:
        """What the run brought, once it is done and was read."""
        return self.folder.with_name(f"{self.folder.name}.result.json")

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.method} with seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a cell.

    Attributes:
        words: What it was started with.
        status: Exit status of its last start, or minus the signal; None while it runs and where
            it was cut.
        cause: Why it failed, in a sentence; empty where it did not.
        seconds: Of all starts, those that were cut included.
        plugins: As of ``Cell``, at its first start.
    """

    words: tuple[str, ...]
    status: int | None = None
    cause: str = ""
    starts: int = 0
    seconds: float = 0.0
    plugins: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def done(self) -> bool:
        """Whether it came to its end."""
        return self.status == 0


def read_record(cell: Cell) -> Record:
    """The record of a cell; a new one where it was never started.

    Raises:
        UserError: It is damaged, of other settings, or of another state of a plug-in.
    """
    if not cell.file.exists():
        return Record(cell.words, plugins=cell.plugins)
    try:
        fields = json.loads(cell.file.read_text(encoding="utf-8"))
        record = Record(**{**fields, "words": tuple(fields["words"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{cell.file} cannot be read ({error}): remove it, and the run is started anew."
        ) from error
    if sorted(record.words) != sorted(cell.words):
        odd = [word for word in cell.words if word not in record.words]
        old = [word for word in record.words if word not in cell.words]
        change = f"{' '.join(old) or 'nothing'} became {' '.join(odd) or 'nothing'}"
        raise UserError(
            f"The run of {cell.name} in {cell.folder.parent} has other settings ({change}): name "
            "another folder with --out, or keep the settings."
        )
    for name, digest in record.plugins.items():
        if cell.plugins.get(name, digest) != digest:
            raise UserError(
                f"The plug-in {name} was edited since the run of {cell.name} was started: name "
                f"another folder with --out, or remove {cell.folder.parent}, whose runs are then "
                "made anew."
            )
    return record


def file_digest(path: Path) -> str:
    """Names the contents of a file.

    Raises:
        UserError: It cannot be read.
    """
    try:
        return sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"The plug-in {path} cannot be read ({error.strerror}).") from error


def write_record(cell: Cell, record: Record) -> None:
    """Replace the record of a cell.

    Raises:
        UserError: The disk or the folder does not take it.
    """
    beside = cell.file.with_name(f".{cell.file.name}.{os.getpid()}")
    body = json.dumps({**asdict(record), "words": list(record.words)}, indent=1)
    try:
        cell.file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(body + "\n", encoding="utf-8")
        os.replace(beside, cell.file)
    except OSError as error:
        raise UserError(
            f"{cell.file} cannot be written ({error.strerror}): make room, or name another folder "
            "with --out."
        ) from error


@dataclass
class _Running:
    """A start that is going on.

    Attributes:
        events: Length of the run's list of events before.
        kills: Processes that the kernel had killed for want of memory before.
    """

    cell: Cell
    record: Record
    slot: Slot
    session: Session
    began: float
    events: int
    kills: int


class Crew:
    """Runs cells, as many at once as there are slots."""

    def __init__(
        self,
        program: Sequence[str],
        slots: Sequence[Slot],
        limit_seconds: float,
        say: Callable[[str], None],
        grace: float = GRACE_SECONDS,
        done: Callable[[Cell], None] = lambda cell: None,
    ) -> None:
        """Prepare.

        Args:
            program: The command line before a run's settings.
            slots: One for each run at a time.
            limit_seconds: Longest that one start may take.
            say: Tells a person what happens.
            grace: Seconds for a run to end when it is asked to.
            done: Called with each run that came to its end, while the others go on.
        """
        self._program, self._limit, self._say = list(program), limit_seconds, say
        self._grace, self._done = grace, done
        self._free: list[Slot] = list(slots)
        self._running: list[_Running] = []

    def run(self, cells: Sequence[Cell]) -> signal.Signals | None:
        """Run every cell that is not done; returns the signal that cut it short, or None."""
        waiting = [cell for cell in cells if not read_record(cell).done]
        total, started = len(waiting), 0
        with _signals() as signals:
            try:
                while (waiting or self._running) and signals.told is None:
                    while waiting and self._free:
                        started += 1
                        cell = waiting.pop(0)
                        self._say(f"{cell.name} starts ({started} of {total})")
                        self._start(cell, signals)
                    signals.wait(POLL_SECONDS)
                    self._look()
            finally:
                self._end_all(signals)
            return signals.told

    def _start(self, cell: Cell, signals: Signals) -> None:
        for name, digest in cell.plugins.items():
            if file_digest(Path(name)) != digest:
                raise UserError(
                    f"The plug-in {name} was edited while the comparison went on: give the command "
                    "again with another folder in --out."
                )
        before = read_record(cell)
        record = replace(
            before, status=None, cause="", starts=before.starts + 1, plugins=cell.plugins
        )
        write_record(cell, record)
        events = cell.folder / "events.jsonl"
        length = events.stat().st_size if events.exists() else 0
        slot, kills = self._free.pop(), oom_kills()
        place = str(cell.folder.absolute()).replace("'", "\\'")
        words = [*self._program, *cell.words, f"trainer.output_dir='{place}'"]
        try:
            output = os.open(cell.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UserError(f"{cell.log} cannot be written ({error.strerror}).") from error
        try:
            pid = spawn(words, output, {**os.environ, **slot})
        finally:
            os.close(output)
        session = Session(pid, born(pid), Kin(), signals, driver=pid)
        self._running.append(_Running(cell, record, slot, session, time.monotonic(), length, kills))

    def _look(self) -> None:
        for one in list(self._running):
            late = time.monotonic() - one.began > self._limit
            if has_ended(one.session.pid):
                one.session.end(LEFTOVER_SECONDS)
                self._note(one, late=False)
            elif late:
                self._say(f"{one.cell.name} is at its limit of time and is asked to end")
                one.session.end(self._grace)
                self._note(one, late=True)

    def _note(self, one: _Running, *, late: bool) -> None:
        """Record an end and free the place."""
        status = collect(one.session.pid)
        seconds = time.monotonic() - one.began
        cause = "" if status == 0 else self._cause(one, status, late=late)
        record = replace(
            one.record,
            status=status,
            cause=cause,
            seconds=round(one.record.seconds + seconds, 3),
        )
        write_record(one.cell, record)
        self._running.remove(one)
        self._free.append(one.slot)
        self._say(f"{one.cell.name}: {cause or f'done after {seconds:.0f} s'}")
        if record.done:
            self._done(one.cell)

    def _cause(self, one: _Running, status: int, *, late: bool) -> str:
        if late:
            return f"it took longer than {self._limit / 3600:g} h (--limit-hours)"
        end = read_end(one.cell.folder, one.events)
        kind = classify(status, end, oom_kills=oom_kills() - one.kills)
        told = signal_of(status)
        said = last_line(one.cell.log) or (told.name if told else f"status {status}")
        return f"{kind}: {said} ({one.cell.log})"

    def _end_all(self, signals: Signals) -> None:
        """Ask all runs at once and wait for all together; their records stay open."""
        if signals.told is not None and self._running:
            self._say(f"{signals.told.name}: {len(self._running)} runs are asked to end")
        deadline = time.monotonic() + self._grace
        send([one.session.pid for one in self._running], signal.SIGTERM)
        while left := [one for one in self._running if not has_ended(one.session.pid)]:
            if time.monotonic() >= deadline:
                for one in left:
                    family = one.session.kin.family(one.session.pid)
                    send([one.session.pid, *family], signal.SIGKILL)
                break
            signals.wait(POLL_SECONDS)
        ended: list[tuple[_Running, int, float]] = []
        for one in self._running:
            most = min(LEFTOVER_SECONDS, deadline - time.monotonic())
            one.session.end(max(most, LAST_SECONDS))
            ended.append((one, collect(one.session.pid), time.monotonic() - one.began))
        self._running.clear()
        # Not before all have ended: the disk may not take a record.
        for one, status, seconds in ended:
            spent = round(one.record.seconds + seconds, 3)
            record = replace(one.record, status=0 if status == 0 else None, seconds=spent)
            write_record(one.cell, record)


@contextmanager
def _signals() -> Iterator[Signals]:
    """Signals waited for, in place of their handlers, for the length of the block."""
    signals = Signals()
    try:
        yield signals
    finally:
        signals.close()


def last_line(log: Path) -> str:
    """The last line of a log that says something, cut to a length."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:LONGEST_DETAIL] if said else ""
