"""Which groups the dynamic sampling keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from delta_belief_rl.algo.samplers.informative import METRICS, informative_groups
from delta_belief_rl.types import TurnTable, UserError


def table_of(games: Sequence[tuple[int, float, float]], invalid: Sequence[int] = ()) -> TurnTable:
    """Games of one turn as (group, outcome, belief)."""
    count = len(games)
    flags = np.zeros(count, dtype=np.bool_)
    return TurnTable(
        group=np.array([group for group, *_ in games], dtype=np.int64),
        traj=np.arange(count),
        turn=np.zeros(count, dtype=np.int64),
        n_tokens=np.ones(count, dtype=np.int64),
        valid=np.array([i not in invalid for i in range(count)], dtype=np.bool_),
        terminal=~flags,
        truncated=flags,
        won=flags,
        rewards={
            "outcome": np.array([won for _, won, _ in games]),
            "belief": np.array([belief for *_, belief in games]),
        },
    )


GAMES = [
    (0, 2.0, 0.1),  # both win, beliefs differ
    (0, 2.0, 0.3),
    (1, 2.0, 0.1),  # one wins
    (1, 0.0, 0.1),
    (2, 0.0, 0.1),  # nothing differs
    (2, 0.0, 0.1),
]


def kept(metric: str, invalid: Sequence[int] = (), sizes: Sequence[int] = (2, 2, 2)) -> list[bool]:
    return informative_groups(table_of(GAMES, invalid), list(sizes), metric).tolist()


def test_groups_are_kept_where_their_games_differ_in_the_metric() -> None:
    assert kept("seq_reward") == [True, True, False]
    assert kept("seq_final_reward") == [False, True, False]


def test_rounding_is_no_difference() -> None:
    games = [(0, 0.1 + 0.2, 0.0), (0, 0.3, 0.0)]
    assert informative_groups(table_of(games), [2], "seq_reward").tolist() == [False]


def test_J1_a_game_without_outcome_makes_no_difference() -> None:
    assert kept("seq_reward", invalid=[3]) == [True, False, False]
    assert kept("seq_reward", invalid=[0, 1, 2, 3, 4, 5]) == [False, False, False]


@pytest.mark.parametrize("metric", METRICS)
def test_a_group_of_one_is_kept_if_it_has_an_outcome(metric: str) -> None:
    table = table_of([(0, 0.0, 0.0), (1, 0.0, 0.0)], invalid=[1])
    assert informative_groups(table, [1, 1], metric).tolist() == [True, False]


def test_a_group_without_a_turn_is_left_out() -> None:
    table = table_of([(1, 2.0, 0.0), (1, 0.0, 0.0)])
    assert informative_groups(table, [2, 2, 2], "seq_reward").tolist() == [False, True, False]
    assert informative_groups(table_of([]), [2], "seq_reward").tolist() == [False]


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(UserError, match=r"filter_groups\.metric is 'acc'"):
        kept("acc")
