"""Ending a process so that what it holds is flushed."""

from __future__ import annotations

import signal
from types import FrameType

TERMINATED = 128 + signal.SIGTERM
"""Exit status of a process that was asked to end, as a shell counts it."""

CHECK_FAILED = 1
"""Exit status of a run that stopped because engine and trainer gave different numbers, because no
judge was left, or because an engine or a training rank died or hung. A new start loads everything
anew from the checkpoint, which may mend it."""

COLLAPSED = 3
"""Exit status of a run that stopped itself. Starting it again would end it in the same place, so
this differs from 1, which a crash gives."""


def exit_on_sigterm() -> None:
    """Make SIGTERM leave through ``SystemExit``, so that ``finally`` blocks and exit hooks run.

    Call it in the main thread. Batch systems send this signal before the hard kill.
    """

    def leave(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        # A second signal must not interrupt the flush that the first began.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(TERMINATED)

    signal.signal(signal.SIGTERM, leave)
