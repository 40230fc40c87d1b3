"""How a run's process ends: what its exit status means, and flushing when it is told to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    training rank died or hung more often than the run may mend, code of a plug-in failed. A new
    start loads everything anew from the checkpoint, which may mend it."""
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
    INTERRUPTED = 128 + signal.SIGINT
    """Somebody pressed Ctrl-C."""
    TERMINATED = 128 + signal.SIGTERM
    """The process was asked to end, as a shell counts it; a new start goes on."""


class Terminated(SystemExit):
    """The process was told to end."""

    def __init__(self) -> None:
        super().__init__(int(ExitStatus.TERMINATED))


def exit_on_sigterm() -> None:
    """Make SIGTERM leave through ``Terminated``, so that ``finally`` blocks and exit hooks run.

    Call it in the main thread; again after anything that takes the signal for itself, as Ray's
    start does. Batch systems send this signal before the hard kill.
    """

    def leave(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        signal.signal(signal.SIGTERM, _told_already)
        raise Terminated

    if _in_main_thread() and signal.getsignal(signal.SIGTERM) is not _told_already:
        signal.signal(signal.SIGTERM, leave)


@contextmanager
def sigterm_asks(ask: Callable[[], None]) -> Iterator[None]:
    """Within the block SIGTERM calls ``ask`` instead, once; after it, it is as it was before.

    For code that must not be left at any odd place. Outside of the main thread it does nothing.
    """
    if not _in_main_thread() or signal.getsignal(signal.SIGTERM) is _told_already:
        yield
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        signal.signal(signal.SIGTERM, _told_already)
        ask()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, before)


def on_sigusr1(act: Callable[[], None]) -> None:
    """Make SIGUSR1 call ``act`` and go on. Outside of the main thread it does nothing."""
    if _in_main_thread():
        signal.signal(signal.SIGUSR1, lambda signum, frame: act())


def _told_already(signum: int, frame: FrameType | None) -> None:
    """A second signal must not interrupt the flush that the first one began."""
    del signum, frame


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
