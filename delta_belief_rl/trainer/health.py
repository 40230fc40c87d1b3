"""When a run must stop by itself, and why it did.

A policy that has collapsed goes on for hours: every step looks like a step. Four signals say so,
each compared with its limit in ``trainer.abort`` after every training step:

=========================  ==========================================  ======================
metric                     collapse                                    limit
=========================  ==========================================  ======================
``actor/skipped_updates``  a gradient was not finite                   ``nan_gradients``
``actor/entropy``          sampling has no choice left                 ``min_entropy``
``health/repeated_chars``  questions repeat one character (``!!!!``)   ``max_repeated_chars``
``health/invalid_turns``   hardly any question is valid                ``max_invalid_turns``
=========================  ==========================================  ======================

A rule stops the run when it was broken in so many steps in a row. The counts are part of the run's
state, so a resumed run stops where the straight one does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from delta_belief_rl.algo.shapers.channels import iter_games
from delta_belief_rl.config.schema_trainer import Abort
from delta_belief_rl.types import Group, Verdict


class RunCollapsed(RuntimeError):
    """A rule of ``trainer.abort`` stopped the run; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the module's head.

    Attributes:
        setting: Its limit in ``Abort``; None there switches the rule off.
        metric: What is looked at; a step without it breaks no rule.
        above: Broken above the limit, otherwise below it.
        cause: What has happened, for the sentence.
    """

    setting: str
    metric: str
    above: bool
    cause: str


GRADIENTS = "nan_gradients"
RULES = (
    Rule(GRADIENTS, "actor/skipped_updates", True, "the gradient was not finite"),
    Rule("min_entropy", "actor/entropy", False, "the policy's entropy was next to nothing"),
    Rule("max_repeated_chars", "health/repeated_chars", True, "questions repeated one character"),
    Rule("max_invalid_turns", "health/invalid_turns", True, "hardly any question was valid"),
)


def repeated_chars(text: str) -> float:
    """Share of a text's characters that equal the one before; 0 for less than two characters.

    Example:
        >>> repeated_chars("!!!!"), repeated_chars("Is it an apple?") < 0.1
        (1.0, True)
    """
    return sum(a == b for a, b in pairwise(text)) / max(len(text) - 1, 1)


def game_signals(groups: Sequence[Group]) -> dict[str, float]:
    """Means over all turns of a step; empty without a turn."""
    turns = [turn for _, game in iter_games(groups) for turn in game.turns]
    if not turns:
        return {}
    return {
        "health/repeated_chars": float(np.mean([repeated_chars(turn.action) for turn in turns])),
        "health/invalid_turns": float(np.mean([t.verdict is Verdict.INVALID for t in turns])),
    }


def count_broken(
    before: Mapping[str, int], metrics: Mapping[str, float], limits: Abort
) -> dict[str, int]:
    """Steps in a row, this one included, in which each rule was broken; unbroken ones left out."""
    return {
        rule.setting: before.get(rule.setting, 0) + 1
        for rule in RULES
        if _is_broken(rule, metrics, limits)
    }


def check(broken: Mapping[str, int], metrics: Mapping[str, float], limits: Abort) -> None:
    """Stop a run that has collapsed.

    Args:
        broken: From ``count_broken``.
        metrics: Of the step.
        limits: ``trainer.abort``.

    Raises:
        RunCollapsed: A rule was broken often enough.
    """
    for rule in RULES:
        limit = getattr(limits, rule.setting)
        patience = limit if rule.setting == GRADIENTS else limits.patience
        count = broken.get(rule.setting, 0)
        if limit is not None and count >= patience:
            raise RunCollapsed(
                f"The run stopped itself because {rule.cause} in {count} training steps in a row "
                f"({rule.metric}={metrics[rule.metric]:.4g}): go back to an earlier checkpoint "
                f"with a lower learning rate, or set trainer.abort.{rule.setting}=null."
            )


def _is_broken(rule: Rule, metrics: Mapping[str, float], limits: Abort) -> bool:
    limit, value = getattr(limits, rule.setting), metrics.get(rule.metric)
    # The mean entropy of no token is 0, and no collapse.
    nothing = rule.metric == "actor/entropy" and metrics.get("state_tokens/sampled") == 0
    if limit is None or value is None or nothing:
        return False
    if rule.setting == GRADIENTS:
        return value > 0
    return value > limit if rule.above else value < limit
