"""GraphGPO: a turn is worth how near to a win it leads, whatever became of its own game.

All games of a group are laid over each other to one graph: states are nodes, turns are edges from
the state they began in to the state in which the game's next turn began. The last turn of a won
game leads to the win, that of a lost game to an end of its own. ``d(s)`` is the number of turns on
the shortest way from ``s`` to the win; where there is no way, one more than the longest such way of
the group. With ``norm(x) = (x - mean) / (std + eps)`` (std unbiased, eps = 1e-6)::

    raw     = scale * omega ^ d(next)                      form="reference", the public code
    raw     = scale * omega ^ (d(next) + 1)                form="paper", the turn's own cost added
    raw     = scale * omega ^ (d(next) - d(state) + 1)     form="progress"
    A_{i,k} = episode_advantage_w * norm_group(S_i) + graph_advantage_w * norm_state(raw)

``S_i`` is the return of a game over all channels. ``norm_state`` is over all valid turns of the
group that began in one state, a turn that was taken twice counting twice; a state met once, or
whose turns lead equally far, gives 0. A group without a win has no graph term. With
``norm_adv_by_std_in_grpo=False`` neither term is divided.

The first two forms differ by a factor, so they agree up to ``eps`` once they are divided. Far from
the win their values sink below ``eps``; ``progress`` has the same size everywhere. Laying games
over each other takes for granted that an action leads from one state to one other: where replies
are a matter of chance, a way of the graph need not be one that can be walked.

Shapes: ``N`` games, ``K`` turns, ``R`` rows, ``S`` states.

Source: GraphGPO (arXiv 2605.26684). Confidence: from a public port and the paper's summary; the
worked example is our own reading of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import (
    Advantage,
    Grain,
    Stateless,
    require_choice,
    require_first,
    require_range,
)
from delta_belief_rl.algo.credit.groups import finish, standardised, used_channels
from delta_belief_rl.algo.credit.grpo import whole_games
from delta_belief_rl.algo.credit.states import state_numbers, with_state_stats
from delta_belief_rl.types import BoolArray, FloatArray, IntArray, TurnTable

FORMS = ("reference", "paper", "progress")


@dataclass(frozen=True, slots=True)
class GraphGpoSettings:
    """Knobs of ``GraphGpo``; ``scale`` and ``epsilon`` in reward units.

    ``omega`` is what one turn more on the way to the win leaves of a turn's worth.
    """

    graph_advantage_w: float = 1.0
    episode_advantage_w: float = 1.0
    omega: float = 0.1
    scale: float = 10.0
    form: str = "reference"
    norm_adv_by_std_in_grpo: bool = True
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        require_range("algorithm.graphgpo.graph_advantage_w", self.graph_advantage_w, 0.0)
        require_range("algorithm.graphgpo.episode_advantage_w", self.episode_advantage_w, 0.0)
        require_range("algorithm.graphgpo.omega", self.omega, 0.0, 1.0, open_low=True)
        require_range("algorithm.graphgpo.scale", self.scale, 0.0, open_low=True)
        require_choice("algorithm.graphgpo.form", self.form, FORMS)
        require_range("algorithm epsilon", self.epsilon, 0.0)


@dataclass(frozen=True, slots=True)
class Distances:
    """Turns to the win along the group's graph, ``[R]`` each.

    Attributes:
        own: From the state in which the turn began.
        following: From where the turn led.
        lost: True where no way leads from the turn's own state to a win.
    """

    own: FloatArray
    following: FloatArray
    lost: BoolArray


def next_rows(table: TurnTable) -> IntArray:
    """Row of the game's next valid turn, -1 where there is none. ``[R]``.

    A turn whose judge failed did nothing, so the turn before it leads to the one after it.
    """
    rows = table.grid(np.arange(table.num_rows), fill=-1).astype(np.int64)
    valid = table.grid(table.valid).astype(np.bool_)
    after = np.full(len(rows), -1, dtype=np.int64)
    out = np.full_like(rows, -1)
    for turn in range(rows.shape[1] - 1, -1, -1):
        out[:, turn] = after
        after = np.where(valid[:, turn], rows[:, turn], after)
    return out[table.traj, table.turn]


def distances(table: TurnTable) -> Distances:
    """Shortest ways to a win, of all groups at once; only valid turns are edges.

    Raises:
        ValueError: The table has no state keys.
    """
    states, following, valid = state_numbers(table), next_rows(table), table.valid
    count = int(states.max()) + 1 if len(states) else 0
    ends = np.where(table.won, 0.0, np.inf)
    way = np.full(count, np.inf)
    # Every turn costs one, so a pass lets each way grow by one turn; ways have no more than S.
    for _ in range(count):
        target = np.where(following >= 0, way[states[following]], ends)
        shorter = way.copy()
        np.minimum.at(shorter, states[valid], target[valid] + 1.0)
        if np.array_equal(shorter, way):
            break
        way = shorter
    target = np.where(following >= 0, way[states[following]], ends) if count else ends
    own, reached = way[states], np.isfinite(way[states])
    longest = np.zeros(int(table.group.max()) + 1 if count else 0)
    np.maximum.at(longest, table.group[reached], own[reached])
    far = longest[table.group] + 1.0
    return Distances(
        own=np.where(np.isfinite(own), own, far),
        following=np.where(np.isfinite(target), target, far),
        lost=~np.isfinite(own) & valid,
    )


@dataclass(frozen=True, slots=True)
class GraphGpo(Stateless):
    """See the module's head."""

    settings: GraphGpoSettings = GraphGpoSettings()
    requires: ClassVar[tuple[str, ...]] = (
        *("group", "traj", "turn", "valid", "won"),
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
        require_first(previous, "graphgpo")
        knobs = self.settings
        way = distances(table)
        whole = whole_games(table, knobs.norm_adv_by_std_in_grpo, knobs.epsilon)
        steps = self._steps(table, way)
        turns = knobs.episode_advantage_w * whole + knobs.graph_advantage_w * steps
        advantage = with_state_stats(finish(table, turns, used_channels(table)), table)
        share = float(way.lost.sum() / max(table.valid.sum(), 1))
        return replace(advantage, stats={**advantage.stats, "frac_lost_states": share})

    def _steps(self, table: TurnTable, way: Distances) -> FloatArray:
        """The comparison of turns from one state, ``[R]``."""
        knobs, power = self.settings, way.following
        if knobs.form == "paper":
            power = power + 1.0
        elif knobs.form == "progress":
            power = power - way.own + 1.0
        raw, divided = knobs.scale * knobs.omega**power, knobs.norm_adv_by_std_in_grpo
        return standardised(raw, table.valid, state_numbers(table), knobs.epsilon, divided=divided)
