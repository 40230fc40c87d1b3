"""GraphGPO: worked example, a plain search, what it reduces to, shards, junk and edges."""

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
    by_turn,
    part_of,
    rows_in_order,
    table_of,
    tables,
    with_junk,
)

from delta_belief_rl.algo.base import Advantage, Credit
from delta_belief_rl.algo.credit.graphgpo import (
    FORMS,
    GraphGpo,
    GraphGpoSettings,
    distances,
    next_rows,
)
from delta_belief_rl.algo.credit.grpo import Grpo
from delta_belief_rl.types import FloatArray, TurnTable, UserError


def run(table: TurnTable, **knobs: Any) -> Advantage:
    return GraphGpo(replace(GraphGpoSettings(), **knobs)).apply(table)


STEPS = [-0.433682, 0.707106, 0, -0.433682, -0.707106, 0, 1.493792, 0, -0.626429, 0, 0]
BOTH = [
    *(0.432342, 1.57313, 0.866024, -1.299705, -1.57313, -0.866024),
    *(2.359816, 0.866024, -1.492453, -0.866024, -0.866024),
]


def test_A13_graphgpo_matches_its_worked_example() -> None:
    way = distances(FIXTURE_A)
    np.testing.assert_array_equal(way.own, [2, 2, 1, 2, 2, 3, 2, 1, 2, 3, 3])
    np.testing.assert_array_equal(way.following, [2, 1, 0, 2, 3, 3, 1, 0, 3, 3, 3])
    np.testing.assert_allclose(run(FIXTURE_A).turns, BOTH, atol=1e-5)
    np.testing.assert_allclose(run(FIXTURE_A, episode_advantage_w=0.0).turns, STEPS, atol=1e-5)


def test_graphgpo_worked_by_hand_without_division() -> None:
    """Raw values of fixture A are .1, 1, 10, .1, .01, .01, 1, 10, .01, .01, .01."""
    plain = {"norm_adv_by_std_in_grpo": False, "episode_advantage_w": 0.0}
    start = (0.1 + 0.1 + 1 + 0.01) / 4
    want = [0.1 - start, 0.495, 0, 0.1 - start, -0.495, 0, 1 - start, 0, 0.01 - start, 0, 0]
    np.testing.assert_allclose(run(FIXTURE_A, **plain).turns, want, atol=1e-12)
    twice = run(FIXTURE_A, **plain, graph_advantage_w=2.0).turns
    np.testing.assert_allclose(twice, 2 * np.array(want), atol=1e-12)
    # The paper's form has the cost of the turn in its exponent.
    paper = run(FIXTURE_A, **plain, form="paper").turns
    np.testing.assert_allclose(paper, 0.1 * np.array(want), atol=1e-12)


def test_the_progress_form_weighs_a_step_alike_near_and_far() -> None:
    """From ``s0`` (two turns away) 1 and 10 are had for standing still and for one step nearer."""
    plain = {"norm_adv_by_std_in_grpo": False, "episode_advantage_w": 0.0, "form": "progress"}
    start = (1 + 1 + 10 + 0.1) / 4
    want = [1 - start, 4.95, 0, 1 - start, -4.95, 0, 10 - start, 0, 0.1 - start, 0, 0]
    np.testing.assert_allclose(run(FIXTURE_A, **plain).turns, want, atol=1e-12)


@pytest.mark.parametrize("form", ["paper", "progress"])
def test_forms_agree_up_to_epsilon_once_they_are_divided(form: str) -> None:
    first = run(FIXTURE_A, epsilon=1e-15).turns
    np.testing.assert_allclose(run(FIXTURE_A, epsilon=1e-15, form=form).turns, first, atol=1e-9)


# --- a plain search ------------------------------------------------------------------------------


