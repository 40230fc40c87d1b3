"""Methods of credit teach a tabular policy a chain whose reward comes at its end."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from delta_belief_rl.algo import build_credit
from delta_belief_rl.types import FloatArray, IntArray, TurnTable

LENGTH, TURNS, GAMES, UPDATES, RATE = 4, 5, 16, 60, 1.0
RIGHT = np.array([0, 1, 1, 0])
"""The action that leads on from each place; the other one stays."""


def sampled(logits: FloatArray, rng: np.random.Generator) -> tuple[TurnTable, IntArray, IntArray]:
    """A group of games, and place and action of each turn."""
    rows: list[tuple[int, int, int, int, bool]] = []
    for game in range(GAMES):
        place = turn = 0
        while place < LENGTH and turn < TURNS:
            first = 1 / (1 + np.exp(logits[place, 1] - logits[place, 0]))
            action = int(rng.random() > first)
            after = place + int(action == RIGHT[place])
            rows.append((game, turn, place, action, after == LENGTH))
            place, turn = after, turn + 1
    traj, turns, places, actions, wins = (np.array(column) for column in zip(*rows, strict=True))
    size = len(rows)
    table = TurnTable(
        group=np.zeros(size, dtype=np.int64),
        traj=traj,
        turn=turns,
        n_tokens=np.ones(size, dtype=np.int64),
        valid=np.ones(size, dtype=np.bool_),
        terminal=np.append(np.diff(traj) > 0, True),
        truncated=np.zeros(size, dtype=np.bool_),
        won=np.isin(traj, traj[wins]),
        answered=np.ones(size, dtype=np.bool_),
        state_key=tuple(str(place) for place in places),
        action_key=tuple(str(action) for action in actions),
        progress=places.astype(np.float64),
        rewards={
            "outcome": wins.astype(np.float64),
            "belief": 0.1 * (actions == RIGHT[places]),
        },
    )
    return table, places, actions


def win_rate(logits: FloatArray) -> float:
    """Exact: the chance to get to the end in time."""
    right = np.exp(logits - logits.max(axis=1, keepdims=True))
    right = (right / right.sum(axis=1, keepdims=True))[np.arange(LENGTH), RIGHT]
    at = np.eye(LENGTH + 1)[0]
    for _ in range(TURNS):
        moved = at[:LENGTH] * right
        at = at - np.append(moved, 0.0) + np.insert(moved, 0, 0.0)
    return float(at[LENGTH])


def trained(name: str, knobs: Mapping[str, object], seed: int) -> float:
    """The win rate after some updates by the policy gradient."""
    rng, credit = np.random.default_rng(seed), build_credit(name, knobs)
    logits = np.zeros((LENGTH, 2))
    for _ in range(UPDATES):
        table, places, actions = sampled(logits, rng)
        advantage = credit.apply(table).turns
        chosen = np.exp(logits - logits.max(axis=1, keepdims=True))
        chosen = chosen / chosen.sum(axis=1, keepdims=True)
        step = np.zeros_like(logits)
        np.add.at(step, (places, actions), advantage)
        np.add.at(step, places, -advantage[:, None] * chosen[places])
        logits = logits + RATE * step / GAMES
    return win_rate(logits)


@pytest.mark.parametrize(
    ("name", "knobs", "least"),
    [
        # It learns from groups with one best game only, which end when wins become common.
        ("grpo_passk", {}, 0.25),
        ("opo", {}, 0.8),
        ("mt_grpo", {}, 0.8),
        ("mt_grpo", {"turn_credit": "boundary"}, 0.8),
        ("gigpo", {}, 0.8),
        ("gigpo", {"norm_adv_by_std_in_grpo": False, "episode_weighting": "turn"}, 0.8),
        ("hgpo", {}, 0.8),
        ("hgpo", {"base_group": True, "skip_zero": False}, 0.8),
        ("graphgpo", {}, 0.8),
        ("graphgpo", {"form": "progress"}, 0.8),
        ("state_progress", {}, 0.8),
        ("state_progress", {"form": "centered"}, 0.8),
        ("igpo", {}, 0.8),
        ("tree_grpo", {}, 0.8),
    ],
)
def test_a_method_learns_a_chain_that_is_paid_at_its_end(
    name: str, knobs: dict[str, object], least: float
) -> None:
    by_chance = win_rate(np.zeros((LENGTH, 2)))
    assert by_chance == pytest.approx(6 / 32)
    rates = [trained(name, knobs, seed) for seed in range(5)]
    assert min(rates) > least, rates
