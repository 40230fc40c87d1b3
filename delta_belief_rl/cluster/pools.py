"""Placement groups and the actors in them: training ranks, policy engines, judges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from delta_belief_rl.cluster.groups import RayEngineGroup, RayPolicyGroup
from delta_belief_rl.cluster.judges import JudgeReplicas, is_self_tested, least_accuracy
from delta_belief_rl.cluster.vllm_replicas import (
    RemoteEngine,
    VllmEngineWorker,
    VllmSettings,
    engine_format,
)
from delta_belief_rl.cluster.workers import (
    ActorWorker,
    EngineWorker,
    JudgeWorker,
    worker_env,
)
from delta_belief_rl.config.plan import Plan
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.engines.base import Completion, Engine, GenRequest, TailRequest
from delta_belief_rl.engines.pump import EnginePump, EngineRouter
from delta_belief_rl.judge.pool import JudgePool
from delta_belief_rl.judge.selftest import SelfTestReport
from delta_belief_rl.trainer.judge_settings import judge_settings, pool_settings
from delta_belief_rl.trainer.policy_engine import EngineSettings
from delta_belief_rl.trainer.settings import (
    actor_settings,
    adapter_settings,
    judge_cache_key,
    number_format,
)
from delta_belief_rl.types import UserError

PROBE_BOUND = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}
"""Largest difference of a probe log-prob between engine and trainer, in nats, by number format."""

RANK_SHARE, ENGINE_SHARE = 0.5, 0.4
"""Shares of a GPU that Ray books for a training rank and for the engine that lives beside it."""


@dataclass(frozen=True, slots=True)
class Pools:
    """All pools, ready."""

    policy: RayPolicyGroup
    engines: RayEngineGroup
    router: EngineRouter
    judge: JudgePool
    self_tests: tuple[SelfTestReport, ...] = ()


def max_games(cfg: RunConfig, plan: Plan) -> int:
    """Games alive at a time: all of a step or of a validation, at most what the engine takes."""
    most = max(plan.games_per_step, plan.val_games or 0)
    return max(1, min(cfg.actor_rollout_ref.rollout.max_num_seqs // branches(cfg), most))


def branches(cfg: RunConfig) -> int:
    """Sequences that one game has in the engine at a time."""
    return cfg.actor_rollout_ref.rollout.n if cfg.multi_turn.logprob_sampling.enabled else 1


def start_pools(cfg: RunConfig, plan: Plan, probe_ids: Sequence[int]) -> Pools:
    """Place and start every actor; returns when all have loaded their models.

    Raises:
        UserError: A model cannot be loaded, a pool does not fit, or a worker is late.
    """
    deadline = cfg.trainer.ray_wait_register_center_timeout
    # All processes start at once; what takes time is that each of them imports and loads.
    replicas = _start_engines(cfg, plan, deadline)
    judges = _start_judges(cfg, plan, deadline)
    ranks = _start_ranks(cfg, plan, deadline)
    _wait("policy engines", [replica.health.remote() for replica in replicas], deadline)
    _wait("judges", [judge.answer.remote([]) for judge in judges.actors], deadline)
    tests: list[SelfTestReport] = []
    if is_self_tested(cfg):
        tests = _wait("judges", [judge.self_test.remote() for judge in judges.actors], deadline)
    group = RayEngineGroup(
        replicas, probe_ids, _probe_bound(cfg, plan.device), sleeps=_sleeps(cfg, plan.device)
    )
    return Pools(
        policy=RayPolicyGroup(ranks, group.rest),
        engines=group,
        router=EngineRouter([_engine(cfg, replica) for replica in replicas]),
        judge=JudgePool(
            judges.calls(),
            pool_settings(cfg),
            failures=(RayError,),
            cache_key=judge_cache_key(cfg),
            restart=judges.restarter(deadline, least_accuracy(cfg)),
        ),
        self_tests=tuple(tests),
    )


def _start_ranks(cfg: RunConfig, plan: Plan, deadline: float) -> list[Any]:
    settings = actor_settings(cfg, plan.device, plan.total_steps or 1, plan.threads)
    count = len(plan.pool("actor"))
    share = RANK_SHARE if plan.device == "cuda" else 0.0
    handles = _place("training ranks", ActorWorker, count, share, deadline, plan.threads)
    ranks = [handle.remote(settings, index, count) for index, handle in enumerate(handles)]
    host, port = _wait("training ranks", [ranks[0].address.remote()], deadline)[0]
    timeout = cfg.actor_rollout_ref.nccl_timeout
    _wait("training ranks", [rank.setup.remote(host, port, timeout) for rank in ranks], deadline)
    return ranks


def _start_engines(cfg: RunConfig, plan: Plan, deadline: float) -> list[Any]:
    rollout = cfg.actor_rollout_ref.rollout
    count = len(plan.pool("engine"))
    threads = max(1, plan.threads // count)
    share = ENGINE_SHARE if plan.device == "cuda" else 0.0
    if rollout.name == "vllm":
        places = _place("policy engines", VllmEngineWorker, count, share, deadline, threads)
        return [place.remote(VllmSettings(cfg, plan.device)) for place in places]
    settings = EngineSettings(
        model_path=cfg.actor_rollout_ref.model.path,
        adapter=adapter_settings(cfg),
        device=plan.device,
        dtype=number_format(cfg.actor_rollout_ref.actor.dtype, plan.device),
        max_sequences=math.ceil(max_games(cfg, plan) / count) * branches(cfg),
        max_len=cfg.data.max_prompt_length + cfg.data.max_response_length,
        max_batch_tokens=rollout.max_num_batched_tokens,
        num_threads=threads,
        seed=cfg.seed,
    )
    handles = _place("policy engines", EngineWorker, count, share, deadline, threads)
    return [handle.remote(settings) for handle in handles]


def _start_judges(cfg: RunConfig, plan: Plan, deadline: float) -> JudgeReplicas:
    places = plan.pool("judge")
    # The table's judge needs no thread; a model takes turns with the policy on the same cores.
    threads = max(1, plan.threads // len(places)) if cfg.judge_rollout.name == "hf" else 1
    settings = judge_settings(cfg, threads)
    gpus = 1.0 if places[0].gpus else 0.0
    handles = _place("judges", JudgeWorker, len(places), gpus, deadline, threads)
    return JudgeReplicas.start(handles, settings)


def _place(
    name: str, worker: Any, count: int, gpus: float, deadline: float, num_threads: int | None
) -> list[Any]:
    """Actor classes bound to the bundles of a new placement group, one bundle each."""
    bundle: dict[str, float] = {"CPU": 1.0} | ({"GPU": gpus} if gpus else {})
    group = placement_group([bundle] * count, strategy="PACK", name=name)
    try:
        ray.get(group.ready(), timeout=deadline)
    except GetTimeoutError as error:
        have = ray.available_resources()
        raise UserError(
            f"The pool of {name} needs {count} x {bundle} but only CPU {have.get('CPU', 0):g} and "
            f"GPU {have.get('GPU', 0):g} are free: lower the pool's size or raise "
            "ray_init.num_cpus."
        ) from error
    return [
        worker.options(
            num_cpus=1,
            num_gpus=gpus,
            max_restarts=0,
            runtime_env={"env_vars": worker_env(num_threads)},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        )
        for index in range(count)
    ]


def _wait(name: str, refs: Sequence[Any], deadline: float) -> list[Any]:
    """Results of start-up calls; a worker's own complaint is passed on as it is."""
    try:
        return ray.get(list(refs), timeout=deadline)
    except GetTimeoutError as error:
        raise UserError(
            f"The {name} did not start within {deadline:g} s: raise "
            "trainer.ray_wait_register_center_timeout or look into the logs of Ray."
        ) from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UserError):
            raise UserError(str(cause)) from error
        raise


