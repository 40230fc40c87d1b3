"""Multi-turn REINFORCE: rewards are discounted from turn to turn, not from token to token.

Every sampled token of turn ``k`` carries the turn's reward ``r_k``; ``eog`` is the sum of the
game's outcome and length rewards, paid behind the last turn ``K``::

    only_propagate_eog_in_mtr:    G_k = r_k + gamma^(K - k) * eog
    otherwise:                    G_k = r_k + gamma * G_{k+1},    G_K = r_K + eog

``norm_adv_in_mtr`` whitens the returns over all sampled tokens of the batch (``credit.whitening``);
``clip_adv_in_mtr`` then cuts them to ``[clip_adv_min, clip_adv_max]``. Games of one secret are not
compared.

Source: the reference implementation of arXiv 2602.12342, whose own program for it never ran.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import Advantage, Grain, Stateless, require_first, require_range
from delta_belief_rl.algo.credit.groups import finish, return_to_go, total_reward, used_channels
from delta_belief_rl.algo.credit.whitening import trained_tokens, whiten
from delta_belief_rl.types import TurnTable, UserError


@dataclass(frozen=True, slots=True)
class MultiTurnReinforceSettings:
    """Knobs of ``MultiTurnReinforce``, by the reference's names; ``gamma`` discounts per turn.

    ``episode_channels`` make up ``eog``.
    """

    gamma: float = 1.0
    norm_adv_in_mtr: bool = False
    clip_adv_in_mtr: bool = False
    clip_adv_min: float = -3.0
    clip_adv_max: float = 3.0
    only_propagate_eog_in_mtr: bool = True
    episode_channels: tuple[str, ...] = ("outcome", "length", "normalised")

    def __post_init__(self) -> None:
        require_range("algorithm.gamma", self.gamma, 0.0, 1.0)
        require_range("algorithm.clip_adv_min", self.clip_adv_min)
        require_range("algorithm.clip_adv_max", self.clip_adv_max)
        if self.clip_adv_min >= self.clip_adv_max:
            raise UserError("algorithm.clip_adv_min must be less than algorithm.clip_adv_max.")


@dataclass(frozen=True, slots=True)
class MultiTurnReinforce(Stateless):
    """See the module's head."""

    settings: MultiTurnReinforceSettings = MultiTurnReinforceSettings()
    requires: ClassVar[tuple[str, ...]] = ("traj", "turn", "n_tokens", "valid", "rewards")
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.TOKEN

    @property
    def needs_group(self) -> bool:
        """The batch, if anything, is the baseline."""
        return False

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``.

        Raises:
            UserError: It is not the first of its chain.
        """
        require_first(previous, "multi_turn_reinforce")
        options, used = self.settings, used_channels(table)
        if options.only_propagate_eog_in_mtr:
            late = {name: used[name] for name in options.episode_channels if name in used}
            own = {name: value for name, value in used.items() if name not in late}
        else:
            late, own = used, {}
        # The late channels lie on the last turn, so their discounted sum is what reaches each turn.
        grid = table.grid(total_reward(own, table))
        grid = grid + return_to_go(table.grid(total_reward(late, table)), options.gamma)
        turns = grid[table.traj, table.turn]
        if options.norm_adv_in_mtr:
            turns = whiten(turns, trained_tokens(table))
        if options.clip_adv_in_mtr:
            turns = np.clip(turns, options.clip_adv_min, options.clip_adv_max)
        return finish(table, turns, used)
