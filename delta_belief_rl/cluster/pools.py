"""Placement groups and the actors in them: training ranks, policy engines, judges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from delta_belief_rl.cluster.footprints import Footprint
from delta_belief_rl.cluster.gpus import BookedGpus, book_gpus
from delta_belief_rl.cluster.groups import RayEngineGroup, RayPolicyGroup
from delta_belief_rl.cluster.judge_worker import JudgeWorker
from delta_belief_rl.cluster.judges import (
    API,
    MODELS,
    JudgeReplicas,
    is_self_tested,
    least_accuracy,
)
from delta_belief_rl.cluster.machines import check_machines, find_machines
from delta_belief_rl.cluster.members import Role, Roster
from delta_belief_rl.cluster.ranks import RankLimits
from delta_belief_rl.cluster.remote_engine import RemoteEngine, remote_pump
from delta_belief_rl.cluster.restarts import RankPlaces, RankRestarter, engine_restarter
from delta_belief_rl.cluster.vllm_replicas import (
    VllmEngineWorker,
    VllmSettings,
)
from delta_belief_rl.cluster.workers import (
    ActorWorker,
    EngineWorker,
    worker_env,
)
from delta_belief_rl.config.plan import Placement, Plan
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.engines.base import Engine
from delta_belief_rl.engines.pump import EngineRouter
from delta_belief_rl.judge.pool import JudgePool
from delta_belief_rl.judge.selftest import SelfTestReport
from delta_belief_rl.rollout.api_player import NoEngine
from delta_belief_rl.trainer.api_policy import is_api_policy
from delta_belief_rl.trainer.crosscheck import run_bound
from delta_belief_rl.trainer.judge_settings import judge_calls, judge_settings, pool_settings
from delta_belief_rl.trainer.policy_engine import EngineSettings
from delta_belief_rl.trainer.settings import (
    actor_settings,
    adapter_settings,
    judge_cache_key,
    number_format,
)
from delta_belief_rl.types import UserError


@dataclass(frozen=True, slots=True)
class Pools:
    """All pools, ready."""

    policy: RayPolicyGroup
    engines: RayEngineGroup
    router: EngineRouter
    judge: JudgePool
    judges: JudgeReplicas
    gpus: BookedGpus
    roster: Roster
    self_tests: tuple[SelfTestReport, ...] = ()
    footprints: tuple[Footprint, ...] = ()


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
    roster = Roster()
    machines = () if cfg.ray_init.address == "local" else find_machines(plan.machines)
    if machines:
        check_machines(machines, plan, Path(cfg.trainer.output_dir), deadline)
    gpus = book_gpus(plan.gpus, deadline, machines, plan.machines.gpus)
    if is_api_policy(cfg):
        return _start_without_policy(cfg, plan, gpus, roster, probe_ids)
    engine_places, engine_settings = _engine_places(cfg, plan, gpus, deadline)
    replicas = [place.remote(engine_settings) for place in engine_places]
    engines_measure = _measures(cfg.actor_rollout_ref.rollout.name, plan)
    if engines_measure and cfg.judge_rollout.share_actor_gpu:
        _wait_for_engines(replicas, deadline)
    judges = _start_judges(cfg, plan, gpus, deadline)
    if engines_measure:
        _wait_for_engines(replicas, deadline)
    rank_places = _rank_places(cfg, plan, gpus, deadline)
    ranks = _start_ranks(rank_places, deadline)
    _wait_for_engines(replicas, deadline)
    _wait_for_judges(judges.actors, deadline)
    tests = _self_tests(cfg, judges, deadline)
    reach = _reach(cfg)
    router = EngineRouter([reach(replica) for replica in replicas])
    _note_all(roster, {"rank": ranks, "engine": replicas, "judge": judges.actors}, deadline)
    group = RayEngineGroup(
        replicas,
        probe_ids,
        run_bound(cfg, plan.device),
        sleeps=_sleeps(cfg, plan.device),
        judges=judges.actors if _judge_sleeps(cfg) else (),
        restart=engine_restarter(engine_places, engine_settings, reach, router, deadline, roster),
        signs=cfg.trainer.heartbeat_timeout,
    )
    return Pools(
        gpus=gpus,
        roster=roster,
        policy=RayPolicyGroup(
            ranks,
            group.rest,
            rank_places.limits,
            expected_bytes=sum(line.bytes for line in plan.memory) or None,
            restarter=RankRestarter(rank_places, deadline, roster),
        ),
        engines=group,
        router=router,
        judges=judges,
        judge=_judge_pool(cfg, judges, deadline, roster),
        self_tests=tests,
        footprints=tuple(_footprints(cfg, plan, replicas, judges.actors, deadline)),
    )


def _start_without_policy(
    cfg: RunConfig, plan: Plan, gpus: BookedGpus, roster: Roster, probe_ids: Sequence[int]
) -> Pools:
    """The judges of a run whose policy is somebody else's: no rank trains and no engine samples."""
    deadline = cfg.trainer.ray_wait_register_center_timeout
    judges = _start_judges(cfg, plan, gpus, deadline)
    _wait_for_judges(judges.actors, deadline)
    tests = _self_tests(cfg, judges, deadline)
    _note_all(roster, {"judge": judges.actors}, deadline)
    return Pools(
        gpus=gpus,
        roster=roster,
        policy=RayPolicyGroup(()),
        engines=RayEngineGroup((), probe_ids, run_bound(cfg, plan.device)),
        router=EngineRouter([NoEngine()]),
        judges=judges,
        judge=_judge_pool(cfg, judges, deadline, roster),
        self_tests=tests,
        footprints=tuple(_footprints(cfg, plan, (), judges.actors, deadline)),
    )


