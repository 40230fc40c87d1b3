"""GiGPO and HGPO: worked examples, plain loops, what they reduce to, states and edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.algo import CREDITS, SCORERS, build_credit
from delta_belief_rl.algo.base import (
    HOOK_COLUMNS,
    LOGP,
    VALUES,
    VIEW,
    Advantage,
    Credit,
    check_requires,
)
from delta_belief_rl.algo.credit.archer import Q, V
from delta_belief_rl.algo.credit.groups import return_to_go
from delta_belief_rl.algo.credit.istar import PRM
from delta_belief_rl.algo.credit.spa_rl import CONTRIBUTION
from delta_belief_rl.algo.credit.states import history_numbers, state_numbers
from delta_belief_rl.algo.shapers.channels import ChannelShaper
from delta_belief_rl.types import FloatArray, TurnTable, UserError

EXACT = 1e-9
LEARNT = (CONTRIBUTION, PRM, f"tokens:{Q}", f"tokens:{V}")
TOKENS = (LOGP, VALUES, *LEARNT, *(f"{VIEW}{name}" for name in SCORERS))
"""Everything that a run can know of a token."""
Games = Sequence[Sequence[tuple[str, float]]]


def table_of(
    games: Games,
    group: Sequence[int] | None = None,
    invalid: Sequence[tuple[int, int]] = (),
) -> TurnTable:
    """A table from the state and the reward of each turn; ``invalid`` lists (game, turn)."""
    rows = [(i, k) for i, game in enumerate(games) for k in range(len(game))]
    traj = np.array([i for i, _ in rows], dtype=np.int64)
    return TurnTable(
        group=np.array(group or [0] * len(games), dtype=np.int64)[traj],
        traj=traj,
        turn=np.array([k for _, k in rows], dtype=np.int64),
        n_tokens=np.ones(len(rows), dtype=np.int64),
        valid=np.array([row not in invalid for row in rows], dtype=np.bool_),
        terminal=np.array([k == len(games[i]) - 1 for i, k in rows], dtype=np.bool_),
        truncated=np.zeros(len(rows), dtype=np.bool_),
        won=np.zeros(len(rows), dtype=np.bool_),
        state_key=tuple(games[i][k][0] for i, k in rows),
        rewards={"outcome": np.array([games[i][k][1] for i, k in rows], dtype=np.float64)},
    )


def run(name: str, table: TurnTable, **knobs: object) -> Advantage:
    return build_credit(name, knobs).apply(table)


FIXTURE_A = table_of(
    [
        [("s0", 0), ("s1", 0), ("s2", 1)],
        [("s0", 0), ("s1", 0), ("s3", 0)],
        [("s0", 0), ("s2", 1)],
        [("s0", 0), ("s4", 0), ("s4", 0)],
    ]
)
STEPS = [0.3825, 0.45, 0, -0.4275, -0.45, 0, 0.4725, 0, -0.4275, 0, 0]
SCALED = [0.772726, 0.707106, 0, -0.863635, -0.707106, 0, 0.954544, 0, -0.863635, 0, 0]
SIGNS = np.array([1, -1, 1, -1])[FIXTURE_A.traj]
BY_TURN = [
    *(0.927955, 0.995455, 0.545455, -0.882045, -0.904545, -0.454545),
    *(1.017955, 0.545455, -0.882045, -0.454545, -0.454545),
]
HISTORY = [0.892266, 0.999998, 0, -0.997239, -0.999998, 0, 1.102211, 0, -0.997239, 0, 0]

# --- worked examples ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({"norm_adv_by_std_in_grpo": False}, 0.5 * SIGNS + STEPS),
        ({}, 0.866024 * SIGNS + SCALED),
        ({"norm_adv_by_std_in_grpo": False, "episode_weighting": "turn"}, BY_TURN),
        (
            {"norm_adv_by_std_in_grpo": False, "step_advantage_w": 2.0},
            0.5 * SIGNS + 2 * np.array(STEPS),
        ),
    ],
)
def test_A13_gigpo_matches_its_worked_example(
    knobs: dict[str, object], expected: Sequence[float]
) -> None:
    np.testing.assert_allclose(
        run("gigpo", FIXTURE_A, gamma=0.9, **knobs).turns, expected, atol=1e-5
    )


def test_A13_hgpo_matches_its_worked_example() -> None:
    got = run("hgpo", FIXTURE_A, gamma=0.9, history=1).turns
    np.testing.assert_allclose(got, HISTORY, atol=1e-5)


def test_hgpo_worked_by_hand() -> None:
    """Turn 1 of three games: two came to ``b`` from ``a``, one from ``c``; returns 1, 0 and 0.5.

    All three are compared at depth 1 (mean 0.5), the first two at depth 2 (mean 0.5): weights 2, 3.
    """
    games = [[("a", 0), ("b", 1)], [("a", 0), ("b", 0)], [("c", 0), ("b", 0.5)]]
    plain = {"norm_adv_by_std_in_grpo": False, "gamma": 1.0, "history": 1}
    turns = table_of(games).grid(run("hgpo", table_of(games), **plain).turns)
    np.testing.assert_allclose(turns, [[0.5, 0.5], [-0.5, -0.5], [0, 0]])
    games[2] = [("c", 0), ("b", 2.0)]
    turns = table_of(games).grid(run("hgpo", table_of(games), **plain).turns)
    np.testing.assert_allclose(turns[0, 1], 0.5)  # at depth 1 it lies at the mean
    np.testing.assert_allclose(turns[1, 1], (2 * -1 + 3 * -0.5) / 5)
    np.testing.assert_allclose(turns[2, 1], 1.0)
    kept = run("hgpo", table_of(games), **plain, length_weight_alpha=0.0).turns
    np.testing.assert_allclose(table_of(games).grid(kept)[1, 1], (-1 - 0.5) / 2)


def test_hgpo_averages_zeros_in_when_asked_to() -> None:
    games = [[("a", 0), ("b", 1)], [("a", 0), ("b", 0)], [("c", 0), ("b", 2.0)]]
    plain = {"norm_adv_by_std_in_grpo": False, "gamma": 1.0, "history": 1}
    turn = table_of(games).grid(run("hgpo", table_of(games), **plain, skip_zero=False).turns)[0, 1]
    np.testing.assert_allclose(turn, (2 * 0.0 + 3 * 0.5) / 5)
    skipped = table_of(games).grid(run("hgpo", table_of(games), **plain).turns)[0, 1]
    np.testing.assert_allclose(skipped, 0.5)


# --- plain loops ----------------------------------------------------------------------------------


def returns_of(table: TurnTable, gamma: float) -> FloatArray:
    grid = return_to_go(table.grid(np.where(table.valid, table.rewards["outcome"], 0.0)), gamma)
    return grid[table.traj, table.turn]


def loop_gigpo(table: TurnTable, gamma: float) -> FloatArray:
    """The step term, row by row, divided."""
    returns, out = returns_of(table, gamma), np.zeros(table.num_rows)
    for row in np.flatnonzero(table.valid):
        same = [
            other
            for other in np.flatnonzero(table.valid)
            if table.group[other] == table.group[row]
            and table.state_key[other] == table.state_key[row]
        ]
        values = returns[same]
        if len(values) > 1 and np.ptp(values) > EXACT:
            out[row] = (returns[row] - values.mean()) / (values.std(ddof=1) + 1e-6)
    return out


def last_states(table: TurnTable, row: int, length: int) -> tuple[str, ...] | None:
    game = [i for i in range(table.num_rows) if table.traj[i] == table.traj[row]]
    keys = [table.state_key[i] for i in game if table.turn[i] <= table.turn[row]]
    return tuple(keys[-length:]) if len(keys) >= length else None


def loop_hgpo(
    table: TurnTable, gamma: float, history: int, alpha: float, *, skip: bool, base: bool
) -> FloatArray:
    returns, out = returns_of(table, gamma), np.zeros(table.num_rows)
    scores = table.grid(np.where(table.valid, table.rewards["outcome"], 0.0)).sum(axis=1)
    for row in np.flatnonzero(table.valid):
        items: list[tuple[float, float]] = []
        for depth in range(0 if base else 1, history + 2):
            mine = last_states(table, row, depth) if depth else ()
            same = [
                other
                for other in np.flatnonzero(table.valid)
                if mine is not None
                and table.group[other] == table.group[row]
                and (not depth or last_states(table, other, depth) == mine)
            ]
            values, own = returns[same], returns[row]
            if not depth:
                values, own = scores[np.unique(table.traj[same])], scores[table.traj[row]]
            if len(values) < 2:
                continue
            item = (own - values.mean()) / (values.std() + 1e-6) if np.ptp(values) > EXACT else 0.0
            if not skip or abs(item) > EXACT:
                items.append(((depth + 1) ** alpha, item))
        if items:
            out[row] = sum(w * a for w, a in items) / sum(w for w, _ in items)
    return out


played = st.lists(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(-4, 4).map(float)), min_size=1, max_size=4
    ),
    min_size=2,
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(games=played, gamma=st.sampled_from([1.0, 0.5]), lost=st.booleans())
def test_gigpo_equals_the_plain_loop(games: Games, gamma: float, lost: bool) -> None:
    table = table_of(games, [i % 2 for i in range(len(games))], invalid=[(0, 0)] if lost else [])
    both = run("gigpo", table, gamma=gamma).turns
    whole = run("gigpo", table, gamma=gamma, step_advantage_w=0.0).turns
    np.testing.assert_allclose(both - whole, loop_gigpo(table, gamma), atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(
    games=played,
    history=st.integers(0, 5),
    alpha=st.sampled_from([0.0, 1.0, 2.0]),
    skip=st.booleans(),
    base=st.booleans(),
    lost=st.booleans(),
)
def test_hgpo_equals_the_plain_loop(
    games: Games, history: int, alpha: float, skip: bool, base: bool, lost: bool
) -> None:
    table = table_of(games, [i % 2 for i in range(len(games))], invalid=[(0, 0)] if lost else [])
    knobs = {"length_weight_alpha": alpha, "skip_zero": skip, "base_group": base}
    got = run("hgpo", table, gamma=0.5, history=history, **knobs).turns
    want = loop_hgpo(table, 0.5, history, alpha, skip=skip, base=base)
    np.testing.assert_allclose(got, want, atol=1e-7)


# --- what they reduce to --------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(games=played, divided=st.booleans())
def test_gigpo_without_its_step_term_is_grpo(games: Games, divided: bool) -> None:
    table = table_of(games)
    plain = {"norm_adv_by_std_in_grpo": divided}
    np.testing.assert_allclose(
        run("gigpo", table, step_advantage_w=0.0, **plain).turns, run("grpo", table, **plain).turns
    )


@settings(max_examples=20, deadline=None)
@given(games=played)
def test_gigpo_where_no_state_is_met_twice_is_grpo(games: Games) -> None:
    table = table_of(games)
    alone = replace(table, state_key=tuple(f"s{row}" for row in range(table.num_rows)))
    advantage = run("gigpo", alone)
    np.testing.assert_allclose(advantage.turns, run("grpo", alone).turns)
    assert advantage.stats["frac_lone_states"] == 1.0
    assert not run("hgpo", alone).turns.any()


@settings(max_examples=20, deadline=None)
@given(games=played)
def test_hgpo_without_history_is_the_step_term_of_gigpo(games: Games) -> None:
    table = table_of(games)
    plain = {"norm_adv_by_std_in_grpo": False, "gamma": 0.5}
    both = run("gigpo", table, **plain).turns
    whole = run("gigpo", table, step_advantage_w=0.0, **plain).turns
    for skip in (True, False):
        got = run("hgpo", table, history=0, skip_zero=skip, **plain).turns
        np.testing.assert_allclose(got, both - whole, atol=EXACT)


@settings(max_examples=20, deadline=None)
@given(games=played)
def test_states_that_are_all_equal_and_games_of_one_turn_give_grpo_twice(games: Games) -> None:
    short = table_of([[("s", game[0][1])] for game in games])
    np.testing.assert_allclose(run("gigpo", short).turns, 2 * run("grpo", short).turns)


# --- states and edges -----------------------------------------------------------------------------


def test_states_of_different_groups_are_different() -> None:
    games = [[("s", 0.0), ("t", 1.0)], [("s", 0.0), ("t", 0.0)]] * 2
    table = table_of(games, [0, 0, 1, 1])
    numbers = state_numbers(table)
    assert len(set(numbers[:4])) == 2
    assert set(numbers[:4]).isdisjoint(numbers[4:])
    for name in ("gigpo", "hgpo"):
        both, one = run(name, table).turns, run(name, table_of(games[:2])).turns
        np.testing.assert_allclose(both[:4], one)
        np.testing.assert_allclose(both[4:], one)


def test_repeated_visits_inside_one_game_are_compared() -> None:
    table = table_of([[("s", 1.0), ("s", 0.0)], [("t", 0.0)]])
    steps = run("gigpo", table, norm_adv_by_std_in_grpo=False, gamma=1.0).turns - [0.5, 0.5, -0.5]
    np.testing.assert_allclose(steps, [0.5, -0.5, 0])


def test_a_history_is_as_long_as_asked_for_and_ends_with_the_own_state() -> None:
    games = [[("a", 0), ("b", 0), ("c", 0)], [("x", 0), ("b", 0), ("c", 0)], [("c", 0)]]
    table = table_of(games)
    numbers, deep = history_numbers(table, 2)
    assert deep.tolist() == [False, True, True, False, True, True, False]
    assert numbers[2] == numbers[5]
    assert numbers[1] != numbers[4]
    longest, deep = history_numbers(table, 3)
    assert longest[2] != longest[5]
    assert np.flatnonzero(deep).tolist() == [2, 5]


def test_A3_states_are_counted_and_dead_groups_too() -> None:
    advantage = run("gigpo", FIXTURE_A)
    # s0 four times, s1, s2 and s4 twice, s3 once.
    assert advantage.stats["mean_state_group_size"] == pytest.approx(11 / 5)
    assert advantage.stats["frac_lone_states"] == pytest.approx(1 / 11)
    flat = table_of([[("s", 0.0), ("t", 0.0)], [("s", 0.0)]])
    for name in ("gigpo", "hgpo"):
        dead = run(name, flat)
        assert not dead.turns.any()
        assert dead.stats["frac_dead_groups"] == 1.0


def test_J1_turns_that_are_not_valid_are_neither_compared_nor_counted() -> None:
    games = [[("s", 1.0)], [("s", 0.0)], [("s", 9.0)]]
    two, three = table_of(games[:2]), table_of(games, invalid=[(2, 0)])
    for name in ("gigpo", "hgpo"):
        whole, part = run(name, three), run(name, two)
        np.testing.assert_allclose(whole.turns, [*part.turns, 0])
        for stat in ("mean_state_group_size", "frac_lone_states"):
            assert whole.stats[stat] == part.stats[stat]


@pytest.mark.parametrize("name", ["gigpo", "hgpo"])
def test_a_table_without_states_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="state_key"):
        run(name, replace(FIXTURE_A, state_key=()))


# --- what a method needs --------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CREDITS))
def test_every_method_needs_only_what_a_run_makes(name: str) -> None:
    credit = build_credit(name)
    check_requires(credit, HOOK_COLUMNS, ChannelShaper.provides, "maze", TOKENS)
    assert "valid" in credit.requires
    known = {item.name for item in fields(TurnTable)} | {*ChannelShaper.provides, *TOKENS}
    assert set(credit.requires) <= known
    for needed in set(credit.requires) & set(TOKENS):
        others = [name for name in TOKENS if name != needed]
        with pytest.raises(UserError, match=f"needs {needed}, which nothing in this run makes"):
            check_requires(credit, HOOK_COLUMNS, ChannelShaper.provides, "maze", others)


@pytest.mark.parametrize("name", list(CREDITS))
def test_only_methods_that_compare_states_need_the_hook(name: str) -> None:
    credit = build_credit(name)
    if "state_key" not in credit.requires:
        hooks = set(HOOK_COLUMNS) & set(credit.requires)
        check_requires(credit, hooks, ChannelShaper.provides, "maze", TOKENS)
        assert hooks == ({"footprint"} if name == "graph_opd" else set())
        return
    assert name in ("gigpo", "hgpo", "graphgpo", "state_progress", "relace")
    with pytest.raises(UserError) as caught:
        check_requires(credit, ("progress",), ChannelShaper.provides, "maze", TOKENS)
    assert str(caught.value) == (
        f"{type(credit).__name__} needs the hook state_key, which the environment maze does not "
        "have: add state_key() to it, or choose another algorithm.adv_estimator."
    )


def test_a_reward_channel_that_no_shaper_makes_is_refused_by_name() -> None:
    credit: Credit = build_credit("mt_grpo")
    with pytest.raises(UserError, match="MtGrpo needs reward:outcome, which nothing"):
        check_requires(credit, HOOK_COLUMNS, ("reward:belief",), "maze")
