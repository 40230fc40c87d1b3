"""Methods with views teach a tabular policy a chain whose reward comes at its end.

What a policy would say once the outcome is told is exact here: by Bayes' rule, an action's
probability times the chance of the outcome after it, over the chance of the outcome before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from test_credit_learning import GAMES, LENGTH, RATE, RIGHT, TURNS, UPDATES, sampled, win_rate

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.base import VIEW, Advantage
from delta_belief_rl.algo.chain import chain_of
from delta_belief_rl.types import FloatArray, IntArray, TurnTable


def softmax(logits: FloatArray) -> FloatArray:
    share = np.exp(logits - logits.max(axis=1, keepdims=True))
    return share / share.sum(axis=1, keepdims=True)


def chances(chosen: FloatArray) -> FloatArray:
    """Chance to get to the end by turns left and place, ``[TURNS + 1, LENGTH + 1]``."""
    found = np.zeros((TURNS + 1, LENGTH + 1))
    found[:, LENGTH] = 1.0
    right = chosen[np.arange(LENGTH), RIGHT]
    for left in range(1, TURNS + 1):
        before = found[left - 1]
        found[left, :LENGTH] = right * before[1:] + (1 - right) * before[:-1]
    return found


def with_views(
    table: TurnTable, places: IntArray, actions: IntArray, logits: FloatArray
) -> TurnTable:
    """The table with log-probs as played and as said with the outcome told."""
    chosen = softmax(logits)
    chance = chances(chosen)
    left = TURNS - table.turn
    after = chance[left - 1, places + (actions == RIGHT[places])]
    before = chance[left, places]
    paid = np.bincount(table.traj, weights=table.rewards["outcome"])[table.traj] > 0
    ratio = np.where(
        paid, after / np.maximum(before, 1e-12), (1 - after) / np.maximum(1 - before, 1e-12)
    )
    logp = np.log(chosen[places, actions])
    told = logp + np.log(np.maximum(ratio, 1e-12))
    views = {VIEW + name: told for name in ("hindsight", "outcome", "reference")}
    return replace(table, won=paid, tokens={"logp": logp, **views})


def trained(names: tuple[str, ...], knobs: Mapping[str, object], seed: int) -> float:
    """The win rate after some updates by the policy gradient; ``knobs`` are of the last method."""
    rng = np.random.default_rng(seed)
    credit = chain_of(
        [
            (name, build_credit(name, knobs if name == names[-1] else {}, transform=place > 0))
            for place, name in enumerate(names)
        ]
    )
    logits = np.zeros((LENGTH, 2))
    for _ in range(UPDATES):
        table, places, actions = sampled(logits, rng)
        table = with_views(table, places, actions, logits)
        found: Advantage = credit.apply(table)
        advantage = found.turns if found.tokens is None else found.tokens
        step = np.zeros_like(logits)
        np.add.at(step, (places, actions), advantage)
        np.add.at(step, places, -advantage[:, None] * softmax(logits)[places])
        logits = logits + RATE * step / GAMES
    return win_rate(logits)


@pytest.mark.parametrize(
    ("names", "knobs"),
    [
        (("igpo",), {}),
        (("igpo",), {"norm": "joint", "gamma": 0.9, "curriculum_steps": UPDATES}),
        (("hcapo",), {}),
        (("hcapo",), {"temperature": 1.0, "smoothing": 1.0}),
        (("relace",), {}),
        (("relace",), {"smoothing": 1.0}),
        (("grpo", "rlsd"), {}),
    ],
)
def test_a_method_learns_a_chain_that_is_paid_at_its_end(
    names: tuple[str, ...], knobs: dict[str, object]
) -> None:
    rates = [trained(names, knobs, seed) for seed in range(5)]
    assert min(rates) > 0.8, rates


def test_the_chances_are_those_of_the_exact_win_rate() -> None:
    logits = np.random.default_rng(1).normal(size=(LENGTH, 2))
    assert chances(softmax(logits))[TURNS, 0] == pytest.approx(win_rate(logits))
