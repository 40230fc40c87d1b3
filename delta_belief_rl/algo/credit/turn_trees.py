"""Trees of turns from the turn table, the two methods that compare them, and turns counted once.

The games of a group may share their first turns (``TurnTable.node``), so that they are the ways
from the root of a tree (``TurnTable.tree``) to its leaves. ``tree_nodes`` makes the tree of them;
the formulas are those of ``credit.tree`` and ``credit.at2po``. ``R`` of a leaf is the sum of all
channels over its game, shared turns included.

``tree_grpo`` gives the advantage of a game's leaf to all of its turns, so a turn that several games
share is trained once for each of them, with another advantage each time. ``at2po`` gives each turn
its own, also as often as it is shared. Both is what public code does.

``shared_once`` is a transform behind any method. A turn that ``m`` games share with advantages
``A_1 .. A_m`` is trained in one of them, with their mean::

    A = (A_1 + ... + A_m) / m        weight 1 in the first game, 0 in the others

so that it enters loss and denominators once. Games in which the turn is not valid do not count.
Behind ``grpo`` this is ARPO's hard variant; without it is the soft one.

Shapes: ``R`` rows, ``S`` sampled tokens, ``D`` nodes of all trees. A table without trees has one of
its own for each game.

Source: Tree-GRPO (arXiv 2509.21240), AT2PO (2601.04767), ARPO (2507.19849). Confidence: see
``credit.tree`` and ``credit.at2po``; the mean is that of ARPO's hard variant, that one copy carries
it is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import (
    LOGP,
    Advantage,
    Grain,
    Stateless,
    require_first,
    require_previous,
)
from delta_belief_rl.algo.credit.at2po import At2poSettings, at2po
from delta_belief_rl.algo.credit.groups import finish, live_games, total_reward, used_channels
from delta_belief_rl.algo.credit.tree import TreeGrpoSettings, TreeTable, tree_grpo
from delta_belief_rl.types import BoolArray, FloatArray, IntArray, TurnTable


def shared_rows(table: TurnTable) -> IntArray:
    """The first row that holds the same turn, ``[R]``."""
    return table.node if len(table.node) else np.arange(table.num_rows, dtype=np.int64)


def tree_nodes(table: TurnTable) -> tuple[TreeTable, IntArray]:
    """The trees of a table, and the node of each row, ``[R]``.

    Roots come first, by tree; the turns follow in the order of their first rows.
    """
    tree = table.tree if len(table.tree) else table.traj
    roots, root = np.unique(tree, return_inverse=True)
    first, inverse = np.unique(shared_rows(table), return_inverse=True)
    node = len(roots) + inverse
    size = len(roots) + len(first)
    parent = np.full(size, -1, dtype=np.int64)
    above = table.grid(node)[table.traj, table.turn - 1].astype(np.int64)
    parent[node] = np.where(table.turn == 0, root, above)
    group, reward = np.zeros(size, dtype=np.int64), np.zeros(size)
    group[root], group[node] = table.group, table.group
    games = table.grid(total_reward(used_channels(table), table)).sum(axis=1)
    live = live_games(table)
    # A leaf is one game's last turn; what stands at other nodes is not read.
    ends = np.flatnonzero(table.terminal)
    reward[node[ends]] = games[table.traj[ends]]
    valid = np.zeros(size, dtype=np.bool_)
    valid[node[ends]] = live[table.traj[ends]]
    surprisal = np.zeros(size)
    surprisal[node] = _surprisal(table)
    return TreeTable(parent, group, reward, valid, surprisal), node


@dataclass(frozen=True, slots=True)
class TreeGrpo(Stateless):
    """See the module's head."""

    settings: TreeGrpoSettings = field(default_factory=TreeGrpoSettings)
    requires: ClassVar[tuple[str, ...]] = ("group", "traj", "tree", "node", "valid", "rewards")
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """Leaves are compared with each other."""
        return True

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``.

        Raises:
            UserError: It is not the first of its chain.
        """
        require_first(previous, "tree_grpo")
        trees, node = tree_nodes(table)
        leaves = tree_grpo(trees, self.settings)
        games = np.zeros(table.num_games)
        games[table.traj[table.terminal]] = leaves[node[table.terminal]]
        return _with_trees(finish(table, games[table.traj], used_channels(table)), trees)


@dataclass(frozen=True, slots=True)
class At2po(Stateless):
    """See the module's head."""

    settings: At2poSettings = field(default_factory=At2poSettings)
    requires: ClassVar[tuple[str, ...]] = ("traj", "tree", "node", "valid", "rewards", LOGP)
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """Leaves are compared with each other."""
        return True

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``.

        Raises:
            UserError: It is not the first of its chain.
            ValueError: The table has no log-probs, which ``value="entropy"`` needs.
        """
        require_first(previous, "at2po")
        if self.settings.value == "entropy" and "logp" not in table.tokens:
            raise ValueError("turns are weighted by log-probs, which the table does not have")
        trees, node = tree_nodes(table)
        turns = at2po(trees, self.settings)[node]
        return _with_trees(finish(table, turns, used_channels(table)), trees)


@dataclass(frozen=True, slots=True)
class SharedOnceSettings:
    """It has no knobs."""


@dataclass(frozen=True, slots=True)
class SharedOnce(Stateless):
    """See the module's head."""

    settings: SharedOnceSettings = SharedOnceSettings()
    requires: ClassVar[tuple[str, ...]] = ("node", "valid")
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """What is compared is up to the method before it."""
        return False

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """``previous`` with every shared turn in one of its rows.

        Raises:
            UserError: It is the first of its chain.
        """
        before = require_previous(previous, "shared_once")
        node = shared_rows(table)
        counted = table.valid & (before.weight > 0)
        first = _first_of(node, counted)
        turns = np.where(first, _mean_of(node, counted, before.turns), 0.0)
        left_out = 1 - first.sum() / counted.sum() if counted.any() else 0.0
        row = table.token_row()
        tokens, targets = before.tokens, before.targets
        if tokens is not None:
            tokens = np.where(first[row], _mean_tokens(table, node, counted[row], tokens), 0.0)
        if targets is not None:
            known = counted[row] & np.isfinite(targets)
            mean = _mean_tokens(table, node, known, targets)
            targets = np.where(first[row] & known, mean, np.nan)
        return replace(
            before,
            turns=turns,
            weight=np.where(first, before.weight, 0.0),
            stats={**before.stats, "frac_shared_turns": float(left_out)},
            tokens=tokens,
            targets=targets,
            distil=None if before.distil is None else np.where(first, before.distil, 0.0),
        )


