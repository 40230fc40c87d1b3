"""Trees of turns, and Tree-GRPO: leaves are compared inside their tree and across the trees.

A tree grows from one prompt: its root is the prompt and holds no sampled token, every other node is
one turn, and a way from the root to a leaf is one game. Several trees may belong to one group
(one secret). With ``norm_x`` the standardisation inside ``x`` (unbiased deviation, eps = 1e-6) and
``R`` the return of a leaf's game::

    A = norm_group(R) + norm_tree(R)      mode="both"
    A = norm_tree(R)                      mode="tree"
    A = norm_tree(norm_group(R))          mode="nested"

A tree or a group of one leaf, or without spread, gives 0. With ``norm_adv_by_std_in_grpo=False``
nothing is divided. A leaf that is not valid (its game has no outcome) enters no statistic and
has 0.

``node_advantages`` gives the leaves' advantages to the turns: a turn that several games share has
the mean of theirs, so that it can be trained once. ``leaf_counts`` is how often it would be trained
if each game were, which turns the mean into the sum of the public code.

Shapes: ``D`` nodes of all trees, in any order.

Source: Tree-GRPO (arXiv 2509.21240). Confidence: the group, tree, summed and nested advantages are
those of its public code, but for trees of one leaf, which keep their raw return there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from delta_belief_rl.algo.base import require_choice, require_range
from delta_belief_rl.algo.credit.groups import standardised
from delta_belief_rl.types import BoolArray, FloatArray, IntArray

MODES = ("both", "tree", "nested")


@dataclass(frozen=True, slots=True)
class TreeTable:
    """One row per node of all trees; ``[D]`` each.

    Attributes:
        parent: Row of the node's parent; -1 for a root.
        group: Group number; the same over a whole tree.
        reward: Return of the game that ends in this leaf; read at leaves only.
        valid: False for a leaf whose game has no outcome; read at leaves only.
        surprisal: Mean negative log-probability of the node's sampled tokens, in nats.

    Example:
        A prompt with two first turns, of which the first was continued twice::

            TreeTable(parent=[-1, 0, 0, 1, 1], group=[0] * 5, reward=[0, 0, 1, 1, 0], ...)
    """

    parent: IntArray
    group: IntArray
    reward: FloatArray
    valid: BoolArray
    surprisal: FloatArray

    def __post_init__(self) -> None:
        size = len(self.parent)
        columns = (self.group, self.reward, self.valid, self.surprisal)
        if any(len(column) != size for column in columns):
            raise ValueError("the columns of a tree table must have one entry for each node")
        if size and not (int(self.parent.min()) >= -1 and int(self.parent.max()) < size):
            raise ValueError("a parent is not a row of the tree table")
        depths(self.parent)
        child = self.parent >= 0
        if (self.group[child] != self.group[self.parent[child]]).any():
            raise ValueError("the nodes of one tree must belong to one group")

    @property
    def num_nodes(self) -> int:
        """``D``, nodes of all trees."""
        return len(self.parent)

    def leaves(self) -> BoolArray:
        """True where no node continues, ``[D]``; a root without a turn is no leaf."""
        inner = np.isin(np.arange(self.num_nodes), self.parent)
        return ~inner & (self.parent >= 0)

    def counted(self) -> BoolArray:
        """Leaves whose game has an outcome, ``[D]``; only these enter any statistic."""
        return self.leaves() & self.valid & np.isfinite(self.reward)

    def roots(self) -> IntArray:
        """Row of each node's root, ``[D]``: equal inside a tree."""
        root = np.arange(self.num_nodes, dtype=np.int64)
        for _ in range(int(depths(self.parent).max(initial=0))):
            root = np.where(self.parent[root] >= 0, self.parent[root], root)
        return root


@dataclass(frozen=True, slots=True)
class TreeGrpoSettings:
    """Knobs of ``tree_grpo``; ``epsilon`` in reward units."""

    mode: str = "both"
    norm_adv_by_std_in_grpo: bool = True
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        require_choice("algorithm.tree_grpo.mode", self.mode, MODES)
        require_range("algorithm epsilon", self.epsilon, 0.0)


def tree_grpo(table: TreeTable, settings: TreeGrpoSettings | None = None) -> FloatArray:
    """Advantages of the leaves, ``[D]``; 0 at all other nodes."""
    knobs = settings or TreeGrpoSettings()
    leaf, roots = table.counted(), table.roots()
    reward = np.where(leaf, table.reward, 0.0)
    if knobs.mode == "tree":
        return _norm(reward, leaf, roots, knobs)
    across = _norm(reward, leaf, table.group, knobs)
    if knobs.mode == "nested":
        return _norm(across, leaf, roots, knobs)
    return across + _norm(reward, leaf, roots, knobs)


def node_advantages(table: TreeTable, leaf_values: FloatArray) -> FloatArray:
    """Mean of the counted leaves at or below each node, ``[D]``.

    A node without such a leaf, and a root, which holds no sampled token, have 0.
    """
    total = up(table, np.where(table.counted(), leaf_values, 0.0))
    mean = total / np.maximum(leaf_counts(table), 1)
    return np.where(table.parent >= 0, mean, 0.0)


def leaf_counts(table: TreeTable) -> IntArray:
    """Counted leaves at or below each node, ``[D]``: games in which the node's turn was played."""
    return up(table, table.counted().astype(np.float64)).astype(np.int64)


def up(table: TreeTable, values: FloatArray) -> FloatArray:
    """Sum of ``values`` over each node and all nodes below it, ``[D]``."""
    out, depth = values.astype(np.float64), depths(table.parent)
    for level in range(int(depth.max(initial=0)), 0, -1):
        here = np.flatnonzero(depth == level)
        np.add.at(out, table.parent[here], out[here])
    return out


def depths(parent: IntArray) -> IntArray:
    """Edges between each node and its root, ``[D]``.

    Raises:
        ValueError: Some nodes are their own ancestors.
    """
    out = np.zeros(len(parent), dtype=np.int64)
    ancestor = parent.astype(np.int64)
    for _ in range(len(parent)):
        above = ancestor >= 0
        if not above.any():
            return out
        out += above
        ancestor = np.where(above, parent[ancestor], -1)
    if (ancestor >= 0).any():
        raise ValueError("the parents of a tree table form a circle")
    return out


def _norm(
    values: FloatArray, mask: BoolArray, group: IntArray, knobs: TreeGrpoSettings
) -> FloatArray:
    divided = knobs.norm_adv_by_std_in_grpo
    return standardised(values, mask, group, knobs.epsilon, divided=divided)
