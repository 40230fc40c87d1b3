"""What vLLM engines need of a GPU, from ``config.json`` alone: weights, and the cache that is left.

An engine takes a share of the GPU. Of that share the weights come first, then what one forward pass
needs, and the rest becomes key-value cache. How much one pass needs is vLLM's own to measure, so
the cache is an upper bound here.
"""

from __future__ import annotations

from dataclasses import dataclass

from delta_belief_rl.config.facts import ModelShape
from delta_belief_rl.config.memory import MemoryLine
from delta_belief_rl.config.schema import RunConfig

FOUR_BIT = ("awq", "awq_marlin", "compressed-tensors", "gptq", "gptq_marlin")
"""Quantisations whose linear layers have four bits a weight in the checkpoints that we know."""

_GROUP_BYTES = 2.5
"""A scale in half precision and a four-bit zero point, for each group of weights."""
_GROUP = 128


@dataclass(frozen=True, slots=True)
class EngineNeeds:
    """Estimate for one GPU of one engine, in bytes.

    Attributes:
        weights: Of the model, split over the engine's GPUs.
        adapters: Room for LoRA adapters.
        cache_per_token: Of the key-value cache.
    """

    weights: float
    adapters: float
    cache_per_token: float

    def lines(self, what: str) -> tuple[MemoryLine, ...]:
        """Lines of the plan."""
        rows = [MemoryLine(f"weights ({what})", self.weights)]
        if self.adapters:
            rows.append(MemoryLine("room for one adapter", self.adapters))
        return (*rows, MemoryLine("cache of 1,000 tokens", 1000 * self.cache_per_token))


def policy_engine_needs(config: RunConfig, shape: ModelShape | None) -> EngineNeeds | None:
    """Of one GPU of the policy's vLLM engine; None without one, or where the shape is not known."""
    actor = config.actor_rollout_ref
    if shape is None or actor.rollout.name != "vllm":
        return None
    parallel = (actor.rollout.tensor_model_parallel_size or actor.ngpus or 1) if actor.ngpus else 1
    width = 4 if actor.rollout.dtype == "float32" else 2
    rank = actor.model.lora_rank
    return EngineNeeds(
        weights=shape.parameters() * width / parallel,
        adapters=shape.lora_parameters(rank) * width / parallel if rank else 0.0,
        cache_per_token=_cache(shape, width, parallel),
    )


def judge_engine_needs(config: RunConfig, shape: ModelShape | None) -> EngineNeeds | None:
    """Likewise of the judge's engine."""
    judge = config.judge_rollout
    if shape is None or judge.name != "vllm":
        return None
    parallel = (judge.rollout.tensor_model_parallel_size or judge.ngpus or 1) if judge.ngpus else 1
    width = 4 if judge.rollout.dtype == "float32" else 2
    weights = shape.parameters() * width
    if judge.rollout.quantization in FOUR_BIT:
        blocks = shape.layers * sum(a * b for a, b in shape.linear_sizes())
        weights = (shape.parameters() - blocks) * width + blocks * (0.5 + _GROUP_BYTES / _GROUP)
    return EngineNeeds(weights / parallel, 0.0, _cache(shape, width, parallel))


def _cache(shape: ModelShape, width: int, parallel: int) -> float:
    # vLLM copies key-value heads where there are fewer of them than GPUs.
    heads = max(1, shape.kv_heads // parallel)
    return 2.0 * shape.layers * heads * shape.head_dim * width
