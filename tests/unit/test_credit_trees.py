"""Trees of turns: Tree-GRPO and AT2PO against worked numbers, plain recursions and edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_belief_rl.algo.credit.at2po import (
    ADVANTAGES,
    VALUES,
    At2poSettings,
    at2po,
    leaf_scores,
    node_values,
)
from delta_belief_rl.algo.credit.grpo import Grpo, GrpoSettings
from delta_belief_rl.algo.credit.tree import (
    MODES,
    TreeGrpoSettings,
    TreeTable,
    depths,
    leaf_counts,
    node_advantages,
    tree_grpo,
)
from delta_belief_rl.types import FloatArray, IntArray, TurnTable, UserError


def tree_of(
    parent: Sequence[int],
    reward: Sequence[float],
    group: Sequence[int] | None = None,
    invalid: Sequence[int] = (),
    surprisal: Sequence[float] | None = None,
) -> TreeTable:
    size = len(parent)
    return TreeTable(
        parent=np.array(parent, dtype=np.int64),
        group=np.array([0] * size if group is None else group, dtype=np.int64),
        reward=np.array(reward, dtype=np.float64),
        valid=~np.isin(np.arange(size), invalid),
        surprisal=np.array([0.0] * size if surprisal is None else surprisal, dtype=np.float64),
    )


# Two trees of two leaves; leaves are the rows 1, 2, 4 and 5.
PAIRS = tree_of([-1, 0, 0, -1, 3, 3], [0, 1, 0, 0, 1, 1])
# A prompt, n1 and n2, the leaves 0 and 1 below n1 and leaf 2 below n2.
TURNS = tree_of([-1, 0, 0, 1, 1, 2], [0, 0, 0, 1, 0, 1])
LEAVES = [3, 4, 5]


# --- Tree-GRPO -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("both", [1.207105, -2.207103, 0.499999, 0.499999]),
        ("tree", [0.707106, -0.707106, 0, 0]),
        ("nested", [0.707106, -0.707106, 0, 0]),
    ],
)
def test_A13_tree_grpo_matches_its_worked_example(mode: str, expected: list[float]) -> None:
    got = tree_grpo(PAIRS, TreeGrpoSettings(mode))
    np.testing.assert_allclose(got[[1, 2, 4, 5]], expected, atol=1e-5)
    assert not got[[0, 3]].any()


def test_tree_grpo_without_division_is_the_sum_of_two_differences() -> None:
    plain = TreeGrpoSettings(norm_adv_by_std_in_grpo=False)
    np.testing.assert_allclose(tree_grpo(PAIRS, plain), [0, 0.75, -1.25, 0, 0.25, 0.25])


def games_of(table: TreeTable) -> TurnTable:
    """The counted leaves as games of one turn."""
    rows = np.flatnonzero(table.counted())
    flags = np.ones(len(rows), dtype=np.bool_)
    return TurnTable(
        group=table.group[rows],
        traj=np.arange(len(rows)),
        turn=np.zeros(len(rows), dtype=np.int64),
        n_tokens=np.ones(len(rows), dtype=np.int64),
        valid=flags,
        terminal=flags,
        truncated=~flags,
        won=~flags,
        rewards={"outcome": table.reward[rows]},
    )


@st.composite
def trees(draw: st.DrawFn) -> TreeTable:
    """Some trees of two groups, in which a node follows its parent."""
    parent, group = [-1, -1], [0, 1]
    for _ in range(draw(st.integers(1, 14))):
        above = draw(st.integers(-1, len(parent) - 1))
        parent.append(above)
        group.append(group[above] if above >= 0 else draw(st.integers(0, 1)))
    size = len(parent)
    reward = draw(st.lists(st.integers(-2, 2).map(float), min_size=size, max_size=size))
    surprisal = draw(st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=size, max_size=size))
    invalid = draw(st.lists(st.integers(0, size - 1), max_size=3))
    return tree_of(parent, reward, group, invalid, surprisal)


def in_order(table: TreeTable, order: IntArray) -> TreeTable:
    """The same trees, node ``i`` being node ``order[i]`` of ``table``."""
    place = np.argsort(order)
    above = table.parent[order]
    return TreeTable(
        parent=np.where(above >= 0, place[above], -1),
        group=table.group[order],
        reward=table.reward[order],
        valid=table.valid[order],
        surprisal=table.surprisal[order],
    )


@settings(max_examples=40, deadline=None)
@given(table=trees(), divided=st.booleans())
def test_one_tree_for_each_group_is_grpo_twice(table: TreeTable, divided: bool) -> None:
    roots = np.unique(table.roots(), return_inverse=True)[1]
    alone = replace(table, group=roots)
    rows = np.flatnonzero(alone.counted())
    games = Grpo(GrpoSettings(divided)).apply(games_of(alone)).turns
    for mode, times in (("both", 2.0), ("tree", 1.0)):
        got = tree_grpo(alone, TreeGrpoSettings(mode, divided))
        np.testing.assert_allclose(got[rows], times * games)


@settings(max_examples=40, deadline=None)
@given(table=trees())
def test_trees_of_one_leaf_are_grpo(table: TreeTable) -> None:
    rows = np.flatnonzero(table.counted())
    roots = np.full(len(rows), -1)
    chains = tree_of(
        [*roots, *range(len(rows))],
        [*np.zeros(len(rows)), *table.reward[rows]],
        [*table.group[rows], *table.group[rows]],
    )
    got = tree_grpo(chains)
    np.testing.assert_allclose(got[len(rows) :], Grpo().apply(games_of(table)).turns)
    assert not tree_grpo(chains, TreeGrpoSettings("tree")).any()


def test_a_shared_turn_has_the_mean_of_its_games() -> None:
    leaf = np.array([9.0, 9.0, 9.0, 1.0, 2.0, 4.0])
    np.testing.assert_allclose(node_advantages(TURNS, leaf), [0, 1.5, 4, 1, 2, 4])
    assert leaf_counts(TURNS).tolist() == [3, 2, 1, 1, 1, 1]
    lost = replace(TURNS, valid=np.array([True, True, True, True, False, False]))
    np.testing.assert_allclose(node_advantages(lost, leaf), [0, 1, 0, 1, 0, 0])
    assert leaf_counts(lost).tolist() == [1, 1, 0, 1, 0, 0]


# --- AT2PO ---------------------------------------------------------------------------------------


def test_A13_at2po_matches_its_worked_example() -> None:
    np.testing.assert_allclose(
        leaf_scores(TURNS)[LEAVES], [0.707105, -1.414211, 0.707105], atol=1e-5
    )
    value = node_values(TURNS)
    np.testing.assert_allclose(value[:3], [0.176776, -0.353553, 0.707105], atol=1e-5)
    by_leaves = node_values(TURNS, At2poSettings("leaf_mean"))
    np.testing.assert_allclose(by_leaves[:3], [0, -0.353553, 0.707105], atol=1e-5)
    over_parent = at2po(TURNS, At2poSettings(advantage="parent"))
    np.testing.assert_allclose(over_parent[[1, 3]], [-0.530329, 1.060658], atol=1e-5)


def test_the_four_advantages_are_differences_of_values() -> None:
    value = node_values(TURNS)
    above, root = value[np.maximum(TURNS.parent, 0)], value[0]
    got = {name: at2po(TURNS, At2poSettings(advantage=name))[1:] for name in ADVANTAGES}
    np.testing.assert_allclose(got["value"], value[1:])
    np.testing.assert_allclose(got["parent"], (value - above)[1:])
    np.testing.assert_allclose(got["root"], (value - root)[1:])
    np.testing.assert_allclose(got["both"], (2 * value - above - root)[1:])
    for name in ADVANTAGES:
        assert at2po(TURNS, At2poSettings(advantage=name))[0] == 0.0


def test_uncertain_turns_weigh_more_in_their_parent() -> None:
    table = replace(TURNS, surprisal=np.array([9.0, np.log(3.0), 0.0, 0.0, 0.0, 0.0]))
    value = node_values(table, At2poSettings("entropy"))
    np.testing.assert_allclose(value[0], (3 * value[1] + value[2]) / 4)
    np.testing.assert_allclose(value[1], -0.353553, atol=1e-5)
    far = replace(TURNS, surprisal=np.array([0.0, 800.0, 0.0, 0.0, 0.0, 0.0]))
    np.testing.assert_allclose(node_values(far, At2poSettings("entropy"))[0], value[1])


def recursive(table: TreeTable, scores: FloatArray, node: int, how: str) -> float | None:
    """``V`` from the definition; None where no counted leaf lies below."""
    children = np.flatnonzero(table.parent == node)
    if not len(children):
        return float(scores[node]) if table.counted()[node] else None
    found = {int(c): recursive(table, scores, int(c), how) for c in children}
    known = {c: value for c, value in found.items() if value is not None}
    if not known:
        return None
    sure = np.array([np.exp(table.surprisal[c]) if how == "entropy" else 1.0 for c in known])
    return float((sure * list(known.values())).sum() / sure.sum())


def leaves_below(table: TreeTable, node: int) -> list[int]:
    children = np.flatnonzero(table.parent == node)
    if not len(children):
        return [node] if table.counted()[node] else []
    return [leaf for child in children for leaf in leaves_below(table, int(child))]


@settings(max_examples=60, deadline=None)
@given(table=trees(), how=st.sampled_from(VALUES))
def test_values_equal_the_recursion(table: TreeTable, how: str) -> None:
    scores, got = leaf_scores(table), node_values(table, At2poSettings(how))
    for node in range(table.num_nodes):
        if how == "leaf_mean":
            below = leaves_below(table, node)
            want = float(scores[below].mean()) if below else None
        else:
            want = recursive(table, scores, node, how)
        assert got[node] == pytest.approx(want or 0.0, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(table=trees())
def test_where_all_surprisals_are_equal_the_entropy_weights_are_the_mean(table: TreeTable) -> None:
    equal = replace(table, surprisal=np.full(table.num_nodes, 2.0))
    np.testing.assert_allclose(
        node_values(equal, At2poSettings("entropy")), node_values(equal), atol=1e-12
    )


@settings(max_examples=40, deadline=None)
@given(table=trees())
def test_differences_to_the_parent_add_up_to_the_difference_to_the_root(table: TreeTable) -> None:
    over_parent = at2po(table, At2poSettings(advantage="parent"))
    over_root = at2po(table, At2poSettings(advantage="root"))
    for leaf in np.flatnonzero(table.counted()):
        way, node = 0.0, int(leaf)
        while node >= 0:
            way, node = way + over_parent[node], int(table.parent[node])
        assert way == pytest.approx(over_root[leaf], abs=1e-9)


# --- orders, shards, junk, edges -----------------------------------------------------------------


def everything(table: TreeTable) -> list[FloatArray]:
    """Every form of both methods."""
    out = [tree_grpo(table, TreeGrpoSettings(mode)) for mode in MODES]
    return out + [at2po(table, At2poSettings(v, a)) for v in VALUES for a in ADVANTAGES]


@settings(max_examples=40, deadline=None)
@given(table=trees(), data=st.data())
def test_A9_trees_do_not_depend_on_the_order_of_nodes(
    table: TreeTable, data: st.DataObject
) -> None:
    order = np.array(data.draw(st.permutations(range(table.num_nodes))), dtype=np.int64)
    for straight, mixed in zip(everything(table), everything(in_order(table, order)), strict=True):
        np.testing.assert_allclose(mixed, straight[order], atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(table=trees())
def test_A11_a_group_does_not_depend_on_the_other_groups(table: TreeTable) -> None:
    for group in (0, 1):
        rows = np.flatnonzero(table.group == group)
        place = np.full(table.num_nodes + 1, -1)
        place[rows] = np.arange(len(rows))
        alone = TreeTable(
            parent=place[table.parent[rows]],
            group=table.group[rows],
            reward=table.reward[rows],
            valid=table.valid[rows],
            surprisal=table.surprisal[rows],
        )
        for whole, part in zip(everything(table), everything(alone), strict=True):
            np.testing.assert_allclose(part, whole[rows], atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(table=trees())
def test_J1_junk_on_inner_nodes_and_on_leaves_without_an_outcome_does_not_leak(
    table: TreeTable,
) -> None:
    dirty = replace(table, reward=np.where(table.counted(), table.reward, 999.0))
    unknown = replace(table, reward=np.where(table.counted(), table.reward, np.nan))
    for first, second, third in zip(
        everything(table), everything(dirty), everything(unknown), strict=True
    ):
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(first, third)
        assert not first[table.leaves() & ~table.counted()].any()


def test_a_return_that_is_no_number_is_no_outcome() -> None:
    unknown = replace(TURNS, reward=np.array([0, 0, 0, 1, np.nan, 0.0]))
    failed = replace(TURNS, valid=np.arange(6) != 4, reward=np.array([0, 0, 0, 1, 0, 0.0]))
    for first, second in zip(everything(unknown), everything(failed), strict=True):
        np.testing.assert_array_equal(first, second)
        assert first.any()


@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_A3_equal_leaves_one_leaf_one_turn_and_no_tree_give_zero(outcome: float) -> None:
    flat = replace(TURNS, reward=np.full(6, outcome))
    chain = tree_of([-1, 0, 1], [0, 0, outcome])
    one_turn = tree_of([-1, 0], [0, outcome])
    bare = tree_of([-1], [outcome])
    for table in (flat, chain, one_turn, bare, tree_of([], [])):
        for form in everything(table):
            assert not form.any()
            assert form.shape == (table.num_nodes,)


def test_a_prompt_without_a_turn_is_no_leaf() -> None:
    table = tree_of([-1, -1, 1], [5.0, 0.0, 1.0])
    assert table.leaves().tolist() == [False, False, True]
    assert table.roots().tolist() == [0, 1, 1]
    assert depths(TURNS.parent).tolist() == [0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("parent", "group", "message"),
    [
        ([0], [0], "circle"),
        ([-1, 2, 1], [0, 0, 0], "circle"),
        ([-1, 5], [0, 0], "not a row"),
        ([-2], [0], "not a row"),
        ([-1, 0], [0, 1], "one group"),
        ([-1, 0], [0], "one entry for each node"),
    ],
)
def test_what_is_no_tree_is_refused(parent: list[int], group: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree_of(parent, [0.0] * len(parent), group)


def test_tree_settings_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"algorithm\.tree_grpo\.mode is"):
        TreeGrpoSettings("inter")
    with pytest.raises(UserError, match=r"algorithm\.at2po\.value is"):
        At2poSettings("max")
    with pytest.raises(UserError, match=r"algorithm\.at2po\.advantage is"):
        At2poSettings(advantage="sibling")
    for settings_class in (TreeGrpoSettings, At2poSettings):
        with pytest.raises(UserError, match="epsilon"):
            settings_class(epsilon=-1.0)
