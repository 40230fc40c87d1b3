"""``delta-belief watchdog``: run a training for days, and start it again where that can help.

The command is a child in a session of its own. Its end is judged by exit status, signal, the run's
own records and the kernel's count of processes that it killed for want of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from delta_belief_rl.cli.leash import born, send
from delta_belief_rl.cli.verb import Result, Verb
from delta_belief_rl.cli.watchdog_causes import (
    FINAL,
    MOST_LOWERINGS,
    Budget,
    Cause,
    End,
    as_shell,
    classify,
    default_lowerings,
    lowered,
    newest_step,
    oom_kills,
    pause_seconds,
    read_end,
    setting,
    signal_of,
)
from delta_belief_rl.cli.watchdog_files import Backup, Folder, Shown, read_config
from delta_belief_rl.cli.watchdog_processes import (
    Guard,
    Kin,
    Session,
    Signals,
    collect,
    has_ended,
    spawn,
)
from delta_belief_rl.obs.exits import ExitStatus
from delta_belief_rl.obs.run_facts import VARIABLE, RunFacts, read_run_facts
from delta_belief_rl.types import UserError

STACKS_SECONDS = 3.0
"""What a hung run has for writing its stacks before it is asked to end."""
LEFTOVER_SECONDS = 10.0
"""What processes have to end after the run they belonged to has ended."""
HEARTBEATS = 3
"""Heartbeats that must be missing, however short --hung is."""
LAST_BACKUP_SECONDS = 3600.0
"""Longest that the last backup is waited for when the run is over."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a watchdog was asked for; times in seconds.

    Attributes:
        command: What is run.
        max_restarts: Restarts without progress within ``window``.
        backoff: The first pause.
        hung: How long a heartbeat may stay away; 0 for ever.
        grace: Between asking processes to end and killing them.
        on_oom: Factors of settings by name; empty for those that have an effect.
        run_dir: The run's folder, where the run itself does not say it.
        seed: Of the random part of the pauses.
    """

    command: tuple[str, ...]
    max_restarts: int
    window: float
    backoff: float
    hung: float
    grace: float
    on_oom: dict[str, float]
    backup: tuple[str, ...]
    backup_every: float
    log_dir: Path
    run_dir: Path | None
    seed: int


@dataclass
class Start:
    """One start of the command, as ``state.json`` keeps it."""

    number: int
    log: str
    began: str
    overrides: list[str]
    pid: int = 0
    birth: str = ""
    run_dir: str = ""
    seconds: float | None = None
    status: int | None = None
    cause: Cause | None = None
    detail: str = ""
    step: int | None = None


class Heart:
    """Whether a run's heartbeat goes on, by the watchdog's own clock."""

    def __init__(self, hung: float) -> None:
        self._hung = hung
        self._content: bytes | None = None
        self._since: float | None = None

    def expect(self, every: object) -> None:
        """A run whose heart beats that seldom, in seconds, has the time of some beats."""
        if self._hung and isinstance(every, int | float):
            self._hung = max(self._hung, HEARTBEATS * every)

    def stopped(self, file: Path, now: float) -> str:
        """Why the run counts as hung; empty where it does not.

        The clock runs from the first change on, so that a file of an earlier start says nothing.

        Args:
            now: Of a monotonic clock, seconds.
        """
        try:
            content = file.read_bytes()
        except OSError:
            return ""
        if content != self._content:
            self._since = None if self._content is None else now
            self._content = content
        if not self._hung or self._since is None:
            return ""
        if now - self._since >= self._hung:
            return f"no heartbeat for {now - self._since:.0f} s"
        try:
            waited = float(json.loads(content)["loop_seconds"])
        except (ValueError, KeyError, TypeError):
            return ""
        return f"its loop has not answered for {waited:.0f} s" if waited >= self._hung else ""


@dataclass
class Lowering:
    """Settings that are lowered after an out-of-memory, for all following starts.

    Attributes:
        values: New values by name.
        count: How often settings were lowered.
        untried: No start with the last lowering has ended.
    """

    values: dict[str, float | int] = field(default_factory=dict)
    count: int = 0
    untried: bool = False
    _before: dict[str, float | int] = field(default_factory=dict)

    def lower(self, run_dir: Path | None, factors: dict[str, float]) -> str:
        """Lower once more; returns the sentence that says so."""
        config = read_config(run_dir)
        if not config:
            return "no setting is lowered, because the run's config.yaml is not known"
        new = lowered(config, factors or default_lowerings(config))
        if self.count >= MOST_LOWERINGS or not new:
            return f"no setting is lowered: {self.count} times is all that is tried"
        self._before, self.values = self.values, self.values | new
        self.count += 1
        self.untried = True
        words = ", ".join(f"{name}={value}" for name, value in new.items())
        return f"next starts have {words} (lowered {self.count} of {MOST_LOWERINGS} times)"

    def take_back(self) -> None:
        """The run cannot work with the last values."""
        self.values, self.count, self.untried = self._before, MOST_LOWERINGS, False

    def words(self) -> list[str]:
        """Settings for the command line."""
        return [f"{name}={value}" for name, value in self.values.items()]


class Watchdog:
    """Runs a command until it is done, or until a new start cannot help."""

    def __init__(self, settings: Settings) -> None:
        """Raises ``UserError`` where the watchdog's folder cannot be used."""
        self._settings = settings
        self._folder = Folder(settings.log_dir)
        self._kin = Kin()
        self._kin.adopt()
        self._signals = Signals()
        self._guard = Guard(settings.grace)
        self._kin.apart.add(self._guard.pid)
        self._backup = Backup(settings.backup, settings.backup_every, self._folder, self._kin)
        self._budget = Budget(settings.max_restarts, settings.window)
        self._lowering = Lowering()
        self._starts: list[Start] = []
        self._facts: RunFacts | None = None
        self._tick = min(1.0, settings.hung / 4) if settings.hung else 1.0

    def run(self) -> dict[str, object]:
        """Supervise to the end; returns what ``state.json`` holds, its ``status`` included."""
        try:
            while True:
                start = self._start()
                pause = self._judge(start)
                if isinstance(pause, str):
                    return self._end(start, pause)
                if self._told_within(pause):
                    return self._end(start, "told to end before the next start")
        finally:
            self._guard.close()
            self._signals.close()
            self._folder.close()

    # --- one start

    def _start(self) -> Start:
        overrides = self._lowering.words()
        number = self._starts[-1].number + 1 if self._starts else 1
        number, log, output = self._folder.new_log(number)
        start = Start(number, str(log or ""), time.strftime("%Y-%m-%dT%H:%M:%S%z"), overrides)
        self._starts.append(start)
        facts = self._folder.path / f"start-{number}.run.json"
        self._facts = self._given_folder()
        words = [*self._settings.command, *overrides]
        kills, began = oom_kills(), time.monotonic()
        try:
            start.pid = spawn(words, output, {**os.environ, VARIABLE: str(facts.resolve())})
        except OSError as error:
            start.status, start.cause, start.seconds = 1, Cause.FAILED, 0.0
            start.detail = f"no process could be started ({error.strerror})"
            return start
        finally:
            os.close(output)
        start.birth = born(start.pid)
        self._guard.watch(start.pid, start.birth)
        self._folder.say(f"start {number}: {shlex.join(words)} (output in {start.log or 'stderr'})")
        self._write(None)
        shown = Shown(log)
        session = Session(start.pid, start.birth, self._kin, self._signals)
        hung = self._attend(session, facts)
        shown.close()
        self._guard.watch(0, "")
        start.status = collect(start.pid)
        start.seconds = round(time.monotonic() - began, 3)
        self._describe(start, hung, oom_kills() - kills)
        return start

    def _attend(self, session: Session, facts: Path) -> str:
        """Until every process of a start is gone; returns why it was hung, or nothing."""
        heart, hung, known = Heart(self._settings.hung), "", False
        while not has_ended(session.pid) and self._signals.told is None:
            self._look(session, facts)
            if self._facts is not None:
                run_dir = Path(self._facts.run_dir)
                if not known:
                    heart.expect(setting(read_config(run_dir), "trainer.heartbeat_seconds"))
                    known = True
                hung = heart.stopped(run_dir / "heartbeat.json", time.monotonic())
            if hung:
                self._folder.say(f"the run hangs ({hung}): stacks, then its end")
                session.show_stacks(min(STACKS_SECONDS, self._settings.grace))
                break
            if self._signals.wait(self._tick) == signal.SIGUSR1:
                send([session.pid], signal.SIGUSR1)
            self._kin.reap_orphans(session.pid)
        if self._signals.told is not None:
            self._folder.say(f"{self._signals.told.name}: the run is asked to end")
        self._look(session, facts)
        grace = self._settings.grace
        over = has_ended(session.pid)
        if not session.end(min(grace, LEFTOVER_SECONDS) if over else grace):
            self._folder.say("processes that did not end were killed")
        return hung

    def _look(self, session: Session, facts: Path) -> None:
        """Read what the run says of itself, and have its checkpoints copied."""
        told = read_run_facts(facts)
        if told is not None:
            self._facts, session.driver = told, told.pid
        self._backup.look(Path(self._facts.run_dir) if self._facts else None)

    def _given_folder(self) -> RunFacts | None:
        given = self._settings.run_dir
        if given is None:
            return None
        events = given / "events.jsonl"
        return RunFacts(str(given), 0, events.stat().st_size if events.exists() else 0)

    def _describe(self, start: Start, hung: str, kills: int) -> None:
        end: End | None = None
        status = start.status or 0
        if self._facts is not None:
            run_dir, before = Path(self._facts.run_dir), self._facts.events_bytes
            start.run_dir = self._facts.run_dir
            end = read_end(run_dir, before)
            start.step = newest_step(run_dir, before)
        start.cause = classify(status, end, oom_kills=kills, hung=bool(hung))
        signum = signal_of(status)
        details = [
            hung,
            signum.name if signum else f"status {status}",
            end.cause if end and end.cause != start.cause else "",
            f"the kernel killed {kills} for want of memory" if kills > 0 else "",
            f"at step {start.step}" if start.step is not None else "",
        ]
        start.detail = ", ".join(part for part in details if part)
        # A wrapper may have lost the run's own status.
        if status == 0 and end is not None and end.status:
            start.status = end.status

    # --- what follows

    def _judge(self, start: Start) -> float | str:
        """Seconds to the next start, or the sentence that says why there is none."""
        cause = start.cause or Cause.FAILED
        words = f"start {start.number} ended after {start.seconds:.1f} s: {cause}, {start.detail}"
        self._folder.say(words)
        self._write(None)
        if self._signals.told is not None:
            return f"told to end by {self._signals.told.name}"
        if cause is Cause.TERMINATED and self._signals.announced:
            return "the end of the job's time was announced"
        untried, self._lowering.untried = self._lowering.untried, False
        if cause is Cause.BAD_INPUT and untried:
            self._lowering.take_back()
            self._folder.say("the run cannot work with the lowered settings: taken back")
        elif cause is Cause.DONE:
            return "the run is done"
        elif cause in FINAL:
            return f"{cause}: a new start would end in the same way"
        self._budget.progress(start.step)
        if not self._budget.take(time.monotonic()):
            hours = self._settings.window / 3600
            return f"{self._budget.most} restarts within {hours:g} h brought no new step"
        if cause is Cause.OUT_OF_MEMORY:
            run_dir = Path(start.run_dir) if start.run_dir else None
            self._folder.say(self._lowering.lower(run_dir, self._settings.on_oom))
        name = f"{self._settings.seed}/{platform.node()}/{self._folder.path.resolve()}"
        pause = pause_seconds(self._settings.backoff, self._budget.used, cause, name)
        number = f"{self._budget.used} of {self._budget.most}"
        self._folder.say(f"restart {number} without progress follows in {pause:.1f} s")
        return pause

    def _told_within(self, seconds: float) -> bool:
        """Wait for the next start; True where the watchdog was told to end meanwhile."""
        deadline = time.monotonic() + seconds
        while self._signals.told is None and (left := deadline - time.monotonic()) > 0:
            self._signals.wait(min(left, self._tick))
            self._kin.reap_orphans(0)
            self._backup.look(Path(self._facts.run_dir) if self._facts else None)
        return self._signals.told is not None

    def _end(self, start: Start, reason: str) -> dict[str, object]:
        if self._signals.told is None:
            self._backup.look(Path(self._facts.run_dir) if self._facts else None)

            def waited(seconds: float) -> None:
                self._signals.wait(seconds)

            last = time.monotonic() + LAST_BACKUP_SECONDS
            while self._signals.told is None and time.monotonic() < last:
                if self._backup.finish(waited, 1.0):
                    break
        if self._backup.pid:
            left = Session(self._backup.pid, born(self._backup.pid), Kin(), self._signals)
            left.end(min(self._settings.grace, LEFTOVER_SECONDS))
            collect(self._backup.pid)
        status = as_shell(start.status or 0)
        if self._signals.told is not None:
            status = 128 + self._signals.told
        elif start.cause is Cause.TERMINATED:
            status = ExitStatus.TERMINATED
        self._folder.say(f"ends with status {status}: {reason}")
        return self._write({"status": int(status), "reason": reason})

    def _write(self, ended: dict[str, object] | None) -> dict[str, object]:
        state: dict[str, object] = {
            "pid": os.getpid(),
            "birth": born(os.getpid()),
            "command": list(self._settings.command),
            "lowered": self._lowering.values,
            "starts": [asdict(start) for start in self._starts],
            "ended": ended,
        }
        self._folder.write_state(state)
        return state


