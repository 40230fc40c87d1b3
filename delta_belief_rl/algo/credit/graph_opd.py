"""GraphOPD: distil only the turns that others build on and that a teacher would have played apart.

A teacher reads the played tokens behind the ``reference`` view, in which the answer is told. The
divergence of a turn is estimated on its own tokens::

    D_k = max(0, mean_t(l_t - l_t^T))

``scorers.footprints`` makes the mask from it and from what each turn read and wrote. Masked turns
are pulled towards the teacher (``losses.distil``), with ``coefficient`` next to the loss of the
method that stands before it. Alone, as ``algorithm.adv_estimator``, it takes no reward, and turns
outside the mask are in no count.

Games without the view are left out.

Source: GraphOPD (arXiv 2610.08959). Confidence: reconstructed from the abstract; see
``scorers.footprints`` for what is ours, and the estimate of the divergence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import (
    LOGP,
    VIEW,
    Advantage,
    Grain,
    Scorer,
    Stateless,
    require_choice,
    require_range,
)
from delta_belief_rl.algo.credit.distilling import Distillation, distil_stats, with_distil
from delta_belief_rl.algo.credit.groups import dead_share, finish, used_channels
from delta_belief_rl.algo.credit.views import seen_games, token_gap, turn_means, view_share
from delta_belief_rl.algo.scorers.footprints import (
    FootprintSettings,
    distilled_turns,
    masked_divergence,
)
from delta_belief_rl.algo.scorers.hints import READERS, HintSettings
from delta_belief_rl.algo.scorers.reference import VIEW_NAME, ReferenceScorer
from delta_belief_rl.types import FloatArray, TurnTable


@dataclass(frozen=True, slots=True)
class GraphOpdSettings:
    """Knobs of ``GraphOpd``; ``alpha`` is the walk's part with ``fusion="sum"``."""

    coefficient: float = 0.1
    damping: float = 0.85
    direction: str = "to_enablers"
    fusion: str = "product"
    alpha: float = 0.5
    teacher: str = "base"

    def __post_init__(self) -> None:
        require_range("algorithm.graph_opd.coefficient", self.coefficient, 0.0, open_low=True)
        require_choice("algorithm.graph_opd.teacher", self.teacher, READERS)
        self.walk()

    def walk(self) -> FootprintSettings:
        """Those of the mask.

        Raises:
            UserError: One is out of its range.
        """
        return FootprintSettings(self.damping, self.direction, self.fusion, self.alpha)


@dataclass(frozen=True, slots=True)
class GraphOpd(Stateless):
    """See the module's head."""

    settings: GraphOpdSettings = GraphOpdSettings()
    requires: ClassVar[tuple[str, ...]] = (
        *("traj", "turn", "valid", "footprint"),
        *(LOGP, VIEW + VIEW_NAME),
    )
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.TRAJECTORY

    @property
    def needs_group(self) -> bool:
        """Turns are compared with those of their own game."""
        return False

    @property
    def distillation(self) -> Distillation:
        """What the update adds to the loss."""
        return Distillation(VIEW_NAME, coefficient=self.settings.coefficient, ratio_cap=0.0)

    def scorers(self, rule: str) -> tuple[Scorer, ...]:
        """What tells the answer."""
        return (ReferenceScorer(HintSettings(rule, self.settings.teacher)),)

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """The advantages before it, if any, with the turns of the mask marked.

        Raises:
            UserError: Another method distils already.
            ValueError: The table has no such view, or no footprints.
        """
        alone = previous is None
        before = previous or finish(table, np.zeros(table.num_rows), used_channels(table))
        seen = seen_games(table, VIEW + VIEW_NAME, "logp")
        divergence = self._divergence(table)
        mask = distilled_turns(table, table.footprint, divergence, self.settings.walk())
        weight = np.where(mask, with_distil(table, before, VIEW_NAME), 0.0)
        stats = {
            **before.stats,
            **distil_stats(table, weight),
            "view_share": view_share(table, seen),
            "linked_turns": _linked_share(table),
            "masked_divergence": masked_divergence(
                divergence, table.n_tokens.astype(np.float64), weight > 0.0
            ),
            "frac_dead_groups": dead_share(table, (before.turns != 0.0) | (weight > 0)),
        }
        after = replace(before, distil=weight, stats=stats)
        return replace(after, weight=weight) if alone else after

    def _divergence(self, table: TurnTable) -> FloatArray:
        """``D`` of each row, ``[R]``; 0 where the game has no view."""
        seen = seen_games(table, VIEW + VIEW_NAME, "logp")
        means = turn_means(table, -token_gap(table, VIEW_NAME, seen))
        return np.maximum(np.where(np.isfinite(means), means, 0.0), 0.0)


def _linked_share(table: TurnTable) -> float:
    """Share of the valid turns that read what an earlier turn of their game wrote."""
    linked, written = 0, dict[int, set[str]]()
    for row in np.flatnonzero(table.valid):
        reads, writes = table.footprint[row]
        mine = written.setdefault(int(table.traj[row]), set())
        linked += not mine.isdisjoint(reads)
        mine.update(writes)
    return linked / max(int(table.valid.sum()), 1)
