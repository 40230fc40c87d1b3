"""How a run's process ends: what its exit status means, and flushing when it is told to end."""

from __future__ import annotations

import signal
from enum import IntEnum
from types import FrameType


class ExitStatus(IntEnum):
    """What the exit status of a run says to whoever started it.

    The run's ``events.jsonl`` ends with an event ``end`` that holds the same number as ``status``
    and the kind of failure as ``cause``; a process that was killed leaves neither.
    """

    DONE = 0
    CHECK_FAILED = 1
    """A defect, or: engine and trainer gave different numbers, no judge was left, an engine or a
    training rank died or hung more often than the run may mend. A new start loads everything anew
    from the checkpoint, which may mend it."""
    BAD_INPUT = 2
    """The user must change something; the same start again ends in the same way."""
    COLLAPSED = 3
    """The run stopped itself; the same start again ends in the same place."""
    OUT_OF_MEMORY = 4
    """A GPU had too little memory; a start with smaller micro-batches may do."""
    STALLED = 5
    """Steps went on without doing anything; a new start may mend it."""
    DISK_FULL = 6
    """A checkpoint or a record could not be written; the one before is as it was."""
    TERMINATED = 128 + signal.SIGTERM
    """The process was asked to end, as a shell counts it; a new start goes on."""


def exit_on_sigterm() -> None:
    """Make SIGTERM leave through ``SystemExit``, so that ``finally`` blocks and exit hooks run.

    Call it in the main thread. Batch systems send this signal before the hard kill.
    """

    def leave(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        # A second signal must not interrupt the flush that the first began.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(ExitStatus.TERMINATED)

    signal.signal(signal.SIGTERM, leave)
