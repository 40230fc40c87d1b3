"""What a record says: rates, gains and differences, and by rule which of them are real.

A method is in the tables when every seed of it is done. Three families of differences are tested,
each by Holm's rule over its methods: the trained policy less the same policy before training,
a method less the baseline, and the method with the highest rate less every other one. That one was
chosen by the games it is judged by: its p-values are multiplied by half the number of methods as
well, so that the smallest counts as one of all pairs. Its lead is more likely too large than too
small all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from delta_belief_rl.eval.compare import REAL, Comparison, Difference, MethodResult, compare
from delta_belief_rl.eval.compare_results import CellResult
from delta_belief_rl.eval.compare_statistics import Estimate, grid_mean, holm, t_cdf
from delta_belief_rl.types import UserError
from validation.credit import records


@dataclass(frozen=True, slots=True)
class Gain:
    """The trained policy less the same policy before training.

    Attributes:
        p: By Holm's rule over the methods of the study.
    """

    method: str
    rate: Estimate
    p: float

    @property
    def is_real(self) -> bool:
        """Whether training changed the rate."""
        return self.p < REAL


@dataclass(frozen=True, slots=True)
class Findings:
    """A record, analysed.

    Attributes:
        ranked: Methods by their rate, the highest first.
        start: Rate of the policy before training.
        spent: Method to the share of the budget before the validation that counts, mean over seeds.
        judged: Method to the step of that validation, mean over seeds.
        against: Method to its difference from the baseline.
        behind: Method to its difference from the first of ``ranked``; p-values as of all pairs.
        unfinished: Methods that lack a seed.
    """

    record: Mapping[str, Any]
    ranked: tuple[MethodResult, ...]
    start: Estimate
    spent: Mapping[str, float]
    judged: Mapping[str, float]
    gains: Mapping[str, Gain]
    against: Mapping[str, Difference]
    behind: Mapping[str, Difference]
    unfinished: tuple[str, ...]

    @property
    def baseline(self) -> str:
        """What the others are compared with."""
        return str(self.record["baseline"])

    @property
    def leader(self) -> str:
        """The method with the highest rate."""
        return self.ranked[0].method


def analyse(record: Mapping[str, Any]) -> Findings:
    """Count everything anew from the games of a record.

    Raises:
        UserError: The baseline, or any other method, has no run of every seed.
    """
    done = records.complete(record)
    baseline = str(record["baseline"])
    if baseline not in done or len(done) < 2:
        raise UserError(
            f"The record of {record['study']} lacks seeds of {baseline} or of all other methods: "
            "go on with the study."
        )
    cells = {method: seeds for method, seeds in records.cells_of(record).items() if method in done}
    budget = records.budget_of(record)
    found = compare(cells, baseline, budget)
    ranked = tuple(sorted(found.results, key=lambda one: -one.rate.interval.value))
    first = compare(cells, ranked[0].method, budget)
    secrets = list(record["secrets"])
    return Findings(
        record=record,
        ranked=ranked,
        start=grid_mean(np.stack([one.rates(secrets)[0] for one in cells[baseline].values()])),
        spent={
            method: float(np.mean([one.final.spent for one in seeds.values()])) / budget.total
            for method, seeds in cells.items()
        },
        judged={
            method: float(np.mean([one.final.step for one in seeds.values()]))
            for method, seeds in cells.items()
        },
        gains=_gains(cells, secrets),
        against=_by_method(found),
        behind={
            method: _of_all_pairs(one, len(ranked)) for method, one in _by_method(first).items()
        },
        unfinished=tuple(method for method in record["methods"] if method not in done),
    )


def _by_method(comparison: Comparison) -> dict[str, Difference]:
    return {one.method: one for one in comparison.differences}


def _of_all_pairs(one: Difference, methods: int) -> Difference:
    """A difference from a method that any other could have been in the place of.

    Holm's rule has multiplied the smallest p-value by ``methods - 1``; there are ``methods / 2``
    times as many pairs.
    """
    rate_p, area_p = (float(np.minimum(1.0, p * methods / 2)) for p in (one.rate_p, one.area_p))
    return replace(one, rate_p=rate_p, area_p=area_p)


def _gains(
    cells: Mapping[str, Mapping[int, CellResult]], secrets: Sequence[str]
) -> dict[str, Gain]:
    rates = {
        method: [one.rates(secrets) for one in seeds.values()] for method, seeds in cells.items()
    }
    gains = [
        grid_mean(np.stack([grid[-1] - grid[0] for grid in grids])) for grids in rates.values()
    ]
    adjusted = holm([one.p for one in gains])
    return {
        method: Gain(method, gain, p)
        for method, gain, p in zip(rates, gains, adjusted, strict=True)
    }


# -------------------------------------------------------------------------------------- sentences


def sentences(found: Findings) -> list[str]:
    """The reading of one environment, a sentence or two for each question."""
    return [
        _learnt(found),
        _against(found),
        _first(found),
        _resolution(found),
        *_unequal(found),
        *_left_out(found),
    ]


def _learnt(found: Findings) -> str:
    up = [
        name for name, gain in found.gains.items() if gain.is_real and gain.rate.interval.value > 0
    ]
    down = [
        name for name, gain in found.gains.items() if gain.is_real and gain.rate.interval.value < 0
    ]
    rest = [name for name in found.gains if name not in (*up, *down)]
    return _three(
        f"**Learnt.** The policy starts at {100 * found.start.interval.value:.1f} %.",
        [("Training raises it with", up), ("lowers it with", down)],
        ("no change is seen with", rest),
    )


def _against(found: Findings) -> str:
    apart = [one for one in found.against.values() if one.is_real]
    above = [one.method for one in apart if one.rate.interval.value > 0]
    below = [one.method for one in apart if one.rate.interval.value < 0]
    rest = [name for name in found.against if name not in (*above, *below)]
    return _three(
        f"**Against {found.baseline}.**",
        [("Really above it", above), ("really below it", below)],
        ("not told apart from it", rest),
    )


def _first(found: Findings) -> str:
    lead = found.ranked[0]
    runner = found.ranked[1].method
    gap = -found.behind[runner].rate.interval.value
    beaten = [name for name, one in found.behind.items() if one.is_real]
    shared = [one.method for one in found.ranked[1:] if one.method not in beaten]
    text = (
        f"**First and runner-up.** `{lead.method}` has the highest rate, "
        f"{100 * lead.rate.interval.value:.1f} %, {100 * gap:.1f} points above `{runner}`"
    )
    if not shared:
        return f"{text}, and is really above every other method."
    real = f"It is really above {_listed(beaten)}. " if beaten else ""
    return (
        f"{text}: {'this lead is real' if runner in beaten else 'this lead is not real'}. {real}"
        f"Not told apart from it: {_listed(shared)}; each of them may be first as well."
    )


def _resolution(found: Findings) -> str:
    halves = [
        (one.rate.interval.high - one.rate.interval.low) / 2
        for one in found.against.values()
        if not math.isnan(one.rate.interval.low)
    ]
    if not halves:
        return "**What could be seen.** No difference has an interval."
    seeds, secrets = len(found.record["seeds"]), len(found.record["secrets"])
    return (
        f"**What could be seen.** Intervals of the differences from `{found.baseline}` reach "
        f"{100 * min(halves):.1f} to {100 * max(halves):.1f} points to either side, half of them "
        f"{100 * float(np.median(halves)):.1f} or more, with {seeds} seeds and {secrets} secrets. "
        "This is before Holm's rule, which asks for more: what is smaller does not show, and not "
        "all that is larger does."
    )


def _unequal(found: Findings) -> list[str]:
    """Methods that are not judged at the end of the whole budget."""
    last = found.record["budget"]["steps"]
    early = [name for name, step in found.judged.items() if step < last]
    less = [name for name, share in found.spent.items() if share < 0.995 and name not in early]
    lines: list[str] = []
    if early:
        each = ", ".join(
            f"`{name}` after {found.judged[name]:.1f} of {last} steps with "
            f"{100 * found.spent[name]:.0f} % of the budget"
            for name in early
        )
        lines.append(
            "**Judged early.** Steps that play more than a batch use up the budget sooner. The "
            f"last validation within it, mean over seeds: {each}. What these runs do after it "
            "does not count."
        )
    if less:
        each = ", ".join(f"`{name}` {100 * found.spent[name]:.0f} %" for name in less)
        lines.append(
            f"**Less than the budget.** Of the budget these spend in all of their steps: {each}. "
            "They play fewer turns than the others, so a lag may be of that."
        )
    return lines


def _left_out(found: Findings) -> list[str]:
    lines: list[str] = []
    if found.unfinished:
        lines.append(
            f"**Left out.** {_listed(found.unfinished)}: a run of some seed did not come to its "
            "end."
        )
    for one in found.record["failures"]:
        lines.append(f"`{one['method']}` with seed {one['seed']} failed: {one['cause']}.")
    return lines


def across(one: Findings, other: Findings) -> list[str]:
    """What two environments say together."""
    shared = [name for name in one.against if name in other.against]
    sides = {name: (_side(one.against[name]), _side(other.against[name])) for name in shared}
    both = [name for name, (a, b) in sides.items() if a == b != 0]
    opposed = [name for name, (a, b) in sides.items() if a * b < 0]
    first = [name for name, (a, b) in sides.items() if a and not b]
    second = [name for name, (a, b) in sides.items() if b and not a]
    none = [name for name, (a, b) in sides.items() if a == b == 0]
    return [
        _three(
            f"**Differences from {one.baseline} in both environments.**",
            [("Real in both and to the same side", both), ("real and opposed", opposed)],
            ("real in neither", none),
        ),
        _three(
            "**In one of them only.**",
            [(f"Real in {one.record['study']}", first), (f"in {other.record['study']}", second)],
            ("", ()),
        ),
        _order(one, other),
    ]


def _side(one: Difference) -> int:
    return int(math.copysign(1, one.rate.interval.value)) if one.is_real else 0


def _order(one: Findings, other: Findings) -> str:
    """Spearman's correlation of the two orders."""
    ours = {each.method: each.rate.interval.value for each in one.ranked}
    theirs = {each.method: each.rate.interval.value for each in other.ranked}
    shared = [name for name in ours if name in theirs]
    if len(shared) < 4:
        return "**Order.** Too few methods are in both for a correlation of their ranks."
    ranks = np.array([_ranks([side[name] for name in shared]) for side in (ours, theirs)])
    if not ranks.std(axis=1).all():
        return "**Order.** All methods are level in one of the environments."
    r = float(np.corrcoef(ranks)[0, 1])
    df = len(shared) - 2
    p = 0.0 if abs(r) >= 1 else 2 * (1 - t_cdf(abs(r) * math.sqrt(df / (1 - r * r)), df))
    if p >= REAL:
        tells = "says little about its place"
    else:
        tells = "tends to rank high" if r > 0 else "tends to rank low"
    return (
        f"**Order.** Ranks of the {len(shared)} methods in the two environments correlate with "
        f"{r:+.2f} (Spearman, p {'below 0.001' if p < 0.001 else f'= {p:.3f}'}): what ranks high "
        f"in one {tells} in the other."
    )


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1 on, equal values with the mean of theirs."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
        for value in values
    ]


def _three(
    head: str, groups: Sequence[tuple[str, Sequence[str]]], rest: tuple[str, Sequence[str]]
) -> str:
    """Methods by what was found; a group without one says so, the rest is left out."""
    parts = [f"{words}: {_listed(names) if names else 'none'}" for words, names in groups]
    if rest[1]:
        parts.append(f"{rest[0]}: {_listed(rest[1])}")
    return f"{head} {'; '.join(parts)}."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
