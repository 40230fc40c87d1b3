"""Intervals and differences of methods over seeds and secrets.

A method is trained with every seed and plays the same secrets each time, so its games lie in a grid
of seeds ``S`` and secrets ``Q`` with the rate ``x_sq`` of a secret's games in each cell. Both
another seed and another secret would give other numbers; the variance of the grid's mean counts
each once::

    V = V_seeds + V_secrets - V_rest       V_seeds   = sum_s (row mean - mean)^2 / (S (S - 1))
                                           V_secrets = sum_q (column mean - mean)^2 / (Q (Q - 1))
                                           V_rest    = sum_sq e_sq^2 / (S Q (S - 1) (Q - 1))

with ``e_sq`` what rows and columns leave unexplained: the games' own chance is in the first two
already. These are the variances that a bootstrap of seeds alone, of secrets alone and of what is
left estimates by drawing; drawing seeds and secrets at once would count the chance of the games
three times. ``V`` is never below ``V_rest``. The interval is the mean plus and minus ``t`` times
``sqrt(V)`` with ``V^2 / (V_seeds^2 / (S - 1) + V_secrets^2 / (Q - 1))`` degrees of freedom, at
least 1: three seeds that differ widely leave about 2, for which ``t`` is 4.3 and not 1.96. One seed
says nothing of others: then ``V`` is ``V_secrets``.

Two methods are compared on the grid of their differences, cell by cell, so what a seed or a secret
does to both cancels. Several differences against one baseline are tested by Holm's rule: in order
of their p-values, the smallest is multiplied by their number, the next by one less, and so on.

Source: two-way clustering (Cameron, Gelbach, Miller 2011); Satterthwaite (1946); Holm (1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from delta_belief_rl.eval.statistics import Interval
from delta_belief_rl.types import FloatArray

LEVEL = 0.95
_ROUNDING = 1e-12
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(128)
"""Of the quadrature; the integrand is smooth, so this is exact to about ten digits."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over a grid of seeds and secrets.

    Attributes:
        interval: Its ``units`` are secrets.
        seeds: Rows with a value.
        df: Degrees of freedom of the interval; NaN where there is none.
        p: Two-sided p-value of the mean being zero; NaN where there is no interval.
    """

    interval: Interval
    seeds: int
    df: float
    p: float


NOTHING = Estimate(Interval(math.nan, math.nan, math.nan, math.nan, 0), 0, math.nan, math.nan)


def grid_mean(grid: FloatArray, *, level: float = LEVEL) -> Estimate:
    """Mean of a grid ``[S, Q]`` with its interval; NaN where a cell has no game with an outcome.

    Every cell with a value weighs the same. Without a second secret, or where all cells are the
    same, there is no interval.
    """
    seen = ~np.isnan(grid)
    seen_rows, seen_columns = seen.any(axis=1), seen.any(axis=0)
    grid, seen = grid[seen_rows][:, seen_columns], seen[seen_rows][:, seen_columns]
    seeds, secrets = grid.shape
    if not seen.any():
        return NOTHING
    filled = np.where(seen, grid, 0.0)
    mean = float(filled.sum() / seen.sum())
    if secrets < 2:
        alone = Interval(mean, math.nan, math.nan, math.nan, secrets)
        return Estimate(alone, seeds, math.nan, math.nan)
    off = np.where(seen, grid - mean, 0.0)
    of_rows = float(np.sum((off.sum(axis=1) / seen.sum()) ** 2))
    of_columns = float(np.sum((off.sum(axis=0) / seen.sum()) ** 2)) * secrets / (secrets - 1)
    if seeds == 1:
        variance, df = of_columns, float(secrets - 1)
    else:
        of_rows *= seeds / (seeds - 1)
        rest = off - _means(off, seen, 1) - _means(off, seen, 0)
        rest = np.where(seen, rest, 0.0)
        cells = seeds * secrets * (seeds - 1) * (secrets - 1)
        of_rest = float(np.sum(rest**2)) / cells
        variance = max(of_rows + of_columns - of_rest, of_rest)
        spread = of_rows**2 / (seeds - 1) + of_columns**2 / (secrets - 1)
        # Sums that agree up to rounding would give a number without meaning.
        most = float(seeds * secrets - 1)
        df = min(max(variance**2 / spread, 1.0), most) if spread > 0 else float(secrets - 1)
    se = math.sqrt(variance)
    if se <= _ROUNDING * max(1.0, abs(mean)):
        # All cells are the same: the chance that all secrets go to one side (sign test).
        p = 1.0 if mean == 0 else 2.0 ** (1 - secrets)
        return Estimate(Interval(mean, math.nan, math.nan, 0.0, secrets), seeds, df, p)
    half = t_quantile((1 + level) / 2, df) * se
    p = 2.0 * (1.0 - t_cdf(abs(mean) / se, df))
    return Estimate(Interval(mean, mean - half, mean + half, se, secrets), seeds, df, p)


def share_mean(grid: FloatArray, *, level: float = LEVEL) -> Estimate:
    """:func:`grid_mean` of shares: the interval ends at 0 and at 1.

    Where all games are lost, or all won, it is the exact binomial one over secrets.
    """
    found = grid_mean(grid, level=level)
    interval, tail = found.interval, (1 - level) / 2
    if interval.se == 0 and interval.value in (0.0, 1.0):
        far = 1 - tail ** (1 / interval.units)
        low, high = (0.0, far) if interval.value == 0 else (1 - far, 1.0)
    elif math.isnan(interval.low):
        return found
    else:
        low, high = max(interval.low, 0.0), min(interval.high, 1.0)
    return replace(found, interval=replace(interval, low=low, high=high))


def _means(values: FloatArray, seen: FloatArray, axis: int) -> FloatArray:
    """Mean over the cells that are there; 0 cells cannot be, because empty lines are left out."""
    return values.sum(axis=axis, keepdims=True) / seen.sum(axis=axis, keepdims=True)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number by Holm's rule; NaN stays and is not counted.

    Example:
        >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
        [0.03, 0.06, 0.06]
    """
    known = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    adjusted = [math.nan] * len(p_values)
    highest = 0.0
    for rank, (p, place) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * p))
        adjusted[place] = highest
    return adjusted


