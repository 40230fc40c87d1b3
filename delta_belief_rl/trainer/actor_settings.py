"""What a training rank needs to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from delta_belief_rl.algo.credit.distilling import Distillation
from delta_belief_rl.algo.losses.policy import PolicyLossSettings
from delta_belief_rl.models.adapters import add_lora
from delta_belief_rl.trainer.critic import CriticSettings
from delta_belief_rl.trainer.learner import LearnerSettings
from delta_belief_rl.trainer.optimizer import OptimizerSettings

POLICY, EMA, BASE = "actor", "ema", "base"
"""Names of the models that a belief or a view can be asked of."""


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """LoRA of the policy; ``rank`` 0 trains all weights."""

    rank: int = 0
    alpha: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    exclude_modules: tuple[str, ...] = ()
    ema: bool = False
    ema_beta: float = 0.95
    ema_warmup_steps: int = 0

    def put_on(
        self, model: Any, name: str = POLICY, *, trainable: bool = False, seed: int = 0
    ) -> Any:
        """The model with one more adapter of this kind; see ``models.adapters.add_lora``."""
        return add_lora(
            model,
            self.rank,
            self.alpha,
            self.target_modules,
            name=name,
            exclude=self.exclude_modules,
            trainable=trainable,
            seed=seed,
        )


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """Everything that one rank needs to know.

    Attributes:
        views: Models whose log-probs of the games' own tokens are wanted beside the policy's.
        beliefs: Models whose beliefs are wanted.
        score_tokens: Token budget of one forward of the score pass.
        contexts: Names of the other contexts that games may have (``ScoreRequest.views``), and the
            model that reads each.
        use_liger: On a GPU, use Liger kernels where they are installed and fit the model.
        old_is_new: The batch is used for one optimizer step, so the old policy is the current one.
        critic: A critic to train beside the policy; None for none.
        distil: A teacher to pull the policy towards; None for none.
        learners: Models to train beside the policy.
    """

    model_path: str
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    loss: PolicyLossSettings = field(default_factory=PolicyLossSettings)
    loss_name: str = "ppo"
    seed: int = 42
    device: str = "cpu"
    dtype: str = "float32"
    num_threads: int | None = None
    gradient_checkpointing: bool = False
    use_liger: bool = False
    grad_clip: float = 1.0
    temperature: float = 1.0
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0
    kl_type: str = "low_var_kl"
    views: tuple[str, ...] = ()
    contexts: tuple[tuple[str, str], ...] = ()
    beliefs: tuple[str, ...] = ()
    score_tokens: int = 16384
    old_is_new: bool = False
    critic: CriticSettings | None = None
    distil: Distillation | None = None
    learners: tuple[LearnerSettings, ...] = ()
