"""GraphOPD as a method: its mask on the turn table, alone and behind another method."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from delta_belief_rl.algo import build_credit
from delta_belief_rl.algo.credit.distilling import Distils
from delta_belief_rl.types import TurnTable, UserError

EDGES = {2: (0, 1), 3: (2, 0)}
"""Which turns each turn depends on."""
DIVERGENCE = np.array([0.2, 0.5, 0.4, 0.1, 0.8])
MASK = [0, 1, 1, 0, 1]
APART = [0, 1, 0, 0, 1]


def table_of(games: int = 1, divergence: np.ndarray = DIVERGENCE, linked: bool = True) -> TurnTable:
    """Games of five turns of two tokens each, which read what the turns before them wrote."""
    turns = len(divergence)
    size = games * turns
    reads = [tuple(f"v{k}" for k in EDGES.get(turn, ())) for turn in range(turns)]
    footprint = tuple((reads[t] if linked else (), (f"v{t}",)) for t in range(turns)) * games
    logp = np.full(2 * size, -1.0)
    gap = np.repeat(np.tile(divergence, games), 2)
    return TurnTable(
        group=np.zeros(size, dtype=np.int64),
        traj=np.repeat(np.arange(games), turns),
        turn=np.tile(np.arange(turns), games),
        n_tokens=np.full(size, 2, dtype=np.int64),
        valid=np.ones(size, dtype=np.bool_),
        terminal=np.tile(np.arange(turns) == turns - 1, games),
        truncated=np.zeros(size, dtype=np.bool_),
        won=np.zeros(size, dtype=np.bool_),
        footprint=footprint,
        rewards={"outcome": np.arange(size, dtype=np.float64)},
        tokens={"logp": logp, "view:reference": logp - gap},
    )


def test_the_worked_example_of_a_mask_reaches_the_turns() -> None:
    found = build_credit("graph_opd").apply(table_of())
    np.testing.assert_array_equal(found.distil, MASK)
    np.testing.assert_array_equal(found.weight, MASK)
    assert not found.turns.any()
    assert found.stats["linked_turns"] == pytest.approx(2 / 5)
    assert found.stats["distilled_turns"] == pytest.approx(3 / 5)
    assert found.stats["masked_divergence"] == pytest.approx(0.566667, abs=1e-5)


def test_without_links_the_mask_is_that_of_a_divergence_above_average() -> None:
    found = build_credit("graph_opd").apply(table_of(linked=False))
    np.testing.assert_array_equal(found.distil, APART)
    assert found.stats["linked_turns"] == 0.0


def test_behind_another_method_advantages_and_weights_stay() -> None:
    table = table_of(games=2)
    before = build_credit("grpo").apply(table)
    after = build_credit("graph_opd", transform=True).apply(table, before)
    np.testing.assert_array_equal(after.turns, before.turns)
    np.testing.assert_array_equal(after.weight, before.weight)
    np.testing.assert_array_equal(after.distil, MASK * 2)
    assert after.stats["reward_sum"] == before.stats["reward_sum"]


def test_games_without_the_view_and_turns_that_are_not_valid_are_left_out() -> None:
    table = table_of(games=2)
    view = table.tokens["view:reference"].copy()
    view[:10] = np.nan
    table = replace(table, tokens={**table.tokens, "view:reference": view})
    found = build_credit("graph_opd").apply(table)
    np.testing.assert_array_equal(found.distil, [0] * 5 + MASK)
    assert found.stats["view_share"] == pytest.approx(0.5)
    void = replace(table_of(), valid=np.zeros(5, dtype=np.bool_))
    assert not np.any(build_credit("graph_opd").apply(void).distil)


def test_an_estimate_below_zero_is_no_divergence() -> None:
    less = build_credit("graph_opd").apply(table_of(divergence=-DIVERGENCE))
    assert not np.any(less.distil)


def test_the_order_of_games_does_not_matter() -> None:
    table = table_of(games=2, divergence=DIVERGENCE)
    view = table.tokens["view:reference"].copy()
    view[10:] -= np.repeat([0.9, 0.0, 0.0, 0.0, 0.0], 2)
    table = replace(table, tokens={**table.tokens, "view:reference": view})
    found = np.asarray(build_credit("graph_opd").apply(table).distil).reshape(2, 5)
    swapped = replace(
        table,
        tokens={
            name: np.concatenate([column[10:], column[:10]])
            for name, column in table.tokens.items()
        },
    )
    other = np.asarray(build_credit("graph_opd").apply(swapped).distil).reshape(2, 5)
    np.testing.assert_array_equal(found, other[::-1])
    assert not np.array_equal(found[0], found[1])


@pytest.mark.parametrize("name", ["sdar", "graph_opd"])
def test_turns_trained_once_do_not_count_as_a_distillation(name: str) -> None:
    table = table_of(games=2)
    rows = np.arange(table.num_rows)
    table = replace(table, tree=table.traj, node=rows)
    before = build_credit("grpo").apply(table)
    once = build_credit("shared_once", transform=True).apply(table, before)
    assert once.distil is None
    assert build_credit(name, transform=True).apply(table, once).distil is not None


def test_a_group_whose_turns_are_distilled_is_not_dead() -> None:
    assert build_credit("graph_opd").apply(table_of()).stats["frac_dead_groups"] == 0.0
    apart = table_of(divergence=-DIVERGENCE)
    assert build_credit("graph_opd").apply(apart).stats["frac_dead_groups"] == 1.0


def test_two_distillations_in_one_chain_are_refused() -> None:
    table = table_of()
    before = build_credit("opsd").apply(table)
    with pytest.raises(UserError, match="distil; keep one"):
        build_credit("graph_opd", transform=True).apply(table, before)


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("coefficient", 0.0),
        ("damping", 1.0),
        ("direction", "up"),
        ("fusion", "max"),
        ("alpha", 2.0),
    ],
)
def test_every_knob_has_a_range(knob: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"algorithm\.graph_opd\.{knob}"):
        build_credit("graph_opd", {knob: value})


def test_the_update_is_told_how_to_distil() -> None:
    credit = build_credit("graph_opd", {"coefficient": 0.25})
    assert isinstance(credit, Distils)
    assert (credit.distillation.view, credit.distillation.coefficient) == ("reference", 0.25)
