"""Numbers with their uncertainty: pass@k, bootstrap intervals over secrets, paired differences.

A secret is the unit that is resampled: its games share everything but chance, so they are no
independent evidence. Random draws come from a generator made of a seed, never from global state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from delta_belief_rl.types import FloatArray, UserError


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with a percentile interval; all in the unit of the estimate, NaN without data.

    Attributes:
        se: Standard deviation of the estimate over the draws.
        units: Secrets it rests on.
    """

    value: float
    low: float
    high: float
    se: float
    units: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of ``k`` games, drawn from ``n`` of which ``c`` are won, is won.

    Drawn without replacement: ``1 - C(n - c, k) / C(n, k)``, unbiased (arXiv 2107.03374); exact
    integers, so no overflow.

    Raises:
        UserError: Not ``1 <= k <= n`` and ``0 <= c <= n``.

    Example:
        >>> pass_at_k(n=4, c=1, k=4)
        1.0
    """
    if not 1 <= k <= n:
        raise UserError(f"pass@{k} needs at least {max(k, 1)} games of a secret but there are {n}.")
    if not 0 <= c <= n:
        raise UserError(f"{c} of {n} games cannot be won; check the counts.")
    return 1.0 - comb(n - c, k) / comb(n, k)


def mean_at_n(wins: FloatArray) -> float:
    """Mean over secrets of the mean over games; ``wins`` is ``[S, n]``, NaN without an outcome."""
    seen = ~np.isnan(wins)
    kept = seen.any(axis=1)
    if not kept.any():
        return float("nan")
    rates = np.where(seen, wins, 0.0)[kept].sum(axis=1) / seen[kept].sum(axis=1)
    return float(rates.mean())


def std_at_n(wins: FloatArray) -> float:
    """Deviation (``ddof=0``) over the ``n`` sample columns of the column's mean over secrets.

    ``wins`` is ``[S, n]``, NaN where a game has no outcome.
    """
    seen = ~np.isnan(wins)
    kept = seen.any(axis=0)
    if not kept.any():
        return float("nan")
    means = np.where(seen, wins, 0.0)[:, kept].sum(axis=0) / seen[:, kept].sum(axis=0)
    return float(means.std())


def cluster_bootstrap(
    totals: Sequence[float] | FloatArray,
    counts: Sequence[float] | FloatArray,
    *,
    draws: int = 2000,
    seed: int | np.random.Generator = 0,
    level: float = 0.95,
) -> Interval:
    """Interval of ``sum(totals) / sum(counts)`` when secrets are drawn again with replacement.

    Args:
        totals: Sum of the quantity over the games of each secret, ``[S]``.
        counts: Games of each secret, ``[S]``; secrets without a game are left out.
        draws: Bootstrap samples.
        seed: Names the draws; a generator is drawn from where it stands.
        level: Probability inside the interval.
    """
    total, count = np.asarray(totals, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    total, count = total[count > 0], count[count > 0]
    if not len(count):
        nan = float("nan")
        return Interval(nan, nan, nan, nan, 0)
    index = np.random.default_rng(seed).integers(0, len(count), size=(draws, len(count)))
    samples = total[index].sum(axis=1) / count[index].sum(axis=1)
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    value = total.sum() / count.sum()
    return Interval(float(value), float(low), float(high), float(samples.std()), len(count))


def paired_difference(
    first: Mapping[str, tuple[float, int]],
    second: Mapping[str, tuple[float, int]],
    *,
    draws: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Interval of the mean over secrets of (rate in ``second`` - rate in ``first``).

    Each evaluation maps a secret to (wins, games). Only secrets with games in both are compared, so
    the difficulty of secrets cancels.

    Raises:
        UserError: The evaluations share no secret.
    """
    shared = sorted(s for s in first.keys() & second.keys() if first[s][1] and second[s][1])
    if not shared:
        raise UserError("The two evaluations share no secret; compare runs on the same data file.")
    gaps = [second[s][0] / second[s][1] - first[s][0] / first[s][1] for s in shared]
    return cluster_bootstrap(gaps, np.ones(len(gaps)), draws=draws, seed=seed, level=level)
