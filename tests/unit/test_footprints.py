"""Which turns others build on, and which are distilled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turn_tables import Act, rows_in_order, table_of

from delta_belief_rl.algo.scorers.footprints import (
    DIRECTIONS,
    FUSIONS,
    FootprintSettings,
    above_mean,
    aptitudes,
    distilled_turns,
    last_writer_edges,
    masked_divergence,
    walk,
)
from delta_belief_rl.types import BoolArray, FloatArray, TurnTable, UserError

Footprints = list[tuple[frozenset[str], frozenset[str]]]


def steps(*turns: tuple[str, str]) -> Footprints:
    """What each turn read and wrote, one letter for a variable."""
    return [(frozenset(reads), frozenset(writes)) for reads, writes in turns]


def edges_of(turns: int, pairs: Sequence[tuple[int, int]]) -> BoolArray:
    edges = np.zeros((turns, turns), dtype=np.bool_)
    for before, after in pairs:
        edges[before, after] = True
    return edges


# Edges 0 -> 2, 1 -> 2, 2 -> 3 and 0 -> 3; turn 4 stands alone.
FIVE = steps(("", "a"), ("", "b"), ("ab", "c"), ("ac", ""), ("", "d"))
DIVERGENCE = np.array([0.2, 0.5, 0.4, 0.1, 0.8])


def test_an_edge_leads_from_the_last_writer_to_the_reader() -> None:
    np.testing.assert_array_equal(
        last_writer_edges(FIVE), edges_of(5, [(0, 2), (1, 2), (2, 3), (0, 3)])
    )
    # The second writer hides the first; who reads and writes reads what was there before.
    again = steps(("", "x"), ("x", "x"), ("x", ""), ("y", ""))
    np.testing.assert_array_equal(last_writer_edges(again), edges_of(4, [(0, 1), (1, 2)]))
    assert last_writer_edges([]).shape == (0, 0)


def test_A13_the_walk_and_the_mask_match_their_worked_example() -> None:
    pi = walk(last_writer_edges(FIVE))
    np.testing.assert_allclose(pi, [0.287573, 0.227385, 0.201806, 0.141618, 0.141618], atol=1e-5)
    aptitude = aptitudes(pi, DIVERGENCE)
    np.testing.assert_allclose(
        aptitude, [0.718933, 1.421159, 1.009028, 0.177022, 1.41618], atol=1e-5
    )
    assert aptitude.mean() == pytest.approx(0.948464, abs=1e-5)
    mask = above_mean(aptitude)
    assert mask.tolist() == [False, True, True, False, True]
    assert masked_divergence(DIVERGENCE, np.ones(5), mask) == pytest.approx(0.566667, abs=1e-5)
    # Divergence alone misses turn 2, on which turn 3 builds.
    assert above_mean(DIVERGENCE).tolist() == [False, True, False, False, True]


def test_the_loss_is_a_mean_over_the_tokens_of_the_masked_turns() -> None:
    tokens, mask = np.array([1.0, 4.0, 2.0]), np.array([True, False, True])
    assert masked_divergence(np.array([0.3, 9.0, 0.6]), tokens, mask) == pytest.approx(0.5)
    assert masked_divergence(np.array([0.3, 9.0, 0.6]), tokens, ~mask & mask) == 0.0


graphs = st.integers(1, 6).flatmap(
    lambda turns: st.lists(
        st.tuples(st.integers(0, turns - 1), st.integers(0, turns - 1)), max_size=8
    ).map(lambda pairs: edges_of(turns, [(min(p), max(p)) for p in pairs if p[0] != p[1]]))
)


@settings(max_examples=40, deadline=None)
@given(edges=graphs, damping=st.sampled_from([0.0, 0.5, 0.85]), where=st.sampled_from(DIRECTIONS))
def test_the_walk_is_where_many_steps_of_it_end(
    edges: BoolArray, damping: float, where: str
) -> None:
    turns = len(edges)
    matrix = np.zeros((turns, turns))
    for here in range(turns):
        back, on = np.flatnonzero(edges[:, here]), np.flatnonzero(edges[here])
        targets = {"to_enablers": back, "to_effects": on, "both": np.union1d(back, on)}[where]
        matrix[here, targets if len(targets) else np.arange(turns)] = 1 / (len(targets) or turns)
    share = np.full(turns, 1 / turns)
    for _ in range(200):
        share = (1 - damping) / turns + damping * share @ matrix
    pi = walk(edges, damping, where)
    np.testing.assert_allclose(pi, share, atol=1e-9)
    assert pi.sum() == pytest.approx(1.0)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.integers(0, 8).map(lambda n: n / 8), min_size=1, max_size=6),
    fusion=st.sampled_from(FUSIONS),
)
def test_without_edges_the_mask_is_that_of_the_divergence(values: list[float], fusion: str) -> None:
    divergence = np.array(values)
    pi = walk(edges_of(len(values), []))
    np.testing.assert_allclose(pi, 1 / len(values))
    got = above_mean(aptitudes(pi, divergence, fusion))
    mean = divergence.mean()
    want = divergence > 0 if len(values) == 1 else divergence > mean * (1 + 1e-7)
    np.testing.assert_array_equal(got, want)


def test_the_sum_weighs_the_walk_against_the_divergence() -> None:
    pi, mean = walk(last_writer_edges(FIVE)), DIVERGENCE.mean()
    half = aptitudes(pi, DIVERGENCE, "sum", 0.5)
    np.testing.assert_allclose(half, 0.5 * 5 * pi + 0.5 * DIVERGENCE / mean)
    np.testing.assert_allclose(aptitudes(pi, DIVERGENCE, "sum", 1.0), 5 * pi)
    np.testing.assert_allclose(aptitudes(pi, DIVERGENCE, "sum", 0.0), DIVERGENCE / mean)


def test_A3_one_turn_no_divergence_equal_turns_and_unknown_estimates() -> None:
    one = walk(edges_of(1, []))
    for fusion in FUSIONS:
        assert above_mean(aptitudes(one, np.array([0.3]), fusion)).tolist() == [True]
        assert above_mean(aptitudes(one, np.array([0.0]), fusion)).tolist() == [False]
        three = walk(edges_of(3, [(0, 1), (0, 2)]))
        assert not above_mean(aptitudes(three, np.zeros(3), fusion)).any()
        alike = walk(edges_of(3, []))
        assert not above_mean(aptitudes(alike, np.full(3, 0.1), fusion)).any()
        below = aptitudes(alike, np.array([-5.0, np.nan, 0.2]), fusion)
        np.testing.assert_allclose(below, aptitudes(alike, np.array([0.0, 0.0, 0.2]), fusion))
    # Their mean lies below all of them by rounding.
    tenths = np.full(6, 0.1)
    assert tenths.mean() < 0.1
    assert not above_mean(tenths).any()
    assert walk(edges_of(0, [])).shape == (0,)
    assert above_mean(aptitudes(np.zeros(0), np.zeros(0))).shape == (0,)


# --- many games ----------------------------------------------------------------------------------


def games() -> tuple[TurnTable, Footprints, FloatArray]:
    """The worked example, a game of one turn, and the example again with a failed turn inside."""
    table = table_of([[Act("s")] * 5, [Act("s")], [Act("s")] * 6], invalid=[(2, 2)])
    failed = [*FIVE[:2], (frozenset("ab"), frozenset("ab")), *FIVE[2:]]
    divergence = np.concatenate([DIVERGENCE, [0.3], DIVERGENCE[:2], [99.0], DIVERGENCE[2:]])
    return table, [*FIVE, *steps(("", "")), *failed], divergence


def test_J1_each_game_has_its_own_mask_and_a_failed_turn_does_nothing() -> None:
    table, footprints, divergence = games()
    got = distilled_turns(table, footprints, divergence)
    want = [False, True, True, False, True]
    assert got.tolist() == [*want, True, *want[:2], False, *want[2:]]
    junk = replace(table, valid=table.valid & (table.traj != 0))
    assert distilled_turns(junk, footprints, divergence).tolist()[5:] == got.tolist()[5:]
    assert not distilled_turns(junk, footprints, divergence)[:5].any()


def test_A9_the_mask_does_not_depend_on_the_order_of_rows() -> None:
    table, footprints, divergence = games()
    straight = distilled_turns(table, footprints, divergence)
    rng = np.random.default_rng(2)
    for order in [np.arange(table.num_rows)[::-1], *(rng.permutation(12) for _ in range(8))]:
        mixed = distilled_turns(
            rows_in_order(table, order), [footprints[row] for row in order], divergence[order]
        )
        np.testing.assert_array_equal(mixed, straight[order])


def test_direction_and_fusion_are_those_of_the_settings() -> None:
    table = table_of([[Act("s")] * 5])
    for direction in DIRECTIONS:
        for fusion in FUSIONS:
            chosen = FootprintSettings(0.5, direction, fusion, 0.9)
            pi = walk(last_writer_edges(FIVE), 0.5, direction)
            want = above_mean(aptitudes(pi, DIVERGENCE, fusion, 0.9))
            np.testing.assert_array_equal(distilled_turns(table, FIVE, DIVERGENCE, chosen), want)
    back = FootprintSettings(direction="to_effects", fusion="sum", alpha=1.0)
    assert distilled_turns(table, FIVE, DIVERGENCE, back)[3]
    assert not distilled_turns(table, FIVE, DIVERGENCE, replace(back, direction="to_enablers"))[3]


def test_columns_that_do_not_fit_are_refused() -> None:
    table, footprints, divergence = games()
    with pytest.raises(ValueError, match="the same turns"):
        distilled_turns(table, footprints[1:], divergence)
    with pytest.raises(ValueError, match="the same turns"):
        distilled_turns(table, footprints, divergence[1:])
    assert distilled_turns(table_of([]), [], np.zeros(0)).shape == (0,)


@pytest.mark.parametrize(
    ("knob", "value"),
    [("damping", 1.0), ("damping", -0.1), ("direction", "up"), ("fusion", "max"), ("alpha", 1.1)],
)
def test_footprint_settings_out_of_range_are_refused_by_name(knob: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"algorithm\.graph_opd\.{knob} is"):
        FootprintSettings(**{knob: value})
    if knob == "direction":
        with pytest.raises(UserError, match="direction"):
            walk(edges_of(2, []), 0.85, str(value))
    if knob == "fusion":
        with pytest.raises(UserError, match="fusion"):
            aptitudes(np.ones(1), np.ones(1), str(value))
