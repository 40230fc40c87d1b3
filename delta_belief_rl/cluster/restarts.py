"""Workers that are started again in their places: all training ranks together, an engine alone.

The bundles of a placement group outlive the actors in them, so another actor needs no new room.
Ranks share a process group that one loss breaks for all of them; engine replicas share nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError, RayTaskError

from delta_belief_rl.cluster import members
from delta_belief_rl.cluster.members import Roster
from delta_belief_rl.cluster.ranks import RankFailure, RankLimits
from delta_belief_rl.engines.base import Engine
from delta_belief_rl.engines.pump import EngineLost, EngineRouter
from delta_belief_rl.types import UserError

RestartEngine = Callable[[int], Awaitable[Any]]
"""Starts another replica in the place of a lost one, by its number; returns its handle."""


@dataclass(frozen=True, slots=True)
class RankPlaces:
    """Where the training ranks are, and what they are started with.

    Attributes:
        places: Actor classes, each bound to the place of one rank.
        settings: Of every rank.
        limits: How long they may wait for each other, and where each writes.
    """

    places: Sequence[Any]
    settings: Any
    limits: RankLimits

    def spawn(self) -> list[Any]:
        """An actor in each place; they know nothing of each other yet."""
        count = len(self.places)
        return [place.remote(self.settings, rank, count) for rank, place in enumerate(self.places)]

    def join(self, ranks: Sequence[Any], address: tuple[str, int]) -> list[Any]:
        """Calls by which the ranks meet at the address of the first one and load the model."""
        logs, timeout = self.limits.logs, self.limits.timeout
        return [
            rank.setup.remote(*address, timeout, *logs[index : index + 1])
            for index, rank in enumerate(ranks)
        ]


@dataclass(frozen=True, slots=True)
class RankRestarter:
    """Puts a whole new set of ranks in the places of an old one.

    Attributes:
        places: Of the ranks.
        deadline: Seconds that they may take to start.
        roster: Told of the new ones.
    """

    places: RankPlaces
    deadline: float
    roster: Roster

    async def __call__(self, old: Sequence[Any]) -> list[Any]:
        """End the old ranks and start new ones.

        Returns:
            Their handles.

        Raises:
            RankFailure: They did not start.
        """
        for rank in old:
            members.end(rank)
        ranks = self.places.spawn()
        try:
            async with asyncio.timeout(self.deadline):
                address = await ranks[0].address.remote()
                await asyncio.gather(*self.places.join(ranks, address))
                found = await asyncio.gather(*(rank.present.remote() for rank in ranks))
        except (TimeoutError, RayError) as error:
            for rank in ranks:
                members.end(rank)
            if isinstance(error, RayTaskError) and isinstance(error.cause, UserError):
                raise
            why = _why(error, self.deadline)
            raise RankFailure(
                f"The training ranks did not start again: {why}.", (), "setup"
            ) from error
        for index, where in enumerate(found):
            self.roster.note("rank", index, where)
        self.roster.tell_again()
        return ranks


def engine_restarter(
    places: Sequence[Any],
    settings: Any,
    reach: Callable[[Any], Engine],
    router: EngineRouter,
    deadline: float,
    roster: Roster,
) -> RestartEngine:
    """How a lost replica is replaced: by one in its place, which games reach by the same number.

    Args:
        places: Actor classes, each bound to the place of one replica.
        settings: Of every replica.
        reach: A replica's handle as the rollout sees it.
        router: Of the rollout.
        deadline: Seconds that a replica may take to start.
        roster: Told of the new one.
    """

    async def restart(lane: int) -> Any:
        actor = places[lane].remote(settings)
        try:
            async with asyncio.timeout(deadline):
                await actor.health.remote()
                where = await actor.present.remote()
        except (TimeoutError, RayError) as error:
            members.end(actor)
            if isinstance(error, RayTaskError) and isinstance(error.cause, UserError):
                raise
            raise EngineLost(
                f"Policy engine {lane} of {len(places)} did not start again: "
                f"{_why(error, deadline)}."
            ) from error
        router.replace(lane, reach(actor))
        roster.note("engine", lane, where)
        roster.tell_again()
        return actor

    return restart


def _why(error: Exception, deadline: float) -> str:
    """The beginning of what an error says."""
    if isinstance(error, TimeoutError):
        return f"it took more than {deadline:g} s (trainer.ray_wait_register_center_timeout)"
    return " ".join(str(getattr(error, "cause", error)).split())[:160].rstrip(". ")
