"""RLSD and SDAR: a teacher who knows the answer weighs, or pulls, the tokens of another method.

Both stand behind an estimator, with ``d_t = l_t^T - l_t`` the log-prob of a played token behind the
``reference`` view less that without it, neither with a gradient::

    rlsd    A_t <- A_t * ((1 - mix) + mix * clip(exp(sign(A_t) * d_t), 1 - clip, 1 + clip))
    sdar    A_t unchanged; the loss gets coefficient * mean_t(sigmoid(slope * d_t) * (l_t^T - l_t))

In ``sdar`` the gate has no gradient and the last bracket has, through ``l_t`` (``losses.distil``).
Games without the view keep their advantages and have no such term.

Source: RLSD and SDAR as in the public code of SDAR (arXiv 2605.15155). Confidence: exact; the hint
is in our words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import (
    VIEW,
    Advantage,
    Grain,
    Scorer,
    Stateless,
    require_previous,
    require_range,
)
from delta_belief_rl.algo.credit.distilling import Distillation, distil_stats, with_distil
from delta_belief_rl.algo.credit.groups import dead_share
from delta_belief_rl.algo.credit.reading import gap_behind, gap_requires, require_teacher
from delta_belief_rl.algo.credit.views import seen_games, view_share, with_tokens
from delta_belief_rl.algo.scorers.hints import HintSettings
from delta_belief_rl.algo.scorers.reference import VIEW_NAME, ReferenceScorer
from delta_belief_rl.types import FloatArray, TurnTable


@dataclass(frozen=True, slots=True)
class RlsdSettings:
    """Knobs of ``Rlsd``."""

    mix: float = 0.5
    clip: float = 0.2
    teacher: str = "policy"

    def __post_init__(self) -> None:
        require_range("algorithm.rlsd.mix", self.mix, 0.0, 1.0)
        require_range("algorithm.rlsd.clip", self.clip, 0.0, 1.0)
        require_teacher("rlsd", self.teacher)


@dataclass(frozen=True, slots=True)
class SdarSettings:
    """Knobs of ``Sdar``."""

    coefficient: float = 0.01
    slope: float = 5.0
    teacher: str = "policy"

    def __post_init__(self) -> None:
        require_range("algorithm.sdar.coefficient", self.coefficient, 0.0)
        require_range("algorithm.sdar.slope", self.slope, 0.0)
        require_teacher("sdar", self.teacher)


def sign_weight(advantage: FloatArray, gap: FloatArray, mix: float, clip: float) -> FloatArray:
    """``rlsd`` of the module's head, token by token."""
    # The bounds of the exponential, so that no gap overflows it.
    low = np.log(max(1.0 - clip, 1e-300))
    factor = np.exp(np.clip(np.sign(advantage) * gap, low, np.log1p(clip)))
    return advantage * ((1.0 - mix) + mix * factor)


@dataclass(frozen=True, slots=True)
class Rlsd(Stateless):
    """See the module's head."""

    settings: RlsdSettings = RlsdSettings()
    requires: ClassVar[tuple[str, ...]] = gap_requires(VIEW_NAME)
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.TOKEN

    @property
    def needs_group(self) -> bool:
        """It changes what another method found."""
        return False

    def scorers(self, rule: str) -> tuple[Scorer, ...]:
        """What tells the answer."""
        return (ReferenceScorer(HintSettings(rule, self.settings.teacher)),)

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages with one for each token.

        Raises:
            UserError: It is the first of its chain.
            ValueError: The table has no such view.
        """
        read = gap_behind(table, previous, "rlsd", VIEW_NAME)
        new = sign_weight(read.tokens, read.gap, self.settings.mix, self.settings.clip)
        # A gap of 0 is a factor of 1, so games without the view are as they were.
        return with_tokens(table, read.before, new, {"view_share": read.share})


@dataclass(frozen=True, slots=True)
class Sdar(Stateless):
    """See the module's head."""

    settings: SdarSettings = SdarSettings()
    requires: ClassVar[tuple[str, ...]] = ("traj", "valid", VIEW + VIEW_NAME)
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.TOKEN

    @property
    def needs_group(self) -> bool:
        """It leaves what another method found."""
        return False

    @property
    def distillation(self) -> Distillation:
        """What the update adds to the loss."""
        knobs = self.settings
        return Distillation(
            VIEW_NAME,
            form="gate",
            coefficient=knobs.coefficient,
            slope=knobs.slope,
            ratio_cap=0.0,
        )

    def scorers(self, rule: str) -> tuple[Scorer, ...]:
        """What tells the answer."""
        return (ReferenceScorer(HintSettings(rule, self.settings.teacher)),)

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """The advantages as they were, with the turns that have a teacher marked.

        Raises:
            UserError: It is the first of its chain, or another method distils already.
            ValueError: The table has no such view.
        """
        before = require_previous(previous, "sdar")
        weight = with_distil(table, before, VIEW_NAME)
        stats = {
            **before.stats,
            **distil_stats(table, weight),
            "view_share": view_share(table, seen_games(table, VIEW + VIEW_NAME)),
            "frac_dead_groups": dead_share(table, (before.turns != 0.0) | (weight > 0)),
        }
        return replace(before, distil=weight, stats=stats)
