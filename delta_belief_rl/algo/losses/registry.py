"""Closed lists of the policy losses and the ways to aggregate them."""

from __future__ import annotations

from delta_belief_rl.algo.losses.aggregate import AGGREGATION_NAMES
from delta_belief_rl.algo.losses.policy import (
    PolicyLoss,
    cispo_loss,
    gspo_loss,
    ppo_loss,
    reinforce_loss,
    turn_ratio_loss,
)

LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo_loss,
    "gspo": gspo_loss,
    "turn_ratio": turn_ratio_loss,
    "cispo": cispo_loss,
    "reinforce": reinforce_loss,
}

AGGREGATIONS: tuple[str, ...] = AGGREGATION_NAMES