def loop_steps(table: TurnTable, form: str) -> FloatArray:
    """The graph term, divided, by a search that pushes lengths back from each won game's end."""
    out = np.zeros(table.num_rows)
    after = {}
    for game in range(table.num_games):
        own = [row for row in range(table.num_rows) if table.traj[row] == game]
        rows = sorted((row for row in own if table.valid[row]), key=lambda row: table.turn[row])
        after |= dict(zip(rows, [*rows[1:], None], strict=False))
    for group in set(table.group.tolist()):
        rows = [row for row in after if table.group[row] == group]
        length: dict[str, int] = {}
        frontier = {table.state_key[row] for row in rows if after[row] is None and table.won[row]}
        steps = 1
        while frontier:
            length |= dict.fromkeys(frontier, steps)
            frontier = {
                table.state_key[row]
                for row in rows
                if after[row] is not None
                and table.state_key[after[row]] in length
                and table.state_key[row] not in length
            }
            steps += 1
        far = max(length.values(), default=0) + 1
        raw = {}
        for row in rows:
            target = far
            if after[row] is not None:
                target = length.get(table.state_key[after[row]], far)
            elif table.won[row]:
                target = 0
            own = length.get(table.state_key[row], far)
            power = {"reference": target, "paper": target + 1, "progress": target - own + 1}[form]
            raw[row] = 10.0 * 0.1**power
        for row in rows:
            same = [raw[o] for o in rows if table.state_key[o] == table.state_key[row]]
            if len(same) > 1 and np.ptp(same) > 1e-9 * max(same):
                out[row] = (raw[row] - np.mean(same)) / (np.std(same, ddof=1) + 1e-6)
    return out


@settings(max_examples=60, deadline=None)
@given(table=tables(), form=st.sampled_from(FORMS))
def test_graphgpo_equals_the_plain_search(table: TurnTable, form: str) -> None:
    got = run(table, form=form, episode_advantage_w=0.0).turns
    np.testing.assert_allclose(got, loop_steps(table, form), atol=1e-8)


# --- what it reduces to --------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(table=tables())
def test_graphgpo_without_its_graph_term_is_grpo(table: TurnTable) -> None:
    np.testing.assert_array_equal(
        run(table, graph_advantage_w=0.0).turns, Grpo().apply(table).turns
    )


@settings(max_examples=25, deadline=None)
@given(table=tables(), form=st.sampled_from(FORMS))
def test_graphgpo_without_a_win_is_grpo(table: TurnTable, form: str) -> None:
    lost = replace(table, won=np.zeros_like(table.won))
    advantage = run(lost, form=form)
    np.testing.assert_array_equal(advantage.turns, Grpo().apply(lost).turns)
    assert advantage.stats["frac_lost_states"] == float(table.valid.any())


def test_where_all_win_the_shorter_way_is_the_better_one() -> None:
    games = [[Act("s"), Act("t", "", 1)], [Act("s"), Act("u"), Act("t", "", 1)]]
    turns = by_turn(table_of(games), run(table_of(games)).turns)
    assert turns[0, 0] == pytest.approx(0.707106, abs=1e-5)
    assert turns[1, 0] == pytest.approx(-0.707106, abs=1e-5)
    assert [turns[0, 1], turns[1, 1], turns[1, 2]] == [0, 0, 0]


def test_a_lost_game_is_paid_for_the_turns_that_led_towards_a_win() -> None:
    """Game 1 came to ``t``, from which game 0 won, while game 2 did not."""
    games = [[Act("s"), Act("t", "", 1)], [Act("s"), Act("t")], [Act("s"), Act("u")]]
    turns = by_turn(table_of(games), run(table_of(games), episode_advantage_w=0.0).turns)
    assert turns[0, 0] == turns[1, 0] > 0 > turns[2, 0]
    assert turns[0, 1] > 0 > turns[1, 1]


