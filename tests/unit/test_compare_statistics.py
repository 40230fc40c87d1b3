"""Intervals over seeds and secrets, paired differences, Holm's rule, areas under curves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from delta_belief_rl.eval.compare_statistics import (
    curve_mean,
    grid_mean,
    holm,
    share_mean,
    t_cdf,
    t_quantile,
)
from delta_belief_rl.eval.statistics import cluster_bootstrap


@pytest.mark.parametrize(
    ("df", "value"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (10, 2.22814), (39, 2.02269), (1000, 1.96234)],
)
def test_quantiles_are_those_of_the_tables(df: float, value: float) -> None:
    assert t_quantile(0.975, df) == pytest.approx(value, abs=1e-4)
    assert t_cdf(value, df) == pytest.approx(0.975, abs=1e-6)
    assert t_cdf(-value, df) == pytest.approx(0.025, abs=1e-6)


def test_one_degree_of_freedom_is_cauchy_and_many_are_normal() -> None:
    for x in (0.0, 0.3, 1.0, 7.0, 200.0):
        assert t_cdf(x, 1.0) == pytest.approx(0.5 + math.atan(x) / math.pi, abs=1e-9)
    for x in (0.5, 1.96, 4.0):
        normal = 0.5 * (1 + math.erf(x / math.sqrt(2)))
        assert t_cdf(x, 1e7) == pytest.approx(normal, abs=1e-6)


def test_one_seed_has_the_standard_error_of_its_secrets() -> None:
    x = np.array([0.0, 1.0, 0.5, 0.25])
    found = grid_mean(x[None])
    se = x.std(ddof=1) / 2
    assert found.interval.value == pytest.approx(0.4375)
    assert found.interval.se == pytest.approx(se)
    assert found.df == 3
    assert found.interval.high - found.interval.value == pytest.approx(3.182446 * se, abs=1e-5)
    assert found.seeds == 1
    assert found.interval.units == 4


def test_with_one_seed_it_is_what_the_bootstrap_over_secrets_finds() -> None:
    x = np.random.default_rng(0).random(200)
    drawn = cluster_bootstrap(x, np.ones(200), draws=20000)
    found = grid_mean(x[None]).interval
    assert found.value == pytest.approx(drawn.value)
    assert found.se == pytest.approx(drawn.se, rel=0.03)
    assert found.low == pytest.approx(drawn.low, abs=0.003)
    assert found.high == pytest.approx(drawn.high, abs=0.003)


def test_the_variance_is_that_of_two_way_analysis() -> None:
    grid = np.array([[0.1, 0.5, 0.9], [0.3, 0.4, 0.6]])
    s, q = grid.shape
    rows, columns, mean = grid.mean(axis=1), grid.mean(axis=0), grid.mean()
    rest = grid - rows[:, None] - columns + mean
    of_rows = q * np.sum((rows - mean) ** 2) / (s - 1)
    of_columns = s * np.sum((columns - mean) ** 2) / (q - 1)
    of_rest = np.sum(rest**2) / ((s - 1) * (q - 1))
    expected = (of_rows + of_columns - of_rest) / (s * q)
    assert expected > of_rest / (s * q)
    assert grid_mean(grid).interval.se ** 2 == pytest.approx(expected)


def test_three_seeds_that_differ_and_secrets_that_do_not_leave_two_degrees_of_freedom() -> None:
    grid = np.repeat([[0.2], [0.4], [0.9]], 30, axis=1)
    found = grid_mean(grid)
    assert found.interval.se == pytest.approx(np.std([0.2, 0.4, 0.9], ddof=1) / math.sqrt(3))
    assert found.df == pytest.approx(2.0)


def test_order_of_seeds_and_secrets_is_nothing_to_it() -> None:
    rng = np.random.default_rng(3)
    grid = rng.random((3, 9))
    one, other = grid_mean(grid), grid_mean(grid[[2, 0, 1]][:, rng.permutation(9)])
    assert one.interval.se == pytest.approx(other.interval.se)
    assert one.p == pytest.approx(other.p)


def test_cells_without_an_outcome_are_left_out() -> None:
    grid = np.array([[0.5, np.nan, 1.0], [0.5, np.nan, 0.0]])
    assert grid_mean(grid).interval == grid_mean(grid[:, [0, 2]]).interval
    hole = np.array([[0.5, 0.25, 1.0], [0.5, np.nan, 0.0]])
    found = grid_mean(hole)
    assert found.interval.value == pytest.approx((0.5 + 0.25 + 1.0 + 0.5) / 5)
    assert math.isfinite(found.interval.se)
    alone = np.array([[0.5, 0.25, 1.0], [np.nan, np.nan, np.nan]])
    assert grid_mean(alone) == grid_mean(alone[:1])


def test_nothing_and_one_secret_have_no_interval() -> None:
    nothing = grid_mean(np.full((2, 3), np.nan))
    assert math.isnan(nothing.interval.value)
    assert nothing.seeds == 0
    single = grid_mean(np.array([[0.25], [0.75]]))
    assert single.interval.value == 0.5
    assert math.isnan(single.interval.low)
    assert math.isnan(single.p)


def test_without_spread_there_is_no_interval_but_a_sign_test() -> None:
    same = grid_mean(np.full((2, 5), 0.5))
    assert math.isnan(same.interval.low)
    assert same.p == pytest.approx(2.0**-4)
    assert grid_mean(np.zeros((2, 5))).p == 1.0
    # A mean that is off by rounding is no spread either.
    assert grid_mean(np.full((3, 7), 0.1)).interval.se == 0.0


def test_shares_end_at_nought_and_one() -> None:
    lost = share_mean(np.zeros((2, 10))).interval
    assert (lost.low, lost.high) == (0.0, pytest.approx(0.30850, abs=1e-5))
    won = share_mean(np.ones((1, 10))).interval
    assert (won.low, won.high) == (pytest.approx(0.69150, abs=1e-5), 1.0)
    few = share_mean(np.array([[0.0, 0.0, 0.1]])).interval
    assert few.low == 0.0
    assert few.high == grid_mean(np.array([[0.0, 0.0, 0.1]])).interval.high


@pytest.mark.parametrize(
    ("seeds", "of_seed", "of_secret", "of_game", "low", "high"),
    [
        (1, 0.0, 1.0, 1.0, 0.92, 0.98),
        (3, 0.0, 1.0, 1.0, 0.92, 0.98),
        (3, 0.1, 0.5, 1.0, 0.92, 0.98),
        (3, 0.3, 0.0, 1.0, 0.90, 0.98),
        (5, 0.3, 0.0, 1.0, 0.92, 0.99),
        (5, 1.0, 1.0, 1.0, 0.92, 0.98),
    ],
)
def test_intervals_hold_the_truth_as_often_as_they_say(
    seeds: int, of_seed: float, of_secret: float, of_game: float, low: float, high: float
) -> None:
    """Seeds and secrets are both drawn anew, as in another experiment."""
    rng = np.random.default_rng(11)
    held, rounds = 0, 600
    for _ in range(rounds):
        grid = rng.normal(0, of_seed, (seeds, 1)) + rng.normal(0, of_secret, (1, 40))
        grid = grid + rng.normal(0, of_game, (seeds, 40))
        found = grid_mean(0.3 + grid).interval
        held += found.low <= 0.3 <= found.high
    assert low <= held / rounds <= high


def test_drawing_secrets_alone_would_hold_the_truth_far_too_seldom() -> None:
    """Why seeds are in it: the usual bootstrap over secrets with three seeds that differ."""
    rng = np.random.default_rng(12)
    ours = secrets_only = 0
    for _ in range(200):
        grid = rng.normal(0, 0.3, (3, 1)) + rng.normal(0, 0.2, (3, 40))
        found = grid_mean(grid).interval
        ours += found.low <= 0 <= found.high
        drawn = cluster_bootstrap(grid.sum(axis=0), np.full(40, 3.0), draws=200)
        secrets_only += drawn.low <= 0 <= drawn.high
    assert ours / 200 > 0.9
    assert secrets_only / 200 < 0.5


def test_pairing_takes_out_what_seeds_and_secrets_do_to_both() -> None:
    rng = np.random.default_rng(5)
    shared = rng.normal(0, 1, (3, 1)) + rng.normal(0, 1, (1, 40))
    base = shared + rng.normal(0, 0.1, (3, 40))
    better = shared + 0.1 + rng.normal(0, 0.1, (3, 40))
    paired = grid_mean(better - base)
    assert paired.interval.low < 0.1 < paired.interval.high
    assert paired.p < 0.05
    assert grid_mean(better).interval.se > 10 * paired.interval.se


def test_an_interval_that_leaves_nought_out_has_a_p_value_below_its_level() -> None:
    rng = np.random.default_rng(8)
    for _ in range(50):
        found = grid_mean(rng.normal(0.15, 1.0, (3, 20)))
        outside = not found.interval.low <= 0 <= found.interval.high
        assert outside == (found.p < 0.05)


def test_methods_that_do_not_differ_are_called_real_at_most_as_often_as_said() -> None:
    """Eight methods like the baseline: one or more is called real in about 5 % of comparisons."""
    rng = np.random.default_rng(9)
    alarms = plain = 0
    for _ in range(300):
        base = rng.normal(0, 1, (3, 20))
        p = [grid_mean(rng.normal(0, 1, (3, 20)) - base).p for _ in range(8)]
        alarms += min(holm(p)) < 0.05
        plain += min(p) < 0.05
    assert alarms / 300 <= 0.08
    assert plain / 300 > alarms / 300


def test_holm_by_hand() -> None:
    # Smallest first: 4 x 0.005, 3 x 0.01, 2 x 0.03, then 0.04, which may not fall below 0.06.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_holm_counts_only_what_was_tested() -> None:
    found = holm([0.02, math.nan, 0.01])
    assert found[0] == pytest.approx(0.02)
    assert math.isnan(found[1])
    assert found[2] == pytest.approx(0.02)


def test_areas_of_straight_lines_and_steps() -> None:
    curves = np.array([[0.0, 0.5, 1.0], [0.2, 0.2, 0.2]])
    np.testing.assert_allclose(curve_mean([0, 5, 10], curves), [0.5, 0.2])
    # The second piece is three times as wide.
    np.testing.assert_allclose(curve_mean([0, 1, 4], curves), [(0.25 + 3 * 0.75) / 4, 0.2])
    np.testing.assert_allclose(curve_mean([7], curves[:, :1]), [0.0, 0.2])


AGREEING = (
    [[0.1, 0.7], [0.7, 0.1]],
    [[0.1, 0.9, 0.3, 0.7], [0.9, 0.1, 0.7, 0.3]],
    [[0.2, 0.6, 0.4], [0.6, 0.4, 0.2], [0.4, 0.2, 0.6]],
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("grid", AGREEING)
def test_sums_that_agree_up_to_rounding_have_an_interval(grid: list[list[float]]) -> None:
    found = grid_mean(np.array(grid))
    assert 1 <= found.df <= np.size(grid) - 1
    assert math.isfinite(found.interval.low)
    assert math.isfinite(found.interval.high)
