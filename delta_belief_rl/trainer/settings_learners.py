"""Which learner makes a token column, and its settings from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from delta_belief_rl.algo.credit.archer import Q, V
from delta_belief_rl.algo.credit.istar import PRM
from delta_belief_rl.algo.credit.spa_rl import CONTRIBUTION
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.trainer.archer import NEEDS_LORA, ArcherCriticSettings
from delta_belief_rl.trainer.contributions import WITHOUT_BASE, ContributionSettings
from delta_belief_rl.trainer.learner import LearnerSettings
from delta_belief_rl.trainer.optimizer import OptimizerSettings
from delta_belief_rl.trainer.process_model import ProcessModelSettings
from delta_belief_rl.types import UserError


def process_model(cfg: RunConfig, device: str, total_steps: int) -> LearnerSettings:
    """The process model of ``istar``.

    Raises:
        UserError: A setting is out of its range, or the model has no adapters.
    """
    need_adapters(cfg, "istar")
    ref, knobs = cfg.actor_rollout_ref, cfg.algorithm.istar
    return ProcessModelSettings(
        temperature=ref.rollout.temperature if ref.rollout.do_sample else 1.0,
        passes=ref.actor.ppo_epochs,
        grad_clip=knobs.grad_clip,
        optimizer=OptimizerSettings(
            lr=knobs.lr,
            weight_decay=knobs.weight_decay,
            total_steps=total_steps,
            offload=device == "cuda" and ref.actor.fsdp_config.optimizer_offload,
        ),
    )


def contributions(cfg: RunConfig, _device: str, _total_steps: int) -> LearnerSettings:
    """The head of ``spa_rl``.

    Raises:
        UserError: A setting is out of its range, or there is no base to read apart.
    """
    knobs = cfg.algorithm.spa_rl
    if knobs.source == "base" and not has_adapters(cfg):
        raise UserError(WITHOUT_BASE)
    return ContributionSettings(source=knobs.source, games=knobs.games, ridge=knobs.ridge)


def archer_critics(cfg: RunConfig, _device: str, _total_steps: int) -> LearnerSettings:
    """The critics of ``archer``.

    Raises:
        UserError: A setting is out of its range, or there is no base model to read.
    """
    knobs = cfg.algorithm.archer
    if not has_adapters(cfg):
        raise UserError(NEEDS_LORA)
    return ArcherCriticSettings(
        gamma=cfg.algorithm.gamma,
        tau=knobs.tau,
        lr=knobs.lr,
        width=knobs.width,
        buffer=knobs.buffer,
        epochs=knobs.critic_epochs,
        batch=knobs.critic_batch,
        grad_clip=knobs.grad_clip,
        seed=cfg.seed,
        policy_waits=knobs.warmup_steps,
        token_baseline=knobs.token_baseline,
        baseline_lr=knobs.baseline_lr,
    )


def has_adapters(cfg: RunConfig) -> bool:
    """Whether the policy is LoRA on a base that stays."""
    model = cfg.actor_rollout_ref.model
    return bool(model.lora_rank or (model.adapters and model.adapters[0].r))


def need_adapters(cfg: RunConfig, method: str) -> None:
    """Refuse a model without LoRA to a method whose learner is an adapter.

    Raises:
        UserError: There is no LoRA.
    """
    if not has_adapters(cfg):
        raise UserError(
            f"{method} trains an adapter of its own beside the policy's: set "
            "actor_rollout_ref.model.lora_rank, or choose another algorithm.adv_estimator."
        )


LEARNERS: Mapping[str, Callable[[RunConfig, str, int], LearnerSettings]] = {
    PRM: process_model,
    CONTRIBUTION: contributions,
    f"tokens:{Q}": archer_critics,
    f"tokens:{V}": archer_critics,
}
"""By column: the configuration, the device and the number of training steps to the settings."""


def learners_of(
    cfg: RunConfig, needs: Collection[str], device: str, total_steps: int
) -> tuple[LearnerSettings, ...]:
    """The learners behind the columns that a method needs, each once, in the order of ``LEARNERS``.

    Args:
        cfg: The configuration.
        needs: Names in ``requires`` of all elements of the method.
        device: Where the policy is trained.
        total_steps: Of the run.

    Raises:
        UserError: A setting is out of its range.
    """
    made = [make(cfg, device, total_steps) for name, make in LEARNERS.items() if name in needs]
    return tuple({learner.name: learner for learner in made}.values())
