"""When a run must stop by itself, and why it did.

A policy that has collapsed goes on for hours, and so does a run whose engines do nothing: every
step looks like a step. Seven signals say so, each compared with its limit in ``trainer.abort``
after every training step. The first three are those of a run that has stalled, which a new start
may mend; the others are those of a collapse:

=========================  ==========================================  ======================
metric                     what has happened                           limit
=========================  ==========================================  ======================
``state_tokens/sampled``   engines give empty answers                  ``zero_tokens``
``actor/grad_norm``        the gradient is exactly zero                ``zero_gradients``
``judge/timeout_rate``     the judge answers too late                  ``max_timeout_rate``
``actor/skipped_updates``  a gradient was not finite                   ``nan_gradients``
``actor/entropy``          sampling has no choice left                 ``min_entropy``
``health/repeated_chars``  questions repeat one character (``!!!!``)   ``max_repeated_chars``
``health/invalid_turns``   hardly any question is valid                ``max_invalid_turns``
=========================  ==========================================  ======================

A rule stops the run when it was broken in so many steps in a row. The counts are part of the run's
state, so a resumed run stops where the straight one does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import gt, lt

import numpy as np

from delta_belief_rl.algo.shapers.channels import iter_games
from delta_belief_rl.config.schema_trainer import Abort
from delta_belief_rl.types import Group, Verdict

SAMPLED = "state_tokens/sampled"

_CURES = {
    True: "start it again, which loads everything anew from the last checkpoint",
    False: "go back to an earlier checkpoint with a lower learning rate",
}
"""By whether the run has stalled."""


class RunCollapsed(RuntimeError):
    """A rule of ``trainer.abort`` stopped the run; the message is one sentence."""


class RunStalled(RuntimeError):
    """A rule of ``trainer.abort`` stopped a run whose steps do nothing; one sentence.

    Attributes:
        setting: The rule's.
    """

    def __init__(self, sentence: str, setting: str) -> None:
        super().__init__(sentence)
        self.setting = setting


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the module's head.

    Attributes:
        setting: Its limit in ``Abort``; None there switches the rule off.
        metric: What is looked at; a step without it breaks no rule.
        bad: Whether a value breaks the rule, given the limit.
        cause: What has happened, for the sentence.
        counts: The limit is itself the number of steps; else that is ``Abort.patience``.
        stalls: The run does nothing; else its policy has collapsed.
    """

    setting: str
    metric: str
    bad: Callable[[float, float], bool]
    cause: str
    counts: bool = False
    stalls: bool = False


def _is_zero(value: float, limit: float) -> bool:
    del limit
    return value == 0


def _is_positive(value: float, limit: float) -> bool:
    del limit
    return value > 0


RULES = (
    Rule("zero_tokens", SAMPLED, _is_zero, "no token was sampled", counts=True, stalls=True),
    Rule(
        "zero_gradients",
        "actor/grad_norm",
        _is_zero,
        "the gradient was exactly zero",
        counts=True,
        stalls=True,
    ),
    Rule("max_timeout_rate", "judge/timeout_rate", gt, "the judge was too late", stalls=True),
    Rule(
        "nan_gradients",
        "actor/skipped_updates",
        _is_positive,
        "the gradient was not finite",
        counts=True,
    ),
    Rule("min_entropy", "actor/entropy", lt, "the policy's entropy was next to nothing"),
    Rule("max_repeated_chars", "health/repeated_chars", gt, "questions repeated one character"),
    Rule("max_invalid_turns", "health/invalid_turns", gt, "hardly any question was valid"),
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
    """Stop a run that has collapsed or stalled.

    Args:
        broken: From ``count_broken``.
        metrics: Of the step.
        limits: ``trainer.abort``.

    Raises:
        RunStalled: A rule about steps that do nothing was broken often enough.
        RunCollapsed: Another one was.
    """
    for rule in RULES:
        limit = getattr(limits, rule.setting)
        patience = limit if rule.counts else limits.patience
        count = broken.get(rule.setting, 0)
        if limit is None or count < patience:
            continue
        sentence = (
            f"The run stopped itself because {rule.cause} in {count} training steps in a row "
            f"({rule.metric}={_value(rule, metrics) or 0.0:.4g}): "
            f"{_CURES[rule.stalls]}, or set trainer.abort.{rule.setting}=null."
        )
        raise RunStalled(sentence, rule.setting) if rule.stalls else RunCollapsed(sentence)


def _value(rule: Rule, metrics: Mapping[str, float]) -> float | None:
    # A step in which nothing was to be learnt makes no update, and has no norm.
    if rule.setting == "zero_gradients" and metrics.get("actor/empty_updates"):
        return 0.0
    return metrics.get(rule.metric)


def _is_broken(rule: Rule, metrics: Mapping[str, float], limits: Abort) -> bool:
    limit, value = getattr(limits, rule.setting), _value(rule, metrics)
    # The mean entropy of no token is 0, and no collapse.
    nothing = rule.setting == "min_entropy" and metrics.get(SAMPLED) == 0
    return limit is not None and value is not None and not nothing and rule.bad(value, limit)
