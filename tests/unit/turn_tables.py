"""Turn tables for tests of credit: games as lists of turns, and the same table in other orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from delta_belief_rl.types import FloatArray, IntArray, TurnTable


class Act(NamedTuple):
    """One turn."""

    state: str
    action: str = ""
    reward: float = 0.0
    progress: float = 0.0


Games = Sequence[Sequence[Act]]


def table_of(
    games: Games,
    won: Sequence[bool] | None = None,
    group: Sequence[int] | None = None,
    invalid: Sequence[tuple[int, int]] = (),
) -> TurnTable:
    """A row for each turn; ``won`` by default says whose return is positive."""
    rows = [(i, k) for i, game in enumerate(games) for k in range(len(game))]
    acts = [games[i][k] for i, k in rows]
    wins = [sum(act.reward for act in game) > 0 for game in games] if won is None else won
    traj = np.array([i for i, _ in rows], dtype=np.int64)
    return TurnTable(
        group=np.array(group or [0] * len(games), dtype=np.int64)[traj],
        traj=traj,
        turn=np.array([k for _, k in rows], dtype=np.int64),
        n_tokens=np.array([2 + k for _, k in rows], dtype=np.int64),
        valid=np.array([row not in invalid for row in rows], dtype=np.bool_),
        terminal=np.array([k == len(games[i]) - 1 for i, k in rows], dtype=np.bool_),
        truncated=np.zeros(len(rows), dtype=np.bool_),
        won=np.array(wins, dtype=np.bool_)[traj],
        state_key=tuple(act.state for act in acts),
        action_key=tuple(act.action for act in acts),
        progress=np.array([act.progress for act in acts], dtype=np.float64),
        answered=np.ones(len(rows), dtype=np.bool_),
        rewards={"outcome": np.array([act.reward for act in acts], dtype=np.float64)},
    )


FIXTURE_A = table_of(
    [
        [Act("s0", "a"), Act("s1", "b", 0, 1), Act("s2", "c", 1, 2)],
        [Act("s0", "a"), Act("s1", "d", 0, 1), Act("s3", "e", 0, 1)],
        [Act("s0", "f"), Act("s2", "c", 1, 1)],
        [Act("s0", "g"), Act("s4", "h"), Act("s4", "h")],
    ]
)
GRPO_A = 0.866024 * np.array([1.0, -1.0, 1.0, -1.0])[FIXTURE_A.traj]


def rows_in_order(table: TurnTable, order: IntArray) -> TurnTable:
    """The same games, their rows in another order; row ``i`` is row ``order[i]`` of ``table``."""
    return replace(
        table,
        **{
            name: getattr(table, name)[order]
            for name in (
                *("group", "traj", "turn", "n_tokens", "valid", "terminal"),
                *("truncated", "won", "progress", "answered"),
            )
        },
        state_key=tuple(table.state_key[row] for row in order),
        action_key=tuple(table.action_key[row] for row in order),
        rewards={name: value[order] for name, value in table.rewards.items()},
    )


def with_junk(table: TurnTable) -> TurnTable:
    """Other values of everything that a turn which is not valid might say."""
    junk = ~table.valid
    return replace(
        table,
        state_key=tuple("junk" if bad else x for bad, x in zip(junk, table.state_key, strict=True)),
        action_key=tuple(
            "junk" if bad else x for bad, x in zip(junk, table.action_key, strict=True)
        ),
        progress=np.where(junk, np.nan, table.progress),
        rewards={name: np.where(junk, 999.0, value) for name, value in table.rewards.items()},
    )


def part_of(table: TurnTable, groups: Sequence[int]) -> tuple[TurnTable, IntArray]:
    """A shard that holds some groups, and the rows it has, with games numbered anew."""
    rows = np.flatnonzero(np.isin(table.group, groups))
    shard = rows_in_order(table, rows)
    return replace(shard, traj=np.unique(shard.traj, return_inverse=True)[1]), rows


def by_turn(table: TurnTable, values: FloatArray) -> dict[tuple[int, int], float]:
    """Value of each (game, turn)."""
    places = zip(table.traj.tolist(), table.turn.tolist(), strict=True)
    return dict(zip(places, values.tolist(), strict=True))


acts = st.builds(
    Act,
    state=st.sampled_from("stu"),
    action=st.sampled_from("ab"),
    reward=st.integers(-2, 2).map(float),
    progress=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
)
played = st.lists(st.lists(acts, min_size=1, max_size=4), min_size=2, max_size=6)


@st.composite
def tables(draw: st.DrawFn, num_groups: int = 2) -> TurnTable:
    """Games in some groups, some won, some turns and whole games not valid."""
    games = draw(played)
    group = [i % num_groups for i in range(len(games))]
    won = draw(st.lists(st.booleans(), min_size=len(games), max_size=len(games)))
    places = [(i, k) for i, game in enumerate(games) for k in range(len(game))]
    lost = draw(st.lists(st.sampled_from(places), max_size=3))
    if draw(st.booleans()):
        lost += [place for place in places if place[0] == 0]
    return table_of(games, won, group, lost)
