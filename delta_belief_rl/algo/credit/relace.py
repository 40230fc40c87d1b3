"""RELACE: a turn that looks likelier once the outcome is told gets more of the return.

With the mean log-probs of a turn's tokens as they were played (``l_k``) and behind the ``outcome``
view (``o_k``)::

    x_k   = exp((o_k - l_k) / temperature)
    rho_k = clip(x_k / mean over the game's turns of x, clip_low, clip_high)
    Q_k   = rho_k * G_k                   G_k = r_k + gamma * G_{k+1}, sum of all channels
    Q_k  <- smoothing * Q_k + (1 - smoothing) * Q_{k+1}             (not on the last turn)
    m_k   = (Q_k - mean) / (std + eps)    over the turns of the group from the same state, std
                                          unbiased, eps = 1e-6; 0 for a lone turn or no spread
    m_k  <- max(m_k, 0)                   in games that were won
    A_k   = A_grpo + outcome_w * m_k

States are those of ``Env.state_key``. The hint is one sentence for success and failure alike, in
which one word differs. Games without the view have ``rho = 1``.

Log-probs are means over a turn's tokens, which can reward length: watch ``response_length/mean``.

Source: RELACE (arXiv 2610.07349). Confidence: reconstructed from its abstract, details ours: the
division by the mean, the constants, the order smooth, compare, protect.
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
    require_first,
    require_range,
)
from delta_belief_rl.algo.credit.groups import (
    finish,
    return_to_go,
    standardised,
    total_reward,
    used_channels,
)
from delta_belief_rl.algo.credit.grpo import whole_games
from delta_belief_rl.algo.credit.reading import require_ratio_knobs
from delta_belief_rl.algo.credit.states import state_numbers, with_state_stats
from delta_belief_rl.algo.credit.views import (
    LOGP_COLUMN,
    game_ratios,
    protected,
    ratio_stats,
    seen_games,
    smoothed,
    token_column,
    turn_means,
)
from delta_belief_rl.algo.scorers.hints import HintSettings
from delta_belief_rl.algo.scorers.outcome import VIEW_NAME, OutcomeScorer
from delta_belief_rl.types import TurnTable


@dataclass(frozen=True, slots=True)
class RelaceSettings:
    """Knobs of ``Relace``; ``gamma`` discounts per turn, ``smoothing`` 1 leaves turns apart."""

    outcome_w: float = 1.0
    temperature: float = 1.0
    clip_low: float = 0.8
    clip_high: float = 1.2
    smoothing: float = 0.5
    gamma: float = 0.95
    norm_adv_by_std_in_grpo: bool = True
    epsilon: float = 1e-6
    teacher: str = "policy"

    def __post_init__(self) -> None:
        require_range("algorithm.relace.outcome_w", self.outcome_w, 0.0)
        require_ratio_knobs("relace", self)


@dataclass(frozen=True, slots=True)
class Relace(Stateless):
    """See the module's head."""

    settings: RelaceSettings = RelaceSettings()
    requires: ClassVar[tuple[str, ...]] = (
        *("group", "traj", "turn", "valid", "won"),
        *("rewards", "state_key", LOGP, VIEW + VIEW_NAME),
    )
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """Games are compared with their siblings."""
        return True

    def scorers(self, rule: str) -> tuple[Scorer, ...]:
        """What tells the outcome of a game."""
        return (OutcomeScorer(HintSettings(rule, self.settings.teacher)),)

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``.

        Raises:
            UserError: It is not the first of its chain.
            ValueError: The table has no such view, or no states.
        """
        require_first(previous, "relace")
        knobs = self.settings
        used = used_channels(table)
        seen = seen_games(table, VIEW + VIEW_NAME, LOGP_COLUMN)
        told = turn_means(table, token_column(table, VIEW + VIEW_NAME))
        with np.errstate(invalid="ignore"):
            change = told - turn_means(table, token_column(table, LOGP_COLUMN))
        ratio = game_ratios(
            table, change / knobs.temperature, seen, knobs.clip_low, knobs.clip_high
        )
        returns = return_to_go(table.grid(total_reward(used, table)), knobs.gamma)
        credit = smoothed(table, ratio * returns[table.traj, table.turn], knobs.smoothing)
        local = standardised(credit, table.valid, state_numbers(table), knobs.epsilon)
        whole = whole_games(table, knobs.norm_adv_by_std_in_grpo, knobs.epsilon)
        found = finish(table, whole + knobs.outcome_w * protected(table, local), used)
        more = ratio_stats(table, ratio, seen, knobs.clip_low, knobs.clip_high)
        return with_state_stats(replace(found, stats={**found.stats, **more}), table)
