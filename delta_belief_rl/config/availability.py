"""Settings that are valid and planned but that no code answers to yet.

A run refuses them before anything starts, so that no setting is passed over in silence. A dry run
still shows the plan. An entry of ``GAPS`` goes when the code that it waits for is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from delta_belief_rl.config.schema import RunConfig, lookup

JUDGES = ("world", "rules", "hf", "vllm", "api")
"""Judges (``judge_rollout.name``, after ``auto`` is settled)."""


@dataclass(frozen=True, slots=True)
class Gap:
    """One thing that is missing.

    Attributes:
        setting: The setting that asks for it, in full.
        asked: Whether a configuration does.
        cure: What to set instead.
    """

    setting: str
    asked: Callable[[RunConfig], bool]
    cure: str


def _trains_all_weights(config: RunConfig) -> bool:
    model = config.actor_rollout_ref.model
    first = model.adapters[0].r if model.adapters else 0
    # All weights of a denoiser are trained, and sent to its engine.
    return not (first or model.lora_rank or config.actor_rollout_ref.rollout.name == "denoiser")


def _more_adapters(config: RunConfig) -> bool:
    return any(adapter.name != "ema" for adapter in config.actor_rollout_ref.model.adapters[1:])


def _splits_hf(config: RunConfig) -> bool:
    rollout = config.actor_rollout_ref.rollout
    return rollout.name == "hf" and (rollout.tensor_model_parallel_size or 1) > 1


GAPS: tuple[Gap, ...] = (
    Gap(
        "multi_turn.logprob_sampling.enabled",
        lambda c: (
            c.multi_turn.logprob_sampling.enabled and c.actor_rollout_ref.rollout.name != "hf"
        ),
        "only the hf engine scores candidates: set actor_rollout_ref.rollout.name=hf, or "
        "multi_turn.logprob_sampling.enabled=false",
    ),
    Gap(
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        _splits_hf,
        "the hf engine runs whole on one device: "
        "set actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    ),
    Gap(
        "actor_rollout_ref.rollout.deterministic",
        lambda c: (
            c.actor_rollout_ref.rollout.deterministic
            and c.actor_rollout_ref.rollout.name not in ("hf", "denoiser")
        ),
        "only the hf and denoiser engines advance games in a fixed order: "
        "set actor_rollout_ref.rollout.deterministic=false",
    ),
    Gap(
        "judge_rollout.name",
        lambda c: c.judge_rollout.name not in JUDGES,
        "set data.world=everyday and judge=world, or judge_rollout.name=hf",
    ),
    Gap(
        "actor_rollout_ref.model.lora_rank",
        _trains_all_weights,
        "set actor_rollout_ref.model.lora_rank and the r of its first adapter to 8, say",
    ),
    Gap(
        "actor_rollout_ref.model.adapters",
        _more_adapters,
        "name one trained adapter, and ema where a slow copy is wanted",
    ),
    Gap(
        "actor_rollout_ref.model.trust_remote_code",
        lambda c: c.actor_rollout_ref.model.trust_remote_code,
        "set actor_rollout_ref.model.trust_remote_code=false",
    ),
    Gap(
        "actor_rollout_ref.actor.fsdp_config.param_offload",
        lambda c: c.actor_rollout_ref.actor.fsdp_config.param_offload,
        "set actor_rollout_ref.actor.fsdp_config.param_offload=false",
    ),
    Gap(
        "trainer.max_staleness",
        lambda c: c.trainer.max_staleness > 0,
        "set trainer.max_staleness=0",
    ),
    Gap(
        "trainer.log_val_generations",
        lambda c: c.trainer.log_val_generations > 0,
        "set trainer.log_val_generations=0 and read validation/*.jsonl",
    ),
)


def unavailable(config: RunConfig) -> list[str]:
    """One sentence for each setting of a valid configuration that nothing answers to yet.

    Example:
        >>> from delta_belief_rl.config.compose import load_config
        >>> unavailable(load_config(["experiment=quickstart"])[0])
        []
    """
    return [
        f"{gap.setting}={_shown(config, gap.setting)} is not available yet: {gap.cure}."
        for gap in GAPS
        if gap.asked(config)
    ]


def _shown(config: RunConfig, setting: str) -> str:
    value = lookup(config, setting)
    if isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        names = [str(getattr(item, "name", item)) for item in items]
        return f"[{', '.join(names)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