def _probe_bound(cfg: RunConfig, device: str) -> float:
    """The bound of the coarser number format of trainer and engine."""
    formats = [number_format(cfg.actor_rollout_ref.actor.dtype, device)]
    if cfg.actor_rollout_ref.rollout.name == "vllm":
        formats.append(engine_format(cfg, device))
    return max(PROBE_BOUND[name] for name in formats)


def _sleeps(cfg: RunConfig, device: str) -> bool:
    """Whether the engines give their memory back while the ranks score and update."""
    rollout = cfg.actor_rollout_ref.rollout
    return rollout.name == "vllm" and device == "cuda" and rollout.free_cache_engine


def _engine(cfg: RunConfig, replica: Any) -> Engine:
    """A replica as the rollout sees it."""
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.name == "vllm":
        return RemoteEngine(replica)
    return _pump(replica, rollout.deterministic)


def _pump(replica: Any, deterministic: bool) -> EnginePump:
    async def step(new: list[GenRequest]) -> list[Completion]:
        return await replica.step.remote(new)

    async def release(sessions: list[str]) -> None:
        await replica.release.remote(sessions)

    async def score(requests: list[TailRequest]) -> list[np.ndarray]:
        return await replica.score_tails.remote(requests)

    return EnginePump(step, release, score=score, deterministic=deterministic)
