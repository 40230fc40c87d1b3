"""State and progress: worked examples, a plain loop, what it reduces to, shards, junk, edges."""

from __future__ import annotations

from dataclasses import replace
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
from delta_belief_rl.algo.credit.gigpo import GiGpo, GiGpoSettings
from delta_belief_rl.algo.credit.groups import return_to_go
from delta_belief_rl.algo.credit.grpo import Grpo, GrpoSettings
from delta_belief_rl.algo.credit.state_progress import (
    FORMS,
    StateProgress,
    StateProgressSettings,
    progress_buckets,
)
from delta_belief_rl.types import FloatArray, TurnTable, UserError


def run(table: TurnTable, **knobs: Any) -> Advantage:
    return StateProgress(replace(StateProgressSettings(), **knobs)).apply(table)


def preference(table: TurnTable, **knobs: Any) -> FloatArray:
    """What is added to GRPO."""
    return run(table, **knobs).turns - run(table, **{**knobs, "preference_w": 0.0}).turns


# One place met at two points of the task: what is right at one is wrong at the other.
SHOP = table_of(
    [
        [Act("P", "buy", 1.0, 1.0)],
        [Act("P", "back", 0.0, 1.0)],
        [Act("P", "buy", 0.0, 0.0)],
        [Act("P", "back", 1.0, 0.0)],
    ]
)


def test_A13_preferences_match_their_worked_examples() -> None:
    np.testing.assert_allclose(preference(SHOP), [1, -1, -1, 1])
    by_state_alone = replace(SHOP, progress=np.zeros(4))
    np.testing.assert_allclose(preference(by_state_alone), [0, 0, 0, 0])
    got = preference(FIXTURE_A, gamma=0.9)
    np.testing.assert_allclose(got, [0, 1, 0, 0, -1, 0, 1, 0, -1, 0, 0], atol=1e-12)
    whole = run(FIXTURE_A, gamma=0.9, preference_w=0.5).turns
    np.testing.assert_allclose(whole, GRPO_A + 0.5 * got, atol=1e-5)


def test_A13_centered_is_the_return_less_the_mean_of_the_cell() -> None:
    got = preference(FIXTURE_A, gamma=0.9, form="centered")
    # Row 2 and row 7 lie in ``s2`` with other progress, so they are alone.
    want = [0.3825, 0.45, 0, -0.4275, -0.45, 0, 0.4725, 0, -0.4275, 0, 0]
    np.testing.assert_allclose(got, want, atol=1e-12)
    assert preference(SHOP, form="centered").tolist() == [0.5, -0.5, -0.5, 0.5]


def test_A13_leave_one_out_asks_the_other_games_alone() -> None:
    """Games 0 and 1 take ``a``; of game 0 the other's ``a`` says 0.9, of game 1 it says 0.2."""
    games = [
        [Act("s", "a", 0.2)],
        [Act("s", "a", 0.9)],
        [Act("s", "b", 0.5)],
        [Act("s", "c", 0.0)],
    ]
    table = table_of(games)
    # b and c have no other game to ask what the own action is worth.
    np.testing.assert_allclose(preference(table, form="loo"), [1, 0, 0, 0])
    # Q(a) = 0.55, with a margin of 0.05 * 0.9 just above b.
    np.testing.assert_allclose(preference(table), [1, 1, 0, -1])
    np.testing.assert_allclose(preference(table, margin=0.06), [0.5, 0.5, 0.5, -1])


# --- a plain loop --------------------------------------------------------------------------------


