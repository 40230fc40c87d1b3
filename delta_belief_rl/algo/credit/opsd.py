"""OPSD and SDPO: the policy learns from itself with a better context, and from no reward.

Every game is its own lesson: the played tokens are read again behind a view, and the policy is
pulled towards what that reader would have said (``losses.distil``). Advantages are 0, so the policy
loss adds nothing::

    A_k = 0        weight_k = distil_k = 1 where the game has the view, else 0

``opsd`` reads the ``reference`` view: the answer is told. ``sdpo`` reads the ``retry`` view: the
actions of a game of the same secret that succeeded, else what the environment refused, else the
game is left out. With ``top_k = 0`` the term uses the sampled tokens alone, with more the teacher's
likeliest tokens and the divergence that ``beta`` names.

Turns that are left out are in no count, so a batch without any view moves nothing.

Source: OPSD (arXiv 2601.18734), SDPO (arXiv 2601.20802). Confidence: the losses are those of their
public codes, except that the kept tokens are the teacher's likeliest, not the student's (SDPO), and
that log-probs are at the sampling temperature; the hints are in our words.
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
    require_choice,
    require_first,
    require_range,
)
from delta_belief_rl.algo.credit.distilling import (
    TAILS,
    Distillation,
    distil_stats,
    distilled_turns,
)
from delta_belief_rl.algo.credit.groups import dead_share, finish, used_channels
from delta_belief_rl.algo.credit.views import seen_games, view_share
from delta_belief_rl.algo.scorers import reference, retry
from delta_belief_rl.algo.scorers.hints import READERS, HintSettings
from delta_belief_rl.types import TurnTable, UserError


@dataclass(frozen=True, slots=True)
class OpsdSettings:
    """Knobs of ``Opsd``."""

    teacher: str = "base"
    coefficient: float = 1.0
    beta: float = 0.5
    top_k: int = 0
    tail: str = "bucket"
    ratio_cap: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "opsd")


@dataclass(frozen=True, slots=True)
class SdpoSettings:
    """Knobs of ``Sdpo``; ``threshold`` is the least grade of a game worth showing."""

    teacher: str = "policy"
    coefficient: float = 1.0
    beta: float = 0.5
    top_k: int = 0
    tail: str = "bucket"
    ratio_cap: float = 2.0
    threshold: float = 0.5
    hint_words: int = 80

    def __post_init__(self) -> None:
        _check(self, "sdpo")
        require_range("algorithm.sdpo.threshold", self.threshold, 0.0, 1.0, open_low=True)
        require_range("algorithm.sdpo.hint_words", self.hint_words, 1)


def _check(settings: OpsdSettings | SdpoSettings, name: str) -> None:
    require_choice(f"algorithm.{name}.teacher", settings.teacher, READERS)
    require_choice(f"algorithm.{name}.tail", settings.tail, TAILS)
    require_range(f"algorithm.{name}.coefficient", settings.coefficient, 0.0, open_low=True)
    require_range(f"algorithm.{name}.beta", settings.beta, 0.0, 1.0)
    require_range(f"algorithm.{name}.top_k", settings.top_k, 0)
    require_range(f"algorithm.{name}.ratio_cap", settings.ratio_cap, 0.0)
    if settings.top_k == 1 and settings.tail == "renormalise":
        raise UserError(
            f"algorithm.{name}.tail=renormalise leaves one token nothing to differ in: set "
            f"algorithm.{name}.top_k to 2 or more, or tail=bucket."
        )


def _distillation(settings: OpsdSettings | SdpoSettings, view: str) -> Distillation:
    return Distillation(
        view=view,
        form="top" if settings.top_k else "sampled",
        coefficient=settings.coefficient,
        beta=settings.beta,
        top_k=settings.top_k,
        tail=settings.tail,
        ratio_cap=settings.ratio_cap,
    )


def _lessons(table: TurnTable, view: str) -> Advantage:
    """No advantages, and a weight for the turns that have a teacher."""
    found = finish(table, np.zeros(table.num_rows), used_channels(table))
    weight = distilled_turns(table, view)
    stats = {
        **found.stats,
        **distil_stats(table, weight),
        "view_share": view_share(table, seen_games(table, VIEW + view)),
        # A group is dead here when it has no lesson, not when its advantages are equal.
        "frac_dead_groups": dead_share(table, weight > 0),
    }
    return replace(found, weight=weight, distil=weight, stats=stats)


@dataclass(frozen=True, slots=True)
class Opsd(Stateless):
    """See the module's head."""

    settings: OpsdSettings = OpsdSettings()
    requires: ClassVar[tuple[str, ...]] = ("traj", "valid", VIEW + reference.VIEW_NAME)
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.TOKEN

    @property
    def needs_group(self) -> bool:
        """The teacher knows the answer, not the siblings."""
        return False

    @property
    def distillation(self) -> Distillation:
        """What the update adds to the loss."""
        return _distillation(self.settings, reference.VIEW_NAME)

    def scorers(self, rule: str) -> tuple[Scorer, ...]:
        """What tells the answer."""
        return (reference.ReferenceScorer(HintSettings(rule, self.settings.teacher)),)

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """No advantages; ``distil`` and ``weight`` are 1 where there is a teacher.

        Raises:
            UserError: It is not the first of its chain.
            ValueError: The table has no such view.
        """
        require_first(previous, "opsd")
        return _lessons(table, reference.VIEW_NAME)


@dataclass(frozen=True, slots=True)
class Sdpo(Stateless):
    """See the module's head."""

    settings: SdpoSettings = SdpoSettings()
    requires: ClassVar[tuple[str, ...]] = ("traj", "valid", VIEW + retry.VIEW_NAME)
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """A lone game still has what the environment said."""
        return False

    @property
    def distillation(self) -> Distillation:
        """What the update adds to the loss."""
        return _distillation(self.settings, retry.VIEW_NAME)

    def scorers(self, rule: str) -> tuple[Scorer, ...]:
        """What tells how another try went."""
        knobs = self.settings
        hints = HintSettings(rule, knobs.teacher, knobs.hint_words, knobs.threshold)
        return (retry.RetryScorer(hints),)

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """No advantages; ``distil`` and ``weight`` are 1 where there is a teacher.

        Raises:
            UserError: It is not the first of its chain.
            ValueError: The table has no such view.
        """
        require_first(previous, "sdpo")
        return _lessons(table, retry.VIEW_NAME)
