"""Late turns is RLOO where nothing decays, and says which of its settings is out of range."""

import numpy as np
import pytest
from late_turns import METHODS, LateTurns, LateTurnsSettings

from delta_belief_rl.algo import build_credit
from delta_belief_rl.types import TurnTable, UserError


def table(lengths: list[int], outcomes: list[float]) -> TurnTable:
    """One group of games with so many turns, each paid on its last one."""
    traj = np.repeat(np.arange(len(lengths)), lengths)
    turn = np.concatenate([np.arange(length) for length in lengths])
    last = turn == np.array(lengths)[traj] - 1
    rows = len(turn)
    return TurnTable(
        group=np.zeros(rows, dtype=np.int64),
        traj=traj,
        turn=turn,
        n_tokens=np.full(rows, 3),
        valid=np.ones(rows, dtype=np.bool_),
        terminal=last,
        truncated=np.zeros(rows, dtype=np.bool_),
        won=np.array(outcomes)[traj] > 0,
        rewards={"reward:outcome": np.where(last, np.array(outcomes)[traj], 0.0)},
    )


def test_a_worked_example() -> None:
    """Returns 2, 0 and 1: leads 1.5, -1.5 and 0; the first of two turns gets half of it."""
    advantage = LateTurns(LateTurnsSettings(decay=0.5)).apply(table([2, 1, 2], [2.0, 0.0, 1.0]))
    np.testing.assert_allclose(advantage.turns, [0.75, 1.5, -1.5, 0.0, 0.0])


def test_without_decay_it_is_rloo() -> None:
    """The same numbers, whatever the games' lengths."""
    games = table([3, 1, 2, 4], [2.0, 0.0, 1.0, 0.0])
    ours, rloo = LateTurns(LateTurnsSettings(decay=1.0)), build_credit("rloo")
    np.testing.assert_allclose(ours.apply(games).turns, rloo.apply(games).turns)


def test_games_that_end_alike_teach_nothing() -> None:
    """A group without spread."""
    assert not LateTurns().apply(table([2, 3], [1.0, 1.0])).turns.any()


@pytest.mark.parametrize("decay", [0.0, 1.5, float("nan")])
def test_a_setting_out_of_range_is_named(decay: float) -> None:
    """In one sentence that says what to write."""
    with pytest.raises(UserError, match=r"algorithm\.kwargs\.decay"):
        METHODS["late_turns"].settings(decay=decay)