def _self_tests(
    cfg: RunConfig, judges: JudgeReplicas, deadline: float
) -> tuple[SelfTestReport, ...]:
    """What the replicas make of plain facts; an API is the same behind all of them."""
    if not is_self_tested(cfg):
        return ()
    tested = judges.actors[:1] if cfg.judge_rollout.name == API else judges.actors
    return tuple(_wait("judges", [judge.self_test.remote() for judge in tested], deadline))


def _judge_pool(
    cfg: RunConfig, judges: JudgeReplicas, deadline: float, roster: Roster
) -> JudgePool:
    return JudgePool(
        judges.calls(),
        pool_settings(cfg),
        failures=(RayError,),
        cache_key=judge_cache_key(cfg),
        restart=judges.restarter(deadline, least_accuracy(cfg), roster),
    )


def _note_all(roster: Roster, pools: Mapping[Role, Sequence[Any]], deadline: float) -> None:
    """Take down which process each worker is."""
    for role, actors in pools.items():
        found = _wait(f"{role}s", [actor.present.remote() for actor in actors], deadline)
        for index, where in enumerate(found):
            roster.note(role, index, where)


def _rank_places(cfg: RunConfig, plan: Plan, gpus: BookedGpus, deadline: float) -> RankPlaces:
    settings = actor_settings(cfg, plan.device, plan.total_steps or 1, plan.threads)
    places = plan.pool("actor")
    handles = _place("training ranks", ActorWorker, places, gpus, deadline, plan.threads)
    return RankPlaces(handles, settings, rank_limits(cfg, len(places)))


def _start_ranks(places: RankPlaces, deadline: float) -> list[Any]:
    ranks = places.spawn()
    address = _wait("training ranks", [ranks[0].address.remote()], deadline)[0]
    _wait("training ranks", places.join(ranks, address), deadline)
    return ranks


def rank_limits(cfg: RunConfig, num_ranks: int) -> RankLimits:
    """How long the training ranks may wait for each other, and where each of several writes."""
    folder = Path(cfg.trainer.output_dir).absolute() / "logs"
    logs = [folder / f"rank_{rank}.log" for rank in range(num_ranks)] if num_ranks > 1 else []
    limits = cfg.actor_rollout_ref.nccl_timeout, tuple(logs), cfg.trainer.heartbeat_timeout
    return RankLimits(*limits)


def _engine_places(
    cfg: RunConfig, plan: Plan, gpus: BookedGpus, deadline: float
) -> tuple[list[Any], VllmSettings | EngineSettings]:
    """Actor classes bound to the place of each engine replica, and what they are started with."""
    rollout = cfg.actor_rollout_ref.rollout
    places = plan.pool("engine")
    count = len(places)
    threads = max(1, plan.threads // count)
    if rollout.name == "vllm":
        handles = _place("policy engines", VllmEngineWorker, places, gpus, deadline, threads)
        return handles, VllmSettings(cfg, plan.device)
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
        per_step=rollout.tokens_per_step,
    )
    handles = _place("policy engines", EngineWorker, places, gpus, deadline, threads)
    return handles, settings


