"""How a run ends: failures that are one sentence and an exit status, not a defect."""

from __future__ import annotations

import errno
import sys
import traceback
from dataclasses import dataclass

from ray.exceptions import RayTaskError

from delta_belief_rl.cluster.groups import SyncMismatch
from delta_belief_rl.cluster.ranks import RankFailure, RankOutOfMemory
from delta_belief_rl.cluster.ray_watch import RayLost
from delta_belief_rl.engines.pump import EngineFailure
from delta_belief_rl.judge.pool import JudgePoolFailure
from delta_belief_rl.obs.disk import DiskRefused
from delta_belief_rl.obs.events import EventLog
from delta_belief_rl.obs.exits import ExitStatus, Terminated
from delta_belief_rl.trainer.crosscheck import CheckFailed
from delta_belief_rl.trainer.health import RunCollapsed, RunStalled
from delta_belief_rl.trainer.own_failures import PluginFailed
from delta_belief_rl.types import UserError


@dataclass(frozen=True, slots=True)
class Ending:
    """One way to end.

    Attributes:
        event: Its kind in ``events.jsonl``, and the ``cause`` of the last event.
        status: Exit status of the process.
        told: The sentence is printed by the run; else by whoever started it.
    """

    event: str
    status: ExitStatus
    told: bool = True

    def cause_of(self, error: BaseException) -> str:
        """The cause of the end: a run that stalled names the setting whose limit it met."""
        cause = _cause(error)
        return cause.setting if isinstance(cause, RunStalled) else self.event


ENDINGS: dict[type[Exception], Ending] = {
    DiskRefused: Ending("disk_full", ExitStatus.DISK_FULL),
    RunStalled: Ending("stalled", ExitStatus.STALLED),
    RunCollapsed: Ending("collapsed", ExitStatus.COLLAPSED),
    CheckFailed: Ending("check_failed", ExitStatus.CHECK_FAILED),
    SyncMismatch: Ending("sync_failed", ExitStatus.CHECK_FAILED),
    JudgePoolFailure: Ending("judge_failed", ExitStatus.CHECK_FAILED),
    RankOutOfMemory: Ending("out_of_memory", ExitStatus.OUT_OF_MEMORY),
    RankFailure: Ending("rank_failed", ExitStatus.CHECK_FAILED),
    EngineFailure: Ending("engine_failed", ExitStatus.CHECK_FAILED),
    RayLost: Ending("ray_lost", ExitStatus.CHECK_FAILED),
    PluginFailed: Ending("plugin_failed", ExitStatus.CHECK_FAILED),
}
"""Failures that the parts of a run end it by."""

STOPS = tuple(ENDINGS)

OUTSIDE: dict[type[BaseException], Ending] = {
    UserError: Ending("bad_input", ExitStatus.BAD_INPUT, told=False),
    Terminated: Ending("terminated", ExitStatus.TERMINATED),
    KeyboardInterrupt: Ending("interrupted", ExitStatus.INTERRUPTED),
}
"""What a run is ended by from outside. Everything else is a defect and keeps its traceback."""

_FULL = Ending("disk_full", ExitStatus.DISK_FULL)
_FULL_CODES = (errno.ENOSPC, errno.EDQUOT)

_GO_ON = "start it again with trainer.resume_mode=auto to go on"


def ending_of(error: BaseException) -> Ending | None:
    """How a run ends by an error, perhaps of another process; None for a defect."""
    cause = _cause(error)
    if isinstance(cause, OSError) and cause.errno in _FULL_CODES:
        return _FULL
    ways = (*ENDINGS.items(), *OUTSIDE.items())
    return next((end for kind, end in ways if isinstance(cause, kind)), None)


def tell_ending(error: BaseException, step: int, events: EventLog) -> int:
    """Print and record why a run ends; returns the exit status.

    Args:
        error: One that ``ending_of`` knows.
        step: Training steps that are done.
        events: Of the run.
    """
    cause, ending = _cause(error), ending_of(error)
    assert ending is not None, "defects are not told here"
    sentence = _sentence(cause, ending, step)
    print(sentence, file=sys.stderr)
    try:
        events.write(ending.event, step, reason=sentence, **_details(cause))
    except OSError as failure:
        print(f"this could not be recorded: {failure}", file=sys.stderr)
    return ending.status


def _details(cause: BaseException) -> dict[str, object]:
    """What an event says besides its sentence."""
    if isinstance(cause, RankFailure):
        return {"ranks": cause.ranks} if cause.ranks else {}
    if isinstance(cause, PluginFailed):
        return {"traceback": "".join(traceback.format_exception(cause))}
    return {}


def _sentence(cause: BaseException, ending: Ending, step: int) -> str:
    if isinstance(cause, Terminated):
        return f"The run was told to end (SIGTERM) after step {step}: {_GO_ON}."
    if isinstance(cause, KeyboardInterrupt):
        return f"The run was interrupted after step {step}: {_GO_ON}."
    if ending is _FULL:
        where = getattr(cause, "filename", None) or "the run's folder"
        return f"No space is left for {where}: make room, then {_GO_ON}."
    return " ".join(str(cause).split())


def _cause(error: BaseException) -> BaseException:
    """What went wrong, in whatever process."""
    return error.cause if isinstance(error, RayTaskError) else error