# --- the verb -------------------------------------------------------------------------------------


def _factor(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        factor = float(value)
    except ValueError:
        factor = 0.0
    if not name or not 0 < factor < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no SETTING=FACTOR with a factor between 0 and 1"
        )
    return name, factor


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return number


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--max-restarts",
        type=_count,
        default=5,
        metavar="N",
        help="restarts without a new step, within the window (5)",
    )
    add("--window", type=_number, default=6.0, metavar="HOURS", help="that window (6)")
    add(
        "--backoff",
        type=_number,
        default=10.0,
        metavar="SECONDS",
        help="first pause; it doubles while no new step comes, up to 60 times it (10)",
    )
    add(
        "--hung",
        type=_number,
        default=900.0,
        metavar="SECONDS",
        help="end a run whose heartbeat stays away for so long; 0 never (900)",
    )
    add(
        "--grace",
        type=_number,
        default=120.0,
        metavar="SECONDS",
        help="what the run has to end after SIGTERM, before SIGKILL (120)",
    )
    add(
        "--on-oom",
        type=_factor,
        nargs="+",
        action="extend",
        default=[],
        metavar="SETTING=FACTOR",
        help="what is lowered after an out-of-memory of a GPU (the token budget of the update by "
        "0.8 or its micro-batch by 0.5, and vLLM's share of the memory by 0.9)",
    )
    add(
        "--backup",
        default="",
        metavar="COMMAND",
        help="run after each new checkpoint; {run_dir} in it becomes the run's folder",
    )
    add(
        "--backup-minutes",
        type=_number,
        default=0.0,
        metavar="MINUTES",
        help="also run it so often; 0 for new checkpoints only (0)",
    )
    add(
        "--log-dir",
        type=Path,
        default=Path("logs/watchdog"),
        metavar="DIR",
        help="output of every start, and state.json (logs/watchdog)",
    )
    add(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="the run's folder, for a command that does not say it itself",
    )
    add("--seed", type=int, default=0, help="of the random part of the pauses (0)")


