"""Settings of the critic (``critic.*``) and of the methods that need one (``algorithm.*``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from delta_belief_rl.config.fields import opt

NORMALISE_HELP = "Standardise the advantages over the batch"
BOOTSTRAP_HELP = (
    "Value a game that its context cut off as if it went on; otherwise nothing follows its end."
)


@dataclass(frozen=True, slots=True)
class CriticOptim:
    """AdamW of the critic and its schedule."""

    lr: float = opt(1e-5, "Learning rate of the critic; small models take more.")
    lr_warmup_steps: int = opt(-1, "Training steps of linear warm-up; -1 uses the ratio.", new=True)
    lr_warmup_steps_ratio: float = opt(0.0, "Warm-up as a share of all training steps.")
    min_lr_ratio: float | None = opt(
        None, "Floor of the cosine schedule as a share of lr.", corrected="takes effect"
    )
    warmup_style: Literal["constant", "cosine"] = opt("constant", "Schedule after the warm-up.")
    weight_decay: float = opt(0.01, "Decoupled weight decay.")
    betas: tuple[float, float] = opt((0.9, 0.95), "Averaging factors of AdamW.", new=True)


@dataclass(frozen=True, slots=True)
class Critic:
    """The critic of gae, turn_ppo, bilevel_gae, mpo and spa_rl; no other method starts one."""

    form: Literal["shared", "own"] = opt(
        "shared",
        "What the values are read from: the policy's hidden states (shared), or those of the base "
        "model with a LoRA adapter of the critic's own (own), which takes passes of its own.",
        new=True,
    )
    detach: bool = opt(
        True, "With shared: keep the value loss away from the policy's adapter.", new=True
    )
    vf_coef: float = opt(
        0.5, "With detach=false: weight of the value loss next to the policy's.", new=True
    )
    cliprange_value: float = opt(
        0.5, "How far a value may move in one training step before its loss stops to help."
    )
    grad_clip: float = opt(1.0, "Largest norm of the critic's gradient.")
    optim: CriticOptim = field(default_factory=CriticOptim)


@dataclass(frozen=True, slots=True)
class Gae:
    """Settings of gae alone."""

    normalise: bool = opt(True, f"{NORMALISE_HELP}'s trained tokens.", new=True)
    bootstrap_truncated: bool = opt(False, BOOTSTRAP_HELP, new=True)


@dataclass(frozen=True, slots=True)
class TurnPpo:
    """Settings of turn_ppo alone."""

    normalise: bool = opt(True, f"{NORMALISE_HELP}'s turns.", new=True)
    bootstrap_truncated: bool = opt(False, BOOTSTRAP_HELP, new=True)


@dataclass(frozen=True, slots=True)
class BilevelGae:
    """Settings of bilevel_gae alone."""

    version: Literal["v1", "v2"] = opt(
        "v1",
        "Share a turn's return out inside the turn alone (v1), or run the tokens' recursion "
        "through the game with the next turn's advantage at each border (v2).",
        new=True,
    )
    gamma_turn: float = opt(
        0.95, "Discount of one turn; algorithm.gamma is that of a token.", new=True
    )
    lam_turn: float | None = opt(
        None, "Reach of the recursion over turns; null takes algorithm.lam.", new=True
    )
    normalise: bool = opt(True, f"{NORMALISE_HELP}'s trained tokens.", new=True)
    bootstrap_truncated: bool = opt(False, BOOTSTRAP_HELP, new=True)


@dataclass(frozen=True, slots=True)
class Mpo:
    """Settings of mpo alone."""

    signal: Literal["td", "gae", "external"] = opt(
        "td",
        "What tells a turn's tokens apart: the critic's error at each token, its weighted sum to "
        "the turn's end, or a token column.",
        new=True,
    )
    column: str = opt(
        "", "That column with signal=external, e.g. logp or view:reference.", new=True
    )
    eta: float = opt(1.0, "Size of the differences inside a turn; 0 makes none.", new=True)
    kappa: float = opt(
        1.0,
        "Largest difference inside a turn as a share of the turn's advantage; above 1 a token's "
        "sign may turn over.",
        new=True,
    )
    normalise: bool = opt(
        True, f"{NORMALISE_HELP}'s turns, before a turn's tokens are told apart.", new=True
    )
    bootstrap_truncated: bool = opt(False, BOOTSTRAP_HELP, new=True)
