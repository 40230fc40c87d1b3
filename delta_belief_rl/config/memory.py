"""A rough account of memory, from the sizes in ``config.json`` alone.

Counted in bytes per GPU (or for the one CPU process): for the policy weights, what the optimizer
keeps of trained weights, kept activations, and the logits of one chunk; for a judge that runs
through transformers its weights and its key-value cache. Caches of other engines are reserved
shares and stand apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from delta_belief_rl.config.facts import ModelShape
from delta_belief_rl.config.schema import RunConfig

GIB = 2**30
_TRAINED_BYTES = 16
"""Float32 value, gradient and two averages of AdamW."""
_LOGIT_CHUNK = 1024
"""Tokens whose logits exist at once."""
_MAX_HF_LANES = 32
"""More questions side by side save a judge on CPUs nothing."""
_KEPT_PER_LAYER = 12
"""Kept vectors of the hidden size per token and layer, besides the feed-forward's own."""


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One part of the account, in bytes on each device."""

    what: str
    bytes: float


def estimate_memory(
    config: RunConfig, shape: ModelShape | None, actor_gpus: int, tokens: int
) -> tuple[MemoryLine, ...]:
    """Memory of one training rank.

    Args:
        config: The configuration.
        shape: None gives an empty account.
        actor_gpus: Training ranks; 0 for one CPU process.
        tokens: Tokens of the largest micro-batch.
    """
    if shape is None:
        return ()
    model, update = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    ranks = max(1, actor_gpus)
    dtype = update.dtype if update.dtype != "auto" else ("bfloat16" if actor_gpus else "float32")
    width = 4 if dtype == "float32" else 2
    weights = shape.parameters() * width / ranks
    if config.trainer.val_only:
        return (MemoryLine(f"weights ({dtype})", weights),)
    trained = shape.lora_parameters(model.lora_rank) if model.lora_rank else shape.parameters()
    kept_on_device = 8 if update.fsdp_config.optimizer_offload and actor_gpus else _TRAINED_BYTES
    layer = (_KEPT_PER_LAYER * shape.hidden + 3 * shape.intermediate) * width
    if model.enable_gradient_checkpointing:
        activations = tokens * (shape.layers * shape.hidden * width + layer)
    else:
        activations = tokens * shape.layers * layer
    logits = min(tokens, _LOGIT_CHUNK) * shape.vocab * 4 * 2
    return (
        MemoryLine(f"weights ({dtype})", weights),
        MemoryLine("trained weights, gradients, optimizer", trained * kept_on_device / ranks),
        MemoryLine("activations of a full micro-batch", activations),
        MemoryLine("logits of one chunk", logits),
    )


def judge_lanes(config: RunConfig) -> int:
    """Questions that one replica of an hf judge answers side by side.

    In a deterministic run it is one, so that a reply depends on its question alone.
    """
    if config.actor_rollout_ref.rollout.deterministic:
        return 1
    return min(config.judge_rollout.rollout.max_num_seqs, _MAX_HF_LANES)


def estimate_judge_memory(config: RunConfig, shape: ModelShape | None) -> tuple[MemoryLine, ...]:
    """Memory of one replica of an hf judge; empty for other judges and where ``shape`` is None."""
    judge = config.judge_rollout
    if shape is None or judge.name != "hf":
        return ()
    dtype = judge.rollout.dtype
    if dtype == "auto":
        dtype = "bfloat16" if judge.ngpus else "float32"
    width = 4 if dtype == "float32" else 2
    tokens = judge_lanes(config) * (judge.rollout.prompt_length + judge.rollout.response_length)
    cached = 2 * shape.layers * shape.kv_heads * shape.head_dim * width
    return (
        MemoryLine(f"weights ({dtype})", shape.parameters() * width),
        MemoryLine(f"key-value cache of {tokens:,} tokens", tokens * cached),
    )


def show_bytes(count: float) -> str:
    """Bytes in GiB or MiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 2 else f"{count / 2**20:.0f} MiB"
