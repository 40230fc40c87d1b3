"""The heartbeat of a run: a thread that tells what the run is doing and how long it has waited.

A hang shows by itself: every ``trainer.heartbeat_seconds`` there is a line in the log, unless the
phase began within that time, and a new ``heartbeat.json``. The thread goes on when the event loop
does not, and says so. Whoever watches a run from outside reads the file:

====================  =============================================================================
``time``              seconds since 1970 when it was written: old means that the process is gone or
                      stopped
``uptime_seconds``    since the run began, by a clock that nobody sets
``status``            ``running``, or ``ended`` after any end that the process could still tell of
``phase``             e.g. ``play``, and ``phase_seconds``, how long it has lasted
``step``              last finished training step
``outstanding``       calls to engines and judges that were not answered, and ``oldest_seconds``
``loop_seconds``      how long the event loop has left a question of the heartbeat unanswered: long
                      means that the run hangs, whatever the phase
====================  =============================================================================
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "heartbeat.json"


@dataclass(frozen=True, slots=True)
class Pulse:
    """What the run is doing now.

    Attributes:
        phase: e.g. ``"play"``.
        phase_seconds: How long it has lasted.
        step: Last finished training step.
        outstanding: Calls that were sent and not answered, over all pools.
        oldest_seconds: Age of the oldest of them; 0 when there is none.
        loop_seconds: How long the event loop has not answered.
        detail: Anything worth a few words, e.g. ``"games 37/96"``.
    """

    phase: str
    phase_seconds: float = 0.0
    step: int = 0
    outstanding: int = 0
    oldest_seconds: float = 0.0
    loop_seconds: float = 0.0
    detail: str = ""

    def line(self) -> str:
        """The heartbeat's text."""
        parts = [
            f"heartbeat: {self.phase} for {self.phase_seconds:.0f} s after step {self.step}",
            f"{self.outstanding} calls outstanding",
        ]
        if self.outstanding:
            parts.append(f"oldest {self.oldest_seconds:.0f} s")
        if self.loop_seconds:
            parts.append(f"the event loop has not answered for {self.loop_seconds:.0f} s")
        return ", ".join([*parts, self.detail] if self.detail else parts)


class Heartbeat:
    """Beats while its block runs.

    Attributes:
        pulse: Called in another thread, so it must only read.
        say: Takes the line.
        on_failure: Told what ``pulse`` or ``say`` raised, once; the thread has ended then.
    """

    def __init__(
        self,
        run_dir: Path,
        run_id: str,
        pulse: Callable[[], Pulse],
        say: Callable[[str], None],
        seconds: float,
    ) -> None:
        """Args: ``run_dir`` gets the file; ``seconds`` lie between two beats."""
        self.pulse, self.say = pulse, say
        self.on_failure: Callable[[BaseException], None] = _nobody
        self._run_dir, self._run_id, self._seconds = run_dir, run_id, seconds
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = ThreadPoolExecutor(1, "heartbeat")

    def __enter__(self) -> Heartbeat:
        self._write("running")
        self._thread.submit(self._work).add_done_callback(self._over)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.shutdown()
        self._write("ended")

    def _work(self) -> None:
        while not self._ended.wait(self._seconds):
            pulse = self._write("running")
            if pulse.phase_seconds >= self._seconds:
                self.say(pulse.line())

    def _over(self, work: Future[None]) -> None:
        if (error := work.exception()) is not None:
            self.on_failure(error)

    def _write(self, status: str) -> Pulse:
        pulse = self.pulse()
        record = {
            "time": time.time(),
            "uptime_seconds": time.monotonic() - self._began,
            "run_id": self._run_id,
            "pid": os.getpid(),
            "status": status,
            **asdict(pulse),
        }
        # A full disk ends the run where it loses something; a heartbeat is no loss.
        with suppress(OSError):
            beside = self._run_dir / f".{FILE}.{os.getpid()}"
            beside.write_text(json.dumps(record), encoding="utf-8")
            beside.replace(self._run_dir / FILE)
        return pulse


def _nobody(error: BaseException) -> None:
    del error
