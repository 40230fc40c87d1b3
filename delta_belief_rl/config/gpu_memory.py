"""Whether a plan fits onto its GPUs beside what others hold there, known before anything loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from delta_belief_rl.config.gpus import Gpu
from delta_belief_rl.config.memory import GIB, show_bytes
from delta_belief_rl.config.plan import Placement, Plan
from delta_belief_rl.types import UserError

IDLE_BYTES = GIB
"""What the driver and a display may hold on a GPU that nobody uses."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a process of the plan needs of one GPU, in bytes."""

    who: str
    bytes: float


def check_gpus(plan: Plan, gpus: Sequence[Gpu]) -> None:
    """Refuse to load models onto a GPU that somebody else holds too much of.

    Raises:
        UserError: The first such GPU, with what the plan needs there and who holds it.
    """
    for sentence in gpu_problems(plan, gpus):
        raise UserError(sentence)


def gpu_problems(plan: Plan, gpus: Sequence[Gpu]) -> Iterator[str]:
    """One sentence for each GPU where the plan does not fit beside what others hold.

    A GPU that is empty is never refused: the account is an estimate, and where it is too small for
    the plan alone nobody else is in the way.
    """
    for gpu in gpus:
        needs = gpu_needs(plan, gpu)
        needed, held = sum(need.bytes for need in needs), gpu.total - gpu.free
        if needed <= gpu.free or held <= IDLE_BYTES:
            continue
        who = " and ".join(f"{need.who} {show_bytes(need.bytes)}" for need in needs)
        yield (
            f"GPU {gpu.index} ({gpu.name}) has {show_bytes(gpu.free)} of {show_bytes(gpu.total)} "
            f"free and the plan needs {show_bytes(needed)} there ({who}): {_holders(gpu)}; wait "
            "for it or end it, or choose other GPUs with CUDA_VISIBLE_DEVICES."
        )


def gpu_needs(plan: Plan, gpu: Gpu) -> list[Need]:
    """What each process of the plan needs of a GPU.

    A policy engine that sleeps while the policy is trained gives its memory back, so of engine and
    update only the larger one counts, beside the weights of the training rank.
    """
    places = [place for place in plan.placements if gpu.index in place.gpus]
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