def _surprisal(table: TurnTable) -> FloatArray:
    """Mean negative log-prob of each row's tokens, ``[R]``; zero where there are none."""
    if "logp" not in table.tokens:
        return np.zeros(table.num_rows)
    row = table.token_row()
    total = np.bincount(row, weights=-table.tokens["logp"], minlength=table.num_rows)
    return total / np.maximum(table.n_tokens, 1)


def _with_trees(advantage: Advantage, trees: TreeTable) -> Advantage:
    """The advantage with the number of trees and the games with an outcome in one of them."""
    count = int((trees.parent < 0).sum())
    stats = {"num_trees": float(count), "mean_tree_leaves": trees.counted().sum() / max(count, 1)}
    return replace(advantage, stats={**advantage.stats, **stats})


def _first_of(node: IntArray, counted: BoolArray) -> BoolArray:
    """The first counted row of each node, ``[R]``."""
    rows = np.flatnonzero(counted)
    out = np.zeros(len(node), dtype=np.bool_)
    out[rows[np.unique(node[rows], return_index=True)[1]]] = True
    return out


def _mean_of(place: IntArray, counted: BoolArray, values: FloatArray) -> FloatArray:
    """Mean of the counted values of one place, at each of them; zero where none is counted."""
    size = int(place.max(initial=-1)) + 1
    total = np.bincount(place, weights=np.where(counted, values, 0.0), minlength=size)
    count = np.bincount(place, weights=counted, minlength=size)
    return (total / np.maximum(count, 1))[place]


def _mean_tokens(
    table: TurnTable, node: IntArray, counted: BoolArray, tokens: FloatArray
) -> FloatArray:
    """The same of every sampled token, ``[S]``: copies of a turn have the same tokens."""
    starts = np.cumsum(table.n_tokens) - table.n_tokens
    # A row of each node, by which the copies of a token find each other.
    _, sample, inverse = np.unique(node, return_index=True, return_inverse=True)
    row = table.token_row()
    offset = np.arange(len(row), dtype=np.int64) - starts[row]
    place = starts[sample[inverse]][row] + offset
    return _mean_of(place, counted, tokens)
