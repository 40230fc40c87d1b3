"""Which turns of a group began in the same state, or at the end of the same states.

A state is what ``Env.state_key`` names. Shapes: ``R`` rows of the turn table.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from delta_belief_rl.algo.base import Advantage
from delta_belief_rl.types import BoolArray, FloatArray, IntArray, TurnTable


def state_numbers(table: TurnTable) -> IntArray:
    """A number for each row, equal where group and state are. ``[R]``.

    Raises:
        ValueError: The table has no state keys.
    """
    if len(table.state_key) != table.num_rows:
        raise ValueError("the turn table has no column state_key")
    known: dict[tuple[int, str], int] = {}
    pairs = zip(table.group.tolist(), table.state_key, strict=True)
    return np.array([known.setdefault(pair, len(known)) for pair in pairs], dtype=np.int64)


def history_numbers(table: TurnTable, length: int) -> tuple[IntArray, BoolArray]:
    """Numbers that are equal where the last states of a group are, the row's own included.

    Args:
        table: Its rows.
        length: How many states must agree, at least 1.

    Returns:
        The numbers, and the rows whose game has so many states by then; both ``[R]``.
    """
    states = table.grid(state_numbers(table)).astype(np.int64)
    known: dict[tuple[int, ...], int] = {}
    numbers = np.zeros(table.num_rows, dtype=np.int64)
    deep = table.turn + 1 >= length
    for row, (game, turn) in enumerate(zip(table.traj, table.turn, strict=True)):
        last = tuple(states[game, max(turn + 1 - length, 0) : turn + 1].tolist())
        numbers[row] = known.setdefault(last, len(known))
    return numbers, deep


def with_state_stats(advantage: Advantage, table: TurnTable) -> Advantage:
    """Add how often states were met: without repetition nothing is learnt from comparing them.

    ``mean_state_group_size`` is the mean number of turns that share a state, and
    ``frac_lone_states`` the share of turns whose state no other turn began in.
    """
    states = state_numbers(table)[table.valid]
    sizes: FloatArray = np.bincount(states).astype(np.float64) if len(states) else np.zeros(0)
    met = sizes[sizes > 0]
    stats = {
        "mean_state_group_size": float(met.mean()) if len(met) else 0.0,
        "frac_lone_states": float((met == 1).sum() / len(states)) if len(states) else 0.0,
    }
    return replace(advantage, stats={**advantage.stats, **stats})
