"""AT2PO: values flow from the leaves of a tree to its turns, and each turn is paid its own value.

With ``R`` the return of a leaf's game, ``z`` its standard score inside the tree (deviation of the
population, eps = 1e-6), and ``H`` the mean surprisal of a node's tokens::

    V(leaf) = z
    V(node) = mean over its children of V                          value="child_mean"
            = mean of z over the leaves below it                   value="leaf_mean"
            = sum over its children of softmax(H)_c * V(c)         value="entropy"

    A = V(node)                                                    advantage="value"
      = V(node) - V(parent)                                        advantage="parent"
      = V(node) - V(root)                                          advantage="root"
      = 2 V(node) - V(parent) - V(root)                            advantage="both"

A leaf that is not valid (its game has no outcome) has no value, and neither has a node above such
leaves only: these enter no mean and have advantage 0. A tree whose counted leaves are alike gives 0
everywhere. The root is the prompt: it has a value but no token, so its advantage is 0. A turn that
several games share is one node and counts once.

Shapes: ``D`` nodes of all trees, in any order; see ``credit.tree``.

Source: AT2PO (arXiv 2601.04767), its public code. Confidence: the formulas are those of that code,
checked on a worked example of our own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from delta_belief_rl.algo.base import require_choice, require_range
from delta_belief_rl.algo.credit.groups import group_stats
from delta_belief_rl.algo.credit.tree import TreeTable, depths, leaf_counts, up
from delta_belief_rl.types import FloatArray

VALUES = ("child_mean", "leaf_mean", "entropy")
ADVANTAGES = ("value", "parent", "root", "both")


@dataclass(frozen=True, slots=True)
class At2poSettings:
    """Knobs of ``at2po``; ``epsilon`` in reward units."""

    value: str = "child_mean"
    advantage: str = "value"
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        require_choice("algorithm.at2po.value", self.value, VALUES)
        require_choice("algorithm.at2po.advantage", self.advantage, ADVANTAGES)
        require_range("algorithm epsilon", self.epsilon, 0.0)


def leaf_scores(table: TreeTable, epsilon: float = 1e-6) -> FloatArray:
    """``z`` of the counted leaves, 0 elsewhere. ``[D]``."""
    leaf = table.counted()
    reward = np.where(leaf, table.reward, 0.0)
    stats = group_stats(reward, leaf, table.roots())
    population = stats.std * np.sqrt((stats.count - 1).clip(0) / np.maximum(stats.count, 1))
    return np.where(leaf & ~stats.flat, (reward - stats.mean) / (population + epsilon), 0.0)


def node_values(table: TreeTable, settings: At2poSettings | None = None) -> FloatArray:
    """``V`` of every node, roots included; 0 where it has none. ``[D]``."""
    knobs = settings or At2poSettings()
    scores, known = leaf_scores(table, knobs.epsilon), leaf_counts(table)
    if knobs.value == "leaf_mean":
        return up(table, scores) / np.maximum(known, 1)
    weight = _weights(table) if knobs.value == "entropy" else np.ones(table.num_nodes)
    weight = np.where(known > 0, weight, 0.0)
    out, depth = scores.copy(), depths(table.parent)
    for level in range(int(depth.max(initial=0)), 0, -1):
        here = np.flatnonzero(depth == level)
        above = table.parent[here]
        total, weights = np.zeros(table.num_nodes), np.zeros(table.num_nodes)
        np.add.at(total, above, weight[here] * out[here])
        np.add.at(weights, above, weight[here])
        out = np.divide(total, weights, out=out, where=weights > 0)
    return out


def at2po(table: TreeTable, settings: At2poSettings | None = None) -> FloatArray:
    """Advantages of all turns, ``[D]``; 0 at roots."""
    knobs = settings or At2poSettings()
    value = node_values(table, knobs)
    over_parent = value - value[table.parent] if table.num_nodes else value
    over_root = value - value[table.roots()]
    out = {
        "value": value,
        "parent": over_parent,
        "root": over_root,
        "both": over_parent + over_root,
    }[knobs.advantage]
    return np.where((table.parent >= 0) & (leaf_counts(table) > 0), out, 0.0)


def _weights(table: TreeTable) -> FloatArray:
    """``exp(H)`` up to a factor for each set of siblings, so that no exponent is large."""
    highest = np.full(table.num_nodes, -np.inf)
    child = (table.parent >= 0) & (leaf_counts(table) > 0)
    np.maximum.at(highest, table.parent[child], table.surprisal[child])
    out = np.zeros(table.num_nodes)
    out[child] = np.exp(table.surprisal[child] - highest[table.parent[child]])
    return out