# --- orders, shards, junk ------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(table=tables(), form=st.sampled_from(FORMS), data=st.data())
def test_A9_graphgpo_does_not_depend_on_the_order_of_rows(
    table: TurnTable, form: str, data: st.DataObject
) -> None:
    order = np.array(data.draw(st.permutations(range(table.num_rows))), dtype=np.int64)
    straight, mixed = run(table, form=form), run(rows_in_order(table, order), form=form)
    np.testing.assert_allclose(mixed.turns, straight.turns[order], rtol=1e-9, atol=1e-9)
    assert mixed.stats == pytest.approx(straight.stats)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_A11_graphgpo_does_not_depend_on_the_shards(shards: int) -> None:
    rng = np.random.default_rng(3)
    games = [
        [Act(f"s{rng.integers(3)}", "", float(rng.integers(2))) for _ in range(rng.integers(1, 5))]
        for _ in range(16)
    ]
    table = table_of(games, group=[i // 4 for i in range(16)])
    whole = run(table).turns
    for part in np.array_split(np.arange(4), shards):
        shard, rows = part_of(table, part.tolist())
        np.testing.assert_allclose(run(shard).turns, whole[rows])


@settings(max_examples=25, deadline=None)
@given(table=tables(), form=st.sampled_from(FORMS))
def test_J1_graphgpo_does_not_see_junk_on_turns_that_are_not_valid(
    table: TurnTable, form: str
) -> None:
    clean, dirty = run(table, form=form), run(with_junk(table), form=form)
    np.testing.assert_allclose(dirty.turns, clean.turns, atol=1e-9)
    assert not clean.turns[~table.valid].any()
    np.testing.assert_array_equal(clean.weight > 0, table.valid)


def test_a_turn_whose_judge_failed_is_no_step_of_a_way() -> None:
    games = [[Act("s"), Act("s"), Act("t", "", 1)], [Act("s"), Act("u")]]
    table = table_of(games, invalid=[(0, 1)])
    assert next_rows(table).tolist() == [2, 2, -1, 4, -1]
    assert distances(table).own.tolist()[:3] == [2, 2, 1]


# --- edges ---------------------------------------------------------------------------------------


def test_A3_one_game_equal_games_and_one_turn_teach_nothing_or_what_grpo_teaches() -> None:
    alone = run(table_of([[Act("s"), Act("t", "", 1)]]))
    assert not alone.turns.any()
    assert alone.stats["frac_singleton_groups"] == 1.0
    same = [Act("s"), Act("t", "", 1)]
    assert run(table_of([same, same])).stats["frac_dead_groups"] == 1.0
    short = table_of([[Act("s", "", 1)], [Act("s")], [Act("s")]])
    np.testing.assert_allclose(run(short).turns, 2 * Grpo().apply(short).turns, atol=1e-5)
    assert run(table_of([])).turns.shape == (0,)


def test_groups_do_not_share_their_graphs() -> None:
    games = [[Act("s"), Act("t", "", 1)], [Act("s"), Act("u")]]
    lost = [[Act("s"), Act("t")], [Act("s"), Act("u")]]
    table = table_of([*games, *lost], group=[0, 0, 1, 1])
    np.testing.assert_array_equal(run(table).turns[:4], run(table_of(games)).turns)
    assert not run(table).turns[4:].any()


def test_graphgpo_counts_the_states_from_which_nobody_won() -> None:
    stats = run(FIXTURE_A).stats
    assert stats["frac_lost_states"] == pytest.approx(3 / 11)
    assert stats["frac_lone_states"] == pytest.approx(1 / 11)
    assert stats["reward_sum"] == 2.0


def test_graphgpo_meets_the_protocol_and_stands_first() -> None:
    credit = GraphGpo()
    assert isinstance(credit, Credit)
    assert credit.needs_group
    credit.load_state_dict(credit.state_dict())
    with pytest.raises(UserError, match="first in the credit chain"):
        credit.apply(FIXTURE_A, Advantage(GRPO_A, np.ones(11)))
    with pytest.raises(ValueError, match="state_key"):
        credit.apply(replace(FIXTURE_A, state_key=()))


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("graph_advantage_w", -1.0),
        ("episode_advantage_w", float("nan")),
        ("omega", 0.0),
        ("omega", 1.5),
        ("scale", 0.0),
        ("form", "dijkstra"),
    ],
)
def test_graphgpo_settings_out_of_range_are_refused_by_name(knob: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"algorithm\.graphgpo\.{knob} is"):
        GraphGpoSettings(**{knob: value})
