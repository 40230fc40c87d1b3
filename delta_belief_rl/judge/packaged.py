"""Judges that answer from the packaged data of an environment, on a CPU and without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from delta_belief_rl.envs.base import Judge
from delta_belief_rl.judge.customer_service.rules import CustomerServiceRules
from delta_belief_rl.judge.guess_my_city.rules import CityJudge
from delta_belief_rl.judge.murder_mystery.rules import MysteryJudge
from delta_belief_rl.judge.user_personalization.rules import UserPersonalizationJudge

RULE_JUDGES: Mapping[str, Callable[[], Judge]] = {
    "guess_my_city": CityJudge,
    "murder_mystery": MysteryJudge,
    "customer_service": CustomerServiceRules,
    "user_personalization": UserPersonalizationJudge,
}
"""By environment (``multi_turn.env``)."""
