"""What the watchdog keeps and shows: logs of starts, its state, and the copies of checkpoints."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

import yaml

from delta_belief_rl.cli.watchdog_causes import setting
from delta_belief_rl.cli.watchdog_processes import Kin, collect, has_ended, spawn
from delta_belief_rl.types import UserError

RUN_DIR = "{run_dir}"
"""Stands for the run's folder in the command of a backup."""
TRACKER = "latest_checkpointed_iteration.txt"
"""File in a folder of checkpoints that names the latest one."""


class Folder:
    """The watchdog's own folder, held by one watchdog at a time.

    Nothing in it is ever overwritten but ``state.json``, and a full disk stops no watchdog.
    """

    def __init__(self, path: Path) -> None:
        """Raises ``UserError`` where the folder cannot be used, or another watchdog uses it."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
            flock(self._lock, LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"Another watchdog works with {path}: choose another folder with --log-dir."
            ) from error
        except OSError as error:
            raise UserError(
                f"{path} cannot be written ({error.strerror}): choose another --log-dir."
            ) from error

    def close(self) -> None:
        """Let another watchdog have it."""
        os.close(self._lock)

    def new_log(self, number: int) -> tuple[int, Path | None, int]:
        """A new file for the output of a start: its number, path and file descriptor.

        The number is the first free one from ``number`` on. Where no file can be made, the output
        goes where the watchdog's own goes, and the path is None.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        while True:
            path = self.path / f"start-{number}.log"
            try:
                return number, path, os.open(path, flags, 0o644)
            except FileExistsError:
                number += 1
            except OSError as error:
                self.say(f"{path} cannot be written ({error.strerror})")
                return number, None, os.dup(2)

    def say(self, sentence: str) -> None:
        """A line with the time, on stderr and in ``watchdog.log``."""
        line = f"watchdog: {time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}\n"
        # The terminal may be gone, the disk full.
        with suppress(OSError):
            print(line, end="", file=sys.stderr, flush=True)
        with suppress(OSError), (self.path / "watchdog.log").open("a", encoding="utf-8") as file:
            file.write(line)

    def write_state(self, state: Mapping[str, object]) -> None:
        """Replace ``state.json``."""
        beside = self.path / f".state.json.{os.getpid()}"
        with suppress(OSError):
            beside.write_text(json.dumps(state, indent=2, default=str) + "\n", encoding="utf-8")
            beside.replace(self.path / "state.json")


class Shown:
    """Shows what is added to a log on the terminal, apart: one that stops holds up nothing."""

    def __init__(self, log: Path | None) -> None:
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if log is not None and sys.stderr.isatty():
            self._thread = threading.Thread(target=self._show, args=(log,), daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Show the rest."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _show(self, log: Path) -> None:
        with suppress(OSError), log.open("rb") as file:
            while True:
                ended = self._ended.wait(0.2)
                while data := file.read(1 << 16):
                    os.write(2, data)
                if ended:
                    return


def read_config(run_dir: Path | None) -> dict[str, Any]:
    """The resolved configuration in a run's folder; empty where there is none."""
    if run_dir is None:
        return {}
    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def trackers(run_dir: Path) -> tuple[Path, Path]:
    """Where a run may name its latest checkpoint: as configured, and inside its folder."""
    given = setting(read_config(run_dir), "trainer.default_local_dir")
    root = Path(str(given or "checkpoints"))
    # A relative path is relative to where the run works, which may be elsewhere.
    return root / TRACKER, run_dir / root.name / TRACKER


def latest_checkpoint(places: Sequence[Path]) -> str:
    """What the first of some files says that exists; empty where none does."""
    for place in places:
        with suppress(OSError):
            return place.read_text(encoding="utf-8").strip()
    return ""


class Backup:
    """A command that copies checkpoints elsewhere, one at a time, which stops nothing.

    It is started for each new checkpoint that is seen, and every so many seconds where asked for.
    """

    def __init__(
        self,
        command: Sequence[str],
        every: float,
        folder: Folder,
        kin: Kin,
    ) -> None:
        """Args: ``every`` so many seconds, 0 for new checkpoints only."""
        self._command = command
        self._every = every
        self._folder = folder
        self._kin = kin
        self._last = time.monotonic()
        self._seen = ""
        self._run_dir: Path | None = None
        self._trackers: tuple[Path, ...] = ()
        self._due = False
        self.pid = 0
        """Of the one that is running; 0 for none."""

    def look(self, run_dir: Path | None) -> None:
        """Start one where it is due, and say what became of the one before."""
        if not self._command:
            return
        self._read_end()
        if run_dir is not None and run_dir != self._run_dir:
            self._run_dir, self._trackers = run_dir, trackers(run_dir)
        latest = latest_checkpoint(self._trackers)
        self._due |= latest not in ("", self._seen)
        self._seen = latest or self._seen
        needs_folder = any(RUN_DIR in word for word in self._command)
        self._due |= bool(self._every) and time.monotonic() - self._last >= self._every
        if self._due and not self.pid and not (needs_folder and run_dir is None):
            self._start(run_dir)

    def finish(self, wait: Callable[[float], object], seconds: float) -> bool:
        """Wait for the one that is running; False where it is running still.

        Args:
            wait: Waits for a signal, so many seconds.
        """
        deadline = time.monotonic() + seconds
        while self.pid and time.monotonic() < deadline:
            wait(0.2)
            self._read_end()
        return not self.pid

    def _start(self, run_dir: Path | None) -> None:
        words = [word.replace(RUN_DIR, str(run_dir)) for word in self._command]
        self._due, self._last = False, time.monotonic()
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            output = os.open(self._folder.path / "backup.log", flags, 0o644)
        except OSError as error:
            self._folder.say(f"no backup was started: {error.strerror}")
            return
        try:
            self.pid = spawn(words, output, os.environ)
            self._kin.apart.add(self.pid)
        except OSError as error:
            self._folder.say(f"no backup was started: {error.strerror}")
        finally:
            os.close(output)

    def _read_end(self) -> None:
        if self.pid and has_ended(self.pid):
            status = collect(self.pid)
            self._kin.apart.discard(self.pid)
            self.pid = 0
            if status:
                log = self._folder.path / "backup.log"
                self._folder.say(f"the backup failed with status {status}: see {log}")
