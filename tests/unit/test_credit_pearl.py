"""PEARL: worked example, a pairwise loop, memory over updates, what never changes, round trips."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turn_tables import (
    FIXTURE_A,
    GRPO_A,
    Act,
    part_of,
    rows_in_order,
    table_of,
    tables,
    with_junk,
)

from delta_belief_rl.algo.base import Advantage, Credit
from delta_belief_rl.algo.credit.gigpo import GiGpo
from delta_belief_rl.algo.credit.grpo import Grpo
from delta_belief_rl.algo.credit.pearl import Pearl, PearlSettings
from delta_belief_rl.types import TurnTable, UserError

Counts = dict[tuple[str, str], tuple[float, float]]


def pearl(**knobs: Any) -> Pearl:
    return Pearl(replace(PearlSettings(), **knobs))


def step(method: Pearl, table: TurnTable) -> Advantage:
    return method.apply(table, Grpo().apply(table))


def counts(method: Pearl) -> Counts:
    """Wins and losses by state and action."""
    return {
        (state, action): (entry.win, entry.loss)
        for (_, state, action), entry in method.memory.items()
    }


def test_A13_pearl_matches_its_worked_example() -> None:
    method = pearl()
    advantage = step(method, FIXTURE_A)
    want = GRPO_A.copy()
    want[8] = -1.190783
    np.testing.assert_allclose(advantage.turns, want, atol=1e-5)
    assert counts(method) == {
        ("s0", "g"): (0, 2),
        ("s0", "a"): (1, 1),
        ("s0", "f"): (2, 0),
        ("s1", "b"): (1, 0),
        ("s1", "d"): (0, 1),
    }
    assert method.strength(("all", "s0", "g")) == pytest.approx(0.375)
    assert method.strength(("all", "s0", "a")) == 0.0
    assert method.strength(("all", "s9", "a")) == 0.0
    assert advantage.stats["decision_memory_size"] == 5.0
    assert advantage.stats["decisions_recorded"] == 4.0
    assert advantage.stats["frac_enlarged_turns"] == pytest.approx(1 / 11)
    np.testing.assert_array_equal(advantage.rewards, FIXTURE_A.rewards["outcome"])
    assert advantage.stats["reward_sum"] == 2.0


def test_the_memory_fades_and_recurring_decisions_weigh_more() -> None:
    """``g`` in ``s0`` loses twice a step: 2, 2 * 0.9 + 2, and 3.8 * 0.9 + 2, above the cap of 4."""
    method = pearl()
    steps = [step(method, FIXTURE_A).turns for _ in range(3)]
    factors = [turns[8] / Grpo().apply(FIXTURE_A).turns[8] for turns in steps]
    losses = [2.0, 3.8, 5.42]
    want = [1 + min(1, loss / 4) * (loss + 1) / (loss + 2) for loss in losses]
    np.testing.assert_allclose(factors, want)
    assert counts(method)["s0", "g"] == (0.0, pytest.approx(5.42))
    # d in s1 has lost 1 + 0.9 + 0.81 times by now, against no win.
    rate = 3.71 / 4.71
    np.testing.assert_allclose(steps[2][4] / GRPO_A[4], 1 + 2.71 / 4 * rate, atol=1e-5)


@pytest.mark.parametrize(
    ("win", "loss", "strength"),
    [
        (0.0, 1.9, 0.0),  # too few losses
        (2.0, 2.0, 0.0),  # 3 of 6
        (1.0, 2.0, 0.5 * 0.6),
        (0.0, 9.0, 10 / 11),
        (8.0, 9.0, 0.0),  # 10 of 19
    ],
)
def test_a_decision_must_have_lost_often_and_more_than_it_won(
    win: float, loss: float, strength: float
) -> None:
    method = pearl()
    method.load_state_dict({"update": 1, "entries": [["all", "s", "a", win, loss, 1]]})
    assert method.strength(("all", "s", "a")) == pytest.approx(strength)


def test_a_decision_is_remembered_where_nothing_new_is_learnt() -> None:
    method = pearl()
    step(method, FIXTURE_A)
    step(method, FIXTURE_A)
    lone = table_of([[Act("s0", "g")], [Act("t", "x", 1.0)]])
    turn = step(method, lone).turns[0] / Grpo().apply(lone).turns[0]
    loss = 3.8 * 0.9
    assert turn == pytest.approx(1 + loss / 4 * (loss + 1) / (loss + 2))


# --- a pairwise loop -----------------------------------------------------------------------------


def loop_counts(table: TurnTable, margin: float) -> Counts:
    """Wins and losses, by walking every ordered pair of games."""
    out: Counts = {}
    games = []
    for game in range(table.num_games):
        rows = [r for r in range(table.num_rows) if table.traj[r] == game and table.valid[r]]
        rows.sort(key=lambda r: table.turn[r])
        games.append(rows)
    for better, worse in permutations(range(len(games)), 2):
        if not games[better] or not games[worse]:
            continue
        if table.group[games[better][0]] != table.group[games[worse][0]]:
            continue
        totals = [table.rewards["outcome"][games[game]].sum() for game in (better, worse)]
        if totals[0] <= totals[1] + margin:
            continue
        for one, two in zip(games[better], games[worse], strict=False):
            if table.state_key[one] != table.state_key[two]:
                break
            if table.action_key[one] != table.action_key[two]:
                for row, (win, loss) in ((one, (1, 0)), (two, (0, 1))):
                    key = (table.state_key[row], table.action_key[row])
                    before = out.get(key, (0, 0))
                    out[key] = (before[0] + win, before[1] + loss)
                break
    return out


@settings(max_examples=80, deadline=None)
@given(table=tables(), margin=st.sampled_from([0.0, 1.0]))
def test_decisions_equal_the_loop_over_pairs(table: TurnTable, margin: float) -> None:
    method = pearl(outcome_margin=margin)
    step(method, table)
    assert counts(method) == loop_counts(table, margin)


def test_games_that_never_part_or_part_by_chance_leave_no_record() -> None:
    same = [[Act("s", "a"), Act("t", "b", 1.0)], [Act("s", "a"), Act("t", "b")]]
    by_chance = [[Act("s", "a"), Act("t", "b", 1.0)], [Act("s", "a"), Act("u", "c")]]
    shorter = [[Act("s", "a", 1.0)], [Act("s", "a"), Act("u", "c")]]
    for games in (same, by_chance, shorter):
        method = pearl()
        assert step(method, table_of(games)).stats["decisions_recorded"] == 0.0
        assert not method.memory


def test_returns_that_differ_by_rounding_decide_nothing() -> None:
    method = pearl()
    step(method, table_of([[Act("s", "a", 0.1 + 0.2)], [Act("s", "b", 0.3)]]))
    assert not method.memory


# --- what changes and what does not --------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(table=tables())
def test_pearl_without_kappa_changes_nothing(table: TurnTable) -> None:
    method, before = pearl(kappa=0.0, min_losses=0.1, min_rate=0.0), Grpo().apply(table)
    np.testing.assert_array_equal(method.apply(table, before).turns, before.turns)


@settings(max_examples=30, deadline=None)
@given(table=tables(), kappa=st.sampled_from([0.5, 3.0]))
def test_positive_advantages_stay_and_negative_ones_only_grow(
    table: TurnTable, kappa: float
) -> None:
    method, before = pearl(kappa=kappa, min_losses=1.0, min_rate=0.0), Grpo().apply(table)
    after = method.apply(table, before)
    gains = before.turns >= 0.0
    np.testing.assert_array_equal(after.turns[gains], before.turns[gains])
    assert (after.turns[~gains] <= before.turns[~gains]).all()
    assert (after.turns[~gains] >= (1 + kappa) * before.turns[~gains]).all()
    np.testing.assert_array_equal(after.weight, before.weight)


def test_any_estimator_may_stand_in_front() -> None:
    before = GiGpo().apply(FIXTURE_A)
    after = pearl().apply(FIXTURE_A, before)
    want = before.turns.copy()
    want[8] *= 1.375
    np.testing.assert_allclose(after.turns, want)
    assert after.stats["mean_state_group_size"] == before.stats["mean_state_group_size"]


def test_advantages_of_tokens_are_changed_one_by_one() -> None:
    """The tokens of a turn may have either sign; row 8 has two of them."""
    table, rows = FIXTURE_A, FIXTURE_A.token_row()
    tokens = np.where(np.arange(len(rows)) % 2 == 0, -1.0, 3.0)
    turns = np.bincount(rows, tokens) / table.n_tokens
    before = Advantage(turns, np.ones(11), tokens=tokens)
    after = pearl().apply(table, before)
    assert after.tokens is not None
    want = tokens.copy()
    want[(rows == 8) & (tokens < 0)] *= 1.375
    np.testing.assert_allclose(after.tokens, want)
    np.testing.assert_allclose(after.turns, np.bincount(rows, want) / table.n_tokens)
    np.testing.assert_array_equal(before.tokens, tokens)


# --- orders, shards, junk ------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(table=tables(), data=st.data(), capacity=st.sampled_from([2, 100]))
def test_A9_pearl_and_its_memory_do_not_depend_on_the_order_of_rows(
    table: TurnTable, data: st.DataObject, capacity: int
) -> None:
    order = np.array(data.draw(st.permutations(range(table.num_rows))), dtype=np.int64)
    straight, mixed = pearl(capacity=capacity), pearl(capacity=capacity)
    for _ in range(2):
        first, second = step(straight, table), step(mixed, rows_in_order(table, order))
        np.testing.assert_allclose(second.turns, first.turns[order], rtol=1e-12)
        assert straight.state_dict() == mixed.state_dict()


def test_A9_the_memory_does_not_depend_on_the_numbers_of_groups_and_games() -> None:
    rng = np.random.default_rng(1)
    games = [
        [Act(f"s{rng.integers(2)}", f"a{rng.integers(2)}", float(rng.integers(2)))]
        for _ in range(12)
    ]
    group = [i // 4 for i in range(12)]
    straight, turned = pearl(capacity=3), pearl(capacity=3)
    step(straight, table_of(games, group=group))
    step(turned, table_of(games[::-1], group=group))
    assert straight.state_dict() == turned.state_dict()


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_A11_one_memory_that_sees_all_shards_counts_what_the_whole_batch_says(shards: int) -> None:
    rng = np.random.default_rng(4)
    games = [
        [Act(f"s{rng.integers(2)}", f"a{rng.integers(3)}", float(rng.integers(2)))]
        for _ in range(16)
    ]
    table = table_of(games, group=[i // 4 for i in range(16)])
    whole, parts = pearl(decay=1.0), pearl(decay=1.0)
    step(whole, table)
    for part in np.array_split(np.arange(4), shards):
        step(parts, part_of(table, part.tolist())[0])
    assert counts(parts) == counts(whole)


@settings(max_examples=30, deadline=None)
@given(table=tables())
def test_J1_pearl_does_not_see_junk_on_turns_that_are_not_valid(table: TurnTable) -> None:
    clean, dirty = pearl(min_losses=1.0), pearl(min_losses=1.0)
    first, second = step(clean, table), step(dirty, with_junk(table))
    np.testing.assert_array_equal(first.turns, second.turns)
    assert clean.state_dict() == dirty.state_dict()


def test_A3_one_game_equal_games_and_no_rows_record_nothing_but_let_the_memory_fade() -> None:
    method = pearl()
    step(method, FIXTURE_A)
    for games in ([[Act("s0", "g")]], [[Act("s0", "g")], [Act("s0", "f")]], []):
        assert step(method, table_of(games)).stats["decisions_recorded"] == 0.0
    assert counts(method)["s0", "g"] == (0.0, pytest.approx(2 * 0.9**3))


# --- state ---------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(first=tables(), second=tables())
def test_a_saved_memory_makes_the_same_next_update(first: TurnTable, second: TurnTable) -> None:
    straight = pearl(min_losses=1.0)
    step(straight, first)
    resumed = pearl(min_losses=1.0)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    np.testing.assert_array_equal(step(resumed, second).turns, step(straight, second).turns)
    assert resumed.state_dict() == straight.state_dict()


def test_a_full_memory_forgets_what_was_met_longest_ago() -> None:
    method = pearl(capacity=3)
    old = table_of([[Act("old", "b", 1.0)], [Act("old", "a")]])
    new = table_of([[Act("new", "a", 1.0)], [Act("new", "b")]])
    step(method, old)
    step(method, table_of([[Act("old", "a")], [Act("other", "x", 1.0)]]))  # looks ``old, a`` up
    advantage = step(method, new)
    assert set(counts(method)) == {("old", "a"), ("new", "a"), ("new", "b")}
    assert advantage.stats["decision_memory_size"] == 3.0
    smaller = pearl(capacity=1)
    smaller.load_state_dict(method.state_dict())
    assert set(counts(smaller)) == {("new", "b")}


def test_families_do_not_share_their_decisions() -> None:
    chess, cards = pearl(family="chess"), pearl(family="cards")
    step(chess, FIXTURE_A)
    cards.load_state_dict(chess.state_dict())
    lone = table_of([[Act("s0", "g")], [Act("t", "x", 1.0)]])
    np.testing.assert_array_equal(step(cards, lone).turns, Grpo().apply(lone).turns)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"update": 1},
        {"update": 1, "entries": [], "more": 0},
        {"update": "1", "entries": []},
        {"update": 1, "entries": "none"},
        {"update": 1, "entries": ["all"]},
        {"update": 1, "entries": [["all", "s", "a", 1.0, 1.0]]},
        {"update": 1, "entries": [["all", "s", 3, 1.0, 1.0, 1]]},
        {"update": 1, "entries": [["all", "s", "a", float("nan"), 1.0, 1]]},
        {"update": 1, "entries": [["all", "s", "a", 1.0, 1.0, "1"]]},
    ],
)
def test_a_state_of_something_else_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(UserError, match="memory of pearl cannot be read"):
        pearl().load_state_dict(state)


def test_pearl_meets_the_protocol_and_stands_behind_an_estimator() -> None:
    method = Pearl()
    assert isinstance(method, Credit)
    assert method.needs_group
    np.testing.assert_array_equal(method.paid(FIXTURE_A), FIXTURE_A.rewards["outcome"])
    with pytest.raises(UserError, match="pearl changes"):
        method.apply(FIXTURE_A)
    for column in ("state_key", "action_key"):
        with pytest.raises(ValueError, match=column):
            step(method, replace(FIXTURE_A, **{column: ()}))


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("kappa", -1.0),
        ("outcome_margin", -0.1),
        ("min_losses", 0.0),
        ("min_rate", 1.1),
        ("loss_cap", 0.0),
        ("decay", 1.5),
        ("capacity", 0),
    ],
)
def test_pearl_settings_out_of_range_are_refused_by_name(knob: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"algorithm\.pearl\.{knob} is"):
        PearlSettings(**{knob: value})
