"""Two real training ranks behind Ray, one of which can be told to fail; shared by CPU and GPU."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from delta_belief_rl.cluster.groups import RayPolicyGroup
from delta_belief_rl.cluster.members import remote_worker
from delta_belief_rl.cluster.ranks import RankFailure, RankLimits
from delta_belief_rl.cluster.workers import ActorWorker, worker_env
from delta_belief_rl.trainer.actor import ActorSettings
from tests.unit import training_fakes as fakes

RANKS = 2
SLEEP = 120.0
"""Seconds for which a rank hangs: longer than any test waits."""


class FaultyWorker(ActorWorker.__ray_metadata__.modified_class):  # type: ignore[name-defined]
    """A training rank that fails in the middle of its next forward pass once it is armed."""

    def arm(self, fault: str) -> int:
        """Set the fault, ``kill`` or ``hang``; returns the process id."""
        model = self.actor.model
        base = model.get_base_model() if hasattr(model, "get_base_model") else model

        def fail(*_args: Any) -> None:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(SLEEP)

        base.get_decoder().layers[1].register_forward_pre_hook(fail)
        return os.getpid()


@dataclass
class Pair:
    """Both ranks, ready."""

    group: RayPolicyGroup
    ranks: Sequence[Any]
    limits: RankLimits

    def end(self) -> None:
        for rank in self.ranks:
            ray.kill(rank)


def start_pair(
    settings: ActorSettings, timeout: float, folder: Path, devices: Sequence[str] = ()
) -> Pair:
    """Start two ranks; ``devices`` are the values of CUDA_VISIBLE_DEVICES."""
    limits = RankLimits(timeout, tuple(folder / f"rank_{rank}.log" for rank in range(RANKS)))
    worker = remote_worker()(FaultyWorker)
    ranks = []
    for rank in range(RANKS):
        env = worker_env(1)
        if devices:
            env |= {
                "CUDA_VISIBLE_DEVICES": devices[rank],
                "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            }
        options: dict[str, Any] = {"num_cpus": 1, "runtime_env": {"env_vars": env}}
        ranks.append(worker.options(**options).remote(settings, rank, RANKS))
    host, port = ray.get(ranks[0].address.remote())
    logs = limits.logs
    ray.get(
        [rank.setup.remote(host, port, timeout, log) for rank, log in zip(ranks, logs, strict=True)]
    )
    return Pair(RayPolicyGroup(ranks, limits=limits), ranks, limits)


@dataclass(frozen=True)
class Outcome:
    """How a call to the ranks ended."""

    failure: RankFailure
    seconds: float


def fail_in(pair: Pair, phase: str, fault: str, rank: int) -> Outcome:
    """Arm one rank, make the call, and return the failure that it must end in."""
    groups = fakes.make_groups(((3, 1, 2), (4, 1)))
    requests = fakes.requests(groups)

    async def play() -> RankFailure:
        scores = await pair.group.score(requests)
        batch = fakes.make_batch(groups, scores)
        plan = fakes.one_step(batch, ranks=RANKS, max_tokens=40)
        await pair.ranks[rank].arm.remote(fault)
        try:
            if phase == "score":
                await pair.group.score(requests)
            else:
                await pair.group.update(batch, plan, 1)
        except RankFailure as error:
            return error
        raise AssertionError(f"a {fault} in {phase} went unnoticed")

    began = time.monotonic()
    failure = asyncio.run(play())
    return Outcome(failure, time.monotonic() - began)
