"""Whether a plan fits onto its GPUs beside what others hold there, known before anything loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from delta_belief_rl.config.facts import ModelShape
from delta_belief_rl.config.gpus import Gpu
from delta_belief_rl.config.memory import GIB, show_bytes
from delta_belief_rl.config.plan import Placement, Plan
from delta_belief_rl.config.schema_actor import Rollout
from delta_belief_rl.config.schema_judge import JudgeEngine
from delta_belief_rl.types import UserError

IDLE_BYTES = GIB
"""What the driver and a display may hold on a GPU that nobody uses."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a process of the plan needs of one GPU, in bytes."""

    who: str
    bytes: float


def check_gpus(plan: Plan, gpus: Sequence[Gpu], first: int = 0) -> None:
    """Refuse to load models onto a GPU that is too small, or that others hold too much of.

    Args:
        plan: Of the run.
        gpus: Those of one machine.
        first: Number of its first GPU in the plan.

    Raises:
        UserError: The first such GPU, with what the plan needs there and who holds it.
    """
    for sentence in (*size_problems(plan, gpus, first), *gpu_problems(plan, gpus, first)):
        raise UserError(sentence)


def size_problems(plan: Plan, gpus: Sequence[Gpu], first: int = 0) -> Iterator[str]:
    """One sentence for each process of the plan that no empty GPU of this kind could hold.

    Only what is exact counts: weights, the state of their optimizer, and a cache of the size that
    was asked for or that a single sequence needs.
    """
    config = plan.config
    by_number = {first + gpu.index: gpu for gpu in gpus}
    for place in plan.placements:
        gpu = by_number.get(place.gpus[0]) if place.gpus else None
        if gpu is None:
            continue
        if place.pool == "actor":
            yield from _rank_size(plan, place, gpu)
        elif place.pool == "engine" and config.actor_rollout_ref.rollout.name == "vllm":
            data, rollout = config.data, config.actor_rollout_ref.rollout
            tokens = rollout.max_model_len or data.max_prompt_length + data.max_response_length
            who = f"policy engine {place.replica}"
            load = _Load(who, "actor_rollout_ref", rollout, tokens, plan.facts.model, None)
            yield from _engine_size(load, len(place.gpus), gpu)
        elif place.pool == "judge" and config.judge_rollout.name == "vllm":
            judge, facts = config.judge_rollout.rollout, plan.facts
            tokens = judge.max_model_len or judge.prompt_length + judge.response_length
            found = facts.judge_checkpoint
            stored = found.weight_bytes if found is not None else None
            packed = judge.quantization or (found is not None and found.quantisation is not None)
            shape = None if packed and stored is None else facts.judge_model
            who = f"judge {place.replica}"
            load = _Load(who, "judge_rollout", judge, tokens, shape, stored if packed else None)
            yield from _engine_size(load, len(place.gpus), gpu)


@dataclass(frozen=True, slots=True)
class _Load:
    """What an engine loads.

    Attributes:
        tokens: Of the longest sequence.
        shape: None where the size of the weights is not known.
        packed: Bytes of quantised weights; None for plain ones.
    """

    who: str
    pool: str
    engine: Rollout | JudgeEngine
    tokens: int
    shape: ModelShape | None
    packed: int | None


def _rank_size(plan: Plan, place: Placement, gpu: Gpu) -> Iterator[str]:
    kept = sum(line.bytes for line in plan.memory[:2])
    if kept > gpu.total:
        yield (
            f"GPU {gpu.index} ({gpu.name}) has {show_bytes(gpu.total)} and training rank "
            f"{place.replica} keeps {show_bytes(kept)} there (weights and optimizer): raise "
            "actor_rollout_ref.ngpus, or train a smaller model or a smaller adapter."
        )


