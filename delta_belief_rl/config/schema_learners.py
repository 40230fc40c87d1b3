"""Settings of methods that train a model beside the policy (``algorithm.*``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from delta_belief_rl.config.fields import opt
from delta_belief_rl.config.schema_critic import BOOTSTRAP_HELP, NORMALISE_HELP


@dataclass(frozen=True, slots=True)
class Archer:
    """Settings of archer alone."""

    tau: float = opt(
        0.1, "How far the slow copies of the critics follow them in one update.", new=True
    )
    lr: float = opt(2e-5, "Learning rate of the critics; small models take more.", new=True)
    width: int = opt(256, "Width of the two layers of a critic.", new=True)
    buffer: int = opt(
        100_000,
        "Transitions that are kept for replay; each takes three hidden states in host memory of "
        "every training rank, and in checkpoints.",
        new=True,
    )
    critic_epochs: int = opt(50, "Updates of the critics at the end of a training step.", new=True)
    critic_batch: int = opt(128, "Transitions of one such update.", new=True)
    grad_clip: float = opt(1.0, "Largest norm of the critics' gradient.", new=True)
    warmup_steps: int = opt(
        0,
        "Training steps, from the first, in which the critics alone learn and the policy stays as "
        "it is.",
        new=True,
    )
    bootstrap_truncated: bool = opt(False, BOOTSTRAP_HELP, new=True)
    token_baseline: bool = opt(
        False,
        "Subtract from the advantage of each token what a baseline expects of its turn from the "
        "tokens before it.",
        new=True,
    )
    baseline_lr: float = opt(
        1e-3,
        "Learning rate of that baseline, which takes one step for each of the policy's.",
        new=True,
    )


@dataclass(frozen=True, slots=True)
class Istar:
    """Settings of istar alone."""

    beta: float = opt(
        0.05, "What a nat of the process model's log-ratio to the policy is worth.", new=True
    )
    step_advantage_w: float = opt(1.0, "Weight of the worth of turns.", new=True)
    baseline: Literal["rloo", "grpo", "reinforce_plus_plus_baseline"] = opt(
        "rloo",
        "What the worth of a turn is held against: the other turns of the group (rloo), all of "
        "them in units of their deviation (grpo), or their mean, whitened over the batch.",
        new=True,
    )
    normalise: bool = opt(
        False,
        "Divide the worth of turns by the largest sum to the end of a game, over the batch.",
        new=True,
    )
    lr: float = opt(1e-6, "Learning rate of the process model; small models take more.", new=True)
    weight_decay: float = opt(0.01, "Decoupled weight decay of the process model.", new=True)
    grad_clip: float = opt(10.0, "Largest gradient norm of the process model.", new=True)


@dataclass(frozen=True, slots=True)
class SpaRl:
    """Settings of spa_rl alone."""

    alpha: float = opt(1.0, "Weight of what a turn contributed to the outcome.", new=True)
    beta: float = opt(0.5, "Reward of an action that took effect.", new=True)
    warmup_steps: int = opt(
        10,
        "Training steps, from the first, in which the head learns and the outcome is paid as it "
        "is.",
        new=True,
    )
    refresh: bool = opt(True, "Train the head behind the warm-up as well.", new=True)
    estimator: Literal["gae", "turn_ppo"] = opt(
        "gae", "What makes advantages of these rewards.", new=True
    )
    source: Literal["base", "policy"] = opt(
        "base",
        "Whose hidden states the head reads: the model's without adapter, or the policy's.",
        new=True,
    )
    games: int = opt(2048, "Latest games that the head learns from.", new=True)
    ridge: float = opt(
        1e-4, "Price of the square of the head's length, per game, in its loss.", new=True
    )
    normalise: bool = opt(True, f"{NORMALISE_HELP}'s tokens or turns.", new=True)
    bootstrap_truncated: bool = opt(False, BOOTSTRAP_HELP, new=True)
