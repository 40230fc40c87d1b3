"""Settings of credit assignment (``algorithm.*``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from delta_belief_rl.config.fields import opt

GROUP_ESTIMATORS = (
    *("grpo", "grpo_turn", "grpo_turn_rtg", "grpo_passk", "rloo", "opo"),
    *("mt_grpo", "gigpo", "hgpo", "reinforce_plus_plus_baseline"),
)
"""These compare the games of one secret."""
ESTIMATORS = (*GROUP_ESTIMATORS, "reinforce", "reinforce_plus_plus", "multi_turn_reinforce")
CREDIT_TRANSFORMS: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FilterGroups:
    """Replaying groups without variance (DAPO)."""

    enabled: bool = opt(
        False,
        "Keep only groups whose games differ, and play more until the batch is full.",
        corrected="works",
    )
    metric: Literal["seq_reward", "seq_final_reward"] = opt(
        "seq_reward", "What must differ: the sum of rewards or the outcome."
    )
    max_num_gen_batches: int = opt(
        10, "Batches that may be played for one step, which then stops the run; 0 has no limit."
    )


@dataclass(frozen=True, slots=True)
class KlControl:
    """The coefficient of the KL reward."""

    type: Literal["fixed", "adaptive"] = opt(
        "fixed", "Keep the coefficient, or move it towards target_kl after each step."
    )
    kl_coef: float = opt(0.001, "Coefficient; where an adaptive one begins.")
    horizon: int = opt(10000, "Games over which an adaptive coefficient may double, roughly.")
    target_kl: float = opt(
        0.1, "Divergence per token, in nats, that an adaptive coefficient seeks."
    )


@dataclass(frozen=True, slots=True)
class MtGrpo:
    """Settings of mt_grpo alone."""

    turn_advantage_w: float = opt(
        1.0, "Weight of what a turn itself brought, next to the outcome.", new=True
    )
    turn_credit: Literal["each", "boundary"] = opt(
        "each",
        "Compare each turn index on its own, or pay the sum of all turns up to the first that was "
        "answered.",
        new=True,
    )


@dataclass(frozen=True, slots=True)
class GiGpo:
    """Settings of gigpo alone."""

    step_advantage_w: float = opt(
        1.0, "Weight of the comparison of turns from the same state.", new=True
    )
    episode_weighting: Literal["game", "turn"] = opt(
        "game", "What counts once in the statistics of whole games.", new=True
    )


@dataclass(frozen=True, slots=True)
class Hgpo:
    """Settings of hgpo alone."""

    history: int = opt(2, "States before a turn's own that may agree as well.", new=True)
    length_weight_alpha: float = opt(
        1.0, "How much more a longer agreement weighs; 0 weighs all alike.", new=True
    )
    base_group: bool = opt(False, "Average in the comparison of whole games.", new=True)
    skip_zero: bool = opt(True, "Leave comparisons that are zero out of the average.", new=True)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How rewards become advantages."""

    adv_estimator: str = opt(
        "grpo",
        "Advantage: grpo (whole games), grpo_turn (each turn index on its own), grpo_turn_rtg "
        "(return-to-go against the siblings), grpo_passk (the best game's lead), rloo, opo "
        "(baseline weighted by length), mt_grpo (outcome and turn apart), gigpo and hgpo (turns "
        "from the same state), reinforce (no group), reinforce_plus_plus, "
        "reinforce_plus_plus_baseline or multi_turn_reinforce; see docs/algorithms.md.",
        corrected="the last three run",
    )
    kwargs: Mapping[str, object] = field(
        default_factory=dict[str, object],
        metadata={
            "help": "Settings of a method that a plug-in brings, for it to check and to read.",
            "new": True,
        },
    )
    transforms: tuple[str, ...] = opt(
        (), "Methods that change these advantages, one after the other.", new=True
    )
    parity: Literal["reference", "masked"] = opt(
        "reference",
        "Turns after a game's end in group statistics: reference counts them as zeros and gives a "
        "lone game its raw score; masked leaves them out and gives it zero. With "
        "reinforce_plus_plus, reference starts the return anew at each reply and masked lets it "
        "run through the game.",
        new=True,
    )
    std_floor: float = opt(
        0.01, "Smallest standard deviation of a group, in reward; with parity=masked.", new=True
    )
    norm_adv_by_std_in_grpo: bool = opt(
        True, "Divide by the group's standard deviation, where the method leaves the choice."
    )
    gamma: float = opt(
        1.0,
        "Discount of grpo_turn_rtg, gigpo, hgpo, reinforce and multi_turn_reinforce per turn, of "
        "reinforce_plus_plus per token, and of the potential in logprob_reward.methods.",
    )
    norm_adv_in_mtr: bool = opt(False, "Whiten the advantages of multi_turn_reinforce.")
    clip_adv_in_mtr: bool = opt(False, "Clip the advantages of multi_turn_reinforce.")
    clip_adv_min: float = opt(-3.0, "Lower bound of that clip.")
    clip_adv_max: float = opt(3.0, "Upper bound of that clip.")
    only_propagate_eog_in_mtr: bool = opt(
        True, "Carry only the end-of-game reward back to earlier turns in multi_turn_reinforce."
    )
    mt_grpo: MtGrpo = field(default_factory=MtGrpo)
    gigpo: GiGpo = field(default_factory=GiGpo)
    hgpo: Hgpo = field(default_factory=Hgpo)
    use_kl_in_reward: bool = opt(
        False,
        "Pay each turn for its divergence from the policy without adapter.",
        corrected="is paid",
    )
    kl_penalty: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = opt(
        "kl", "Estimator of that divergence."
    )
    kl_ctrl: KlControl = field(default_factory=KlControl)
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
