"""GiGPO: games are compared with their siblings, and turns with all turns from the same state.

With ``norm(x) = (x - mean) / (std + eps)`` (std unbiased, eps = 1e-6), ``S_i`` the return of a game
and ``G_{i,k} = r_{i,k} + gamma * G_{i,k+1}`` the return-to-go, both over the sum of all channels::

    A_{i,k} = norm_group(S_i) + step_advantage_w * norm_state(G_{i,k})

``norm_state`` is over all valid turns of the group whose action was taken in the state that
``Env.state_key`` names, repeated visits inside one game included; a state met once, or without
spread, gives 0. With ``norm_adv_by_std_in_grpo=False`` neither term is divided.

``episode_weighting="game"`` counts each game once in mean and deviation of ``S``; ``"turn"`` counts
it once for each of its turns, which favours long games, and is what the public code does.

States are equal where their keys are: keys name what is known and are no texts, so there is no
grouping by similarity.

Source: GiGPO (arXiv 2505.10978). Confidence: exact, the formula of its public code, but for groups
of one, which keep their raw return there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from delta_belief_rl.algo.base import (
    Advantage,
    Grain,
    Stateless,
    require_choice,
    require_first,
    require_range,
)
from delta_belief_rl.algo.credit.groups import (
    finish,
    live_games,
    return_to_go,
    standardised,
    total_reward,
    used_channels,
)
from delta_belief_rl.algo.credit.states import state_numbers, with_state_stats
from delta_belief_rl.types import BoolArray, FloatArray, IntArray, TurnTable


@dataclass(frozen=True, slots=True)
class GiGpoSettings:
    """Knobs of ``GiGpo``; ``gamma`` discounts per turn, ``epsilon`` is in reward units."""

    step_advantage_w: float = 1.0
    gamma: float = 0.95
    norm_adv_by_std_in_grpo: bool = True
    episode_weighting: str = "game"
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        require_range("algorithm.gigpo.step_advantage_w", self.step_advantage_w, 0.0)
        require_range("algorithm.gamma", self.gamma, 0.0, 1.0)
        weightings = ("game", "turn")
        require_choice("algorithm.gigpo.episode_weighting", self.episode_weighting, weightings)
        require_range("algorithm epsilon", self.epsilon, 0.0)


@dataclass(frozen=True, slots=True)
class GiGpo(Stateless):
    """See the module's head."""

    settings: GiGpoSettings = GiGpoSettings()
    requires: ClassVar[tuple[str, ...]] = (
        *("group", "traj", "turn", "valid"),
        *("rewards", "state_key"),
    )
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """Games are compared with their siblings."""
        return True

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``.

        Raises:
            UserError: It is not the first of its chain.
        """
        require_first(previous, "gigpo")
        used, weight = used_channels(table), self.settings.step_advantage_w
        grid = table.grid(total_reward(used, table))
        returns = return_to_go(grid, self.settings.gamma)[table.traj, table.turn]
        steps = self._norm(returns, table.valid, state_numbers(table))
        turns = self._games(table, grid.sum(axis=1)) + weight * steps
        return with_state_stats(finish(table, turns, used), table)

    def _games(self, table: TurnTable, score: FloatArray) -> FloatArray:
        """The comparison of whole games, ``[R]``."""
        if self.settings.episode_weighting == "turn":
            return self._norm(score[table.traj], table.valid, table.group)
        return self._norm(score, live_games(table), table.game_group())[table.traj]

    def _norm(self, values: FloatArray, mask: BoolArray, group: IntArray) -> FloatArray:
        divided = self.settings.norm_adv_by_std_in_grpo
        return standardised(values, mask, group, self.settings.epsilon, divided=divided)
