"""Which rows of a turn table hold one and the same turn, and which games belong to one tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from delta_belief_rl.types import Group, IntArray


def tree_columns(groups: Sequence[Group]) -> tuple[IntArray, IntArray]:
    """``TurnTable.tree`` and ``TurnTable.node``, ``[R]`` each; empty where no game has a lineage.

    A turn is told by its group, the game that was first to play it and its index, so that games
    which came to equal turns by themselves do not share them.
    """
    if not any(game.lineage for group in groups for game in group.trajectories):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    trees: dict[tuple[int, int], int] = {}
    nodes: dict[tuple[int, int, int], int] = {}
    tree: list[int] = []
    node: list[int] = []
    for number, group in enumerate(groups):
        for game in group.trajectories:
            for turn in game.turns:
                key = (number, game.player_of(turn.index), turn.index)
                tree.append(trees.setdefault((number, game.tree), len(trees)))
                node.append(nodes.setdefault(key, len(node)))
    return np.array(tree, dtype=np.int64), np.array(node, dtype=np.int64)
