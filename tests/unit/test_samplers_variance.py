"""Which groups are kept by how much their games differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turn_tables import Act, rows_in_order, table_of, tables

from delta_belief_rl.algo.samplers.informative import METRICS
from delta_belief_rl.algo.samplers.variance import (
    RULES,
    VarianceSettings,
    group_deviations,
    varied_groups,
)
from delta_belief_rl.types import TurnTable, UserError


def groups_of(
    groups: Sequence[Sequence[float]], invalid: Sequence[tuple[int, int]] = ()
) -> TurnTable:
    """Games of one turn, by group and return."""
    games = [[Act("s", "", value)] for group in groups for value in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    return table_of(games, group=numbers, invalid=invalid)


def kept(table: TurnTable, num_groups: int, **knobs: Any) -> list[int]:
    chosen = replace(VarianceSettings(), **knobs)
    return np.flatnonzero(varied_groups(table, num_groups, chosen)).tolist()


FOUR = groups_of([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1], [0.5, 0.5, 0, 1]])


def test_A13_the_filter_matches_its_worked_example() -> None:
    deviations = group_deviations(FOUR, 4)
    np.testing.assert_allclose(deviations, [0.57735, 0, 0.5, 0.408248], atol=1e-5)
    assert kept(FOUR, 4, keep=0.5) == [0, 2]
    assert kept(FOUR, 4, keep=0.74) == [0, 2]
    assert kept(FOUR, 4, keep=0.75) == [0, 2, 3]
    assert kept(FOUR, 4, keep=1.0) == [0, 1, 2, 3]


def test_at_least_one_group_is_kept() -> None:
    assert kept(FOUR, 4, keep=0.25) == [0]
    assert kept(FOUR, 4, keep=0.01) == [0]


def test_the_share_rule_keeps_groups_until_enough_of_the_variance_is_had() -> None:
    """Variances 1/3, 0, 1/4 and 1/6 of 3/4 in all: 0.444, 0.778 and 1 as the groups come in."""
    share = {"rule": "share"}
    assert kept(FOUR, 4, keep=0.4, **share) == [0]
    assert kept(FOUR, 4, keep=0.45, **share) == [0, 2]
    assert kept(FOUR, 4, keep=0.77, **share) == [0, 2]
    assert kept(FOUR, 4, keep=0.78, **share) == [0, 2, 3]
    # All of the variance, and no group that has none.
    assert kept(FOUR, 4, keep=1.0, **share) == [0, 2, 3]


def test_a_share_that_is_a_whole_number_on_paper_is_one() -> None:
    """0.29 * 100 lies below 29 in binary."""
    table = groups_of([[0.0, float(value)] for value in range(1, 101)])
    assert len(kept(table, 100, keep=0.29)) == 29


def test_of_equal_groups_the_earlier_ones_are_kept() -> None:
    table = groups_of([[0, 0], [1, 0], [0, 1], [1, 0]])
    assert kept(table, 4, keep=0.5) == [1, 2]
    assert kept(table, 4, keep=0.5, rule="share") == [1, 2]
    many = groups_of([[0, number % 2] for number in range(60)])
    assert kept(many, 60, keep=0.25) == list(range(1, 30, 2))


@pytest.mark.parametrize("rule", RULES)
def test_A3_where_nothing_differs_one_group_is_kept(rule: str) -> None:
    for groups in ([[1, 1], [1, 1]], [[0, 0], [0, 0]], [[0.3], [0.9]]):
        assert kept(groups_of(groups), 2, rule=rule, keep=0.5) == [0]


def test_rounding_is_no_difference() -> None:
    table = groups_of([[0.1 + 0.2, 0.3], [0.0, 0.001]])
    np.testing.assert_allclose(group_deviations(table, 2)[0], 0.0, atol=0)
    assert kept(table, 2, keep=0.5) == [1]


def test_the_returns_of_all_turns_count_or_the_outcome_alone() -> None:
    table = groups_of([[1, 0], [1, 1]])
    belief = replace(table, rewards={**table.rewards, "belief": np.array([0.0, 0.0, 5.0, -5.0])})
    assert kept(belief, 2, keep=0.5, metric="seq_reward") == [1]
    assert kept(belief, 2, keep=0.5, metric="seq_final_reward") == [0]


@pytest.mark.parametrize("rule", RULES)
def test_J1_games_without_an_outcome_enter_nothing_and_empty_groups_are_never_kept(
    rule: str,
) -> None:
    groups = [[1, 0, 1, 0], [9, -9], [0, 0, 9]]
    table = groups_of(groups, invalid=[(4, 0), (5, 0), (8, 0)])
    deviations = group_deviations(table, 4)
    np.testing.assert_allclose(deviations[[0, 2]], [0.57735, 0], atol=1e-5)
    assert np.isnan(deviations[[1, 3]]).all()
    assert kept(table, 4, keep=1.0, rule=rule) == ([0, 2] if rule == "top_k" else [0])
    nothing = groups_of([[1], [2]], invalid=[(0, 0), (1, 0)])
    assert kept(nothing, 2, rule=rule) == []
    assert kept(table_of([]), 3, rule=rule) == []


@settings(max_examples=40, deadline=None)
@given(
    table=tables(num_groups=3),
    rule=st.sampled_from(RULES),
    keep=st.sampled_from([0.1, 0.4, 0.7, 1.0]),
    metric=st.sampled_from(METRICS),
    data=st.data(),
)
def test_A9_what_is_kept_does_not_depend_on_the_order_of_rows_or_on_junk(
    table: TurnTable, rule: str, keep: float, metric: str, data: st.DataObject
) -> None:
    knobs = {"rule": rule, "keep": keep, "metric": metric}
    order = np.array(data.draw(st.permutations(range(table.num_rows))), dtype=np.int64)
    straight = kept(table, 3, **knobs)
    assert kept(rows_in_order(table, order), 3, **knobs) == straight
    junk = np.where(table.valid, table.rewards["outcome"], 1e6)
    assert kept(replace(table, rewards={"outcome": junk}), 3, **knobs) == straight
    # No group that was left out differs more than one that was kept.
    deviations = group_deviations(table, 3, metric)
    left = [deviations[g] for g in range(3) if g not in straight and np.isfinite(deviations[g])]
    assert max(left, default=-1.0) <= min((deviations[g] for g in straight), default=np.inf)


@pytest.mark.parametrize(
    ("knob", "value"), [("rule", "median"), ("keep", 0.0), ("keep", 1.1), ("metric", "acc")]
)
def test_settings_out_of_range_are_refused_by_name(knob: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"algorithm\.filter_groups\.{knob} is"):
        VarianceSettings(**{knob: value})
