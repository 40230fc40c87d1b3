"""What goes with a masked denoiser, and what does not; see ``rules``."""

from __future__ import annotations

from collections.abc import Iterator

from delta_belief_rl.config.rules_views import READING
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.config.schema_algo import CRITIC_ESTIMATORS

DENOISER = "denoiser"
"""``actor_rollout_ref.rollout.name`` of a masked denoiser."""
_TRACED = "dtca"
"""The transform that reads how a denoiser came to its answer."""


def denoiser(config: RunConfig) -> Iterator[str]:
    """The engine, and everything that asks a causal model for something else than its answers."""
    rollout, chosen = config.actor_rollout_ref.rollout, config.algorithm.transforms
    if rollout.tokens_per_step < 1:
        yield (
            "actor_rollout_ref.rollout.tokens_per_step must be at least 1, not "
            f"{rollout.tokens_per_step}."
        )
    yield from _ranges(config)
    if rollout.name != DENOISER:
        if _TRACED in chosen and not config.trainer.val_only:
            yield (
                f"algorithm.transforms={_TRACED} reads the order in which a masked denoiser fills "
                "its answers: set actor_rollout_ref.rollout.name=denoiser, or leave it out."
            )
        return
    yield from _policy(config)
    if not config.trainer.val_only:
        yield from _methods(config)


def _policy(config: RunConfig) -> Iterator[str]:
    actor, turns = config.actor_rollout_ref, config.multi_turn
    what = f"actor_rollout_ref.rollout.name={DENOISER}"
    if actor.model.lora_rank or any(adapter.r for adapter in actor.model.adapters):
        yield (
            f"{what} trains all weights: set actor_rollout_ref.model.lora_rank=0 and "
            "actor_rollout_ref.model.adapters=[]."
        )
    if (actor.ngpus or 0) > 1:
        yield f"{what} trains on one rank: set actor_rollout_ref.ngpus to 0 or 1."
    if actor.actor.dtype not in ("auto", "float32"):
        yield f"{what} computes in float32: set actor_rollout_ref.actor.dtype=float32."
    if turns.logprob_reward.enabled:
        yield (
            f"{what} has no belief, because a denoiser does not say how likely a text is: set "
            "multi_turn.logprob_reward.enabled=false."
        )
    if turns.logprob_sampling.enabled:
        yield (
            f"{what} scores no candidates: set multi_turn.logprob_sampling.enabled=false and "
            "actor_rollout_ref.rollout.n=1."
        )


def _methods(config: RunConfig) -> Iterator[str]:
    algorithm, update = config.algorithm, config.actor_rollout_ref.actor
    chosen = (algorithm.adv_estimator, *algorithm.transforms)
    what = f"actor_rollout_ref.rollout.name={DENOISER}"
    for name in chosen:
        if name in CRITIC_ESTIMATORS:
            yield f"{what} has no critic, which {name} trains: choose another method, such as grpo."
        elif name in READING:
            yield (
                f"{what} reads no game behind another context, as {name} asks: choose another "
                "method, such as grpo."
            )
    if update.use_kl_loss or algorithm.use_kl_in_reward:
        yield (
            f"{what} keeps no model that it began with: set actor_rollout_ref.actor.use_kl_loss "
            "and algorithm.use_kl_in_reward to false."
        )
    if algorithm.tree.rule != "none":
        yield f"{what} grows no trees of games: set algorithm.tree.rule=none."


def _ranges(config: RunConfig) -> Iterator[str]:
    knobs = config.algorithm.dtca
    if not knobs.tau > 0:
        yield f"algorithm.dtca.tau must be positive, not {knobs.tau}."
    if not 0 <= knobs.decay <= 1:
        yield f"algorithm.dtca.decay must lie in [0, 1], not {knobs.decay}."
    if not 0 <= knobs.weight_low <= 1 <= knobs.weight_high:
        yield (
            "algorithm.dtca.weight_low and weight_high must lie on either side of 1, not at "
            f"{knobs.weight_low} and {knobs.weight_high}."
        )
    if not 0 < knobs.step_share <= 1:
        yield f"algorithm.dtca.step_share must lie in (0, 1], not {knobs.step_share}."
