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
_LEARNERS = ("archer", "istar", "spa_rl")
"""Methods that train a model on the policy's hidden states, or from the base of its adapters."""


def denoiser(config: RunConfig) -> Iterator[str]:
    """The engine, and everything that asks a causal model for something else than its answers."""
    rollout, chosen = config.actor_rollout_ref.rollout, config.algorithm.transforms
    yield from _ranges(config)
    if rollout.name != DENOISER:
        if _TRACED in chosen and not config.trainer.val_only:
            yield (
                f"algorithm.transforms={_TRACED} reads the order in which a masked denoiser fills "
                "its answers: set actor_rollout_ref.rollout.name=denoiser, or leave it out."
            )
        return
    yield from _policy(config)
    yield from _kernels(config)
    yield from _steps(config)
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
    if (actor.actor.dtype, actor.rollout.dtype) != ("float32", "float32"):
        yield (
            f"{what} computes in float32: set actor_rollout_ref.actor.dtype and "
            "actor_rollout_ref.rollout.dtype to float32."
        )
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


def _kernels(config: RunConfig) -> Iterator[str]:
    """Ways of computing that this policy does not have."""
    actor, what = config.actor_rollout_ref, f"actor_rollout_ref.rollout.name={DENOISER}"
    for name, chosen in (
        ("model.use_liger", actor.model.use_liger),
        ("model.enable_gradient_checkpointing", actor.model.enable_gradient_checkpointing),
        ("actor.fsdp_config.optimizer_offload", actor.actor.fsdp_config.optimizer_offload),
    ):
        if chosen:
            yield f"{what} has no {name.split('.')[-1]}: set actor_rollout_ref.{name}=false."
    if (actor.rollout.tensor_model_parallel_size or 1) > 1:
        yield (
            f"{what} plays on one device: set "
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1."
        )


def _steps(config: RunConfig) -> Iterator[str]:
    """Places of a step against those of an answer."""
    places = config.actor_rollout_ref.rollout.tokens_per_step
    length = config.data.max_response_length
    name = f"actor_rollout_ref.rollout.tokens_per_step={places}"
    if places > length:
        yield (
            f"{name} is more than the {length} places of an answer "
            "(data.max_response_length): lower it."
        )
    elif (
        places == length and _TRACED in config.algorithm.transforms and not config.trainer.val_only
    ):
        yield (
            f"{name} fills an answer in one step, and algorithm.transforms={_TRACED} tells steps "
            "apart: lower it, or leave the transform out."
        )


def _methods(config: RunConfig) -> Iterator[str]:
    algorithm, update = config.algorithm, config.actor_rollout_ref.actor
    chosen = (algorithm.adv_estimator, *algorithm.transforms)
    what = f"actor_rollout_ref.rollout.name={DENOISER}"
    for name in chosen:
        if name in _LEARNERS:
            yield (
                f"{what} trains no model beside the policy, as {name} does: choose another method, "
                "such as grpo."
            )
        elif name in CRITIC_ESTIMATORS:
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
    knobs, places = config.algorithm.dtca, config.actor_rollout_ref.rollout.tokens_per_step
    if places < 1:
        yield f"actor_rollout_ref.rollout.tokens_per_step must be at least 1, not {places}."
    if not knobs.tau > 0:
        yield f"algorithm.dtca.tau must be positive, not {knobs.tau}."
    if not 0 <= knobs.decay <= 1:
        yield f"algorithm.dtca.decay must lie in [0, 1], not {knobs.decay}."
    if not 0 < knobs.weight_low <= 1 <= knobs.weight_high:
        yield (
            "algorithm.dtca.weight_low must lie in (0, 1] and weight_high be at least 1, not "
            f"{knobs.weight_low} and {knobs.weight_high}."
        )
    if not 0 < knobs.step_share <= 1:
        yield f"algorithm.dtca.step_share must lie in (0, 1], not {knobs.step_share}."
