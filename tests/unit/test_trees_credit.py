"""Trees of turns from the turn table, the methods on them, and shared turns that count once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turn_tables import by_turn, rows_in_order

from delta_belief_rl.algo.base import Advantage
from delta_belief_rl.algo.credit.at2po import ADVANTAGES, VALUES, At2poSettings, node_values
from delta_belief_rl.algo.credit.grpo import Grpo, GrpoSettings
from delta_belief_rl.algo.credit.tree import TreeGrpoSettings, node_advantages, tree_grpo
from delta_belief_rl.algo.credit.turn_trees import At2po, SharedOnce, TreeGrpo, tree_nodes
from delta_belief_rl.algo.shapers.channels import build_table
from delta_belief_rl.types import (
    Group,
    StopReason,
    Task,
    Trajectory,
    Turn,
    TurnTable,
    UserError,
    Verdict,
)

Lineage = tuple[tuple[int, int], ...]
TASK = Task("t", "tw_q", "oak", ())


def game(
    number: int,
    turns: int,
    lineage: Lineage = (),
    *,
    won: bool = False,
    stop: StopReason = StopReason.TURN_LIMIT,
    errors: Sequence[int] = (),
) -> Trajectory:
    """A game whose turns have two, three, ... tokens."""
    made: list[Turn] = []
    free = 1
    for index in range(turns):
        verdict = Verdict.ERROR if index in errors else Verdict.NO
        win = won and index == turns - 1
        end = free + 2 + index
        logprobs = tuple(-0.1 * (number + 1) for _ in range(2 + index))
        made.append(
            Turn(index, free, end, logprobs, 0, "q", "No", verdict, win, win)
            if not win
            else Turn(index, free, end, logprobs, 0, "q", "Yes", Verdict.WIN, win, win)
        )
        free = end + 1
    stop = StopReason.WIN if won else stop
    return Trajectory(TASK, number, tuple(range(free)), tuple(made), stop, lineage=lineage)


def table_of(*groups: Sequence[Trajectory]) -> TurnTable:
    """Outcomes of 1 and 0 on the last turns."""
    table = build_table([Group(TASK, tuple(games)) for games in groups])
    outcome = np.where(table.terminal & table.valid, table.won, 0.0).astype(np.float64)
    return replace(table, rewards={"outcome": outcome})


# Leaves below n1: a win and a loss; a win below n2. All of one tree.
TURNS = table_of(
    [
        game(0, 2, won=True),
        game(1, 2, ((0, 0), (1, 1))),
        game(2, 2, ((0, 0), (2, 0)), won=True),
    ]
)
# Two trees of two leaves: R = 1, 0, 1, 1.
PAIRS = table_of(
    [
        game(0, 2, won=True),
        game(1, 2, won=True),
        game(2, 2, ((0, 0), (2, 1))),
        game(3, 2, ((1, 0), (3, 1)), won=True),
    ]
)


def test_rows_of_a_shared_turn_are_one_node_and_games_of_a_lineage_one_tree() -> None:
    assert TURNS.node.tolist() == [0, 1, 0, 3, 4, 5]
    assert TURNS.tree.tolist() == [0] * 6
    assert PAIRS.node.tolist() == [0, 1, 2, 3, 0, 5, 2, 7]
    assert PAIRS.tree.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    trees, node = tree_nodes(TURNS)
    assert trees.parent.tolist() == [-1, 0, 1, 1, 0, 4]
    assert node.tolist() == [1, 2, 1, 3, 4, 5]
    assert trees.leaves().tolist() == [False, False, True, True, False, True]


def test_a_table_without_lineages_has_no_columns_of_trees_and_each_game_is_a_tree() -> None:
    table = table_of([game(0, 2, won=True), game(1, 3)], [game(0, 1)])
    assert table.tree.size == table.node.size == 0
    trees, node = tree_nodes(table)
    assert trees.parent.tolist() == [-1, -1, -1, 0, 3, 1, 5, 6, 2]
    assert node.tolist() == [3, 4, 5, 6, 7, 8]
    assert trees.group.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 1]


def test_the_turns_of_a_game_that_was_left_out_are_still_shared() -> None:
    """Game 0 was played and is not trained on; the games that left it meet in its turns."""
    games = [game(1, 3, ((0, 0), (1, 2))), game(2, 3, ((0, 0), (1, 2), (2, 2)), won=True)]
    games += [game(3, 3, ((0, 0), (3, 1)))]
    table = table_of(games)
    assert table.node.tolist() == [0, 1, 2, 0, 1, 5, 0, 7, 8]
    assert len(set(table.tree.tolist())) == 1


def test_equal_numbers_in_two_groups_are_not_the_same_turns() -> None:
    games = [game(0, 2), game(1, 2, ((0, 0), (1, 1)))]
    table = table_of(games, games)
    assert table.node.tolist() == [0, 1, 0, 3, 4, 5, 4, 7]
    assert table.tree.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # Leaves in the order of the games 0, 2, 1, 3 are those of the worked example.
        ("both", [1.207105, 0.499999, -2.207103, 0.499999]),
        ("tree", [0.707106, 0, -0.707106, 0]),
        ("nested", [0.707106, 0, -0.707106, 0]),
    ],
)
def test_A13_tree_grpo_pays_every_turn_of_a_game_its_leaf(mode: str, expected: list[float]) -> None:
    out = TreeGrpo(TreeGrpoSettings(mode)).apply(PAIRS)
    np.testing.assert_allclose(out.turns, np.repeat(expected, 2), atol=1e-5)
    assert out.weight.tolist() == [1.0] * 8
    assert out.stats["num_trees"] == 2.0
    assert out.stats["mean_tree_leaves"] == 2.0
    assert out.stats["frac_dead_groups"] == 0.0


def test_A13_at2po_pays_every_turn_its_node() -> None:
    """V(n1) = -.353553, V(n2) = .707105, z = .707105, -1.414211, .707105."""
    out = At2po().apply(TURNS)
    expected = [-0.353553, 0.707105, -0.353553, -1.414211, 0.707105, 0.707105]
    np.testing.assert_allclose(out.turns, expected, atol=1e-5)
    over = At2po(At2poSettings(advantage="parent")).apply(TURNS)
    assert over.turns[0] == over.turns[2] == pytest.approx(-0.530329, abs=1e-5)
    assert over.turns[1] == pytest.approx(1.060658, abs=1e-5)


def test_at2po_weighs_children_by_the_log_probs_of_the_turn() -> None:
    knobs = At2po(At2poSettings(value="entropy"))
    with pytest.raises(ValueError, match="log-probs"):
        knobs.apply(TURNS)
    # Surprisal .1 of the winning leaf and .2 of the losing one.
    tokens = np.concatenate([-0.1 * np.ones(2 + 3), [-0.1, -0.1], -0.2 * np.ones(3), np.zeros(5)])
    out = knobs.apply(replace(TURNS, tokens={"logp": tokens}))
    share = np.exp(0.1) / (np.exp(0.1) + np.exp(0.2))
    expected = share * 0.707105 + (1 - share) * -1.414211
    assert out.turns[0] == out.turns[2] == pytest.approx(expected, abs=1e-5)


# --- a shared turn once --------------------------------------------------------------------------


def test_shared_once_trains_a_turn_in_one_row_with_the_mean_of_its_leaves() -> None:
    soft = Grpo().apply(PAIRS)
    hard = SharedOnce().apply(PAIRS, soft)
    mean = (soft.turns[0] + soft.turns[4]) / 2, (soft.turns[2] + soft.turns[6]) / 2
    expected = [mean[0], soft.turns[1], mean[1], soft.turns[3], 0, soft.turns[5], 0, soft.turns[7]]
    np.testing.assert_allclose(hard.turns, expected)
    assert hard.weight.tolist() == [1, 1, 1, 1, 0, 1, 0, 1]
    assert hard.distil is None
    pulled = SharedOnce().apply(PAIRS, replace(soft, distil=soft.weight))
    assert pulled.distil is not None
    assert pulled.distil.tolist() == hard.weight.tolist()
    assert hard.stats["frac_shared_turns"] == 0.25
    np.testing.assert_allclose(soft.turns, Grpo().apply(PAIRS).turns)


def test_shared_once_trains_a_critic_towards_the_mean_of_the_leaves() -> None:
    row = PAIRS.token_row()
    wins = np.array([PAIRS.traj[r] % 2 for r in row], dtype=np.float64)
    before = replace(Grpo().apply(PAIRS), targets=wins)
    after = SharedOnce().apply(PAIRS, before)
    assert after.targets is not None
    kept = np.isfinite(after.targets)
    np.testing.assert_array_equal(kept, (after.weight > 0)[row])
    shared = np.bincount(PAIRS.node)[PAIRS.node][row] > 1
    assert shared.any()
    assert not shared.all()
    expected = [np.mean(wins[PAIRS.node[row] == node]) for node in PAIRS.node[row]]
    np.testing.assert_allclose(after.targets[kept], np.array(expected)[kept])


def test_no_turn_is_shared_where_none_counts() -> None:
    void = replace(PAIRS, valid=np.zeros(PAIRS.num_rows, dtype=np.bool_))
    assert SharedOnce().apply(void, Grpo().apply(void)).stats["frac_shared_turns"] == 0.0


def test_shared_once_behind_tree_grpo_is_the_mean_of_each_nodes_leaves() -> None:
    trees, node = tree_nodes(PAIRS)
    want = node_advantages(trees, tree_grpo(trees))[node]
    got = SharedOnce().apply(PAIRS, TreeGrpo().apply(PAIRS))
    np.testing.assert_allclose(got.turns[got.weight > 0], want[got.weight > 0])


def test_shared_once_behind_at2po_leaves_the_values_and_takes_the_copies_out() -> None:
    before = At2po().apply(TURNS)
    after = SharedOnce().apply(TURNS, before)
    np.testing.assert_allclose(after.turns[after.weight > 0], before.turns[after.weight > 0])
    assert after.weight.tolist() == [1, 1, 0, 1, 1, 1]


def test_shared_once_takes_the_mean_of_each_token() -> None:
    before = Grpo().apply(TURNS)
    row = TURNS.token_row()
    tokens = before.turns[row] + np.linspace(0, 1, len(row))
    out = SharedOnce().apply(TURNS, replace(before, tokens=tokens)).tokens
    assert out is not None
    # Game 0 has tokens 0..4, game 1 tokens 5..9; both begin with the same two.
    np.testing.assert_allclose(out[:2], (tokens[:2] + tokens[5:7]) / 2)
    np.testing.assert_allclose(out[2:5], tokens[2:5])
    assert out[5:7].tolist() == [0, 0]
    np.testing.assert_allclose(out[7:], tokens[7:])


def test_a_copy_in_a_game_without_an_outcome_does_not_count() -> None:
    """The first game that holds the turn has failed, so the second one trains it alone."""
    games = [
        game(0, 2, stop=StopReason.ENGINE_FAILED),
        game(1, 2, ((0, 0), (1, 1)), won=True),
        game(2, 2, ((0, 0), (2, 1))),
    ]
    table = table_of(games)
    soft = Grpo().apply(table)
    assert soft.weight.tolist() == [0, 0, 1, 1, 1, 1]
    hard = SharedOnce().apply(table, soft)
    assert hard.weight.tolist() == [0, 0, 1, 1, 0, 1]
    assert hard.turns[2] == pytest.approx((soft.turns[2] + soft.turns[4]) / 2)
    assert hard.stats["frac_shared_turns"] == 0.25


def test_a_turn_whose_judge_failed_is_trained_in_no_game() -> None:
    games = [game(0, 3, errors=[0]), game(1, 3, ((0, 0), (1, 2)), won=True, errors=[0])]
    hard = SharedOnce().apply(table_of(games), Grpo().apply(table_of(games)))
    assert hard.weight.tolist() == [0, 1, 1, 0, 0, 1]


def test_without_trees_shared_once_changes_nothing() -> None:
    table = table_of([game(0, 2, won=True), game(1, 3)])
    before = Grpo().apply(table)
    after = SharedOnce().apply(table, before)
    np.testing.assert_array_equal(after.turns, before.turns)
    np.testing.assert_array_equal(after.weight, before.weight)
    assert after.stats["frac_shared_turns"] == 0.0


def test_a_branch_that_failed_at_once_has_no_leaf_and_changes_no_other() -> None:
    games = [game(0, 3, won=True), game(1, 3, ((0, 0), (1, 1)))]
    failed = game(2, 1, ((0, 0), (2, 1)), stop=StopReason.ENGINE_FAILED)
    for method in (TreeGrpo(), At2po(), Grpo()):
        without = method.apply(table_of(games)).turns
        got = method.apply(table_of([*games, failed])).turns
        np.testing.assert_allclose(got[:6], without)
        assert got[6] == 0.0


def test_the_order_of_a_chain_is_checked() -> None:
    with pytest.raises(UserError, match="shared_once"):
        SharedOnce().apply(TURNS)
    for method, name in ((TreeGrpo(), "tree_grpo"), (At2po(), "at2po")):
        with pytest.raises(UserError, match=name):
            method.apply(TURNS, Grpo().apply(TURNS))
        assert method.needs_group
        assert method.state_dict() == {}
    assert not SharedOnce().needs_group


# --- reductions and invariances ------------------------------------------------------------------


@st.composite
def forests(draw: st.DrawFn) -> TurnTable:
    """Some groups of games that leave one another, some of which have failed."""
    groups: list[list[Trajectory]] = []
    for _ in range(draw(st.integers(1, 2))):
        games: list[Trajectory] = []
        for number in range(draw(st.integers(1, 5))):
            lineage: Lineage = ()
            shared = 0
            parents = [g for g in games if g.num_turns > 1]
            if parents and draw(st.booleans()):
                parent = draw(st.sampled_from(parents))
                shared = draw(st.integers(0, parent.num_turns - 1))
                own = parent.lineage or ((parent.game, 0),)
                kept = tuple(pair for pair in own[1:] if pair[1] < shared)
                lineage = (own[0], *kept, (number, shared))
            failed = draw(st.integers(0, 5)) == 0
            stop = StopReason.JUDGE_FAILED if failed else StopReason.TURN_LIMIT
            length = shared + draw(st.integers(1, 3))
            won = not failed and draw(st.booleans())
            games.append(game(number, length, lineage, won=won, stop=stop))
        groups.append(games)
    return table_of(*groups)


METHODS = {
    **{f"tree_grpo/{m}": TreeGrpo(TreeGrpoSettings(m)) for m in ("both", "tree", "nested")},
    **{f"at2po/{v}/{a}": At2po(At2poSettings(v, a)) for v in VALUES[:2] for a in ADVANTAGES},
}


@settings(max_examples=40, deadline=None)
@given(table=forests(), name=st.sampled_from(sorted(METHODS)), seed=st.integers(0, 9))
def test_the_order_of_the_rows_does_not_matter(table: TurnTable, name: str, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(table.num_rows)
    moved = rows_in_order(table, order)
    if len(table.node):
        moved = replace(moved, node=table.node[order], tree=table.tree[order])
    plain, other = METHODS[name].apply(table), METHODS[name].apply(moved)
    here, there = by_turn(table, plain.turns), by_turn(moved, other.turns)
    assert there == pytest.approx(here, abs=1e-9)
    once, again = SharedOnce().apply(table, plain), SharedOnce().apply(moved, other)
    assert once.weight.sum() == again.weight.sum()
    total = float((once.turns * table.n_tokens).sum())
    assert float((again.turns * moved.n_tokens).sum()) == pytest.approx(total, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(table=forests(), name=st.sampled_from(sorted(METHODS)))
def test_A9_junk_on_turns_that_are_not_valid_changes_nothing(table: TurnTable, name: str) -> None:
    junk = {n: np.where(table.valid, value, 999.0) for n, value in table.rewards.items()}
    dirty = METHODS[name].apply(replace(table, rewards=junk))
    clean = METHODS[name].apply(table)
    np.testing.assert_array_equal(dirty.turns, clean.turns)
    assert not dirty.turns[~table.valid].any()
    once = SharedOnce().apply(table, replace(clean, turns=np.where(table.valid, clean.turns, 7.0)))
    np.testing.assert_array_equal(once.turns, SharedOnce().apply(table, clean).turns)


@settings(max_examples=40, deadline=None)
@given(table=forests())
def test_A5_every_shared_turn_is_counted_exactly_once_and_with_the_mean(table: TurnTable) -> None:
    soft = Grpo(GrpoSettings(norm_adv_by_std_in_grpo=False)).apply(table)
    hard = SharedOnce().apply(table, soft)
    node = table.node if len(table.node) else np.arange(table.num_rows)
    for name in np.unique(node):
        rows = np.flatnonzero((node == name) & table.valid)
        assert hard.weight[rows].sum() == min(len(rows), 1)
        if len(rows):
            assert hard.turns[rows].sum() == pytest.approx(soft.turns[rows].mean())


@settings(max_examples=40, deadline=None)
@given(table=forests())
def test_leaf_means_of_the_value_are_zero_at_the_opening_of_a_tree(table: TurnTable) -> None:
    trees, _ = tree_nodes(table)
    value = node_values(trees, At2poSettings(value="leaf_mean"))
    np.testing.assert_allclose(value[trees.parent < 0], 0.0, atol=1e-6)


@pytest.mark.parametrize("won", [True, False])
def test_A3_groups_in_which_all_games_end_alike_teach_nothing(won: bool) -> None:
    games = [game(0, 2, won=won), game(1, 3, ((0, 0), (1, 1)), won=won)]
    for table in (table_of(games), table_of(games[:1]), table_of([game(0, 1, won=won)])):
        for method in (TreeGrpo(), At2po()):
            out = method.apply(table)
            assert not out.turns.any()
            assert out.stats["frac_dead_groups"] == 1.0


def test_tree_grpo_without_shared_turns_is_grpo() -> None:
    table = table_of([game(0, 2, won=True), game(1, 3), game(2, 1, won=True)])
    both: Advantage = TreeGrpo().apply(table)
    np.testing.assert_allclose(both.turns, Grpo().apply(table).turns)
    assert both.stats["reward_sum"] == 2.0
