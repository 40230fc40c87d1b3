"""One owner of everything that runs in the driver, and one place in which every end is told.

* Tasks: the training coroutine runs as one task, and whatever it leaves behind ends with it. The
  first failure cancels all and is what the run ends by. A task that nobody waits for cannot fail in
  silence: what the event loop would only print ("exception was never retrieved", an error in a
  callback) ends the run in the same way, as does a failure that another thread tells of.
* SIGTERM cancels the training task at the place where it waits. What a step had finished is saved
  on the way out where it is not yet, and nothing is left in the middle of a write.
* The end: ``to_its_end`` writes the event ``end`` for whatever a process can still handle.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray.exceptions import RayTaskError

from delta_belief_rl.cluster.endings import ending_of, tell_ending
from delta_belief_rl.obs.events import EventLog
from delta_belief_rl.obs.exits import ExitStatus, Terminated, sigterm_asks
from delta_belief_rl.obs.heartbeat import Pulse
from delta_belief_rl.trainer import checkpoint, persist
from delta_belief_rl.trainer.services import Services
from delta_belief_rl.types import UserError

ANSWER_SECONDS = 30.0
"""How long a run that was told to end waits for its training ranks to be free for a save."""


class Supervisor:
    """Owns the tasks of one event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._asked: float | None = None

    def play(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine in an event loop, with everything that it starts, to the end of all.

        Raises:
            Terminated: SIGTERM came.
            BaseException: The first failure of any task or callback.
        """
        try:
            with sigterm_asks(lambda: self.fail(Terminated())):
                asyncio.run(self._play(work()))
        finally:
            self._loop = None
            if self._failure is not None:
                raise self._failure

    def fail(self, error: BaseException) -> None:
        """End the run by a failure, unless another one was first; any thread may call it."""
        if self._loop is None:
            self._failure = self._failure or error
            return
        # A loop that has just closed has nothing left to stop.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop, error)

    async def leave(self, run: Services) -> None:
        """What a cancelled run still does: a save, where it was asked to end and did not fail."""
        if self._failure is None or isinstance(self._failure, Terminated):
            await save_on_leaving(run)

    def silence(self) -> float:
        """Seconds that the loop has left a question unanswered; asks, if none is open.

        For one thread beside the loop.
        """
        if self._asked is not None:
            return time.monotonic() - self._asked
        if self._loop is not None:
            self._asked = time.monotonic()
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._answer)
        return 0.0

    async def _play(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._lost)
        self._main = self._loop.create_task(work, name="run")
        if self._failure is not None:
            self._main.cancel()
        try:
            await self._main
        except asyncio.CancelledError:
            # Told by ``play``; without a failure it is Ctrl-C, which asyncio tells itself.
            if self._failure is None:
                raise
        except BaseException as error:  # whatever it is, it is the first failure or a later one
            self._failure = self._failure or error
        finally:
            # A lost exception in a cycle of references is found when the cycle is.
            gc.collect()

    def _stop(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            if self._main is not None:
                self._main.cancel()

    def _answer(self) -> None:
        self._asked = None

    def _lost(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, future = context.get("exception"), context.get("future")
        # A bare future that got an error after its reader had left was nobody's work.
        nobodys = future is not None and not isinstance(future, asyncio.Task)
        if error is None or nobodys:
            loop.default_exception_handler(context)
        else:
            self._stop(error)


async def save_on_leaving(run: Services) -> None:
    """Save the last finished step where it is not saved and the policy is still that step's.

    Says so where it cannot be done; the checkpoint before is as it was then.
    """
    border = run.border
    if border is None or not persist.saves(run.cfg):
        return
    try:
        await run.saver.finish()
        saved = checkpoint.find_latest(Path(run.cfg.trainer.default_local_dir))
        if saved is not None and saved.step == border.step:
            return
        async with asyncio.timeout(ANSWER_SECONDS):
            await run.policy.snapshot()
        run.state = border
        await persist.save(run)
        await run.saver.finish()
    except Exception as error:  # a run that was told to end ends, whatever else fails
        reason = " ".join(str(error).split()) or type(error).__name__
        run.progress.say(f"step {border.step} could not be saved on leaving: {reason}")
    else:
        run.progress.say(f"saved step {border.step} on leaving")


def pulse_of(run: Services, supervisor: Supervisor) -> Pulse:
    """What a run does now; only reads, for another thread."""
    beats = run.rollouts.heartbeat(), run.val_rollouts.heartbeat()
    live = next((beat for beat in beats if beat.games_live), None)
    return Pulse(
        phase=run.progress.phase,
        phase_seconds=run.progress.phase_seconds,
        step=run.state.step,
        outstanding=sum(beat.engine_calls + beat.judge_calls for beat in beats),
        oldest_seconds=max(max(beat.engine_age, beat.judge_age) for beat in beats),
        loop_seconds=supervisor.silence(),
        detail=f"games {live.games_done}/{live.games_total}" if live else "",
    )


def to_its_end(play: Callable[[], None], events: EventLog, step: Callable[[], int]) -> int:
    """Play a run; the last event is ``end`` with status, cause and step, whatever happens.

    Args:
        play: The run.
        events: Of the run.
        step: Training steps that are done.

    Returns:
        The exit status, for an end that was told in one sentence here.

    Raises:
        UserError: Something that the user can mend.
        BaseException: A defect.
    """
    try:
        play()
    except BaseException as error:  # every end is recorded; defects go on
        cause = error.cause if isinstance(error, RayTaskError) else error
        ending = ending_of(error)
        if ending is None:
            _end(events, step(), ExitStatus.CHECK_FAILED, "defect", error=type(cause).__name__)
            raise
        if ending.told:
            tell_ending(error, step(), events)
        _end(events, step(), ending.status, ending.cause_of(error))
        if ending.told:
            return ending.status
        if cause is error:
            raise
        raise UserError(str(cause)) from error
    _end(events, step(), ExitStatus.DONE, "done")
    return ExitStatus.DONE


def _end(events: EventLog, step: int, status: ExitStatus, cause: str, **more: object) -> None:
    try:
        events.write("end", step, status=int(status), cause=cause, **more)
    except OSError as error:
        print(f"the end of the run could not be recorded: {error}", file=sys.stderr)
