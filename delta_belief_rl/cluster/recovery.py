"""A run that goes on without a worker that it lost, in the same process.

* A training rank: all ranks are started again and take over the newest checkpoint of this run, and
  the steps after it are done again. Engines and judges stay as they are.
* A replica of the policy engine: another one takes its place and the adapter, and the games that
  were being played are played again from their beginning. No step is lost.
* A judge replica: its pool sees to it (``judge.pool``).

Random numbers are functions of names, so what is done again gives the same again. A loss shows in
a call that fails, or in a worker that gives no sign of life before a step. Losses are counted until
a step is finished that never was before; beyond ``trainer.max_recoveries`` the next one ends the
run, as does one that would be the same again, such as too little memory.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from delta_belief_rl.cluster.pools import Pools
from delta_belief_rl.cluster.ranks import RankFailure, RankOutOfMemory
from delta_belief_rl.engines.pump import EngineFailure, EngineLost
from delta_belief_rl.obs.events import EventLog
from delta_belief_rl.obs.jsonl import MetricsLog
from delta_belief_rl.trainer import checkpoint, pending, persist
from delta_belief_rl.trainer.checkpoint import Checkpoint, CheckpointDamaged
from delta_belief_rl.trainer.services import Services


class Budget:
    """How many losses a run takes in a row.

    Args:
        limit: Losses without a new step in between; 0 takes none.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._spent = 0
        self._furthest = -1

    def spend(self, step: int, failure: Exception) -> None:
        """Take one more loss.

        Args:
            step: Training steps that are finished. Steps that are done a second time are no
                progress: a run that always fails in the same one must end.
            failure: Raised when there were too many.
        """
        if step > self._furthest:
            self._furthest, self._spent = step, 0
        if self._spent >= self._limit:
            raise failure
        self._spent += 1


class Recovery:
    """Mends a run; made for one run, whose parts it is told of losses by.

    Args:
        run: The run. Its rollouts, its engines and the check before each step are given to this.
        pools: Its workers.
        events: Its events.
        start: The checkpoint that it began with.
    """

    def __init__(
        self, run: Services, pools: Pools, events: EventLog, start: Checkpoint | None
    ) -> None:
        self._run, self._pools, self._events, self._start = run, pools, events, start
        self._root = Path(run.cfg.trainer.default_local_dir)
        self._budget = Budget(run.cfg.trainer.max_recoveries)
        # Checkpoints of a folder that the run went back in are newer by step, but not this start's.
        self._serial = max((saved.serial for saved in checkpoint.list_valid(self._root)), default=0)
        self._played: dict[int, int] = {}
        self._judged: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        self._games_lost = 0
        pools.engines.may_restart = self._may_restart
        pools.engines.on_restart = self._tell_engine
        run.rollouts.replay = run.val_rollouts.replay = self
        run.check_workers = self.check

    async def play(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work of the run to its end, again from the last checkpoint after every loss.

        Args:
            work: Goes on from ``run.state``.

        Raises:
            RankFailure: Ranks were lost too often, or before the first checkpoint.
            EngineFailure: Engine replicas were lost too often, or an engine has a defect.
        """
        while True:
            try:
                return await work()
            except (RankFailure, EngineLost) as failure:
                if isinstance(failure, RankOutOfMemory):
                    raise
                await self._go_back(failure)

    async def check(self) -> None:
        """Ask every worker for a sign of life, at the border of two steps, when none is busy.

        Raises:
            RankFailure: A training rank gave none.
        """
        self._played[self._run.state.step] = self._run.rollouts.played
        seconds = self._run.cfg.trainer.heartbeat_timeout
        await self._pools.judges.check(seconds)
        await self._pools.engines.check(seconds)
        await self._pools.policy.check(seconds)

    # --- an engine ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Note what was counted before some games; see ``rollout.driver.Replay``."""
        self._judged = self._run.judge.mark()

    async def failed(self, failure: EngineFailure, games: int) -> None:
        """Replace the replicas that are lost, so that the games can be played again.

        Args:
            failure: Raised where none is lost.
            games: That had ended.
        """
        engines, seconds = self._pools.engines, self._run.cfg.trainer.heartbeat_timeout
        # The other replicas end the step that they are in, and forget the games.
        with suppress(EngineFailure):
            await self._pools.router.flush()
        await engines.check(seconds)
        engines.note_lost(self._pools.router.lost())
        if not engines.lost:
            raise failure
        self._games_lost = games
        await engines.sync(self._run.policy)
        self._run.judge.rewind(self._judged)

    def _may_restart(self, loss: EngineLost) -> None:
        self._budget.spend(self._run.state.step, loss)

    def _tell_engine(self, loss: EngineLost, seconds: float) -> None:
        games, self._games_lost = self._games_lost, 0
        self._tell("engine", str(loss), seconds, steps=0, games=games)

    # --- a training rank ----------------------------------------------------------------------

    async def _go_back(self, failure: RankFailure | EngineLost) -> None:
        """Go on from the newest checkpoint.

        Args:
            failure: What made it necessary; raised where it cannot be done.
        """
        run, began, done = self._run, time.monotonic(), self._run.state.step
        # Until the restore the ranks hold nothing that a checkpoint may be made of.
        run.border = None
        lost: RankFailure | EngineLost = failure
        while True:
            self._budget.spend(done, failure)
            await persist.finish(run)
            saved = self._newest()
            if saved is None:
                raise failure
            try:
                if isinstance(lost, RankFailure):
                    await self._pools.policy.restart(lost)
                await persist.restore(run, saved)
                break
            except RankFailure as again:
                if isinstance(again, RankOutOfMemory):
                    raise
                lost = again
        run.log = MetricsLog(run.run_dir / "metrics.jsonl", run.run_id, saved.step)
        # What the step that is done again has cost so far is not its own time.
        run.timers.drain()
        self._pools.engines.forget()
        played = run.rollouts.played
        kind = "rank" if isinstance(failure, RankFailure) else "engine"
        what = failure.what() if isinstance(failure, RankFailure) else str(failure)
        kept = pending.count_kept(self._root, saved.step)
        games = max(0, played - self._played.get(saved.step, played) - kept)
        self._tell(kind, what, time.monotonic() - began, steps=done - saved.step, games=games)

    def _newest(self) -> Checkpoint | None:
        """The intact checkpoint that this start saved last, else the one that it began with."""
        for saved in reversed(checkpoint.list_valid(self._root)):
            if saved.serial <= self._serial:
                break
            try:
                return checkpoint.load(saved.path)
            except CheckpointDamaged as error:
                self._events.write("checkpoint_damaged", saved.step, reason=str(error))
        return self._start

    def _tell(self, kind: str, what: str, seconds: float, *, steps: int, games: int) -> None:
        """Print and record what was mended; ``run.state`` is where the run goes on."""
        step, sentence = self._run.state.step, " ".join(what.split()).rstrip(".")
        self._run.progress.say(
            f"{sentence}. Started again in {seconds:.1f} s; the run goes on after step {step}, "
            f"{steps} steps and {games} games are done again."
        )
        self._events.write(
            "recovered",
            step,
            lost=kind,
            reason=sentence,
            seconds=seconds,
            steps_lost=steps,
            games_lost=games,
        )