def _start_judges(cfg: RunConfig, plan: Plan, gpus: BookedGpus, deadline: float) -> JudgeReplicas:
    places = plan.pool("judge")
    # The table's judge needs no thread; a model takes turns with the policy on the same cores.
    share = max(1, plan.threads // len(places))
    threads = share if cfg.judge_rollout.name in MODELS else 1
    settings = judge_settings(cfg, threads)
    calls = judge_calls(cfg)
    handles = _place("judges", JudgeWorker, places, gpus, deadline, threads, calls)
    if not _measures(cfg.judge_rollout.name, plan):
        return JudgeReplicas.start(handles, settings)
    return JudgeReplicas.start_by_gpu(
        handles,
        settings,
        [place.gpus for place in places],
        lambda actors: _wait_for_judges(actors, deadline),
    )


def _place(
    name: str,
    worker: Any,
    places: Sequence[Placement],
    gpus: BookedGpus,
    deadline: float,
    num_threads: int | None,
    calls: int | None = None,
) -> list[Any]:
    """Actor classes bound to the bundles of a new placement group, one bundle each.

    Args:
        name: Of the pool.
        worker: The actor class.
        places: One for each actor.
        gpus: Those of the run; each actor sees its own, and is on their machine.
        deadline: Seconds until Ray must have room.
        num_threads: CPU threads of an actor.
        calls: Calls that an actor works on at a time; None leaves what the class says.
    """
    count = len(places)
    # Typed as any: None is Ray's default, which its annotation does not have.
    homes: Any = [gpus.place(place.gpus) for place in places] if gpus.machines else None
    group = placement_group(
        [{"CPU": 1.0}] * count,
        strategy="SPREAD" if len(gpus.machines) > 1 else "PACK",
        name=name,
        bundle_label_selector=homes,
    )
    try:
        ray.get(group.ready(), timeout=deadline)
    except GetTimeoutError as error:
        have = ray.available_resources()
        raise UserError(
            f"The pool of {name} needs {count} CPUs but only {have.get('CPU', 0):g} are free: "
            "lower the pool's size or raise ray_init.num_cpus."
        ) from error
    more = {} if calls is None else {"max_concurrency": calls}
    return [
        worker.options(
            num_cpus=1,
            num_gpus=0,
            max_restarts=0,
            runtime_env={"env_vars": worker_env(num_threads) | gpus.environment(place.gpus)},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
            **more,
        )
        for index, place in enumerate(places)
    ]


def _footprints(
    cfg: RunConfig,
    plan: Plan,
    replicas: Sequence[Any],
    judges: Sequence[Any],
    deadline: float,
) -> Iterator[Footprint]:
    """What the vLLM engines of the run hold of their GPUs."""
    pools = (
        ("policy engine", cfg.actor_rollout_ref.rollout.name, replicas, plan.engine_needs),
        ("judge", cfg.judge_rollout.name, judges, plan.judge_needs),
    )
    for role, engine, actors, needs in pools:
        if not _measures(engine, plan):
            continue
        held = _wait(f"{role}s", [actor.memory.remote() for actor in actors], deadline)
        for number, workers in enumerate(held):
            yield Footprint(f"{role} {number}", workers, needs)


def _measures(engine: str, plan: Plan) -> bool:
    """Whether an engine measures the free memory of a GPU that others are about to fill.

    Such engines start one after another and before the training ranks: what another process takes
    meanwhile would count as the engine's own.
    """
    return engine == "vllm" and plan.gpus > 0


def _wait_for_engines(replicas: Sequence[Any], deadline: float) -> None:
    _wait("policy engines", [replica.health.remote() for replica in replicas], deadline)


def _wait_for_judges(actors: Sequence[Any], deadline: float) -> None:
    _wait("judges", [judge.answer.remote([]) for judge in actors], deadline)


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
    except RayActorError as error:
        raise UserError(
            f"One of the {name} died while it started (killed, out of memory, or crashed): look "
            "into the logs of Ray and of the run, and start again."
        ) from error


def _sleeps(cfg: RunConfig, device: str) -> bool:
    """Whether the engines give their memory back while the ranks score and update."""
    rollout = cfg.actor_rollout_ref.rollout
    return rollout.name == "vllm" and device == "cuda" and rollout.free_cache_engine


def _judge_sleeps(cfg: RunConfig) -> bool:
    """Whether the judges give back memory that the ranks need on the same GPUs."""
    judge = cfg.judge_rollout
    return (
        judge.name == "vllm"
        and bool(judge.ngpus)
        and judge.share_actor_gpu
        and judge.rollout.free_cache_engine
    )


def _reach(cfg: RunConfig) -> Callable[[Any], Engine]:
    """How the rollout sees a replica."""
    rollout = cfg.actor_rollout_ref.rollout
    signs = cfg.trainer.heartbeat_timeout
    if rollout.name == "vllm":
        return partial(RemoteEngine, signs=signs)
    return partial(remote_pump, deterministic=rollout.deterministic, signs=signs)
