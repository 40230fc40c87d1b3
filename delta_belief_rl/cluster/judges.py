"""Judge replicas on Ray: how one is asked, tested before the first game, and replaced."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayTaskError

from delta_belief_rl.cluster import members
from delta_belief_rl.cluster.members import Roster
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.schema_judge import SelfTest
from delta_belief_rl.engines.pump import EngineFailure
from delta_belief_rl.envs.base import JudgeReply, JudgeRequest
from delta_belief_rl.judge.pool import OnRestart, ReplicaCall, ReplicaGone, RestartReplica
from delta_belief_rl.judge.selftest import SelfTestReport, check_reports
from delta_belief_rl.obs.events import EventLog

MODELS = ("hf", "vllm")
"""Judges (``judge_rollout.name``) that are models of this run."""
API = "api"
"""The judge that is a model of somebody else's."""


@dataclass(frozen=True, slots=True)
class JudgeReplicas:
    """The pool's actors, and how to make another one.

    Attributes:
        places: Actor classes, each bound to the place of one replica.
        settings: What every replica is started with.
        actors: Handles of ``JudgeWorker``, those of restarted replicas in their place.
    """

    places: Sequence[Any]
    settings: Any
    actors: list[Any]

    @classmethod
    def start(cls, places: Sequence[Any], settings: Any) -> JudgeReplicas:
        """Start one replica in each place; they load in their own time."""
        return cls(places, settings, [place.remote(settings) for place in places])

    @classmethod
    def start_by_gpu(
        cls,
        places: Sequence[Any],
        settings: Any,
        gpus: Sequence[tuple[int, ...]],
        wait: Callable[[Sequence[Any]], None],
    ) -> JudgeReplicas:
        """Like ``start``, but replicas that share a GPU load one after another.

        Args:
            places: See ``JudgeReplicas``.
            settings: See ``JudgeReplicas``.
            gpus: Numbers of the GPUs of each place.
            wait: Returns when the actors that it is given have loaded.
        """
        actors: dict[int, Any] = {}
        for turn in loading_turns(gpus):
            actors |= {place: places[place].remote(settings) for place in turn}
            wait([actors[place] for place in turn])
        return cls(places, settings, [actors[place] for place in range(len(places))])

    def calls(self) -> list[ReplicaCall]:
        """How each replica is asked."""
        return [judge_call(actor) for actor in self.actors]

    async def check(self, seconds: float) -> None:
        """Ask every replica for a sign of life; one that hangs is ended, so that it is replaced.

        Args:
            seconds: That they have for it.
        """
        for place, how in (await members.missing(self.actors, seconds)).items():
            if how != members.DIED:
                members.end(self.actors[place])

    def restarter(self, deadline: float, least: float | None, roster: Roster) -> RestartReplica:
        """How a dead replica is replaced: by an actor in its place that passes the same test.

        Args:
            deadline: Seconds that it may take to load and to be tested.
            least: See ``least_accuracy``.
            roster: Told of the new one.
        """

        async def restart(lane: int) -> ReplicaCall:
            actor = self.places[lane].remote(self.settings)
            try:
                async with asyncio.timeout(deadline):
                    where = await actor.present.remote()
                    report = None
                    if least is None:
                        await actor.answer.remote([])
                    else:
                        report = await actor.self_test.remote()
            except TimeoutError as error:
                ray.kill(actor)
                raise ReplicaGone(f"it did not start within {deadline:g} s") from error
            if report is not None and least is not None and not report.passes(least):
                ray.kill(actor)
                raise ReplicaGone(report.sentence())
            self.actors[lane] = actor
            roster.note("judge", lane, where)
            roster.tell_again()
            return judge_call(actor)

        return restart


def loading_turns(gpus: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Places in turns in which no GPU occurs twice.

    Example:
        >>> loading_turns([(1,), (1,), (2,)])
        [[0, 2], [1]]
    """
    turns: list[list[int]] = []
    for place, mine in enumerate(gpus):
        for turn in turns:
            if not any(set(mine) & set(gpus[other]) for other in turn):
                turn.append(place)
                break
        else:
            turns.append([place])
    return turns


def judge_call(actor: Any) -> ReplicaCall:
    """How a replica is asked; its death is told apart from a call that failed.

    A replica whose engine died is ended, so that its place is free for the next one.
    """

    async def answer(requests: list[JudgeRequest]) -> list[JudgeReply]:
        try:
            return await actor.answer.remote(requests)
        except ActorDiedError as error:
            raise ReplicaGone(" ".join(str(error).split())) from error
        except RayTaskError as error:
            if not isinstance(error.cause, EngineFailure):
                raise
            ray.kill(actor)
            raise ReplicaGone(f"its engine died: {error.cause}") from error

    return answer


def least_accuracy(cfg: RunConfig) -> float | None:
    """Share of plain facts that a replica in the place of a dead one must know.

    None for a judge that is not tested, and for an API, which is the same behind every replica.
    """
    judge = cfg.judge_rollout
    tested = is_self_tested(cfg) and judge.name != API
    return judge.self_test.min_accuracy if tested else None


def is_self_tested(cfg: RunConfig) -> bool:
    """Whether the judge is asked for plain facts before the first game."""
    return cfg.judge_rollout.self_test.enabled and cfg.judge_rollout.name in (*MODELS, API)


def tell_self_tests(
    reports: Sequence[SelfTestReport], settings: SelfTest, events: EventLog
) -> None:
    """Print and record what the replicas made of the facts, then refuse one that is too bad.

    Args:
        reports: One for each replica.
        settings: Least accuracy, and the speed below which a warning is printed.
        events: Of the run.

    Raises:
        UserError: A replica is below the bound.
    """
    for replica, report in enumerate(reports):
        print(f"judge {replica}: {report.sentence()}; {report.rate_text()}", file=sys.stderr)
        floor = settings.min_tokens_per_second
        if report.tokens and report.tokens_per_second < floor:
            print(
                f"WARNING: judge {replica} is slower than the {floor:g} tokens/s of "
                "judge_rollout.self_test.min_tokens_per_second: see which kernel it runs.",
                file=sys.stderr,
            )
        events.write(
            "judge_self_test",
            replica=replica,
            asked=report.asked,
            accuracy=report.accuracy,
            errors=report.errors,
            finite=report.finite,
            tokens_per_second=report.tokens_per_second,
            misses=[
                f"{miss.fact.secret}: {miss.fact.question} {miss.said}" for miss in report.misses
            ],
        )
    check_reports(reports, settings.min_accuracy)


def restart_teller(events: EventLog) -> OnRestart:
    """Prints and records every replacement of a dead replica."""

    def tell(replica: int, reason: str) -> None:
        print(f"judge {replica} died and is started again: {reason}", file=sys.stderr)
        events.write("judge_restart", replica=replica, reason=reason)

    return tell
