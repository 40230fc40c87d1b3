"""Settings of credit assignment (``algorithm.*``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from delta_belief_rl.config.fields import opt

GROUP_ESTIMATORS = ("grpo", "grpo_turn", "grpo_turn_rtg", "rloo")
"""These compare the games of one secret."""
ESTIMATORS = (*GROUP_ESTIMATORS, "reinforce")


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
    max_num_gen_batches: int = opt(10, "Batches that may be played for one step; 0 has no limit.")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How rewards become advantages."""

    adv_estimator: str = opt(
        "grpo",
        "Advantage: grpo (whole games), grpo_turn (each turn index on its own), grpo_turn_rtg "
        "(return-to-go against the siblings), rloo, reinforce (no group), or one that a plug-in "
        "registers.",
    )
    parity: Literal["reference", "masked"] = opt(
        "reference",
        "Turns after a game's end in group statistics: reference counts them as zeros and gives a "
        "lone game its raw score; masked leaves them out and gives it zero.",
        new=True,
    )
    std_floor: float = opt(
        0.01, "Smallest standard deviation of a group, in reward; with parity=masked.", new=True
    )
    norm_adv_by_std_in_grpo: bool = opt(True, "Divide by the group's standard deviation.")
    gamma: float = opt(1.0, "Discount per turn of grpo_turn_rtg.")
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
