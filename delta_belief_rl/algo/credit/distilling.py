"""What a credit method says to the update when the policy shall learn from a teacher's view.

The teacher is the log-prob of the same tokens behind another context. Which turns are pulled
towards it travels in ``Advantage.distil``; how, in ``Distillation``, which the update reads once
(``losses.distil`` has the formulas). No torch is needed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from delta_belief_rl.algo.base import VIEW, Advantage, require_choice, require_range
from delta_belief_rl.algo.credit.views import seen_games
from delta_belief_rl.types import FloatArray, TurnTable, UserError

FORMS = ("sampled", "top", "gate")
TAILS = ("bucket", "renormalise")


@dataclass(frozen=True, slots=True)
class Distillation:
    """A term of the loss that pulls the policy towards a teacher.

    Attributes:
        view: Name of the teacher's view.
        form: ``sampled`` (policy gradient on the played tokens), ``top`` (divergence over the
            teacher's likeliest tokens) or ``gate`` (SDAR).
        coefficient: Factor of the term.
        beta: With ``top``: 0 is KL(teacher || student), 1 is KL(student || teacher).
        top_k: With ``top``: how many tokens of the teacher are kept at each place.
        tail: With ``top``: ``bucket`` keeps the rest as one more token, ``renormalise`` drops it.
        ratio_cap: Bound of the ratio to the policy before the update, which multiplies a token's
            loss; 0 leaves the ratio out.
        slope: With ``gate``: steepness of the gate.
    """

    view: str
    form: str = "sampled"
    coefficient: float = 1.0
    beta: float = 0.5
    top_k: int = 0
    tail: str = "bucket"
    ratio_cap: float = 2.0
    slope: float = 5.0

    def __post_init__(self) -> None:
        require_choice("The form of a distillation", self.form, FORMS)
        require_choice("The tail of a distillation", self.tail, TAILS)
        require_range("The coefficient of a distillation", self.coefficient, 0.0)
        require_range("The beta of a distillation", self.beta, 0.0, 1.0)
        require_range("The ratio cap of a distillation", self.ratio_cap, 0.0)
        require_range("The slope of a distillation's gate", self.slope, 0.0)
        if (self.form == "top") != (self.top_k > 0):
            raise UserError("The form top of a distillation, and no other, needs top_k above 0.")
        if self.top_k == 1 and self.tail == "renormalise":
            raise UserError("One kept token that is renormalised has nothing to differ in.")

    def keeps_top(self, view: str) -> bool:
        """Whether the likeliest tokens of the reader of a view are wanted."""
        return self.form == "top" and self.view == view


@runtime_checkable
class Distils(Protocol):
    """A credit method that also pulls the policy towards a teacher."""

    @property
    def distillation(self) -> Distillation:
        """How."""
        ...


def distilled_turns(table: TurnTable, view: str) -> FloatArray:
    """1 on valid turns with tokens, in games that have the view; 0 elsewhere. ``[R]``."""
    seen = seen_games(table, VIEW + view)
    return (table.valid & seen[table.traj] & (table.n_tokens > 0)).astype(np.float64)


def distil_stats(table: TurnTable, weight: FloatArray) -> dict[str, float]:
    """Share of the trained turns that are distilled."""
    turns = int(table.valid.sum())
    return {"distilled_turns": float((weight > 0).sum() / turns) if turns else 0.0}


def with_distil(table: TurnTable, previous: Advantage, view: str) -> FloatArray:
    """Weights of a view's turns, where no method before has asked for other ones.

    Raises:
        UserError: Two methods of one chain distil.
    """
    if previous.distil is not None:
        raise UserError(
            "Two methods of algorithm.adv_estimator and algorithm.transforms distil; keep one."
        )
    return distilled_turns(table, view)