def loop_preference(table: TurnTable, gamma: float, margin: float, step: float) -> FloatArray:
    paid = table.grid(np.where(table.valid, table.rewards["outcome"], 0.0))
    returns = return_to_go(paid, gamma)[table.traj, table.turn]
    alive = {int(i) for i in table.traj[table.valid]}
    out = np.zeros(table.num_rows)
    for row in np.flatnonzero(table.valid):
        siblings = {int(i) for i in table.traj[table.group == table.group[row]]} & alive
        least = margin * max(abs(paid[i].sum()) for i in siblings)
        cell: dict[str, list[float]] = {}
        for other in np.flatnonzero(table.valid):
            if (
                table.group[other] == table.group[row]
                and table.state_key[other] == table.state_key[row]
                and int(table.progress[other] / step) == int(table.progress[row] / step)
            ):
                cell.setdefault(table.action_key[other], []).append(returns[other])
        own = np.mean(cell[table.action_key[row]])
        leads = [
            own - np.mean(values)
            for action, values in cell.items()
            if action != table.action_key[row]
        ]
        if leads:
            # The returns of the test are multiples of 1/48 and more apart than rounding.
            out[row] = np.mean([np.sign(x) * (abs(x) > least + 1e-7) for x in leads])
    return out


@settings(max_examples=60, deadline=None)
@given(
    table=tables(),
    gamma=st.sampled_from([1.0, 0.5]),
    margin=st.sampled_from([0.0, 0.05, 0.5]),
    step=st.sampled_from([0.25, 0.5, 2.0]),
)
def test_preferences_equal_the_plain_loop(
    table: TurnTable, gamma: float, margin: float, step: float
) -> None:
    got = preference(table, gamma=gamma, margin=margin, progress_step=step)
    np.testing.assert_allclose(got, loop_preference(table, gamma, margin, step), atol=1e-9)
    assert np.abs(got).max(initial=0.0) <= 1.0 + 1e-9


# --- what it reduces to --------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(table=tables(), form=st.sampled_from(FORMS), divided=st.booleans())
def test_without_preferences_it_is_grpo(table: TurnTable, form: str, divided: bool) -> None:
    got = run(table, form=form, preference_w=0.0, norm_adv_by_std_in_grpo=divided).turns
    np.testing.assert_array_equal(got, Grpo(GrpoSettings(divided)).apply(table).turns)


@settings(max_examples=25, deadline=None)
@given(table=tables(), gamma=st.sampled_from([1.0, 0.5]))
def test_centered_with_constant_progress_is_gigpo(table: TurnTable, gamma: float) -> None:
    still = replace(table, progress=np.full(table.num_rows, 0.5))
    plain = {"gamma": gamma, "norm_adv_by_std_in_grpo": False}
    gigpo = GiGpo(replace(GiGpoSettings(), **plain)).apply(still)
    np.testing.assert_allclose(run(still, form="centered", **plain).turns, gigpo.turns, atol=1e-12)


