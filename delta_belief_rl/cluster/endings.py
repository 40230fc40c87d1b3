"""How a run ends by itself: failures that are one sentence and an exit status, not a defect."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ray.exceptions import RayTaskError

from delta_belief_rl.cluster.groups import SyncMismatch
from delta_belief_rl.cluster.ranks import RankFailure
from delta_belief_rl.engines.pump import EngineFailure
from delta_belief_rl.judge.pool import JudgePoolFailure
from delta_belief_rl.obs.events import EventLog
from delta_belief_rl.obs.exits import ExitStatus
from delta_belief_rl.trainer.crosscheck import CheckFailed
from delta_belief_rl.trainer.health import RunCollapsed


@dataclass(frozen=True, slots=True)
class Ending:
    """One way to end.

    Attributes:
        event: Its kind in ``events.jsonl``.
        status: Exit status of the process.
    """

    event: str
    status: ExitStatus


ENDINGS: dict[type[Exception], Ending] = {
    RunCollapsed: Ending("collapsed", ExitStatus.COLLAPSED),
    CheckFailed: Ending("check_failed", ExitStatus.CHECK_FAILED),
    SyncMismatch: Ending("sync_failed", ExitStatus.CHECK_FAILED),
    JudgePoolFailure: Ending("judge_failed", ExitStatus.CHECK_FAILED),
    RankFailure: Ending("rank_failed", ExitStatus.CHECK_FAILED),
    EngineFailure: Ending("engine_failed", ExitStatus.CHECK_FAILED),
}
"""Everything else is a defect and keeps its traceback."""

STOPS = tuple(ENDINGS)


def tell_ending(error: Exception, step: int, events: EventLog) -> int:
    """Print and record why a run ends; returns the exit status.

    Args:
        error: An instance of ``STOPS``, perhaps from another process.
        step: Training steps that are done.
        events: Of the run.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    ending = next(end for kind, end in ENDINGS.items() if isinstance(cause, kind))
    sentence = " ".join(str(cause).split())
    ranks = cause.ranks if isinstance(cause, RankFailure) else None
    events.write(ending.event, step, reason=sentence, **({"ranks": ranks} if ranks else {}))
    print(sentence, file=sys.stderr)
    return ending.status