def _settings(args: argparse.Namespace) -> Settings:
    command = tuple(args.command)
    if not command:
        raise UserError("there is no command: write it behind --, e.g. -- python train.py ...")
    try:
        backup = tuple(shlex.split(args.backup))
    except ValueError as error:
        raise UserError(f"--backup is no command line: {error}.") from error
    for name in {command[0], *backup[:1]}:
        if shutil.which(name) is None:
            raise UserError(f"there is no command {name!r}: check its name and its folder.")
    return Settings(
        command=command,
        max_restarts=args.max_restarts,
        window=args.window * 3600,
        backoff=args.backoff,
        hung=args.hung,
        grace=args.grace,
        on_oom=dict(args.on_oom),
        backup=backup,
        backup_every=args.backup_minutes * 60,
        log_dir=args.log_dir,
        run_dir=args.run_dir,
        seed=args.seed,
    )


def _run(args: argparse.Namespace) -> Result:
    state = Watchdog(_settings(args)).run()
    ended = state["ended"]
    status = int(ended["status"]) if isinstance(ended, dict) else 1
    return Result(value=state, status=status)


VERB = Verb(
    name="watchdog",
    help="Run the command behind -- for days: start it again after each end that a new start may "
    "mend, within a budget of restarts, and leave none of its processes behind.",
    example="delta-belief watchdog --hung 900 -- python train.py experiment=quickstart "
    "trainer.resume_mode=auto",
    add_arguments=_add_arguments,
    run=_run,
    takes_command=True,
)