def _engine_size(load: _Load, parallel: int, gpu: Gpu) -> Iterator[str]:
    shape, engine = load.shape, load.engine
    if shape is None:
        return
    width = 4 if engine.dtype == "float32" else 2
    plain = shape.parameters() * width
    weights = (plain if load.packed is None else load.packed) / parallel
    heads = max(1, shape.kv_heads // parallel)
    sequence = 2 * shape.layers * heads * shape.head_dim * width * load.tokens
    setting, share = f"{load.pool}.rollout.gpu_memory_utilization", engine.gpu_memory_utilization
    if engine.kv_cache_memory_bytes is None:
        cache, room, limit = float(sequence), share * gpu.total, f"{setting}={share:g} leaves it"
    else:
        cache, room, limit = float(engine.kv_cache_memory_bytes), float(gpu.total), "there are"
    if weights + cache > room:
        yield (
            f"GPU {gpu.index} ({gpu.name}, {show_bytes(gpu.total)}) has too little memory for "
            f"{load.who}: its weights take {show_bytes(weights)} and its key-value cache at least "
            f"{show_bytes(cache)}, but {limit} {show_bytes(room)}; give it more, split it over "
            f"more GPUs ({load.pool}.rollout.tensor_model_parallel_size), or give a smaller or a "
            "quantised model."
        )


def gpu_problems(plan: Plan, gpus: Sequence[Gpu], first: int = 0) -> Iterator[str]:
    """One sentence for each GPU where the plan does not fit beside what others hold.

    A GPU that is empty is never refused: the account is an estimate, and where it is too small for
    the plan alone nobody else is in the way.
    """
    for gpu in gpus:
        needs = gpu_needs(plan, gpu, first)
        needed, held = sum(need.bytes for need in needs), gpu.total - gpu.free
        if needed <= gpu.free or held <= IDLE_BYTES:
            continue
        who = " and ".join(f"{need.who} {show_bytes(need.bytes)}" for need in needs)
        yield (
            f"GPU {gpu.index} ({gpu.name}) has {show_bytes(gpu.free)} of {show_bytes(gpu.total)} "
            f"free and the plan needs {show_bytes(needed)} there ({who}): {_holders(gpu)}; wait "
            "for it or end it, or choose other GPUs with CUDA_VISIBLE_DEVICES."
        )


def gpu_needs(plan: Plan, gpu: Gpu, first: int = 0) -> list[Need]:
    """What each process of the plan needs of a GPU; ``first`` as in ``check_gpus``.

    A policy engine that sleeps while the policy is trained gives its memory back, so of engine and
    update only the larger one counts, beside the weights of the training rank.
    """
    places = [place for place in plan.placements if first + gpu.index in place.gpus]
    rank = sum(line.bytes for line in plan.memory)
    weights = plan.memory[0].bytes if plan.memory else 0.0
    needs: list[Need] = []
    for place in places:
        if place.pool == "judge":
            needs.append(Need(f"judge {place.replica}", _judge_bytes(plan, gpu)))
        elif place.pool == "engine":
            needs.append(Need(f"policy engine {place.replica}", _engine_bytes(plan, place, gpu)))
        else:
            needs.append(Need(f"training rank {place.replica}", rank))
    rollout = plan.config.actor_rollout_ref.rollout
    engine = next((need for need in needs if need.who.startswith("policy engine")), None)
    if engine is not None and rollout.name == "vllm" and rollout.free_cache_engine:
        peak = max(rank, weights + engine.bytes)
        others = [need for need in needs if need.who.startswith("judge")]
        return [Need("policy", peak), *others]
    return needs


def _engine_bytes(plan: Plan, place: Placement, gpu: Gpu) -> float:
    rollout = plan.config.actor_rollout_ref.rollout
    if rollout.name == "vllm":
        return rollout.gpu_memory_utilization * gpu.total
    ranks = len(plan.pool("actor"))
    return plan.memory[0].bytes * ranks / len(place.gpus) if plan.memory else 0.0


def _judge_bytes(plan: Plan, gpu: Gpu) -> float:
    judge = plan.config.judge_rollout
    if judge.name == "vllm":
        return judge.rollout.gpu_memory_utilization * gpu.total
    return sum(line.bytes for line in plan.judge_memory)


def _holders(gpu: Gpu) -> str:
    if not gpu.holders:
        held = show_bytes(gpu.total - gpu.free)
        return f"a process that cannot be seen from here holds {held}"
    largest = sorted(gpu.holders, key=lambda holder: -holder.bytes)[:3]
    named = (f"process {one.pid} ({one.name}) holds {show_bytes(one.bytes)}" for one in largest)
    return ", ".join(named)