def curve_mean(x: Sequence[float], values: FloatArray) -> FloatArray:
    """Area under piecewise linear curves over its width, along the last axis.

    A curve of one point has that point's value. ``x`` rises.

    Example:
        >>> float(curve_mean([0.0, 1.0, 3.0], np.array([0.0, 1.0, 1.0])))
        0.8333333333333334
    """
    places = np.asarray(x, dtype=np.float64)
    if len(places) == 1 or places[-1] == places[0]:
        return np.asarray(values[..., -1])
    areas = (values[..., 1:] + values[..., :-1]) / 2 * np.diff(places)
    return np.asarray(areas.sum(axis=-1) / (places[-1] - places[0]))


# -------------------------------------------------------------------------- Student's distribution


def t_cdf(t: float, df: float) -> float:
    """Distribution function of Student's t.

    With ``t = sqrt(df) tan(a)`` the density becomes ``cos(a)^(df - 1)`` over a constant.

    Example:
        >>> round(t_cdf(1.0, 1.0), 6)
        0.75
    """
    # Where many degrees of freedom make the density narrow, the far tail holds nothing.
    end = min(math.atan(abs(t) / math.sqrt(df)), 12.0 / math.sqrt(df))
    angles = end / 2 * (_NODES + 1)
    area = end / 2 * float(np.sum(_WEIGHTS * np.cos(angles) ** (df - 1)))
    constant = math.sqrt(math.pi) * math.exp(math.lgamma(df / 2) - math.lgamma((df + 1) / 2))
    half = min(area / constant, 0.5)
    return 0.5 + math.copysign(half, t)


def t_quantile(share: float, df: float) -> float:
    """The inverse of :func:`t_cdf` for shares from 0.5 on, by halving.

    Example:
        >>> round(t_quantile(0.975, 2.0), 3)
        4.303
    """
    low, high = 0.0, 1.0
    while t_cdf(high, df) < share:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < share else (low, middle)
    return (low + high) / 2