# --- orders, shards, junk ------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(table=tables(), form=st.sampled_from(FORMS), data=st.data())
def test_A9_preferences_do_not_depend_on_the_order_of_rows(
    table: TurnTable, form: str, data: st.DataObject
) -> None:
    order = np.array(data.draw(st.permutations(range(table.num_rows))), dtype=np.int64)
    straight, mixed = run(table, form=form), run(rows_in_order(table, order), form=form)
    np.testing.assert_allclose(mixed.turns, straight.turns[order], rtol=1e-9, atol=1e-9)
    assert mixed.stats == pytest.approx(straight.stats)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_A11_preferences_do_not_depend_on_the_shards(shards: int, form: str) -> None:
    rng = np.random.default_rng(5)
    games = [
        [
            Act(f"s{rng.integers(2)}", f"a{rng.integers(3)}", float(rng.integers(3)))
            for _ in range(rng.integers(1, 4))
        ]
        for _ in range(16)
    ]
    table = table_of(games, group=[i // 4 for i in range(16)])
    whole = run(table, form=form).turns
    for part in np.array_split(np.arange(4), shards):
        shard, rows = part_of(table, part.tolist())
        np.testing.assert_allclose(run(shard, form=form).turns, whole[rows])


@settings(max_examples=30, deadline=None)
@given(table=tables(), form=st.sampled_from(FORMS))
def test_J1_preferences_do_not_see_junk_on_turns_that_are_not_valid(
    table: TurnTable, form: str
) -> None:
    clean, dirty = run(table, form=form), run(with_junk(table), form=form)
    np.testing.assert_array_equal(dirty.turns, clean.turns)
    assert dirty.stats == clean.stats
    assert not clean.turns[~table.valid].any()


# --- edges ---------------------------------------------------------------------------------------


def test_buckets_are_parts_of_a_fraction_or_whole_stages() -> None:
    def buckets(values: list[float], step: float) -> list[int]:
        table = table_of([[Act("s", "a", 0.0, value)] for value in values])
        return progress_buckets(table, step).tolist()

    assert buckets([0.0, 0.24, 0.25, 0.5, 0.99, 1.0], 0.25) == [0, 0, 1, 2, 3, 4]
    # 0.3 / 0.1 and 0.7 / 0.1 lie just below whole numbers.
    assert buckets([0.1, 0.3, 0.7], 0.1) == [1, 3, 7]
    assert buckets([0.0, 1.0, 2.0, 1.5], 1.0) == [0, 1, 2, 1]


def test_equal_actions_and_actions_within_the_margin_have_no_preference() -> None:
    one = table_of([[Act("s", "a", 1.0)], [Act("s", "a", 0.0)]])
    assert not preference(one).any()
    assert run(one).stats["frac_compared_turns"] == 0.0
    near = table_of([[Act("s", "a", 1.0)], [Act("s", "b", 0.96)]])
    assert not preference(near).any()
    np.testing.assert_allclose(preference(near, margin=0.03), [1, -1])
    assert run(near).stats["frac_compared_turns"] == 1.0


def test_returns_that_differ_by_rounding_are_equal() -> None:
    table = table_of([[Act("s", "a", 0.1 + 0.2)], [Act("s", "b", 0.3)]])
    assert not preference(table, margin=0.0).any()


def test_A3_one_game_all_won_all_lost_and_one_turn() -> None:
    assert not run(table_of([[Act("s", "a", 1.0), Act("t", "b")]])).turns.any()
    for outcome in (0.0, 1.0):
        flat = table_of([[Act("s", "a", outcome)], [Act("s", "b", outcome)]])
        advantage = run(flat)
        assert not advantage.turns.any()
        assert advantage.stats["frac_dead_groups"] == 1.0
    # All won, but one sooner: the state they share says which action was better.
    won = table_of([[Act("s", "a", 1.0)], [Act("s", "b"), Act("t", "c", 1.0)]])
    np.testing.assert_allclose(preference(won, gamma=0.5), [1, -1, 0])
    assert run(table_of([])).turns.shape == (0,)


def test_states_of_different_groups_are_not_compared() -> None:
    table = table_of([[Act("s", "a", 1.0)], [Act("s", "b", 0.0)]], group=[0, 1])
    assert not run(table).turns.any()


def test_progress_that_never_moves_is_seen_in_the_log() -> None:
    assert run(FIXTURE_A).stats["num_progress_buckets"] == 3.0
    still = replace(FIXTURE_A, progress=np.zeros(11))
    assert run(still).stats["num_progress_buckets"] == 1.0


@pytest.mark.parametrize("column", ["state_key", "action_key", "progress"])
def test_a_table_without_a_column_is_refused(column: str) -> None:
    empty = np.zeros(0) if column == "progress" else ()
    with pytest.raises(ValueError, match=column):
        run(replace(FIXTURE_A, **{column: empty}))


def test_state_progress_meets_the_protocol_and_stands_first() -> None:
    credit = StateProgress()
    assert isinstance(credit, Credit)
    assert credit.needs_group
    credit.load_state_dict(credit.state_dict())
    with pytest.raises(UserError, match="first in the credit chain"):
        credit.apply(FIXTURE_A, Advantage(GRPO_A, np.ones(11)))


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("form", "wins"),
        ("preference_w", -1.0),
        ("margin", -0.1),
        ("progress_step", 0.0),
        ("progress_step", float("inf")),
    ],
)
def test_state_progress_settings_out_of_range_are_refused_by_name(knob: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"algorithm\.state_progress\.{knob} is"):
        StateProgressSettings(**{knob: value})
