"""HCAPO: a turn that looks likely once its game's end is known gets more of the return.

The policy reads its own actions again behind the ``hindsight`` view. With the mean log-prob ``h_k``
of turn ``k`` there, the return ``S`` of the game and its last turn ``K - 1``::

    p_k   = exp(h_k / temperature)
    rho_k = clip(p_k / mean over the game's turns of p, clip_low, clip_high)
    Q_k   = rho_k * gamma^(K-1-k) * S
    Q_k  <- smoothing * Q_k + (1 - smoothing) * Q_{k+1}             (not on the last turn)
    m_k   = (Q_k - mean) / (std + eps)    over all turns of the group, std unbiased, eps = 1e-6
    m_k  <- max(m_k, 0)                   in games that were won
    A_k   = A_grpo + hindsight_w * m_k

A return of 0 leaves nothing to weigh, so games that are paid nothing share one ``m``. Games
without the view have ``rho = 1``. Discounts count turn indices.

Log-probs are means over a turn's tokens, which can reward length: watch ``response_length/mean``,
``critic/ratio_std`` and the shares at both bounds.

Source: HCAPO (arXiv 2603.08754). Confidence: the formula of a transcription of the paper and of a
public port; the ratio's denominator is the paper's, not the port's first one.
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
    require_first,
    require_range,
)
from delta_belief_rl.algo.credit.groups import (
    finish,
    standardised,
    total_reward,
    used_channels,
)
from delta_belief_rl.algo.credit.grpo import whole_games
from delta_belief_rl.algo.credit.reading import require_ratio_knobs
from delta_belief_rl.algo.credit.views import (
    game_ratios,
    protected,
    ratio_stats,
    seen_games,
    smoothed,
    token_column,
    turn_means,
)
from delta_belief_rl.algo.scorers.hindsight import VIEW_NAME, HindsightScorer
from delta_belief_rl.algo.scorers.hints import HintSettings
from delta_belief_rl.types import FloatArray, TurnTable


@dataclass(frozen=True, slots=True)
class HcapoSettings:
    """Knobs of ``Hcapo``; ``gamma`` discounts per turn, ``smoothing`` 1 leaves turns apart."""

    hindsight_w: float = 1.0
    temperature: float = 5.0
    clip_low: float = 0.8
    clip_high: float = 1.2
    smoothing: float = 0.5
    gamma: float = 0.95
    norm_adv_by_std_in_grpo: bool = True
    epsilon: float = 1e-6
    teacher: str = "policy"
    hint_words: int = 80

    def __post_init__(self) -> None:
        require_range("algorithm.hcapo.hindsight_w", self.hindsight_w, 0.0)
        require_ratio_knobs("hcapo", self)
        require_range("algorithm.hcapo.hint_words", self.hint_words, 1)


@dataclass(frozen=True, slots=True)
class Hcapo(Stateless):
    """See the module's head."""

    settings: HcapoSettings = HcapoSettings()
    requires: ClassVar[tuple[str, ...]] = (
        *("group", "traj", "turn", "valid", "won"),
        *("rewards", VIEW + VIEW_NAME),
    )
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """Games and turns are compared inside a group."""
        return True

    def scorers(self, rule: str) -> tuple[Scorer, ...]:
        """What tells the end of a game."""
        knobs = self.settings
        return (HindsightScorer(HintSettings(rule, knobs.teacher, knobs.hint_words)),)

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``.

        Raises:
            UserError: It is not the first of its chain.
            ValueError: The table has no such view.
        """
        require_first(previous, "hcapo")
        knobs = self.settings
        used = used_channels(table)
        seen = seen_games(table, VIEW + VIEW_NAME)
        scores = turn_means(table, token_column(table, VIEW + VIEW_NAME)) / knobs.temperature
        ratio = game_ratios(table, scores, seen, knobs.clip_low, knobs.clip_high)
        credit = smoothed(table, ratio * self._discounted(table, used), knobs.smoothing)
        local = standardised(credit, table.valid, table.group, knobs.epsilon)
        whole = whole_games(table, knobs.norm_adv_by_std_in_grpo, knobs.epsilon)
        found = finish(table, whole + knobs.hindsight_w * protected(table, local), used)
        more = ratio_stats(table, ratio, seen, knobs.clip_low, knobs.clip_high)
        return replace(found, stats={**found.stats, **more})

    def _discounted(self, table: TurnTable, used: dict[str, FloatArray]) -> FloatArray:
        """The game's return as each turn sees it, ``[R]``."""
        score = table.grid(total_reward(used, table)).sum(axis=1)
        last = np.zeros(table.num_games, dtype=np.int64)
        np.maximum.at(last, table.traj[table.valid], table.turn[table.valid])
        left = np.maximum(last[table.traj] - table.turn, 0)
        return score[table.traj] * self.settings.gamma**left
