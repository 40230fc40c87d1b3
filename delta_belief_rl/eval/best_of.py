"""Best and worst of ``j`` games of a secret, in closed form: no draw is made.

With the ``m`` known values of a secret in rising order, ``x_1 <= ... <= x_m``, the best of ``j`` of
them is ``x_i`` with probability::

    without replacement   C(i - 1, j - 1) / C(m, j)          unbiased, as pass@k is (V1)
    with replacement      (i^j - (i - 1)^j) / m^j            what a bootstrap draws

The worst of ``j`` is minus the best of ``-x``. On wins (0 or 1) the first is exactly pass@j; the
second is what the published code estimates with 1000 draws, and is too low: one win in four games
gives 0.684 at ``j = 4``, where one of the four games certainly is the win.
"""

from __future__ import annotations

from math import comb

import numpy as np

from delta_belief_rl.types import FloatArray, UserError


def draw_sizes(n: int) -> tuple[int, ...]:
    """Sizes that are reported for ``n`` games: the powers of two below ``n``, and ``n``.

    Example:
        >>> draw_sizes(6), draw_sizes(1)
        ((2, 4, 6), ())
    """
    powers = [2**power for power in range(1, n.bit_length()) if 2**power < n]
    return (*powers, n) if n > 1 else ()


def rank_weights(m: int, j: int, *, replace: bool = False) -> FloatArray:
    """Probability that the best of ``j`` is the value of each rank, lowest first, ``[m]``.

    Args:
        m: Values there are.
        j: Values drawn.
        replace: Draw with replacement.

    Raises:
        UserError: ``j`` is below 1, or above ``m`` without replacement.
    """
    if j < 1 or (j > m and not replace) or m < 1:
        raise UserError(f"The best of {j} needs at least {max(j, 1)} games but there are {m}.")
    ranks = range(1, m + 1)
    # Whole numbers until the last division, so that no power overflows or cancels.
    if replace:
        return np.array([(i**j - (i - 1) ** j) / m**j for i in ranks])
    return np.array([comb(i - 1, j - 1) / comb(m, j) for i in ranks])


def best_of(
    values: FloatArray, j: int, *, worst: bool = False, replace: bool = False
) -> tuple[float, float]:
    """Mean and deviation of the best of ``j`` games, each a mean over secrets.

    Args:
        values: ``[S, n]``, NaN where a game has no value.
        j: Games drawn of each secret.
        worst: The lowest value instead of the highest.
        replace: Draw with replacement; see the module's head.

    Returns:
        The expectation, and the standard deviation over draws within a secret. Both are NaN when a
        secret has too few values: a mean over the others would be one of other secrets.
    """
    sign = -1.0 if worst else 1.0
    means: list[float] = []
    deviations: list[float] = []
    for row in values:
        known = np.sort(sign * row[~np.isnan(row)])
        if len(known) < (1 if replace else j):
            return float("nan"), float("nan")
        weights = rank_weights(len(known), j, replace=replace)
        mean = float(weights @ known)
        means.append(sign * mean)
        deviations.append(float(np.sqrt(weights @ (known - mean) ** 2)))
    if not means:
        return float("nan"), float("nan")
    return float(np.mean(means)), float(np.mean(deviations))
