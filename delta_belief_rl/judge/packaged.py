"""Judges of ``judge=rules``: from the packaged data of an environment, or of a plug-in's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from delta_belief_rl.envs.base import Judge, JudgeReply, JudgeRequest
from delta_belief_rl.envs.plugins import MISTAKES, describe, load_plugins
from delta_belief_rl.judge.customer_service.rules import CustomerServiceRules
from delta_belief_rl.judge.guess_my_city.rules import CityJudge
from delta_belief_rl.judge.murder_mystery.rules import MysteryJudge
from delta_belief_rl.judge.user_personalization.rules import UserPersonalizationJudge
from delta_belief_rl.types import UserError, Verdict

RULES = "rules"
"""Their name (``judge_rollout.name``)."""

RULE_JUDGES: Mapping[str, Callable[[], Judge]] = {
    "guess_my_city": CityJudge,
    "murder_mystery": MysteryJudge,
    "customer_service": CustomerServiceRules,
    "user_personalization": UserPersonalizationJudge,
}
"""By environment of this package (``multi_turn.env``)."""


@dataclass(frozen=True, slots=True)
class NoJudge:
    """Of an environment of a plug-in that brings no judge: it has no answer, and says so."""

    env: str

    def answer(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        """A failure for each request."""
        reason = f"The environment {self.env!r} brings no judge for judge_rollout.name=rules."
        return [JudgeReply(Verdict.ERROR, reason=reason) for _ in requests]


def rules_judge(env: str, plugins: Sequence[str] = ()) -> Judge:
    """The judge of an environment that needs no model.

    Args:
        env: ``multi_turn.env``.
        plugins: Modules that may bring it.

    Raises:
        UserError: A plug-in cannot be loaded, or its judge cannot be made.
    """
    packaged = RULE_JUDGES.get(env)
    if packaged is not None:
        return packaged()
    own = load_plugins(plugins)[env].judge
    if own is None:
        return NoJudge(env)
    try:
        return own()
    except MISTAKES as error:
        raise UserError(f"The judge of {env} cannot be made: {describe(error)}.") from error
