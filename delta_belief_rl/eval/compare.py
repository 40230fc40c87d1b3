"""Methods compared: rates, learning curves and paired differences against one of them.

Every number with an interval is the mean of a grid of seeds and secrets (``compare_statistics``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from delta_belief_rl.eval.compare_results import Budget, CellResult
from delta_belief_rl.eval.compare_statistics import Estimate, grid_mean, holm, share_mean
from delta_belief_rl.types import FloatArray

REAL = 0.05
"""A difference is called real where its p-value after Holm's rule is below this."""

Cells = Mapping[str, Mapping[int, CellResult]]
"""Method to seed to what its run brought."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A method at one validation that all of its seeds had.

    Attributes:
        spent: Turns of the budget before it, mean over seeds.
    """

    step: int
    spent: float
    rate: Estimate


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One method over its seeds that are done.

    Attributes:
        rate: Strict win rate at the last validation within the budget.
        area: Mean height of the learning curve over the budget.
        seed_rates: The rate of each seed.
        turns: Mean of the games of that validation.
        failed_games: Of it, over all seeds.
        steps, games, tokens, seconds: Of a run's training within the budget, mean over seeds.
        host_gib, gpu_gib: The highest peak of any seed; NaN where not measured.
    """

    method: str
    rate: Estimate
    area: Estimate
    seed_rates: Mapping[int, float]
    turns: float
    failed_games: int
    steps: float
    games: float
    tokens: float
    seconds: float
    host_gib: float
    gpu_gib: float
    curve: tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A method less the baseline, over the seeds and secrets that both have.

    Attributes:
        rate_p, area_p: p-values after Holm's rule over all methods.
    """

    method: str
    rate: Estimate
    rate_p: float
    area: Estimate
    area_p: float

    @property
    def is_real(self) -> bool:
        """Whether the final rates differ, with the number of methods taken into account."""
        return self.rate_p < REAL


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that the table and the plot show.

    Attributes:
        results: In the order asked for; methods without a finished run are left out.
        differences: Of all but the baseline; empty where it has no finished run.
    """

    budget: Budget
    baseline: str
    results: tuple[MethodResult, ...]
    differences: tuple[Difference, ...]


def compare(cells: Cells, baseline: str, budget: Budget) -> Comparison:
    """Compare what the runs of some methods brought."""
    done = {method: seeds for method, seeds in cells.items() if seeds}
    secrets = sorted(
        {
            secret
            for seeds in done.values()
            for cell in seeds.values()
            for evaluation in cell.evaluations
            for secret in evaluation.counts
        }
    )
    results = tuple(_result(method, seeds, secrets, budget) for method, seeds in done.items())
    return Comparison(budget, baseline, results, _differences(done, baseline, secrets, budget))


def _result(
    method: str, seeds: Mapping[int, CellResult], secrets: Sequence[str], budget: Budget
) -> MethodResult:
    cells = list(seeds.values())
    return MethodResult(
        method=method,
        rate=share_mean(_grid(cells, lambda cell: cell.rates(secrets)[-1])),
        area=share_mean(_grid(cells, lambda cell: cell.areas(secrets, budget))),
        seed_rates={seed: cell.final.rate for seed, cell in seeds.items()},
        turns=_mean([cell.final.turns for cell in cells]),
        failed_games=sum(cell.final.failed for cell in cells),
        steps=_mean([cell.steps for cell in cells]),
        games=_mean([cell.games for cell in cells]),
        tokens=_mean([cell.tokens for cell in cells]),
        seconds=_mean([cell.seconds for cell in cells]),
        host_gib=_largest([cell.host_gib for cell in cells]),
        gpu_gib=_largest([cell.gpu_gib for cell in cells]),
        curve=_curve(cells, secrets),
    )


def _differences(
    done: Cells, baseline: str, secrets: Sequence[str], budget: Budget
) -> tuple[Difference, ...]:
    base = done.get(baseline, {})
    others = [method for method in done if method != baseline]
    pairs = {method: [seed for seed in base if seed in done[method]] for method in others}

    def estimate(method: str, of: Callable[[CellResult], FloatArray]) -> Estimate:
        ours = [done[method][seed] for seed in pairs[method]]
        theirs = [base[seed] for seed in pairs[method]]
        return grid_mean(_grid(ours, of) - _grid(theirs, of))

    compared = [method for method in others if pairs[method]]
    rates = [estimate(method, lambda cell: cell.rates(secrets)[-1]) for method in compared]
    areas = [estimate(method, lambda cell: cell.areas(secrets, budget)) for method in compared]
    rate_p, area_p = holm([one.p for one in rates]), holm([one.p for one in areas])
    rows = zip(compared, rates, rate_p, areas, area_p, strict=True)
    return tuple(Difference(*row) for row in rows)


def _curve(cells: Sequence[CellResult], secrets: Sequence[str]) -> tuple[CurvePoint, ...]:
    places = [{one.step: at for at, one in enumerate(cell.evaluations)} for cell in cells]
    shared = sorted(set(places[0]).intersection(*places))
    points: list[CurvePoint] = []
    rates = [cell.rates(secrets) for cell in cells]
    for step in shared:
        at = [place[step] for place in places]
        grid = [found[row] for found, row in zip(rates, at, strict=True)]
        spent = [cell.evaluations[row].spent for cell, row in zip(cells, at, strict=True)]
        points.append(CurvePoint(step, _mean(spent), share_mean(np.stack(grid))))
    return tuple(points)


def _grid(cells: Sequence[CellResult], of: Callable[[CellResult], FloatArray]) -> FloatArray:
    """One row a seed, ``[S, Q]``."""
    return np.stack([of(cell) for cell in cells])


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _largest(values: Sequence[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)
